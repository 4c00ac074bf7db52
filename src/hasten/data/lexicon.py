"""Which pieces translate which: expected counts of links by IBM model 1, and nothing but numpy."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hasten.data.tokenizer import EOS

_CELLS_AT_ONCE = 4_000_000

IdPair = tuple[Sequence[int], Sequence[int]]
"""Source and target ids, without end symbols."""


class Links(NamedTuple):
    """How often source piece s is expected to make target piece t: three arrays of one length, by s and then t."""

    sources: np.ndarray
    targets: np.ndarray
    counts: np.ndarray


def expected_links(pairs: Sequence[IdPair], vocab_size: int, rounds: int = 5) -> Links:
    """The expected counts after `rounds` rounds of expectation and maximisation, from uniform probabilities.

    Each target piece has one source among the pieces of its pair and the end symbol, which stands for none of them:

        p(t_1 .. t_m | s_1 .. s_n) is proportional to prod_j sum_i p(t_j | s_i)
        count(s, t) = sum over pairs, i, j with s_i = s, t_j = t of p(t_j | s_i) / sum_i' p(t_j | s_i')
        p(t | s)    = count(s, t) / sum_t' count(s, t')

    All pairs are held at once: four bytes for every source piece times every target piece of a pair.
    Source: Brown, Della Pietra, Della Pietra, Mercer, 1993, section 4.1 (model 1).
    """
    tables = [np.unique(keys) for keys, _ in _cells(pairs, vocab_size)]
    keys = np.unique(np.concatenate(tables)) if tables else np.zeros(0, dtype=np.int64)
    cells = [(np.searchsorted(keys, own).astype(np.int32), starts) for own, starts in _cells(pairs, vocab_size)]
    sources, targets = np.divmod(keys, vocab_size)
    counts, probabilities = np.zeros(len(keys)), np.ones(len(keys))
    for _ in range(rounds):
        counts = np.zeros(len(keys))
        for own, starts in cells:
            shares = probabilities[own]
            sums = np.add.reduceat(shares, starts)
            shares /= np.repeat(sums, np.diff(starts, append=len(shares)))
            counts += np.bincount(own, shares, len(keys))
        probabilities = counts / np.bincount(sources, counts, vocab_size)[sources]
    return Links(sources, targets, counts)


def _cells(pairs: Sequence[IdPair], vocab_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Some pairs at a time: source * vocab_size + target for all their combinations, those of a target piece side by
    side, and where the next target piece begins."""
    keys: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    held = 0
    for source, target in pairs:
        if not len(target):
            continue
        ends = np.array([*source, EOS], dtype=np.int64) * vocab_size
        keys.append((ends + np.array(target, dtype=np.int64)[:, None]).ravel())
        lengths.append(np.full(len(target), len(ends)))
        held += len(keys[-1])
        if held >= _CELLS_AT_ONCE:
            yield _joined(keys, lengths)
            keys, lengths, held = [], [], 0
    if keys:
        yield _joined(keys, lengths)


def _joined(keys: list[np.ndarray], lengths: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    ends = np.cumsum(np.concatenate(lengths))
    return np.concatenate(keys), np.concatenate(([0], ends[:-1]))
