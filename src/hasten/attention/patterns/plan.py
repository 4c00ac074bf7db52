"""From a pattern to work: which scores are formed, tile by tile, and which of them count.

A plan is a list of pieces, each a list of tiles (a run of queries against the keys it may read). Most patterns need
one piece. Strides need a piece of their own, in which tokens are sorted by their residue, so that what was scattered
becomes dense blocks; queries marked in the call need one, too. Pieces never share a pair, so their softmaxes merge
exactly by their normalisers. Planning looks at tiles, never at all pairs: its cost is the number of tiles.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from itertools import pairwise, product

import torch
from torch import Tensor

from hasten.attention.patterns.algebra import Pattern, Restriction, Scene, Union
from hasten.attention.patterns.cover import Cover, Pick, Range, clipped
from hasten.attention.patterns.shapes import External, Global, Marked, MarkedRows, Shifted

ROWS = 64
"""Queries in a tile: small enough that its scores stay in a core's cache."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a call: batch, heads, queries, keys, and real tokens of each example (one number: of all)."""

    batch: int
    heads: int
    queries: int
    keys: int
    lengths: tuple[int, ...]

    @property
    def offset(self) -> int:
        """Position of the first query: the last query stands at the last key."""
        return self.keys - self.queries


@dataclass(frozen=True, eq=False)
class Tile:
    """Queries `rows` against the keys in `ranges` and then those in parts of picks, in the units of its group.

    mask: what is added to the scores, 0 or -inf, (b, W) or (sheets, b, W); None: nothing. alive: (b, 1) or
    (sheets, b, 1), 0 for queries that read nothing here; None: there are none.
    """

    rows: Range
    ranges: tuple[Range, ...]
    picks: tuple[tuple[str, Range], ...] = ()
    mask: Tensor | None = None
    alive: Tensor | None = None

    @property
    def width(self) -> int:
        """Keys of the tile."""
        return sum(high - low for low, high in (*self.ranges, *(part for _, part in self.picks)))


@dataclass(frozen=True)
class Group:
    """Tokens a fixed step apart, in `classes` sequences beside each other: with step 1, the sequence itself.

    Query u of class c is row `row` + c + step u of the call and stands at position `first` + c + step (`begin` + u);
    key u of class c is key `first` + c + step u. c counts from 0.
    """

    step: int
    first: int
    classes: int
    row: int
    queries: int
    begin: int
    keys: int


@dataclass(frozen=True, eq=False)
class Piece:
    """Tiles of one group; `marked`: its queries are the marked tokens, (B, 1, G) positions."""

    group: Group
    tiles: tuple[Tile, ...]
    picks: dict[str, Pick] = field(default_factory=dict)
    marked: Pick | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """What one call computes. merge: a query may have a share in several pieces."""

    shape: Shape
    pieces: tuple[Piece, ...]
    merge: bool


def terms(pattern: Pattern) -> list[tuple[Pattern, ...]]:
    """A union of restrictions of single shapes: its disjunctive form."""
    if isinstance(pattern, Union):
        return [term for part in pattern.parts for term in terms(part)]
    if isinstance(pattern, Restriction):
        return [tuple(s for term in chosen for s in term) for chosen in product(*map(terms, pattern.parts))]
    if isinstance(pattern, Marked) and pattern.rows:
        return [(MarkedRows(),), (Marked(rows=False),)]
    return [(pattern,)]


@lru_cache(maxsize=256)
def resolved(pattern: Pattern) -> Pattern:
    """With external tokens as global ones before the rest of the union, which is shifted behind them."""
    parts = pattern.parts if isinstance(pattern, Union) else (pattern,)
    external = [part.tokens for part in parts if isinstance(part, External)]
    if not external:
        return pattern
    tokens = max(external)
    rest = [part for part in parts if not isinstance(part, External)]
    shifted = [Shifted(reduce(Pattern.__or__, rest), tokens)] if rest else []
    return reduce(Pattern.__or__, [Global(first=tokens), *shifted])


def make_plan(
    pattern: Pattern, shape: Shape, scene: Scene, rows: int, dtype: torch.dtype, device: torch.device
) -> Plan:
    """The plan of a call. Plans that depend on nothing but sizes are kept."""
    if scene.marked is None and len(set(shape.lengths)) == 1:
        return _kept(pattern, shape, scene, rows, dtype, device)
    return _plan(pattern, shape, scene, rows, dtype, device)


def _plan(pattern: Pattern, shape: Shape, scene: Scene, rows: int, dtype: torch.dtype, device: torch.device) -> Plan:
    whole = Group(1, 0, 1, 0, shape.queries, shape.offset, shape.keys)
    by_layout: dict[int, list[Pattern]] = {}
    for term in terms(pattern):
        layout = 0 if any(isinstance(one, MarkedRows) for one in term) else max(one.period for one in term)
        by_layout.setdefault(layout, []).append(term[0] if len(term) == 1 else Restriction(term))
    pieces, earlier = [], ()
    for layout, parts in sorted(by_layout.items()):
        here = parts[0] if len(parts) == 1 else Union(tuple(parts))
        for group in [whole] if layout <= 1 else groups(shape, layout):
            drawing = _Drawing(here, earlier, group, shape, scene, dtype, device)
            pieces.append(drawing.marked_piece(rows) if layout == 0 else drawing.piece(rows))
        earlier = (*earlier, here)
    return Plan(shape, tuple(pieces), len(by_layout) > 1)


_kept = lru_cache(maxsize=32)(_plan)


def groups(shape: Shape, step: int) -> list[Group]:
    """Neighbouring residue classes with the same number of queries and keys."""
    found: list[Group] = []
    for residue in range(min(step, max(shape.keys, 1))):
        row = (residue - shape.offset) % step
        queries = max(0, (shape.queries - row + step - 1) // step)
        keys = max(0, (shape.keys - residue + step - 1) // step)
        begin = (shape.offset + row - residue) // step
        last = found[-1] if found else None
        sizes = (queries, begin, keys)
        if last and (last.queries, last.begin, last.keys) == sizes and row == last.row + last.classes:
            found[-1] = Group(step, last.first, last.classes + 1, last.row, *sizes)
        else:
            found.append(Group(step, residue, 1, row, *sizes))
    return [group for group in found if group.queries and group.keys]


@dataclass(frozen=True)
class _Drawing:
    """Draws the tiles of one pattern in one group; pairs of `earlier` patterns belong to other pieces."""

    here: Pattern
    earlier: tuple[Pattern, ...]
    group: Group
    shape: Shape
    scene: Scene
    dtype: torch.dtype
    device: torch.device
    masks: dict[Hashable, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)

    def piece(self, rows: int) -> Piece:
        """All queries of the group, `rows` at a time; cut where rows change their look."""
        group, picks, tiles = self.group, {}, []
        begin, end = group.begin, group.begin + group.queries
        cuts = {begin, end, *range((begin // rows + 1) * rows, end, rows)}
        if group.step == 1:
            cuts |= {at for at in self.here.breaks(self.scene) if begin < at < end}
        for low, high in pairwise(sorted(cuts)):
            cover = self._cover(low, high)
            picks |= {pick.name: pick for pick in cover.picks}
            tiles.append(self._tile((low - begin, high - begin), low, high, cover))
        return Piece(group, tuple(tiles), picks)

    def marked_piece(self, rows: int) -> Piece:
        """The marked queries, picked from the sequence, against all keys."""
        pick = Marked().cover(0, self.shape.keys, self.scene).picks[0]
        pick = replace(pick, positions=torch.where(pick.positions < self.shape.offset, -1, pick.positions))
        cover = Cover(clipped(((0, self.scene.length),), self.shape.keys))
        tiles = []
        for low in range(0, pick.positions.shape[-1], rows):
            some = pick.positions[..., low : low + rows]
            mask, alive = self._mask(some[..., None].to(self.device), cover, ())
            tiles.append(Tile((low, low + some.shape[-1]), cover.ranges, (), mask, alive))
        return Piece(self.group, tuple(tiles), {}, pick)

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

    def _tile(self, rows: Range, low: int, high: int, cover: Cover) -> Tile:
        parts = []
        for pick in cover.picks:
            part = (0, pick.positions.shape[-1])
            if pick.ascending:
                limit = cover.hull or (0, self.scene.length)
                at = torch.searchsorted(pick.positions[0, 0], torch.tensor(limit))
                part = (int(at[0]), int(at[1]))
            if part[0] < part[1]:
                parts.append((pick, part))
        # Where nearly all keys are read, it is cheaper to read all in place than to collect them.
        width = sum(b - a for a, b in (*cover.ranges, *(part for _, part in parts)))
        if parts and 4 * width >= 3 * self.group.keys:
            cover, parts = Cover(clipped(((0, self.scene.length),), self.group.keys)), []
        key = self._alike(low, high, cover, tuple((pick.name, part) for pick, part in parts))
        if key is None or key not in self.masks:
            at = torch.arange(low, high, device=self.device)[:, None]
            drawn = self._mask(self._positions(at), cover, tuple(parts))
            if key is None:
                return Tile(rows, cover.ranges, tuple((pick.name, part) for pick, part in parts), *drawn)
            self.masks[key] = drawn
        return Tile(rows, cover.ranges, tuple((pick.name, part) for pick, part in parts), *self.masks[key])

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

    def _alike(self, low: int, high: int, cover: Cover, parts: tuple[object, ...]) -> Hashable | None:
        """A key under which tiles of equal masks are kept."""
        if parts or (self.group.step > 1 and not self._relative):
            return None
        step, first = self.group.step, self.group.first
        signatures: list[Hashable] = [high - low]
        for a, b in cover.ranges:
            if step * b > min(self.shape.lengths):
                return None
            span = (first + step * a, first + step * (b - 1) + 1)
            queries = (first + step * low, first + step * (high - 1) + 1)
            patterns = (self.here, *self.earlier)
            one = [pattern.signature(*queries, span, self.scene) for pattern in patterns]
            if None in one:
                return None
            signatures.append((b - a, *one))
        return tuple(signatures)

    def _mask(
        self, i: Tensor, cover: Cover, parts: tuple[tuple[Pick, Range], ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The additive mask of a tile and its rows that read something."""
        shape, pieces = self.shape, []
        if cover.ranges:
            units = torch.cat([torch.arange(a, b, device=self.device) for a, b in cover.ranges])
            pieces.append(self._allowed(i, self._positions(units[None, :])))
        for number, (pick, (a, b)) in enumerate(parts):
            j = pick.positions[..., a:b].to(self.device)[..., None, :]
            inside = [(j >= low) & (j < high) for low, high in cover.ranges]
            inside += [_among(j, other.positions[..., c:d].to(j.device)) for other, (c, d) in parts[:number]]
            seen = reduce(torch.logical_or, inside, torch.zeros_like(j, dtype=torch.bool))
            pieces.append(self._allowed(i, j) & (j >= 0) & ~seen)
        if not pieces:
            return None, None
        lead = torch.broadcast_shapes(*(piece.shape[:-1] for piece in pieces))
        allowed = torch.cat([piece.expand(*lead, piece.shape[-1]) for piece in pieces], -1)
        if allowed.all():
            return None, None
        if max(allowed.shape[:-2]) > 1:
            inner = allowed.shape[2:-2] if self.group.step == 1 else (self.group.classes,)
            allowed = allowed.expand(shape.batch, shape.heads, *inner, *allowed.shape[-2:])
        allowed = allowed.reshape(-1, *allowed.shape[-2:])
        alive = allowed.any(-1, keepdim=True)
        # A row without keys is computed as if it read all of them, and then taken back: no softmax is of nothing.
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(~allowed & alive, -torch.inf)
        alone = allowed.shape[0] == 1
        mask, alive = (mask[0], alive[0]) if alone else (mask, alive)
        return mask, None if alive.all() else alive.to(self.dtype)

    def _allowed(self, i: Tensor, j: Tensor) -> Tensor:
        allowed = self.here.allows(i, j, self.scene)
        for pattern in self.earlier:
            allowed = allowed & ~pattern.allows(i, j, self.scene)
        lengths = set(self.shape.lengths)
        if len(lengths) > 1:
            real = torch.tensor(self.shape.lengths, device=self.device).view(-1, *[1] * (j.ndim - 1))
            allowed = allowed & (j < real)
        elif lengths != {self.shape.keys}:
            allowed = allowed & (j < self.shape.lengths[0])
        return allowed


def _among(j: Tensor, others: Tensor) -> Tensor:
    """Which of the picked keys j (..., 1, w) stand among `others` (B or 1, H or 1, x)."""
    return (j[..., None] == others[:, :, None, None, :]).any(-1)
