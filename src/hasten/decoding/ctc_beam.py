"""Reading CTC frames: collapse, greedy decoding and prefix beam search.

A path (one token a frame) becomes a token sequence by merging adjacent equal tokens, then dropping blanks. Equal
tokens stay apart only across a blank: `A A blank A` reads `A A`.

Shapes: B batch, T frames, V vocabulary (blank included), N tokens of the longest result.

Sources: Graves et al. 2006, section 3.2; Hannun, Maas, Jurafsky, Ng 2014 (prefix beam search).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Collapsed(NamedTuple):
    """Token sequences read off frames, right padded."""

    tokens: Int[Tensor, "B N"]
    """Token ids; `pad` where `mask` is False."""
    scores: Float[Tensor, "B N"]
    """Highest frame score of each token's run; 0 where `mask` is False."""
    mask: Bool[Tensor, "B N"]
    """True at real tokens."""


def collapse(frames: Int[Tensor, "B T"], lengths: Int[Tensor, "B"], *, blank: int) -> list[list[int]]:
    """Token lists of paths: merge adjacent equal tokens, then drop blanks; frames beyond the length do not count."""
    starts = _run_starts(frames, lengths, blank)
    return [row[start].tolist() for row, start in zip(frames.cpu(), starts.cpu(), strict=True)]


def collapse_scored(
    frames: Int[Tensor, "B T"], scores: Float[Tensor, "B T"], lengths: Int[Tensor, "B"], *, blank: int, pad: int = 0
) -> Collapsed:
    """Collapse paths and give each token the highest score of the frames in its run.

    score(token) = max over the frames of its run of scores[t]

    `scores` are the frames' log probabilities; gradients reach the winning frames. N is the longest result.
    """
    starts = _run_starts(frames, lengths, blank)
    inside = _real(frames, lengths) & (frames != blank)
    n_tokens = starts.sum(1)
    longest = int(n_tokens.max()) if len(frames) else 0
    mask = torch.arange(longest, device=frames.device) < n_tokens[:, None]
    slot = torch.where(inside, starts.cumsum(1) - 1, longest)  # one slot more takes blanks and padding
    best = scores.new_full((len(frames), longest + 1), -torch.inf)
    best = best.scatter_reduce(1, slot, torch.where(inside, scores, -torch.inf), "amax")[:, :longest]
    tokens = frames.new_full((len(frames), longest + 1), pad).scatter(1, slot, frames)[:, :longest]
    return Collapsed(torch.where(mask, tokens, pad), torch.where(mask, best, 0), mask)


def greedy(
    log_probs: Float[Tensor, "B T V"],
    lengths: Int[Tensor, "B"],
    *,
    blank: int,
    pad: int = 0,
    banned: Sequence[int] = (),
) -> Collapsed:
    """Most probable token of each frame, collapsed; `banned` tokens are never chosen, the lowest id wins a tie.

    Takes logits too; the scores are then logits.
    """
    if blank in banned:
        raise ValueError(f"ctc greedy: blank {blank} is among the banned tokens {tuple(banned)}")
    if banned:
        log_probs = log_probs.index_fill(2, torch.tensor(list(banned), device=log_probs.device), -torch.inf)
    best, frames = log_probs.max(2)
    return collapse_scored(frames, best, lengths, blank=blank, pad=pad)


def prefix_beam_search(
    log_probs: Float[Tensor, "T V"] | np.ndarray,
    *,
    blank: int,
    beam: int,
    n_best: int = 1,
    top_tokens: int | None = None,
    banned: Sequence[int] = (),
    length_bonus: float = 0.0,
) -> list[tuple[tuple[int, ...], float]]:
    """Most probable token sequences of one sentence, best first, with their log probabilities.

    log p(y | x) + length_bonus * len(y) ranks; p sums all paths that collapse to y and stay within the beam.

    Each prefix keeps two masses: of its paths that end in a blank and of those that end in its last token. A repeat of
    the last token extends only the first; the second stays. With `beam` at least the number of prefixes the result is
    exact. A narrow beam may end below the greedy path's sequence, as a repeat splits its mass.

    `top_tokens` limits, frame by frame, the tokens that may extend a prefix to the most probable ones (prefixes that
    are in the beam already lose nothing). `banned` tokens never come out; the others are not renormalised.
    The log probabilities do not contain the bonus. Fewer than `n_best` come back when the beam holds fewer.
    Ties go to the prefix that ranked higher a frame before, an unchanged prefix before an extended one, then the lower
    token id. Computed in float64 on the CPU. Raises ValueError for sizes out of range.
    Source: Hannun et al. 2014, algorithm 1, with merging of a prefix that is reached again.
    """
    frames = log_probs.detach().cpu().double().numpy() if isinstance(log_probs, Tensor) else log_probs.astype(float)
    _check(frames, blank, beam, n_best, top_tokens, banned)
    prefixes = _Prefixes(blank, beam, length_bonus)
    for frame, tokens in zip(frames, _candidates(frames, blank, top_tokens, banned), strict=True):
        prefixes.advance(frame, tokens)
    return prefixes.results()[:n_best]


class _Prefixes:
    """The beam: a trie of prefixes and, best first, the masses of those still alive."""

    def __init__(self, blank: int, beam: int, length_bonus: float):
        self.blank, self.beam, self.bonus = blank, beam, length_bonus
        self.children: dict[tuple[int, int], int] = {}  # (node, token) -> node; a dropped prefix keeps its node
        self.parents, self.tokens, self.depths = [-1], [-1], [0]
        self.nodes = [0]
        self.ends_blank, self.ends_token = np.zeros(1), np.full(1, -np.inf)

    def advance(self, frame: np.ndarray, candidates: np.ndarray) -> None:
        """Read one frame (V,) of log probabilities; `candidates` are the ascending ids that may extend a prefix."""
        total = np.logaddexp(self.ends_blank, self.ends_token)
        last = np.array([self.tokens[node] for node in self.nodes], dtype=int)
        extended = total[:, None] + frame[candidates]  # (prefixes, candidates)
        column, among = np.searchsorted(candidates, last), np.isin(last, candidates)
        extended[among, column[among]] = self.ends_blank[among] + frame[last[among]]
        stays_blank = total + frame[self.blank]
        stays_token = self.ends_token + np.where(last >= 0, frame[last], -np.inf)
        place = {node: i for i, node in enumerate(self.nodes)}
        for i, node in enumerate(self.nodes):
            parent = place.get(self.parents[node])
            if parent is not None:  # its parent extends into it: one prefix, one entry
                mass = self.ends_blank[parent] if last[parent] == last[i] else total[parent]
                stays_token[i] = np.logaddexp(stays_token[i], mass + frame[last[i]])
                if among[i]:
                    extended[parent, column[i]] = -np.inf
        self._keep_best(stays_blank, stays_token, extended, candidates)

    def _keep_best(
        self, stays_blank: np.ndarray, stays_token: np.ndarray, extended: np.ndarray, candidates: np.ndarray
    ) -> None:
        """Keep the best of the unchanged and the extended prefixes."""
        depths = np.array([self.depths[node] for node in self.nodes])
        unchanged = np.logaddexp(stays_blank, stays_token) + self.bonus * depths
        longer = extended + (self.bonus * (depths + 1))[:, None]
        best = _best(np.concatenate([unchanged, longer.ravel()]), self.beam)
        old, count = self.nodes, len(self.nodes)
        self.nodes, blank_mass, token_mass = [], [], []
        for index in best.tolist():
            row, column = divmod(index - count, len(candidates)) if index >= count else (index, -1)
            self.nodes.append(old[row] if column < 0 else self._child(old[row], int(candidates[column])))
            blank_mass.append(stays_blank[row] if column < 0 else -np.inf)
            token_mass.append(stays_token[row] if column < 0 else extended[row, column])
        self.ends_blank, self.ends_token = np.array(blank_mass), np.array(token_mass)

    def _child(self, node: int, token: int) -> int:
        child = self.children.setdefault((node, token), len(self.parents))
        if child == len(self.parents):
            self.parents.append(node)
            self.tokens.append(token)
            self.depths.append(self.depths[node] + 1)
        return child

    def results(self) -> list[tuple[tuple[int, ...], float]]:
        """All prefixes alive, best first."""
        total = np.logaddexp(self.ends_blank, self.ends_token)
        return [(self._spell(node), float(mass)) for node, mass in zip(self.nodes, total, strict=True)]

    def _spell(self, node: int) -> tuple[int, ...]:
        tokens = []
        while node:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))


def _check(
    frames: np.ndarray, blank: int, beam: int, n_best: int, top_tokens: int | None, banned: Sequence[int]
) -> None:
    """Raise ValueError for sizes and ids that do not fit the frames."""
    if frames.ndim != 2:
        raise ValueError(f"prefix beam search: log_probs have shape {frames.shape}, need (frames, vocabulary)")
    vocabulary = frames.shape[1]
    if np.isnan(frames).any():
        raise ValueError("prefix beam search: log_probs hold NaN; pass the sentence's own frames of a finite model")
    for name, token in [("blank", blank), *(("banned token", token) for token in banned)]:
        if not 0 <= token < vocabulary:
            raise ValueError(f"prefix beam search: {name} is {token}, the vocabulary with blank has {vocabulary}")
    if blank in banned:
        raise ValueError(f"prefix beam search: blank {blank} is among the banned tokens {tuple(banned)}")
    for name, count in [("beam", beam), ("n_best", n_best), ("top_tokens", 1 if top_tokens is None else top_tokens)]:
        if count < 1:
            raise ValueError(f"prefix beam search: {name} is {count}, allowed 1 or more")


def _candidates(frames: np.ndarray, blank: int, top_tokens: int | None, banned: Sequence[int]) -> list[np.ndarray]:
    """Ascending ids that may extend a prefix, frame by frame: the `top_tokens` best besides blank and banned."""
    allowed = np.setdiff1d(np.arange(frames.shape[1]), [blank, *banned])
    if top_tokens is None or top_tokens >= len(allowed):
        return [allowed] * len(frames)
    rows = frames[:, allowed]
    return [allowed[np.sort(_best(row, top_tokens))] for row in rows]


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` highest scores, highest first, ties by index; impossible ones (-inf) left out."""
    if count < len(scores):
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        kept = np.flatnonzero((scores >= least) & (scores > -np.inf))
    else:
        kept = np.flatnonzero(scores > -np.inf)
    return kept[np.argsort(-scores[kept], kind="stable")][:count]


def _real(frames: Tensor, lengths: Tensor) -> Tensor:
    """(B, T), True before each row's length."""
    return torch.arange(frames.shape[1], device=frames.device) < lengths[:, None]


def _run_starts(frames: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """(B, T), True where a token comes out: not a blank, not the frame before again."""
    new = torch.ones_like(frames, dtype=torch.bool)
    new[:, 1:] = frames[:, 1:] != frames[:, :-1]
    return new & (frames != blank) & _real(frames, lengths)
