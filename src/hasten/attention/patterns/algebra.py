"""Patterns: which positions may read which, as an algebra of a few shapes that unite (`|`) and restrict (`&`).

A pattern is a value: `Local(64) | Global(first=2)`. Its definition is `allows(i, j)`, a question about two positions.
Everything faster is derived from three more answers that each shape gives about itself, without looking at pairs:
what a run of queries can read at most (`cover`), when two tiles of the score matrix look alike (`signature`), and
what later queries will still need (`needed`). Positions count the real tokens of a sequence from 0.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property, reduce

import torch
from torch import Tensor

from hasten.attention.patterns.cover import Cover, Range
from hasten.errors import UserError

ALL, NONE = "all", "none"
"""Signatures of tiles in which every pair, or no pair, is allowed."""
MOST = 2**31
"""Largest number in a shape: a product of two is still a position."""


@dataclass(frozen=True)
class Scene:
    """What a pattern may know of the call: real tokens, heads, seed of random patterns, marked tokens (B, S).

    size: tokens with the padded ones; a pattern may use it where no real token can tell.
    """

    length: int
    n_heads: int = 1
    seed: int = 0
    marked: Tensor | None = None
    size: int = 0

    def has_marks(self, low: int, high: int) -> bool:
        """Whether any example has a marked token among positions low .. high - 1."""
        before = self._marks_before
        low, high = (min(max(x, 0), len(before) - 1) for x in (low, high))
        return before[high] > before[low]

    @cached_property
    def _marks_before(self) -> list[int]:
        return [0] if self.marked is None else [0, *self.marked.any(0).cumsum(0).tolist()]


class Pattern(ABC):
    """A set of pairs (query position, key position)."""

    @abstractmethod
    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """Whether query i reads key j: bool, of the shape to which i and j (int64) broadcast, (..., B, H, T, S)."""

    @abstractmethod
    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """Keys among which are all that queries low .. high - 1 read."""

    @abstractmethod
    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """Equal for tiles of equal size with equal pairs; ALL or NONE where it is known; None: no two are alike."""

    @abstractmethod
    def needed(self, j: Tensor, now: int) -> Tensor:
        """Whether a query at position `now` or later may read key j, causally: what decoding must keep."""

    def causal(self) -> "Pattern":
        """The part that never reads ahead, and that no later token changes."""
        return self & Causal()

    @property
    def period(self) -> int:
        """Only pairs whose distance is a multiple of this are allowed."""
        return 1

    @property
    def relative(self) -> bool:
        """Only the distance of two positions counts."""
        return False

    @property
    def of_length(self) -> bool:
        """What a token reads depends on how long the sequence is."""
        return False

    @property
    def of_query(self) -> bool:
        """Which keys are read depends on the query: then queries and keys must be tokens of one sequence."""
        return True

    def breaks(self, scene: Scene) -> tuple[int, ...]:
        """Positions at which rows begin to look different."""
        return ()

    def __or__(self, other: "Pattern") -> "Pattern":
        if not isinstance(other, Pattern):
            return NotImplemented
        return Union((*members(self, Union), *members(other, Union)))

    def __and__(self, other: "Pattern") -> "Pattern":
        if not isinstance(other, Pattern):
            return NotImplemented
        return Restriction((*members(self, Restriction), *members(other, Restriction)))

    def __str__(self) -> str:
        given = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]  # type: ignore[arg-type]
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value, usual in given if value != usual)})"
        )


def members(pattern: Pattern, kind: "type[Union | Restriction]") -> tuple[Pattern, ...]:
    """The parts of a union (or restriction); any other pattern is its only part."""
    return pattern.parts if isinstance(pattern, kind) else (pattern,)


def walk(pattern: Pattern) -> Iterable[Pattern]:
    """The shapes that a pattern is made of."""
    if isinstance(pattern, Union | Restriction):
        for part in pattern.parts:
            yield from walk(part)
    else:
        yield pattern


@dataclass(frozen=True)
class Composite(Pattern):
    """A pattern made of parts, which is what its parts are."""

    parts: tuple[Pattern, ...]

    @property
    def relative(self) -> bool:
        """Where all parts are."""
        return all(part.relative for part in self.parts)

    @property
    def of_length(self) -> bool:
        """Where any part is."""
        return any(part.of_length for part in self.parts)

    @property
    def of_query(self) -> bool:
        """Where any part is."""
        return any(part.of_query for part in self.parts)

    def breaks(self, scene: Scene) -> tuple[int, ...]:
        """Those of all parts."""
        return tuple(at for part in self.parts for at in part.breaks(scene))


@dataclass(frozen=True)
class Union(Composite):
    """Pairs that any part allows."""

    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """One or the other."""
        return reduce(torch.logical_or, (part.allows(i, j, scene) for part in self.parts))

    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """All that is covered."""
        return reduce(Cover.__or__, (part.cover(low, high, scene) for part in self.parts))

    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """The parts' signatures."""
        return _joined([part.signature(low, high, keys, scene) for part in self.parts], strong=ALL, weak=NONE)

    def needed(self, j: Tensor, now: int) -> Tensor:
        """What any part needs."""
        return reduce(torch.logical_or, (part.needed(j, now) for part in self.parts))

    def causal(self) -> Pattern:
        """Part by part."""
        return reduce(Pattern.__or__, (part.causal() for part in self.parts))

    def __str__(self) -> str:
        return " | ".join(map(str, self.parts))


@dataclass(frozen=True)
class Restriction(Composite):
    """Pairs that every part allows."""

    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """Both."""
        return reduce(torch.logical_and, (part.allows(i, j, scene) for part in self.parts))

    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """What all cover."""
        return reduce(Cover.__and__, (part.cover(low, high, scene) for part in self.parts))

    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """The parts' signatures."""
        return _joined([part.signature(low, high, keys, scene) for part in self.parts], strong=NONE, weak=ALL)

    def needed(self, j: Tensor, now: int) -> Tensor:
        """What all parts need."""
        return reduce(torch.logical_and, (part.needed(j, now) for part in self.parts))

    def causal(self) -> Pattern:
        """Part by part."""
        return reduce(Pattern.__and__, (part.causal() for part in self.parts))

    @property
    def period(self) -> int:
        """Of the part with the longest: the restriction lies inside that part."""
        return max(part.period for part in self.parts)

    def __str__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Union) else str(part) for part in self.parts)


def _joined(signatures: list[Hashable], *, strong: str, weak: str) -> Hashable:
    if strong in signatures:
        return strong
    others = [one for one in signatures if one != weak]
    return weak if not others else None if None in others else tuple(others)


@dataclass(frozen=True)
class Everything(Pattern):
    """Every query reads every key."""

    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """Always."""
        return torch.ones(torch.broadcast_shapes(i.shape, j.shape), dtype=torch.bool, device=i.device)

    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """All keys."""
        return Cover(((0, scene.length),))

    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """All pairs."""
        return ALL

    def needed(self, j: Tensor, now: int) -> Tensor:
        """Everything."""
        return torch.ones_like(j, dtype=torch.bool)

    @property
    def relative(self) -> bool:
        """Trivially."""
        return True

    @property
    def of_query(self) -> bool:
        """All queries read the same."""
        return False


@dataclass(frozen=True)
class Causal(Pattern):
    """No query reads a later key: j <= i."""

    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """j <= i."""
        return j <= i

    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """Keys up to the last query."""
        return Cover(((0, high),))

    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """The place of the diagonal."""
        return ALL if keys[1] <= low + 1 else NONE if keys[0] >= high else ("causal", keys[0] - low)

    def needed(self, j: Tensor, now: int) -> Tensor:
        """Everything."""
        return torch.ones_like(j, dtype=torch.bool)

    def causal(self) -> Pattern:
        """Itself."""
        return self

    @property
    def relative(self) -> bool:
        """j - i counts."""
        return True


def at_least(pattern: object, least: dict[str, int]) -> None:
    """Refuse fields of a shape that are no whole numbers from their least value."""
    for key, low in least.items():
        value = getattr(pattern, key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= MOST:
            raise UserError(f"{type(pattern).__name__}: {key} is {value!r}; give a whole number from {low} to {MOST}")
