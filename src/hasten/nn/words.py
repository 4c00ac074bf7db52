"""What an output layer may say: the whole vocabulary, or for every row of a batch a list of its own.

With a list, scores are as if all others had -inf before the softmax: log probabilities are over the list. Symbols that
are no text (`banned`: -inf, else 0) count in the softmax and are never said, in both cases.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

_STATES_AT_ONCE = 4096  # whose scores of the whole vocabulary are held in memory

Score = Callable[[Tensor], Tensor]
"""Scores of the whole vocabulary, (N, V) from states (N, D)."""


class Words(ABC):
    """What the rows of a batch may say."""

    @abstractmethod
    def select(self, rows: Tensor) -> "Words":
        """Batch rows by index."""


class FrameWords(Words):
    """For models that say all at once: N states, those of a row side by side, `counts` of each row."""

    @abstractmethod
    def select(self, rows: Tensor) -> "FrameWords":
        """Batch rows by index."""

    @abstractmethod
    def best(self, states: Float[Tensor, "N D"], counts: Sequence[int]) -> tuple[Float[Tensor, "N"], Int[Tensor, "N"]]:
        """The most probable entry that is not banned: its log probability, and which; of equal ones the lowest id."""

    @abstractmethod
    def log_probs(self, states: Float[Tensor, "N D"], counts: Sequence[int]) -> Float[Tensor, "N V"]:
        """Log probabilities of the whole vocabulary; -inf: never."""

    @abstractmethod
    def normaliser(self, states: Float[Tensor, "N D"], counts: Sequence[int]) -> Float[Tensor, "N"]:
        """log sum of exp scores, in float32."""


class NextWords(Words):
    """For models that say one token after the other: a state a row."""

    @abstractmethod
    def select(self, rows: Tensor) -> "NextWords":
        """Batch rows by index."""

    @abstractmethod
    def best(self, states: Float[Tensor, "B D"]) -> tuple[Float[Tensor, "B"], Int[Tensor, "B"]]:
        """The first of the largest `log_probs`, and which entry it is."""

    @abstractmethod
    def log_probs(self, states: Float[Tensor, "B D"]) -> Float[Tensor, "B V"]:
        """Log probabilities of the whole vocabulary; -inf: never."""


@final
@dataclass(frozen=True)
class EveryFrame(FrameWords):
    """The whole vocabulary, at frames."""

    score: Score
    banned: Float[Tensor, "V"]

    def select(self, rows: Tensor) -> "EveryFrame":
        """Itself."""
        return self

    def best(self, states: Float[Tensor, "N D"], counts: Sequence[int]) -> tuple[Float[Tensor, "N"], Int[Tensor, "N"]]:
        """A few thousand states at a time."""
        found = [_best(self.score(some).float(), self.banned) for some in states.split(_STATES_AT_ONCE)]
        scores, ids = (torch.cat(parts) for parts in zip(*found, strict=True))
        return scores, ids

    def log_probs(self, states: Float[Tensor, "N D"], counts: Sequence[int]) -> Float[Tensor, "N V"]:
        """By softmax."""
        return self.score(states).float().log_softmax(-1) + self.banned

    def normaliser(self, states: Float[Tensor, "N D"], counts: Sequence[int]) -> Float[Tensor, "N"]:
        """Over the whole vocabulary."""
        return self.score(states).float().logsumexp(-1)


@final
@dataclass(frozen=True)
class ListedFrames(FrameWords):
    """Each row's own list: row after row, since a product with its few hundred entries is quicker than one for all.

    ids (n,) ascending, weights (n, D) and banned (n,) of each row.
    """

    ids: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    banned: tuple[Tensor, ...]
    vocab_size: int

    @classmethod
    def of(
        cls, weight: Float[Tensor, "V D"], banned: Float[Tensor, "V"], lists: Sequence[Int[Tensor, "_"]]
    ) -> "ListedFrames":
        """The lists of all rows, out of an output layer without bias."""
        sizes, ids = [len(own) for own in lists], torch.cat(list(lists))
        weights, none = (values.index_select(0, ids).split(sizes) for values in (weight, banned))
        return cls(ids.split(sizes), weights, none, len(weight))

    def select(self, rows: Tensor) -> "ListedFrames":
        """Batch rows by index."""
        kept = rows.tolist()
        ids, weights, banned = (tuple(values[i] for i in kept) for values in (self.ids, self.weights, self.banned))
        return ListedFrames(ids, weights, banned, self.vocab_size)

    def best(self, states: Float[Tensor, "N D"], counts: Sequence[int]) -> tuple[Float[Tensor, "N"], Int[Tensor, "N"]]:
        """Among each row's own."""
        rows = zip(states.split(list(counts)), self.ids, self.weights, self.banned, strict=True)
        found = [(ids, *_best(F.linear(own, weight).float(), banned)) for own, ids, weight, banned in rows]
        return torch.cat([scores for _, scores, _ in found]), torch.cat([ids[places] for ids, _, places in found])

    def log_probs(self, states: Float[Tensor, "N D"], counts: Sequence[int]) -> Float[Tensor, "N V"]:
        """-inf outside of each row's own."""
        filled = torch.full((len(states), self.vocab_size), -torch.inf, device=states.device)
        rows = zip(
            filled.split(list(counts)), states.split(list(counts)), self.ids, self.weights, self.banned, strict=True
        )
        for part, own, ids, weight, banned in rows:
            part.index_copy_(1, ids, F.linear(own, weight).float().log_softmax(-1) + banned)
        return filled

    def normaliser(self, states: Float[Tensor, "N D"], counts: Sequence[int]) -> Float[Tensor, "N"]:
        """Over each row's own."""
        rows = zip(states.split(list(counts)), self.weights, strict=True)
        return torch.cat([F.linear(own, weight).float().logsumexp(-1) for own, weight in rows])


@final
@dataclass(frozen=True)
class EveryNext(NextWords):
    """The whole vocabulary, step by step."""

    score: Score
    banned: Float[Tensor, "V"]

    def select(self, rows: Tensor) -> "EveryNext":
        """Itself."""
        return self

    def best(self, states: Float[Tensor, "B D"]) -> tuple[Float[Tensor, "B"], Int[Tensor, "B"]]:
        """The first of the largest."""
        best, ids = self.log_probs(states).max(-1)
        return best, ids

    def log_probs(self, states: Float[Tensor, "B D"]) -> Float[Tensor, "B V"]:
        """By softmax."""
        return self.score(states).float().log_softmax(-1) + self.banned


@final
@dataclass(frozen=True)
class ListedNext(NextWords):
    """What any row lists, in one small matrix for all steps; a row sees -inf at what it does not list itself."""

    ids: Int[Tensor, "n"]
    weight: Float[Tensor, "n D"]
    bias: Float[Tensor, "n"] | None
    banned: Float[Tensor, "n"]
    outside: Float[Tensor, "B n"]
    vocab_size: int

    @classmethod
    def of(
        cls,
        weight: Float[Tensor, "V D"],
        bias: Float[Tensor, "V"] | None,
        banned: Float[Tensor, "V"],
        lists: Sequence[Int[Tensor, "_"]],
    ) -> "ListedNext":
        """The lists of all rows, out of an output layer."""
        listed = torch.cat(list(lists))
        ids = listed.unique()
        sizes = torch.tensor([len(own) for own in lists], device=ids.device)
        rows = torch.arange(len(lists), device=ids.device).repeat_interleave(sizes)
        outside = torch.full((len(lists), len(ids)), -torch.inf, device=ids.device)
        outside[rows, torch.searchsorted(ids, listed)] = 0.0
        # By columns, as `hasten.nn.layout` has wide maps: one row is multiplied quicker.
        columns = weight.t().index_select(1, ids).t()
        return cls(ids, columns, None if bias is None else bias[ids], banned[ids], outside, len(weight))

    def select(self, rows: Tensor) -> "ListedNext":
        """Batch rows by index; the matrix stays."""
        outside = self.outside.index_select(0, rows)
        return ListedNext(self.ids, self.weight, self.bias, self.banned, outside, self.vocab_size)

    def best(self, states: Float[Tensor, "B D"]) -> tuple[Float[Tensor, "B"], Int[Tensor, "B"]]:
        """Among each row's own."""
        best, places = self._log_probs(states).max(-1)
        return best, self.ids[places]

    def log_probs(self, states: Float[Tensor, "B D"]) -> Float[Tensor, "B V"]:
        """-inf outside of each row's own."""
        filled = torch.full((len(states), self.vocab_size), -torch.inf, device=states.device)
        return filled.index_copy_(1, self.ids, self._log_probs(states))

    def _log_probs(self, states: Float[Tensor, "B D"]) -> Float[Tensor, "B n"]:
        scores = F.linear(states, self.weight, self.bias).float() + self.outside
        return scores.log_softmax(-1) + self.banned


def _best(logits: Float[Tensor, "N n"], banned: Float[Tensor, "n"]) -> tuple[Float[Tensor, "N"], Int[Tensor, "N"]]:
    best, places = (logits + banned).max(-1)
    return best - logits.logsumexp(-1), places
