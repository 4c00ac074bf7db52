"""How a masked output is filled over a few passes: what each pass says, and what is masked again for the next."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Le
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.data.tokenizer import MASK, PAD
from hasten.decoding.canvas import Canvas
from hasten.errors import UserError
from hasten.fields import PositiveInt, Spec
from hasten.nn.decoder_inputs import first

_MOST_PASSES = 1000  # with remask "worst" each is made, whether it changes anything or not
_ENDLESS = 2**31  # positions; a block that no output is longer than


@dataclass(frozen=True, kw_only=True)
class MaskedSpec(Spec):
    """Passes over a masked output. As they stand the settings are those of Mask-Predict."""

    iterations: PositiveInt = 10
    """The most passes over a block, T: after pass t at most floor(N (T - t) / T) of its N positions are masked."""
    remask: Literal["worst", "none"] = "worst"
    """What a pass may mask again: of all of the block the least probable, or nothing that an earlier pass kept."""
    threshold: Annotated[float, Gt(0), Le(1)] = 1.0
    """What has a probability above this is kept in any case; 1: the schedule alone decides."""
    block: PositiveInt | None = None
    """Positions of a block; blocks are finished from left to right. Without it the whole output is one."""

    def __post_init__(self) -> None:
        if self.remask == "worst" and self.iterations > _MOST_PASSES:
            raise UserError(
                f"iterations is {self.iterations}; with remask 'worst' a sentence takes them all, allowed are 1 to "
                f"{_MOST_PASSES} (with 'none' it takes at most one for each token)"
            )


MASK_PREDICT = MaskedSpec()
"""Ghazvininejad et al., 2019 (Mask-Predict)."""
LLADA = MaskedSpec(remask="none")
"""Low-confidence remasking of Nie et al., 2025 (LLaDA): what is kept stays; `iterations` and `block` are its steps."""
FAST_DLLM = MaskedSpec(remask="none", threshold=0.9, iterations=2**20)
"""Confidence-aware parallel decoding of Wu et al., 2025 (Fast-dLLM): all above the threshold, at least one a pass."""


@dataclass(frozen=True)
class Progress:
    """How far rows are: `begin` of the block in work, `passes` made over it, and what the last of them predicted."""

    begin: Int[Tensor, "B"]
    passes: Int[Tensor, "B"]
    predicted: Bool[Tensor, "B L"]

    def select(self, rows: Tensor) -> "Progress":
        """Batch rows by index."""
        return Progress(*(part.index_select(0, rows) for part in (self.begin, self.passes, self.predicted)))


def still_masked(n: Int[Tensor, "B"], passes: Int[Tensor, "B"], iterations: int) -> Int[Tensor, "B"]:
    """floor(N (T - t) / T) in whole numbers: how many of N are masked after t of T passes."""
    return n * (iterations - passes) // iterations


def lowest(scores: Float[Tensor, "B L"], among: Bool[Tensor, "B L"], n: Int[Tensor, "B"]) -> Bool[Tensor, "B L"]:
    """The n lowest scores of every row `among` the positions given, n at most as many; of equal ones the rightmost."""
    order = scores.masked_fill(~among, torch.inf).argsort(dim=1, descending=True, stable=True)
    return (order.argsort(1) >= scores.shape[1] - n[:, None]) & among


class MaskedSampler:
    """start, then in turn `fill` with what a model says at the `open` positions and `mask`, until `finished`.

    After a pass, `pool` is what may be masked again: the block, or with remask "none" what this pass predicted. Of the
    pool's positions whose probability is not above the threshold the min(floor(N (T - t) / T), |pool| - 1) least
    probable are masked. So with remask "none" every pass keeps at least one token, and a pass that would change nothing
    is never made: a row moves to its next block, or is finished, as soon as nothing is masked. Probabilities of kept
    tokens stay those of the pass that said them. Equal ones: the rightmost are masked.

    Source: Ghazvininejad et al., 2019; Nie et al., 2025; Wu et al., 2025. It differs from the released
    code of Mask-Predict, which masks at least one token after every pass, and of LLaDA, whose first passes take what
    the number of steps leaves over.
    """

    def __init__(self, spec: MaskedSpec):
        self.iterations = spec.iterations
        self.size = spec.block or _ENDLESS
        self.sure = math.log(spec.threshold)
        self._pool = {"worst": _all_of_block, "none": _predicted}[spec.remask]

    def start(self, lengths: Int[Tensor, "B"], width: int | None = None) -> Canvas:
        """Nothing but masks, as many as `lengths`."""
        real = first(lengths, width)
        tokens = torch.full(real.shape, MASK, device=real.device).masked_fill(~real, PAD)
        zeros = torch.zeros_like(lengths)
        progress = Progress(zeros, zeros, torch.zeros_like(real))
        return Canvas(tokens, torch.zeros(real.shape, device=real.device), zeros > 0, progress)

    def open(self, canvas: Canvas) -> Bool[Tensor, "B L"]:
        """The positions that the next pass predicts."""
        return self._block(canvas) & (canvas.tokens == MASK)

    def fill(self, canvas: Canvas, tokens: Int[Tensor, "M"], scores: Float[Tensor, "M"]) -> Canvas:
        """Tokens and their log probabilities at the open positions, row by row."""
        where = self.open(canvas)
        progress = replace(canvas.cache, passes=canvas.cache.passes + 1, predicted=where)
        return Canvas(
            canvas.tokens.masked_scatter(where, tokens),
            canvas.scores.masked_scatter(where, scores),
            canvas.done,
            progress,
        )

    def mask(self, canvas: Canvas) -> Canvas:
        """Masks where the next pass is to predict; rows where there are none go on to their next block."""
        progress, block = canvas.cache, self._block(canvas)
        pool = self._pool(block, progress.predicted)
        doubtful = pool & (canvas.scores <= self.sure)
        n = still_masked(block.sum(1), progress.passes, self.iterations)
        n = n.minimum(pool.sum(1) - 1).minimum(doubtful.sum(1))
        chosen = lowest(canvas.scores, doubtful, n)
        over = ~chosen.any(1)
        begin, passes = progress.begin + self.size * over, progress.passes * ~over
        tokens = canvas.tokens.masked_fill(chosen, MASK)
        return Canvas(tokens, canvas.scores, canvas.done, replace(progress, begin=begin, passes=passes))

    def finished(self, canvas: Canvas) -> Bool[Tensor, "B"]:
        """Rows without a mask."""
        return ~(canvas.tokens == MASK).any(1)

    def _block(self, canvas: Canvas) -> Bool[Tensor, "B L"]:
        begin = canvas.cache.begin[:, None]
        positions = torch.arange(canvas.tokens.shape[1], device=begin.device)
        return (positions >= begin) & (positions < begin + self.size) & (canvas.tokens != PAD)


def _all_of_block(block: Bool[Tensor, "B L"], predicted: Bool[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
    return block


def _predicted(block: Bool[Tensor, "B L"], predicted: Bool[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
    return predicted
