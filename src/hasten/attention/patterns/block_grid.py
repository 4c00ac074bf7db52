"""Which blocks of the score matrix hold allowed pairs: from what shapes say of themselves, never from all pairs."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.attention.patterns.algebra import ALL, NONE, Pattern, Restriction, Scene, Union
from hasten.attention.patterns.cover import Range, clipped
from hasten.attention.patterns.global_shapes import Marked, MarkedRows, Shifted

EMPTY, SOME, FULL = 0, 1, 2
"""Blocks in which no pair, some pairs or all pairs are allowed."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Kinds of blocks (1 or H, R, C). doubt: some are SOME only because parts overlap in unknown ways."""

    kinds: Tensor
    doubt: Tensor

    @staticmethod
    def sure(kinds: Tensor) -> "Grid":
        """Without doubt."""
        return Grid(kinds, torch.zeros_like(kinds, dtype=torch.bool))


@dataclass(frozen=True, eq=False)
class BlockGrid:
    """The grid of one call: `queries` queries, the last at the last of `keys` keys, in squares of `block` pairs.

    Blocks beyond `scene.length` are empty; blocks that the end of the sequence cuts are never FULL. Where a pattern is
    drawn at random or marked, a block can be SOME although no pair, or all, are allowed: pairs are still checked.
    """

    scene: Scene
    queries: int
    keys: int
    block: int
    known: dict[Hashable, int] = field(default_factory=dict)

    @property
    def offset(self) -> int:
        """Position of the first query."""
        return self.keys - self.queries

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        rows, columns = ((n + self.block - 1) // self.block for n in (self.queries, self.keys))
        return rows, columns

    def kinds(self, pattern: Pattern) -> Tensor:
        """Kinds of all blocks, int8 (1 or H, R, C). External tokens must be resolved before."""
        grid = self._grid(pattern)
        kinds = grid.kinds.clone()
        # Parts that are each sure of a block are not of their union: it is asked as a whole.
        for row, column in grid.doubt.any(0).nonzero().tolist():
            kind = self._kind(pattern, self._rows(row), self._keys(column))
            kinds[:, row, column] = torch.where(grid.doubt[:, row, column], kind, kinds[:, row, column])
        cut = torch.zeros_like(kinds, dtype=torch.bool)
        cut[:, self.queries // self.block :] = True
        cut[:, :, self.scene.length // self.block :] = True
        kinds[cut & (kinds == FULL)] = SOME
        kinds[:, :, (self.scene.length + self.block - 1) // self.block :] = EMPTY
        return kinds

    def _grid(self, pattern: Pattern) -> Grid:
        if pattern.relative:
            return Grid.sure(self._by_distance(pattern))
        if isinstance(pattern, Union | Restriction):
            return self._joined([self._grid(part) for part in pattern.parts], union=isinstance(pattern, Union))
        if isinstance(pattern, Shifted) and isinstance(pattern.pattern, Union | Restriction):
            parts = [self._grid(Shifted(part, pattern.by)) for part in pattern.pattern.parts]
            return self._joined(parts, union=isinstance(pattern.pattern, Union))
        if isinstance(pattern, Shifted) and isinstance(pattern.pattern, Marked | MarkedRows):
            return Grid.sure(self._among_marked(pattern.pattern, pattern.by))
        if isinstance(pattern, Marked | MarkedRows):
            return Grid.sure(self._among_marked(pattern, 0))
        if not pattern.of_query:
            rows, columns = self.shape
            first = [self._kind(pattern, self._rows(0), self._keys(column)) for column in range(columns)]
            return Grid.sure(torch.tensor(first, dtype=torch.int8).expand(1, rows, columns))
        return Grid.sure(self._by_cover(pattern))

    def _joined(self, grids: list[Grid], *, union: bool) -> Grid:
        kinds = [grid.kinds for grid in grids]
        joined = reduce(torch.maximum if union else torch.minimum, kinds)
        partial = sum((kind == SOME).to(torch.int8) for kind in kinds)
        doubt = reduce(torch.logical_or, (grid.doubt for grid in grids))
        return Grid(joined, (joined == SOME) & (doubt | (partial > 1)))

    def _rows(self, row: int) -> Range:
        low = row * self.block
        return self.offset + low, self.offset + min(low + self.block, self.queries)

    def _keys(self, column: int) -> Range:
        """Real keys of a column; none beyond the end."""
        low = column * self.block
        return low, min(low + self.block, self.scene.length)

    def _kind(self, pattern: Pattern, rows: Range, keys: Range) -> int:
        if keys[0] >= keys[1]:
            return EMPTY
        signature = pattern.signature(*rows, keys, self.scene)
        if signature in (ALL, NONE, None):
            return {ALL: FULL, NONE: EMPTY, None: SOME}[signature]  # type: ignore[index]
        key = (pattern, rows[1] - rows[0], keys[1] - keys[0], signature)
        if key not in self.known:
            i, j = torch.arange(*rows)[None, None, :, None], torch.arange(*keys)[None, None, None, :]
            allowed = pattern.allows(i, j, self.scene)
            self.known[key] = FULL if allowed.all() else SOME if allowed.any() else EMPTY
        return self.known[key]

    def _by_distance(self, pattern: Pattern) -> Tensor:
        """Whole blocks differ only by their distance from the diagonal; cut ones are asked one by one."""
        (rows, columns), block = self.shape, self.block
        start = [distance * block - self.offset for distance in range(1 - rows, columns)]
        kinds = torch.tensor([self._kind_at(pattern, at) for at in start], dtype=torch.int8)
        place = torch.arange(columns) - torch.arange(rows)[:, None] + rows - 1
        found = kinds[place]
        for row in range(self.queries // block, rows):
            own = [self._kind(pattern, self._rows(row), self._keys(column)) for column in range(columns)]
            found[row] = torch.tensor(own, dtype=torch.int8)
        for column in range(self.scene.length // block, columns):
            own = [self._kind(pattern, self._rows(row), self._keys(column)) for row in range(rows)]
            found[:, column] = torch.tensor(own, dtype=torch.int8)
        return found[None]

    def _kind_at(self, pattern: Pattern, start: int) -> int:
        """Of a whole block whose first key stands `start` behind its first query."""
        signature = pattern.signature(0, self.block, (start, start + self.block), self.scene)
        if signature in (ALL, NONE):
            return FULL if signature == ALL else EMPTY
        i, j = torch.arange(self.block)[:, None], torch.arange(start, start + self.block)
        allowed = pattern.allows(i[None, None], j[None, None, None], self.scene)
        return FULL if allowed.all() else SOME if allowed.any() else EMPTY

    def _by_cover(self, pattern: Pattern) -> Tensor:
        """Row by row, the blocks that its cover touches; those of picked keys are taken for SOME."""
        rows, columns = self.shape
        found: list[Tensor] = []
        for row in range(rows):
            cover = pattern.cover(*self._rows(row), self.scene)
            kinds = torch.zeros(1, columns + 1, dtype=torch.int8)
            for low, high in clipped(cover.ranges, self.scene.length):
                for column in range(low // self.block, (high - 1) // self.block + 1):
                    kinds[0, column] = self._kind(pattern, self._rows(row), self._keys(column))
            for pick in cover.picks:
                at = pick.positions[0]
                picked = torch.zeros(len(at), columns + 1, dtype=torch.int8)
                picked.scatter_(1, torch.where(at < 0, columns, at // self.block), SOME)
                kinds = torch.maximum(kinds, picked)
            found.append(kinds[:, :columns])
        heads = max(len(kinds) for kinds in found)
        return torch.stack([kinds.expand(heads, -1) for kinds in found], 1)

    def _among_marked(self, pattern: Marked | MarkedRows, after: int) -> Tensor:
        """Blocks in which keys or queries are marked; of tokens before `after`, none is."""
        assert self.scene.marked is not None
        (rows, columns), marked = self.shape, self.scene.marked[0].cpu().clone()
        marked[self.scene.length :] = False
        asking = F.pad(marked, (max(0, -self.offset), 0))[-self.queries :]
        along_rows = self._shares(asking, rows)[:, None]
        along_columns = self._shares(marked, columns)[None]
        if isinstance(pattern, MarkedRows):
            found = along_rows.expand(rows, columns)
        else:
            found = torch.maximum(along_rows, along_columns) if pattern.rows else along_columns.expand(rows, columns)
        found = found.clone()
        found[: max(0, after - self.offset + self.block - 1) // self.block].clamp_(max=SOME)
        found[:, : (after + self.block - 1) // self.block].clamp_(max=SOME)
        return found[None]

    def _shares(self, flags: Tensor, blocks: int) -> Tensor:
        cells = F.pad(flags, (0, blocks * self.block - len(flags))).view(blocks, self.block)
        return cells.any(1).to(torch.int8) + cells.all(1).to(torch.int8)
