"""What activations of a model reach: the numbers that integers of eight bits have to hold."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hasten.data.batch import source_batch
from hasten.data.grouping import group_by_tokens
from hasten.data.tokenizer import Tokenizer
from hasten.decoding.refine import final, refine
from hasten.errors import NOT_FINITE, UserError
from hasten.models.base import GenerationModel

SENTENCES = 200
"""How many sentences show what activations reach."""
_BATCH_TOKENS = 1024


class Range(NamedTuple):
    """The least and the greatest number, 0 among them."""

    low: float
    high: float


class Ranges:
    """What reaches each matrix of weights, or a block of its rows."""

    def __init__(self) -> None:
        self._seen: dict[_Rows, Range] = {}

    def see(self, weight: Tensor, x: Tensor) -> None:
        """Inputs `x` of a product with `weight`; `UserError` where they are no numbers."""
        if x.numel():
            key = _rows(weight)
            old = self._seen.get(key, Range(0.0, 0.0))
            low, high = (float(bound) for bound in x.detach().aminmax())
            if not math.isfinite(low) or not math.isfinite(high):
                raise UserError(NOT_FINITE)
            self._seen[key] = Range(min(old.low, low), max(old.high, high))

    def of(self, weight: Tensor) -> Range:
        """What all products with any of these rows had as inputs; `UserError` where there was none."""
        own = _rows(weight)
        found = [r for k, r in self._seen.items() if k.start < own.end and own.start < k.end and k.matrix == own.matrix]
        if not found:
            raise UserError("calibration reached only a part of the model; give more sentences")
        return Range(min(low for low, _ in found), max(high for _, high in found))


@contextmanager
def recorded(ranges: Ranges) -> Iterator[None]:
    """Every `torch.nn.functional.linear` inside is seen."""

    class Recorder(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func is nn.functional.linear:
                ranges.see(args[1], args[0])
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield


def calibrate(model: GenerationModel, tokenizer: Tokenizer, lines: Sequence[str], longest: int) -> Ranges:
    """The ranges while the model translates the first `SENTENCES` lines greedily; lines without text or with more than
    `longest` tokens are left out. Raises `UserError` where none is left."""
    encoded = (tokenizer.encode(line.strip()) for line in lines)
    sources = [ids for ids in encoded if 0 < len(ids) <= longest][:SENTENCES]
    if not sources:
        raise UserError("there is no sentence to calibrate with: all lines are empty or too long")
    ranges = Ranges()
    with recorded(ranges):
        for group in group_by_tokens([len(ids) for ids in sources], _BATCH_TOKENS):
            final(refine(model, *source_batch([sources[i] for i in group])), len(group))
    return ranges


class _Rows(NamedTuple):
    """Rows of a matrix, known by where its numbers lie, in either layout."""

    matrix: int
    start: int
    end: int


def _rows(weight: Tensor) -> _Rows:
    start = int(weight.storage_offset()) // weight.stride(0)
    return _Rows(weight.untyped_storage().data_ptr(), start, start + len(weight))
