"""Beam search for models that give the log probabilities of the next token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hasten.data.tokenizer import BOS, EOS
from hasten.errors import NOT_FINITE, UserError

if TYPE_CHECKING:
    from hasten.models.base import Memory

LENGTH_PENALTY = 1.0


class Hypothesis(NamedTuple):
    """A possible output: ids as the model says them (end symbol included), log p(tokens | source), and its rank."""

    tokens: list[int]
    log_prob: float
    score: float


@runtime_checkable
class StepModel(Protocol):
    """What beam search asks of a model; `begin` returns a state with `select`, or a tuple of such states."""

    def begin(self, memory: "Memory") -> Any:
        """State before the first token."""
        ...

    def next_log_probs(
        self, last: Int[Tensor, "R"], position: int, state: Any
    ) -> tuple[Float[Tensor, "R V"], Any]:  # fmt: skip
        """Log probabilities after `last`, which stands at `position` (BOS at 0), and the new state; -inf: never."""
        ...

    def limit(self, memory: "Memory") -> Int[Tensor, "B"]:
        """Longest output of each row in tokens, the end symbol included."""
        ...


def length_normalised(log_prob: float, length: int, length_penalty: float = LENGTH_PENALTY) -> float:
    """log_prob / length ** length_penalty; `length` counts every token said, the end symbol included.

    0 ranks by probability, 1 by the mean log probability of a token. No tokens: log_prob itself.
    """
    return log_prob / max(1, length) ** length_penalty


def beam_search(
    model: StepModel, memory: "Memory", *, beam: int, n_best: int = 1, length_penalty: float = LENGTH_PENALTY
) -> list[list[Hypothesis]]:
    """The `n_best` outputs of every row of `memory` by descending score, from a beam of `beam`.

    score = log p(tokens | source) / length ** length_penalty, length counting the end symbol.

    A hypothesis that says the end symbol leaves the beam and narrows it by one, so a beam of 1 is greedy decoding and
    a beam as wide as there are outputs is enumeration. Hypotheses that reach `model.limit` end there, without an end
    symbol, and count like the others. A row is done when its beam is empty, or when `n_best` outputs are found and no
    live hypothesis can still overtake the last of them: log probabilities only fall, so at best it keeps its log
    probability at the length that suits it most. Done rows leave the batch; no row depends on another.

    Equal scores: the hypothesis that ranked higher a step before, then the more probable token. Fewer than `n_best`
    come back when fewer are possible. Raises `UserError` for n_best > beam, numbers out of range, and scores of NaN.
    Source: Sutskever, Vinyals, Le, 2014, section 3.2; length normalisation: Wu et al., 2016, section 7.
    """
    if not 1 <= n_best <= beam:
        raise UserError(f"n_best is {n_best} and beam {beam}; need 1 <= n_best <= beam")
    with torch.inference_mode():
        rows = [_Row(limit, beam, n_best, length_penalty) for limit in model.limit(memory).tolist()]
        live = [_Live(row, 0.0) for row in rows]
        tokens = torch.full((len(rows), 1), BOS, dtype=torch.int64, device=memory.mask.device)
        state, length = model.begin(memory), 0
        while live:
            log_probs, state = model.next_log_probs(tokens[:, -1], length, state)
            length += 1
            live, parents, words = _advance(live, tokens, log_probs, length, beam)
            if live:
                kept = torch.tensor(parents, device=tokens.device)
                said = torch.tensor(words, device=tokens.device)
                tokens = torch.cat((tokens.index_select(0, kept), said[:, None]), 1)
                state = _select(state, kept, unchanged=parents == list(range(len(log_probs))))
    return [row.results() for row in rows]


@dataclass(frozen=True)
class _Live:
    """A hypothesis on the beam; its tokens stand in the batch row of the same number."""

    row: "_Row"
    log_prob: float


class _Row:
    """One source: its room on the beam and the outputs found."""

    def __init__(self, limit: int, beam: int, n_best: int, length_penalty: float):
        self.limit, self.room, self.n_best, self.length_penalty = limit, beam, n_best, length_penalty
        self.found: list[Hypothesis] = []

    def finish(self, tokens: list[int], log_prob: float) -> None:
        """Take an output off the beam."""
        self.room -= 1
        self.found.append(Hypothesis(tokens, log_prob, length_normalised(log_prob, len(tokens), self.length_penalty)))

    def results(self) -> list[Hypothesis]:
        """The best outputs found, best first."""
        return sorted(self.found, key=lambda hypothesis: -hypothesis.score)[: self.n_best]

    def settled(self, best_live: float, length: int) -> bool:
        """Whether no continuation of a hypothesis of `length` with log probability `best_live` would be returned."""
        if len(self.found) < self.n_best:
            return False
        # Dividing a negative number by more makes it larger: with a positive penalty the longest output flatters most.
        final = self.limit if self.length_penalty > 0 else length + 1
        return length_normalised(best_live, final, self.length_penalty) <= self.results()[-1].score


def _advance(
    live: list[_Live], tokens: Tensor, log_probs: Tensor, length: int, beam: int
) -> tuple[list[_Live], list[int], list[int]]:
    """The beams after one token: live hypotheses, the batch row each comes from, and the token each says."""
    best, ids = log_probs.topk(min(beam, log_probs.shape[1]))  # a hypothesis has at most `beam` heirs
    if best[:, 0].isnan().any():  # the largest of numbers and NaN is NaN
        raise UserError(NOT_FINITE)
    options: dict[_Row, list[tuple[float, int, int]]] = {}
    for i, (before, values, words) in enumerate(zip(live, best.tolist(), ids.tolist(), strict=True)):
        heirs = [(before.log_prob + v, i, w) for v, w in zip(values, words, strict=True) if v > -torch.inf]
        options.setdefault(before.row, []).extend(heirs)
    after: list[_Live] = []
    parents: list[int] = []
    said: list[int] = []
    for row, heirs in options.items():
        chosen = sorted(heirs, key=lambda heir: -heir[0])[: row.room]
        going = []
        for log_prob, i, word in chosen:
            if word == EOS or length == row.limit:
                row.finish([*tokens[i, 1:].tolist(), word], log_prob)
            else:
                going.append((log_prob, i, word))
        if going and not row.settled(going[0][0], length):
            after += [_Live(row, log_prob) for log_prob, _, _ in going]
            parents += [i for _, i, _ in going]
            said += [word for _, _, word in going]
    return after, parents, said


def _select(state: Any, rows: Tensor, *, unchanged: bool) -> Any:
    """Batch rows of a state, or of each state of a tuple; nothing is copied where every row stays in place."""
    if unchanged:
        return state
    if isinstance(state, tuple):
        return tuple(_select(part, rows, unchanged=False) for part in state)
    return state.select(rows)
