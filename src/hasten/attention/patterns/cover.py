"""What a run of queries can read at most: ranges of keys, and keys picked one by one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

Range = tuple[int, int]
"""Positions from the first up to, not including, the second."""


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same positions in ascending ranges that neither overlap nor touch."""
    found: list[Range] = []
    for low, high in sorted(ranges):
        if low >= high:
            continue
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def clipped(ranges: Iterable[Range], length: int) -> tuple[Range, ...]:
    """Only positions 0 .. length - 1."""
    return merged((max(0, low), min(length, high)) for low, high in ranges)


@dataclass(frozen=True, eq=False)
class Pick:
    """Keys picked one by one: positions (B or 1, H or 1, w), -1 where there is none.

    ascending: sorted, the same for all queries of the sequence, so that a range of it can be taken.
    whole: every query that the cover was asked for reads every one of them.
    """

    name: str
    positions: Tensor
    ascending: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Cover:
    """Keys in ranges, and picked ones of which those outside `hull` are never read (None: no such limit)."""

    ranges: tuple[Range, ...] = ()
    picks: tuple[Pick, ...] = ()
    hull: Range | None = None

    def __or__(self, other: "Cover") -> "Cover":
        hulls = [cover.hull for cover in (self, other) if cover.picks]
        hull = None
        if hulls and None not in hulls:
            hull = min(h[0] for h in hulls if h), max(h[1] for h in hulls if h)
        known = {pick.name for pick in self.picks}
        picks = self.picks + tuple(pick for pick in other.picks if pick.name not in known)
        return Cover(merged(self.ranges + other.ranges), picks, hull)

    def __and__(self, other: "Cover") -> "Cover":
        """Picked keys of one side are kept where the other side's ranges reach; the pairs are checked one by one."""
        ranges = merged((max(a, c), min(b, d)) for a, b in self.ranges for c, d in other.ranges)
        limits = [cover.hull for cover in (self, other)]
        limits += [_span(b.ranges) for a, b in ((self, other), (other, self)) if a.picks and not b.picks]
        known = [limit for limit in limits if limit is not None]
        hull = (max(h[0] for h in known), min(h[1] for h in known)) if known else None
        picks = self.picks + tuple(pick for pick in other.picks if pick.name not in {p.name for p in self.picks})
        return Cover(ranges, tuple(replace(pick, whole=False) for pick in picks), hull)


def _span(ranges: tuple[Range, ...]) -> Range:
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else (0, 0)
