"""Generation is start, named edits, stop: the contract of every model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hasten.attention.base import Operator
from hasten.attention.losses import attention_losses, together
from hasten.attention.multihead import Attended
from hasten.data.batch import Batch
from hasten.decoding.canvas import Canvas
from hasten.decoding.frame import EditKind
from hasten.errors import UserError
from hasten.nn.loss import LossTerm
from hasten.nn.stack import Observer
from hasten.nn.words import Words

ObserveAttention = Callable[[str, int, Operator, Tensor], None]
"""Told the name of a kind of attention ("encoder", "cross", ...), the layer from 0, its operator, and (B, T) True on
real query positions. Where learnt tokens stand before the sequence, the operator has their rows before those T."""


@dataclass(frozen=True)
class Memory:
    """An encoded batch: states (B, S, D), mask (B, S) True on real positions; words that the output is limited to."""

    states: Float[Tensor, "B S D"]
    mask: Bool[Tensor, "B S"]
    words: Words | None = field(default=None, kw_only=True)

    def select(self, rows: Tensor) -> "Memory":
        """Batch rows by index."""
        words = None if self.words is None else self.words.select(rows)
        return Memory(self.states.index_select(0, rows), self.mask.index_select(0, rows), words=words)

    @property
    def lengths(self) -> Int[Tensor, "B"]:
        """Real positions of each row."""
        return self.mask.sum(1)


class Edit(NamedTuple):
    """A named step. `apply(canvas, memory, iteration)` returns the canvas after it."""

    kind: EditKind
    apply: Callable[[Canvas, Memory, int], Canvas]


class GenerationModel(nn.Module, ABC):
    """A conditional text model that trains by `loss` and generates by `start`, `edits` and `stopped`.

    `embedding` (V, d_model) is shared by source, target and output wherever the model has them.
    """

    embedding: nn.Embedding
    edits: tuple[Edit, ...]
    longest: int | None = None
    """The most tokens on either side, end symbols not counted, that its attention takes; None: any number."""

    @abstractmethod
    def encode(self, source: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> Memory:
        """States of the source ids (EOS included); `mask` is True on real tokens."""

    @abstractmethod
    def loss(self, batch: Batch, generator: torch.Generator) -> dict[str, LossTerm]:
        """Terms of the training objective; sampling uses `generator`."""

    @abstractmethod
    def start(self, memory: Memory) -> Canvas:
        """The canvas before the first edit."""

    @abstractmethod
    def stopped(self, before: Canvas, after: Canvas, memory: Memory, iteration: int) -> Bool[Tensor, "B"]:
        """Rows that are finished after iteration number `iteration` (counted from 0)."""

    def forward(self, batch: Batch, generator: torch.Generator) -> dict[str, LossTerm]:
        """The loss, with the terms that attention adds; the name that data-parallel wrappers call."""
        with attention_losses() as losses:
            terms = self.loss(batch, generator)
        return {**terms, **together(losses)}

    def attentions(self, batch: Batch, observe: ObserveAttention) -> None:
        """Run on a batch, its target given (teacher forcing), and report every layer's attention, layer by layer.

        Names are those that configurations have before `_sharing`. Errors: `UserError` for a model without reports.
        """
        raise UserError(f"{type(self).__name__} models do not report their attention")

    def progress(self, fraction: float) -> None:
        """Told before every training step which fraction of the run is over, for schedules within the loss."""

    def output_ids(self, tokens: list[int]) -> list[int]:
        """The ids of a finished row that are text."""
        return tokens


@runtime_checkable
class Drafting(Protocol):
    """A model that can begin in several ways: with several lengths, several fertilities."""

    def starts(self, memory: Memory, candidates: int) -> Canvas:
        """`candidates` canvases for each row of `memory`, one after the other; the first is that of `start`."""
        ...


@runtime_checkable
class Listing(Protocol):
    """A model that can keep to a list of words, another one for every row."""

    def keep_to(self, memory: Memory, lists: Sequence[Int[Tensor, "_"]]) -> Memory:
        """The same, with each row's output limited to its list (ids, ascending; all special ids are among them)."""
        ...


@runtime_checkable
class Scoring(Protocol):
    """A model that tells the probability of a given output in one pass."""

    def log_probs(self, batch: Batch) -> tuple[Float[Tensor, "B"], Int[Tensor, "B"]]:
        """log p(target | source) of every row, and over how many decisions: the end symbol counts."""
        ...


def encoded(
    model: GenerationModel,
    source: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    lists: Sequence[Int[Tensor, "_"]] | None,
) -> Memory:
    """`model.encode`, each row's output limited to its list; None: to nothing."""
    memory = model.encode(source, mask)
    return memory if lists is None else listing(model).keep_to(memory, [own.to(source.device) for own in lists])


def listing(model: GenerationModel) -> Listing:
    """The model, where it takes lists of words; else `UserError`."""
    if not isinstance(model, Listing):
        raise UserError(f"{type(model).__name__} models take no shortlist; autoregressive, marian, ctc and dag ones do")
    return model


def reported(observe: ObserveAttention, names: Mapping[str, str], real: Bool[Tensor, "B T"]) -> Observer:
    """What a stack tells ("self", "cross") under the names of the model, with its real query positions."""

    def told(kind: str, layer: int, attended: Attended) -> None:
        assert isinstance(attended.operator, Operator)
        observe(names[kind], layer, attended.operator, real)

    return told
