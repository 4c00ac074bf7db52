"""Expected links against an enumeration of every alignment."""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest

from hasten.data import lexicon
from hasten.data.lexicon import expected_links
from hasten.data.tokenizer import EOS

PAIRS = [([10, 11], [20, 21]), ([10], [20]), ([11, 12, 11], [21, 22]), ([], [23]), ([13], []), ([12, 10], [20, 20, 22])]


def enumerated(rounds: int) -> dict[tuple[int, int], float]:
    """Every way to give each target a source is weighed by its probability under the last round's table."""
    table: dict[tuple[int, int], float] = defaultdict(lambda: 1.0)
    counts: dict[tuple[int, int], float] = {}
    for _ in range(rounds):
        counts = defaultdict(float)
        for source, target in PAIRS:
            ways = list(itertools.product([*source, EOS], repeat=len(target)))
            weights = [math.prod(table[s, t] for s, t in zip(way, target, strict=True)) for way in ways]
            for way, weight in zip(ways, weights, strict=True):
                for link in zip(way, target, strict=True):
                    counts[link] += weight / sum(weights)
        totals: dict[int, float] = defaultdict(float)
        for (s, _), count in counts.items():
            totals[s] += count
        table = defaultdict(float, {(s, t): count / totals[s] for (s, t), count in counts.items()})
    return counts


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("at_once", [1, 10**6])
def test_expected_links_are_those_of_all_alignments(rounds, at_once, monkeypatch):
    monkeypatch.setattr(lexicon, "_CELLS_AT_ONCE", at_once)
    found = expected_links(PAIRS, 30, rounds)
    expected = enumerated(rounds)
    assert list(zip(found.sources.tolist(), found.targets.tolist(), strict=True)) == sorted(expected)
    assert np.allclose(found.counts, [expected[link] for link in sorted(expected)], rtol=1e-12)
    assert found.counts.sum() == pytest.approx(sum(len(target) for _, target in PAIRS))


def test_of_no_pairs_there_are_no_links():
    for pairs in ([], [([10], [])]):
        assert [len(part) for part in expected_links(pairs, 30)] == [0, 0, 0]
