"""The output of a batch while it comes to be."""

from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.attention.base import State


@dataclass(frozen=True)
class Canvas:
    """The output so far. It is never changed: edits return a new one.

    tokens (B, L), right padded with PAD; scores (B, L) log probabilities; done (B,) rows that need no further edit;
    cache is whatever the model carries from edit to edit (None: nothing).
    """

    tokens: Int[Tensor, "B L"]
    scores: Float[Tensor, "B L"]
    done: Bool[Tensor, "B"]
    cache: Any = field(default=None, repr=False)

    def select(self, rows: Tensor) -> "Canvas":
        """Batch rows by index."""
        cache = None if self.cache is None else select(self.cache, rows)
        return Canvas(
            self.tokens.index_select(0, rows), self.scores.index_select(0, rows), self.done.index_select(0, rows), cache
        )


def select(state: State | tuple[State, ...], rows: Tensor) -> Any:
    """Batch rows of a state, or of each state of a tuple."""
    return tuple(select(part, rows) for part in state) if isinstance(state, tuple) else state.select(rows)
