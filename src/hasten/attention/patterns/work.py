"""What there is to compute in one call: pieces, each made of tiles, each a block of the score matrix."""

from dataclasses import dataclass, field

from torch import Tensor

from hasten.attention.patterns.cover import Pick, Range

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
class Stretch:
    """Neighbouring columns of a tile, `width` from `start` on, and what is added to their scores, 0 or -inf.

    mask: (b, width) or (sheets, b, width).
    """

    start: int
    width: int
    mask: Tensor


@dataclass(frozen=True, eq=False)
class Tile:
    """Queries `rows` against the keys in `ranges` and then those in parts of picks, in the units of its group.

    masks: only where some pair does not count. alive: (b, 1) or (sheets, b, 1), 0 for queries that read nothing here;
    None: there are none.
    """

    rows: Range
    ranges: tuple[Range, ...]
    picks: tuple[tuple[str, Range], ...] = ()
    masks: tuple[Stretch, ...] = ()
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
