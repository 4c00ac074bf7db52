"""The fixed shapes: windows, blocks, strides, summaries, global tokens.

Each is a pattern of its own; those of the literature are unions of them.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from hasten.attention.patterns.algebra import ALL, NONE, Causal, Pattern, Scene, at_least
from hasten.attention.patterns.cover import Cover, Pick, Range
from hasten.errors import UserError


@dataclass(frozen=True)
class Local(Pattern):
    """A sliding window: -left <= (j - i) / dilation <= right, itself included, every dilation-th token.

    left and right count tokens read on each side; right is left where it is not given. Tokens at the ends have fewer
    neighbours: nothing wraps around. Source: Beltagy et al., 2020, section 3.1.
    """

    left: int
    right: int = field(default=-1)
    dilation: int = 1

    def __post_init__(self) -> None:
        if self.right == -1:
            object.__setattr__(self, "right", self.left)
        at_least("Local", self, left=0, right=0, dilation=1)

    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """-left <= (j - i) / dilation <= right."""
        inside = (j >= i - self.left * self.dilation) & (j <= i + self.right * self.dilation)
        return inside if self.dilation == 1 else inside & ((j - i) % self.dilation == 0)

    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """From the first query's left end to the last one's right end."""
        return Cover(((low - self.left * self.dilation, high + self.right * self.dilation),))

    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """The place of the band."""
        first, last = keys
        left, right = self.left * self.dilation, self.right * self.dilation
        if last <= low - left or first > high - 1 + right:
            return NONE
        whole = self.dilation == 1 and first >= high - 1 - left and last - 1 <= low + right
        return ALL if whole else ("local", left, right, self.dilation, first - low)

    def needed(self, j: Tensor, now: int) -> Tensor:
        """The window before the next query."""
        return j >= now - self.left * self.dilation

    @property
    def period(self) -> int:
        """The dilation."""
        return self.dilation

    @property
    def relative(self) -> bool:
        """Only the distance counts."""
        return True

    def __str__(self) -> str:
        sides = str(self.left) if self.left == self.right else f"{self.left}, {self.right}"
        return f"Local({sides}{'' if self.dilation == 1 else f', dilation={self.dilation}'})"


@dataclass(frozen=True)
class Blocks(Pattern):
    """Blocked windows: a token reads its own block of tokens, `back` blocks before it and `ahead` after it."""

    block: int
    back: int = 0
    ahead: int = 0

    def __post_init__(self) -> None:
        at_least("Blocks", self, block=1, back=0, ahead=0)

    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """-back <= floor(j / block) - floor(i / block) <= ahead."""
        own, other = i // self.block, j // self.block
        return (other >= own - self.back) & (other <= own + self.ahead)

    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """Whole blocks."""
        first, last = low // self.block - self.back, (high - 1) // self.block + self.ahead
        return Cover(((first * self.block, (last + 1) * self.block),))

    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """The place among the blocks."""
        first, last = low // self.block, (high - 1) // self.block
        begin, end = keys[0] // self.block, (keys[1] - 1) // self.block
        if end < first - self.back or begin > last + self.ahead:
            return NONE
        if begin >= last - self.back and end <= first + self.ahead:
            return ALL
        return ("blocks", self.block, self.back, self.ahead, low % self.block, keys[0] - low)

    def needed(self, j: Tensor, now: int) -> Tensor:
        """The block of the next query and those it looks back at."""
        return j // self.block >= now // self.block - self.back


@dataclass(frozen=True)
class Strided(Pattern):
    """Every stride-th token, before and after: (j - i) mod stride = 0. Source: Child et al., 2019, section 4.2."""

    stride: int

    def __post_init__(self) -> None:
        at_least("Strided", self, stride=1)

    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """(j - i) mod stride = 0."""
        return (j - i) % self.stride == 0

    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """All keys: in place there is no block that can be left out."""
        return Cover(((0, scene.length),))

    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """The phase."""
        return ALL if self.stride == 1 else ("strided", self.stride, (keys[0] - low) % self.stride)

    def needed(self, j: Tensor, now: int) -> Tensor:
        """Every key has its turn again."""
        return torch.ones_like(j, dtype=torch.bool)

    @property
    def period(self) -> int:
        """The stride."""
        return self.stride

    @property
    def relative(self) -> bool:
        """Only the distance counts."""
        return True


@dataclass(frozen=True)
class Summary(Pattern):
    """The last `width` tokens of every block, read by all: j mod block >= block - width.

    With `Blocks(block)` it is the fixed pattern. Source: Child et al., 2019, section 4.2.
    """

    block: int
    width: int

    def __post_init__(self) -> None:
        at_least("Summary", self, block=1, width=1)
        if self.width > self.block:
            raise UserError(f"Summary: width {self.width} is more than block {self.block}; a block has no more tokens")

    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """j mod block >= block - width."""
        return (j % self.block >= self.block - self.width) & (i == i)

    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """The summary columns."""
        return Cover((), (_columns(self.block, self.width, scene.length),))

    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """The phase of the keys."""
        if self.width == self.block:
            return ALL
        first, last = keys[0] % self.block, keys[0] % self.block + keys[1] - keys[0]
        if last <= self.block - self.width:
            return NONE
        whole = first >= self.block - self.width and last <= self.block
        return ALL if whole else ("summary", self.block, self.width, first)

    def needed(self, j: Tensor, now: int) -> Tensor:
        """The summary columns."""
        return j % self.block >= self.block - self.width

    @property
    def of_query(self) -> bool:
        """All queries read the same."""
        return False


@lru_cache(maxsize=64)
def _columns(block: int, width: int, length: int) -> Pick:
    at = torch.arange(length)
    columns = at[at % block >= block - width]
    return Pick(f"summary {block} {width}", columns[None, None], ascending=True, whole=True)


@dataclass(frozen=True)
class Global(Pattern):
    """The `first` and the `last` tokens are read by all tokens and, where `rows`, read all tokens.

    Source: Beltagy et al., 2020, section 3.1 (symmetric global attention); Ainslie et al., 2020.
    """

    first: int = 0
    last: int = 0
    rows: bool = True

    def __post_init__(self) -> None:
        at_least("Global", self, first=0, last=0)
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
        at_least("External", self, tokens=1)

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
