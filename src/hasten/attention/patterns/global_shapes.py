"""Global tokens: some tokens are read by all and read all, and learnt tokens before the sequence."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hasten.attention.patterns.algebra import ALL, NONE, Causal, Pattern, Scene, at_least
from hasten.attention.patterns.cover import Cover, Pick, Range
from hasten.errors import UserError


@dataclass(frozen=True)
class Global(Pattern):
    """The `first` and the `last` tokens are read by all tokens and, where `rows`, read all tokens.

    Source: Beltagy et al., 2020, section 3.1 (symmetric global attention); Ainslie et al., 2020.
    """

    first: int = 0
    last: int = 0
    rows: bool = True

    def __post_init__(self) -> None:
        at_least(self, {"first": 0, "last": 0})
        if self.first + self.last == 0:
            raise UserError("Global: say which tokens, for example Global(first=2); for tokens of each call, Marked()")
        if not isinstance(self.rows, bool):
            raise UserError(f"Global: rows is {self.rows!r}; give True or False")

    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """j is global, or i is."""
        return self._at(j, scene) | self._at(i, scene) if self.rows else self._at(j, scene) & (i == i)

    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """All keys for global queries, the global keys for others."""
        n = scene.length
        if self.rows and (low < self.first or (self.last and high > n - self.last)):
            return Cover(((0, n),))
        return Cover(((0, self.first), (n - self.last, n)))

    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """Whether rows, or columns, are global."""
        n = scene.length
        rows, columns = self._of(low, high, n), self._of(*keys, n)
        if columns == ALL or (self.rows and rows == ALL):
            return ALL
        if columns == NONE and (not self.rows or rows == NONE):
            return NONE
        return ("global", self, n, low, keys[0])

    def needed(self, j: Tensor, now: int) -> Tensor:
        """The first tokens; everything while such a token may still ask."""
        asks = self.rows and now < self.first
        return torch.ones_like(j, dtype=torch.bool) if asks else j < self.first

    def causal(self) -> Pattern:
        """The first tokens, as far as they have come."""
        if self.last:
            raise UserError("Global: which tokens are last is not known while a sequence grows; leave out last")
        return self & Causal()

    @property
    def of_length(self) -> bool:
        """Where the last ones are global."""
        return self.last > 0

    @property
    def of_query(self) -> bool:
        """Unless global tokens are only read."""
        return self.rows

    def breaks(self, scene: Scene) -> tuple[int, ...]:
        """Where global rows end and begin."""
        return (self.first, scene.length - self.last, scene.length) if self.rows else ()

    def _at(self, x: Tensor, scene: Scene) -> Tensor:
        n = scene.length
        return ((x >= 0) & (x < self.first)) | ((x >= n - self.last) & (x < n))

    def _of(self, low: int, high: int, n: int) -> str:
        if (low >= 0 and high <= self.first) or (self.last and low >= n - self.last and high <= n):
            return ALL
        return "some" if low < self.first or (self.last and high > n - self.last and low < n) else NONE


@dataclass(frozen=True)
class Marked(Pattern):
    """Tokens marked by the call (`Mask.marked`, a number of its own for each example) are global."""

    rows: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.rows, bool):
            raise UserError(f"Marked: rows is {self.rows!r}; give True or False")

    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """j is marked, or i is."""
        columns = marked_at(j, scene)
        return columns | marked_at(i, scene) if self.rows else columns & (i == i)

    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """The marked keys. Marked queries are computed apart."""
        assert scene.marked is not None
        most = int(scene.marked.sum(1).max())
        order = torch.where(scene.marked, 0, 1).sort(dim=1, stable=True).indices[:, :most]
        real = scene.marked.gather(1, order)
        return Cover((), (Pick("marked", torch.where(real, order, -1)[:, None], whole=True),))

    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """Nothing where no example has a mark; else two examples differ."""
        rows = scene.has_marks(low, high) if self.rows else False
        return None if rows or scene.has_marks(*keys) else NONE

    def needed(self, j: Tensor, now: int) -> Tensor:
        """Any token may be marked."""
        return torch.ones_like(j, dtype=torch.bool)


@dataclass(frozen=True)
class MarkedRows(Pattern):
    """Marked tokens read everything: the rows of `Marked`, which are computed apart from the others."""

    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """i is marked."""
        return marked_at(i, scene) & (j == j)

    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """All keys."""
        return Cover(((0, scene.length),))

    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """Nothing where no example has a mark; else two examples differ."""
        return None if scene.has_marks(low, high) else NONE

    def needed(self, j: Tensor, now: int) -> Tensor:
        """Any token may be marked."""
        return torch.ones_like(j, dtype=torch.bool)


def marked_at(x: Tensor, scene: Scene) -> Tensor:
    """Which of the positions x (B or 1, ...) are marked, (B, ...)."""
    assert scene.marked is not None
    known = (x >= 0) & (x < scene.marked.shape[1])
    at = x.clamp(0, scene.marked.shape[1] - 1)
    if x.shape[0] == 1:
        return scene.marked[:, at[0]] & known
    return scene.marked.gather(1, at.flatten(1)).view(x.shape) & known


@dataclass(frozen=True)
class External(Pattern):
    """The first `tokens` of the sequence are learnt tokens, no text: they read all and are read by all.

    The rest of a union counts its positions behind them. Source: Ainslie et al., 2020 (ETC); Zaheer et al., 2020.
    """

    tokens: int

    def __post_init__(self) -> None:
        at_least(self, {"tokens": 1})

    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """Either is external."""
        return Global(first=self.tokens).allows(i, j, scene)

    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """As global tokens."""
        return Global(first=self.tokens).cover(low, high, scene)

    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """As global tokens."""
        return Global(first=self.tokens).signature(low, high, keys, scene)

    def needed(self, j: Tensor, now: int) -> Tensor:
        """As global tokens."""
        return Global(first=self.tokens).needed(j, now)

    def causal(self) -> Pattern:
        """There is none."""
        raise UserError("External: external tokens read the whole sequence; a causal model uses Global(first=...)")

    def breaks(self, scene: Scene) -> tuple[int, ...]:
        """Where the text begins."""
        return (self.tokens,)


@dataclass(frozen=True)
class Shifted(Pattern):
    """A pattern among the tokens from position `by` on, which it counts from 0."""

    pattern: Pattern
    by: int

    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """Of the shifted positions, both of which must exist."""
        inner = self.pattern.allows(i - self.by, j - self.by, self._scene(scene))
        return inner & (i >= self.by) & (j >= self.by)

    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """Shifted."""
        if high <= self.by:
            return Cover()
        inner, by = self.pattern.cover(max(low, self.by) - self.by, high - self.by, self._scene(scene)), self.by
        picks = tuple(
            replace(pick, positions=torch.where(pick.positions < 0, -1, pick.positions + by)) for pick in inner.picks
        )
        ranges = tuple((max(0, a) + by, b + by) for a, b in inner.ranges if b > 0)
        return Cover(ranges, picks, inner.hull and (inner.hull[0] + by, inner.hull[1] + by))

    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """Shifted; tiles across the border are like no other."""
        by = self.by
        if high <= by or keys[1] <= by:
            return NONE
        if low < by or keys[0] < by:
            return ("shifted", by, low, keys[0])
        return self.pattern.signature(low - by, high - by, (keys[0] - by, keys[1] - by), self._scene(scene))

    def needed(self, j: Tensor, now: int) -> Tensor:
        """Shifted."""
        return self.pattern.needed(j - self.by, now - self.by)

    @property
    def of_length(self) -> bool:
        """As the pattern."""
        return self.pattern.of_length

    @property
    def period(self) -> int:
        """As the pattern."""
        return self.pattern.period

    def breaks(self, scene: Scene) -> tuple[int, ...]:
        """Shifted."""
        return (self.by, *(at + self.by for at in self.pattern.breaks(self._scene(scene))))

    def _scene(self, scene: Scene) -> Scene:
        marked = None if scene.marked is None else scene.marked[:, self.by :]
        return replace(scene, length=max(0, scene.length - self.by), marked=marked, size=max(0, scene.size - self.by))
