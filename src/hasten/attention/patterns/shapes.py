"""The fixed shapes: windows, blocks, strides, summaries.

Each is a pattern of its own; those of the literature are unions of them.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hasten.attention.patterns.algebra import ALL, NONE, Pattern, Scene, at_least
from hasten.attention.patterns.cover import Cover, Pick, Range
from hasten.errors import UserError


@dataclass(frozen=True)
class Local(Pattern):
    """A sliding window: -left <= (j - i) / dilation <= right, itself included, every dilation-th token.

    left and right count tokens read on each side; right is left where it is not given. Tokens at the ends have fewer
    neighbours: nothing wraps around. Source: Beltagy et al., 2020, section 3.1.
    """

    left: int
    right: int = None  # type: ignore[assignment]
    dilation: int = 1

    def __post_init__(self) -> None:
        if self.right is None:
            object.__setattr__(self, "right", self.left)
        at_least(self, {"left": 0, "right": 0, "dilation": 1})

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
        at_least(self, {"block": 1, "back": 0, "ahead": 0})

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
        at_least(self, {"stride": 1})

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
        at_least(self, {"block": 1, "width": 1})
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
    at = torch.arange(length, device="cpu")
    columns = at[at % block >= block - width]
    return Pick(f"summary {block} {width}", columns[None, None], ascending=True, whole=True)
