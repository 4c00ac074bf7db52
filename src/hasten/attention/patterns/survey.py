"""What a pattern allows, counted: keys of each query, and the share of allowed pairs in the cells of a coarse grid.

Only keys that the pattern's cover names are looked at, some queries at a time, so that long sequences can be surveyed.
Where even that is too much, as with strides, which cover everything, some queries stand for their neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from hasten.attention.patterns.algebra import Pattern, Restriction, Scene, Union, walk
from hasten.attention.patterns.cover import Cover, Range, clipped
from hasten.attention.patterns.global_shapes import External, Global, Marked, MarkedRows, Shifted
from hasten.attention.patterns.plan import terms
from hasten.attention.patterns.random_blocks import RandomBlocks
from hasten.errors import UserError

_ROWS = 64
_AT_ONCE = 2**22
_MOST_PAIRS = 2**26


@dataclass(frozen=True, eq=False)
class Survey:
    """Counts of one pattern. P parts of its union, each without what earlier parts allow; H heads that differ.

    shares (P, H, R, C): allowed pairs of each cell of `cell` x `cell` pairs. counts (H, n): keys of n queries, all of
    them or, where `sampled`, some. The query of row i stands at position i + n_keys - n_queries.
    """

    labels: tuple[str, ...]
    shares: Tensor
    counts: Tensor
    cell: int
    n_queries: int
    n_keys: int

    @property
    def sampled(self) -> bool:
        """Whether some queries stand for all."""
        return self.counts.shape[1] < self.n_queries

    def share(self, head: int) -> float:
        """Of all pairs, how many are allowed."""
        cells = (
            self.shares[:, head].sum(0) * _sizes(self.n_queries, self.cell)[:, None] * _sizes(self.n_keys, self.cell)
        )
        return float(cells.sum() / (self.n_queries * self.n_keys))

    def keys_per_query(self, head: int) -> tuple[int, int, int]:
        """Least, median and most keys of a query."""
        counts = self.counts[head].sort().values
        return int(counts[0]), int(counts[(len(counts) - 1) // 2]), int(counts[-1])


def survey(
    pattern: Pattern,
    n_queries: int,
    n_keys: int,
    *,
    n_heads: int = 1,
    seed: int = 0,
    causal: bool = False,
    marked: Sequence[int] = (),
    points: int = 256,
) -> Survey:
    """Count what `pattern` allows, in a grid of at most `points` x `points` cells.

    marked: positions of marked tokens, for patterns with `Marked`. Raises `UserError` where a pattern cannot be causal,
    or marked tokens are missing or outside the sequence.
    """
    work = _Work(pattern, n_queries, n_keys, n_heads, seed, causal, tuple(marked), points)
    counts = [work.count(run) for run in work.runs]
    areas = _sizes(n_queries, work.cell)[:, None] * _sizes(n_keys, work.cell)
    shares = work.cells / areas
    return Survey(work.labels, shares, torch.cat(counts, 1), work.cell, n_queries, n_keys)


def _sizes(length: int, cell: int) -> Tensor:
    """Tokens of each cell along one side, the last one cut."""
    return (length - torch.arange(0, length, cell)).clamp(max=cell)


@dataclass(frozen=True, eq=False)
class _Run:
    """Neighbouring queries of one row of cells, and what covers them: ranges, and picked keys (H, w), -1: none."""

    rows: Range
    ranges: tuple[Range, ...]
    picked: Tensor

    @property
    def pairs(self) -> int:
        """Pairs to be looked at."""
        width = sum(b - a for a, b in self.ranges) + self.picked.shape[1]
        return (self.rows[1] - self.rows[0]) * width * len(self.picked)

    def keys(self) -> Tensor:
        """(H, W)."""
        natural = torch.cat([torch.arange(a, b) for a, b in self.ranges] or [torch.empty(0, dtype=torch.int64)])
        return torch.cat((natural.expand(len(self.picked), -1), self.picked), 1)


class _Work:
    """One survey under way."""

    def __init__(
        self,
        pattern: Pattern,
        n_queries: int,
        n_keys: int,
        n_heads: int,
        seed: int,
        causal: bool,
        marked: tuple[int, ...],
        points: int,
    ):
        shapes = list(walk(pattern))
        self.n_keys, self.offset = n_keys, n_keys - n_queries
        self.n_heads = n_heads if any(isinstance(shape, RandomBlocks) for shape in shapes) else 1
        tokens = _marked(marked, n_keys) if any(isinstance(shape, Marked) for shape in shapes) else None
        self.scene = Scene(n_keys, self.n_heads, seed, tokens, n_keys)
        self.labels, self.parts = zip(*_parts(pattern, causal), strict=True)
        self.terms = [Restriction(term) for part in self.parts for term in terms(part)]
        self.cell = (max(n_queries, n_keys) + points - 1) // points
        shape = [(length + self.cell - 1) // self.cell for length in (n_queries, n_keys)]
        self.cells = torch.zeros(len(self.parts), self.n_heads, *shape)
        coarse = {*range(0, n_queries, self.cell), n_queries}
        self._divide({*range(0, n_queries, _ROWS), *coarse})
        if self.looked_at < 1 / _ROWS:
            self._divide(coarse)
        self.generator = torch.Generator().manual_seed(0)

    def _divide(self, cuts: set[int]) -> None:
        self.runs = [self._run(rows) for rows in pairwise(sorted(cuts))]
        self.looked_at = _MOST_PAIRS / max(1, sum(run.pairs for run in self.runs) * len(self.parts))

    def count(self, run: _Run) -> Tensor:
        """Add to the cells; keys of the queries, (H, n)."""
        rows, keys = torch.arange(*run.rows), run.keys()
        # Tokens at the ends are often global: these are looked at one by one.
        if self.looked_at < 1 and run is not self.runs[0] and run is not self.runs[-1]:
            some = max(1, round(self.looked_at * len(rows)))
            rows = rows[torch.randperm(len(rows), generator=self.generator)[:some].sort().values]
        weight = (run.rows[1] - run.rows[0]) / len(rows)
        step = max(1, _AT_ONCE // max(1, keys.numel()))
        return torch.cat([self._count(some, keys, weight) for some in rows.split(step)], 1)

    def _count(self, rows: Tensor, keys: Tensor, weight: float) -> Tensor:
        i, j = (rows + self.offset)[None, None, :, None], keys[None, :, None, :]
        row = int(rows[0]) // self.cell
        columns = (keys.clamp(min=0) // self.cell).expand(self.n_heads, -1)
        free = (j >= 0).expand(1, self.n_heads, len(rows), -1)
        total = torch.zeros(self.n_heads, len(rows), dtype=torch.int64)
        for number, part in enumerate(self.parts):
            allowed = (part.allows(i, j, self.scene) & free)[0]
            free = free & ~allowed
            total += allowed.sum(-1)
            self.cells[number, :, row].scatter_add_(1, columns, weight * allowed.sum(1).float())
        return total

    def _run(self, rows: Range) -> _Run:
        low, high = rows[0] + self.offset, rows[1] + self.offset
        asked = [term for term in self.terms if self._asks(term, low, high)]
        cover = reduce(Cover.__or__, (term.cover(low, high, self.scene) for term in asked), Cover())
        ranges = clipped(cover.ranges, self.n_keys)
        picks = [pick.positions[0] for pick in cover.picks]
        heads = max((len(positions) for positions in picks), default=1)
        empty = torch.empty(heads, 0, dtype=torch.int64)
        picked = torch.cat([empty, *(positions.expand(heads, -1) for positions in picks)], 1).sort(1).values
        again = torch.zeros_like(picked, dtype=torch.bool)
        again[:, 1:] = picked[:, 1:] == picked[:, :-1]
        for a, b in ranges:
            again |= (picked >= a) & (picked < b)
        return _Run(rows, ranges, torch.where(again, -1, picked))

    def _asks(self, term: Restriction, low: int, high: int) -> bool:
        """Whether a term can allow any of these queries something: rows of marked tokens are few."""
        if not any(isinstance(shape, MarkedRows) for shape in term.parts):
            return True
        assert self.scene.marked is not None
        return bool(self.scene.marked[0, max(0, low) : max(0, high)].any())


def _parts(pattern: Pattern, causal: bool) -> list[tuple[str, Pattern]]:
    """The parts of a union with their names; external tokens first, the others shifted behind them."""
    parts = pattern.parts if isinstance(pattern, Union) else (pattern,)
    tokens = max((part.tokens for part in parts if isinstance(part, External)), default=0)
    found: list[tuple[str, Pattern]] = [(str(External(tokens)), Global(first=tokens))] if tokens else []
    for part in parts:
        if causal:
            found.append((str(part), part.causal()))
        elif not isinstance(part, External):
            found.append((str(part), Shifted(part, tokens) if tokens else part))
    return found


def _marked(positions: tuple[int, ...], n_keys: int) -> Tensor:
    """(1, S)."""
    if not positions:
        raise UserError("which tokens are marked? give their positions, for example 0,17")
    wrong = [at for at in positions if not 0 <= at < n_keys]
    if wrong:
        raise UserError(f"marked token {wrong[0]} is outside the sequence; positions are 0 to {n_keys - 1}")
    tokens = torch.zeros(1, n_keys, dtype=torch.bool)
    tokens[0, list(positions)] = True
    return tokens
