"""Draws the tiles of a pattern: which keys a run of queries meets, and which of these pairs count."""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import pairwise

import torch
from torch import Tensor

from hasten.attention.patterns.algebra import ALL, NONE, Pattern, Scene
from hasten.attention.patterns.cover import Cover, Pick, Range, clipped
from hasten.attention.patterns.global_shapes import Marked
from hasten.attention.patterns.work import Group, Piece, Shape, Stretch, Tile


@dataclass(frozen=True)
class Drawing:
    """Draws the tiles of one pattern in one group, `rows` queries each; pairs of `earlier` ones are other pieces'."""

    here: Pattern
    earlier: tuple[Pattern, ...]
    group: Group
    shape: Shape
    scene: Scene
    dtype: torch.dtype
    device: torch.device
    rows: int
    masks: dict[Hashable, Tensor] = field(default_factory=dict)

    def piece(self) -> Piece:
        """All queries of the group, `rows` at a time; cut where rows change their look."""
        rows, group, picks, tiles = self.rows, self.group, {}, []
        begin, end = group.begin, group.begin + group.queries
        cuts = {begin, end, *range((begin // rows + 1) * rows, end, rows)}
        if group.step == 1:
            cuts |= set(self._breaks_between(begin, end))
        for low, high in pairwise(sorted(cuts)):
            cover = self._cover(low, high)
            tile = self._tile(begin, low, high, cover)
            used = {name for name, _ in tile.picks}
            picks |= {pick.name: pick for pick in cover.picks if pick.name in used}
            tiles.append(tile)
        return Piece(group, tuple(tiles), picks)

    def marked_piece(self) -> Piece:
        """The marked queries, picked from the sequence, against all keys."""
        pick = Marked().cover(0, self.shape.keys, self.scene).picks[0]
        pick = replace(pick, positions=torch.where(pick.positions < self.shape.offset, -1, pick.positions))
        keys = (0, min(self.scene.length, self.shape.keys))
        tiles = []
        for low in range(0, pick.positions.shape[-1], self.rows):
            i = pick.positions[..., low : low + self.rows].to(self.device)[..., None]
            allowed = self._allowed(i, self._positions(torch.arange(*keys, device=self.device)[None, :]))
            masks, alive = self._finished([(keys[1], None, self._additive(allowed))] if keys[1] else [])
            tiles.append(Tile((low, low + i.shape[-2]), clipped([keys], keys[1]), (), masks, alive))
        return Piece(self.group, tuple(tiles), {}, pick)

    @cached_property
    def _breaks(self) -> list[int]:
        return sorted(set(self.here.breaks(self.scene)))

    def _breaks_between(self, low: int, high: int) -> list[int]:
        return self._breaks[bisect_right(self._breaks, low) : bisect_left(self._breaks, high)]

    def _cover(self, low: int, high: int) -> Cover:
        """In the units of the group."""
        group, step = self.group, self.group.step
        if step == 1:
            cover = self.here.cover(low, high, self.scene)
            return Cover(clipped(cover.ranges, min(self.scene.length, group.keys)), cover.picks, cover.hull)
        first, last = group.first, group.first + group.classes - 1
        found: list[Range] = []
        for residue in (first, last):
            cover = self.here.cover(residue + step * low, residue + step * (high - 1) + 1, self.scene)
            # Keys picked one by one may be of any class.
            found += [(0, step * group.keys)] if cover.picks else cover.ranges
        if found:
            # Classes in between begin and end in between: units are counted from the last one and up to the first one.
            low, high = min(a for a, _ in found), max(b for _, b in found)
            found = [((low - last + step - 1) // step, (high - first + step - 1) // step)]
        return Cover(clipped(found, group.keys))

    def _tile(self, begin: int, low: int, high: int, cover: Cover) -> Tile:
        ranges, parts = cover.ranges, self._parts(low, high, cover)
        # Where nearly all keys are read, it is cheaper to read all in place than to collect them.
        width = sum(b - a for a, b in (*ranges, *(part for _, part in parts)))
        if parts and 4 * width >= 3 * self.group.keys:
            ranges, parts = clipped([(0, self.scene.length)], self.group.keys), []
        kept: list[Range] = []
        stretches: list[tuple[int, Hashable, Tensor | None]] = []
        for a, b in ranges:
            blocks = self._blocks(low, high, a, b)
            kept += [(blocks[0][0], blocks[-1][1])] if blocks else []
            stretches += [(b - a, key, mask) for a, b, key, mask in blocks]
        i = self._positions(torch.arange(low, high, device=self.device)[:, None])
        for number, (pick, (a, b)) in enumerate(parts):
            stretches.append((b - a, None, self._picked(i, pick, (a, b), parts[:number], cover.ranges)))
        masks, alive = self._finished(stretches)
        names = tuple((pick.name, part) for pick, part in parts)
        return Tile((low - begin, high - begin), tuple(kept), names, masks, alive)

    def _parts(self, low: int, high: int, cover: Cover) -> list[tuple[Pick, Range]]:
        """The parts of picks that are not in the ranges: exactly so for ascending ones; masks do it for the others."""
        parts: list[tuple[Pick, Range]] = []
        for pick in cover.picks:
            if not pick.ascending:
                parts.append((pick, (0, pick.positions.shape[-1])))
                continue
            limit = cover.hull or (0, self.scene.length)
            at = pick.positions[0, 0].contiguous()
            borders = [limit[0], *(x for pair in cover.ranges for x in pair), low, high, limit[1]]
            cuts = torch.searchsorted(at, torch.tensor(borders, device=at.device)).tolist()
            inside = [(a, b) for a, b in zip(cuts[1:-3:2], cuts[2:-3:2], strict=True) if a < b]
            marks = sorted({cut for cut in cuts if cuts[0] <= cut <= cuts[-1]})
            parts += [(pick, (a, b)) for a, b in pairwise(marks) if not any(c <= a and b <= d for c, d in inside)]
        return [(pick, part) for pick, part in parts if part[0] < part[1]]

    def _blocks(self, low: int, high: int, first: int, last: int) -> list[tuple[int, int, Hashable, Tensor | None]]:
        """A range of keys cut where the look changes, without ends in which no pair counts: (from, to, key, mask)."""
        size = max(high - low, self.rows)
        cuts = {first, last, *range(low + (first - low) // size * size, last, size)}
        if self.group.step == 1:
            cuts |= set(self._breaks_between(first, last))
        marks = sorted(cut for cut in cuts if first <= cut <= last)
        drawn = [(a, b, *self._block(low, high, a, b)) for a, b in pairwise(marks)]
        while drawn and drawn[0][2] == NONE:
            drawn.pop(0)
        while drawn and drawn[-1][2] == NONE:
            drawn.pop()
        return drawn

    def _block(self, low: int, high: int, a: int, b: int) -> tuple[Hashable, Tensor | None]:
        """Signature and mask of a block; no mask where all pairs count."""
        key = self._alike(low, high, a, b)
        if key == ALL:
            return ALL, None
        if key is None or (key, high - low, b - a) not in self.masks:
            i = self._positions(torch.arange(low, high, device=self.device)[:, None])
            allowed = self._allowed(i, self._positions(torch.arange(a, b, device=self.device)[None, :]))
            mask = self._additive(allowed)
            if key is None:
                return (ALL, None) if mask is None else (None if allowed.any() else NONE, mask)
            if mask is None:
                return ALL, None
            self.masks[key, high - low, b - a] = mask
        return key, self.masks[key, high - low, b - a]

    def _alike(self, low: int, high: int, a: int, b: int) -> Hashable:
        """ALL, NONE, a key under which equal masks are kept, or None."""
        step, first, last = self.group.step, self.group.first, self.group.first + self.group.classes - 1
        if last + step * (b - 1) >= min(self.shape.lengths) or (step > 1 and not self._relative):
            return None
        span, queries = (
            (first + step * a, first + step * (b - 1) + 1),
            (first + step * low, first + step * (high - 1) + 1),
        )
        here = self.here.signature(*queries, span, self.scene)
        others = [pattern.signature(*queries, span, self.scene) for pattern in self.earlier]
        others = [one for one in others if one != NONE]
        if here in (NONE, None) or not others:
            return here
        return NONE if ALL in others else None if None in others else ("but", here, *others)

    def _positions(self, units: Tensor) -> Tensor:
        """Of units (b, 1) or (1, w) of the group: (1, 1, b, 1), with classes (1, 1, C, b, 1)."""
        group = self.group
        if group.step == 1:
            return units[None, None]
        classes = 1 if self._relative else group.classes
        first = torch.arange(group.first, group.first + classes, device=self.device)
        return (first[:, None, None] + group.step * units)[None, None]

    @property
    def _relative(self) -> bool:
        padded = set(self.shape.lengths) != {self.shape.keys}
        return not padded and all(pattern.relative for pattern in (self.here, *self.earlier))

    def _picked(
        self, i: Tensor, pick: Pick, part: Range, before: list[tuple[Pick, Range]], ranges: tuple[Range, ...]
    ) -> Tensor | None:
        """The mask of picked keys: each pair counts once, in a range or where it is picked first."""
        j = pick.positions[..., part[0] : part[1]].to(self.device)[..., None, :]
        seen = [(j >= low) & (j < high) for low, high in ranges]
        seen += [_among(j, other.positions[..., a:b].to(self.device)) for other, (a, b) in before if other is not pick]
        if pick.whole and not self.earlier:
            allowed = self._real(j, j >= 0)
            rows = (*[-1] * (j.ndim - 2), i.shape[-2], -1)
            return self._additive(reduce(lambda known, one: known & ~one, seen, allowed).expand(rows))
        allowed = self._allowed(i, j) & (j >= 0)
        return self._additive(reduce(lambda known, one: known & ~one, seen, allowed))

    def _allowed(self, i: Tensor, j: Tensor) -> Tensor:
        allowed = self.here.allows(i, j, self.scene)
        for pattern in self.earlier:
            allowed = allowed & ~pattern.allows(i, j, self.scene)
        return self._real(j, allowed)

    def _real(self, j: Tensor, allowed: Tensor) -> Tensor:
        """Without padded keys."""
        lengths = set(self.shape.lengths)
        if len(lengths) > 1:
            real = torch.tensor(self.shape.lengths, device=self.device).view(-1, *[1] * (j.ndim - 1))
            return allowed & (j < real)
        return allowed if lengths == {self.shape.keys} else allowed & (j < self.shape.lengths[0])

    def _additive(self, allowed: Tensor) -> Tensor | None:
        """0 or -inf, (b, w) or (sheets, b, w); None where all pairs count."""
        if allowed.all():
            return None
        shape = self.shape
        if max(allowed.shape[:-2]) > 1:
            inner = allowed.shape[2:-2] if self.group.step == 1 else (self.group.classes,)
            allowed = allowed.expand(shape.batch, shape.heads, *inner, *allowed.shape[-2:])
        allowed = allowed.reshape(-1, *allowed.shape[-2:])
        allowed = allowed[0] if len(allowed) == 1 else allowed
        return torch.zeros(allowed.shape, dtype=self.dtype, device=self.device).masked_fill_(~allowed, -torch.inf)

    def _finished(
        self, stretches: list[tuple[int, Hashable, Tensor | None]]
    ) -> tuple[tuple[Stretch, ...], Tensor | None]:
        """Stretches (width, key, mask) with their places, neighbours as one, and the rows that read something.

        A row that reads nothing is computed as if it read a few keys, and then taken back: no softmax is of nothing.
        """
        found: list[tuple[int, Hashable, Tensor]] = []
        at, free = 0, not stretches
        for width, key, mask in stretches:
            if mask is None:
                free = True
            elif found and found[-1][0] + found[-1][2].shape[-1] == at:
                found[-1] = (found[-1][0], *self._joined(found[-1][1:], (key, mask)))
            else:
                found.append((at, key, mask))
            at += width
        alive = None
        if not free:
            reads = reduce(torch.logical_or, ((mask == 0).any(-1, keepdim=True) for _, _, mask in found))
            if not reads.all():
                found[0] = (found[0][0], None, torch.where(reads, found[0][2], 0.0))
                alive = reads.to(self.dtype)
        return tuple(Stretch(start, mask.shape[-1], mask) for start, _, mask in found), alive

    def _joined(self, left: tuple[Hashable, Tensor], right: tuple[Hashable, Tensor]) -> tuple[Hashable, Tensor]:
        """Two masks beside each other; of kept ones the pair is kept, so that a plan does not grow with its tiles."""
        key = None if None in (left[0], right[0]) else (left[0], left[1].shape, right[0], right[1].shape)
        if key in self.masks:
            return key, self.masks[key]
        lead = torch.broadcast_shapes(left[1].shape[:-1], right[1].shape[:-1])
        joined = torch.cat([mask.expand(*lead, -1) for mask in (left[1], right[1])], -1)
        if key is not None:
            self.masks[key] = joined
        return key, joined


def _among(j: Tensor, others: Tensor) -> Tensor:
    """Which of the picked keys j (..., 1, w) stand among `others` (B or 1, H or 1, x)."""
    return (j[..., None] == others[:, :, None, None, :]).any(-1)
