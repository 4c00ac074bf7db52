"""Random blocks: each block of queries reads a few blocks of keys, drawn for each head."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from hasten.attention.patterns.algebra import Pattern, Scene, at_least
from hasten.attention.patterns.cover import Cover, Pick, Range
from hasten.errors import UserError

_FAR = 2**40


@dataclass(frozen=True)
class RandomBlocks(Pattern):
    """Each block of queries reads `blocks` blocks of keys, drawn without replacement, for each head anew.

    Never drawn are, where `near` is not negative, blocks at a distance of at most `near` and, where `ends`, the first
    and the last block: a union with windows and global blocks then reads nothing twice. The draw is a function of
    seed, head, block and number of blocks. Causally, each block draws among those before it, whatever the length, and
    the early ones have fewer. Source: Zaheer et al., 2020, appendix D.
    """

    blocks: int
    block: int = 64
    seed: int = 0
    near: int = -1
    ends: bool = False
    past: bool = False

    def __post_init__(self) -> None:
        at_least(self, {"blocks": 1, "block": 1, "seed": 0, "near": -1})
        for name in ("ends", "past"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"RandomBlocks: {name} is {getattr(self, name)!r}; give True or False")

    def allows(self, i: Tensor, j: Tensor, scene: Scene) -> Tensor:
        """The block of j is among those drawn for the block of i."""
        table = self.table(scene).to(i.device)
        if not table.shape[1]:
            return torch.zeros(torch.broadcast_shapes(i.shape, j.shape), dtype=torch.bool, device=i.device)
        row = i // self.block
        known = (row >= 0) & (row < table.shape[1])
        heads = torch.arange(len(table), device=i.device).view(1, -1, *[1] * (i.ndim - 2))
        drawn = table[heads, row.clamp(0, table.shape[1] - 1)]
        return (drawn == (j // self.block)[..., None]).any(-1) & known

    def cover(self, low: int, high: int, scene: Scene) -> Cover:
        """The drawn blocks."""
        first, last = max(0, low // self.block), min(self._n_blocks(scene), (high - 1) // self.block + 1)
        if first >= last:
            return Cover()
        drawn = self.table(scene)[:, first:last].flatten(1)
        positions = drawn[:, :, None] * self.block + torch.arange(min(self.block, scene.length), device="cpu")
        positions = torch.where((drawn[:, :, None] >= 0) & (positions < scene.length), positions, -1)
        return Cover((), (Pick(f"{self} {first} {last}", positions.flatten(1)[None], whole=last == first + 1),))

    def signature(self, low: int, high: int, keys: Range, scene: Scene) -> Hashable:
        """No two are alike."""
        return None

    def needed(self, j: Tensor, now: int) -> Tensor:
        """Any block may be drawn later."""
        return torch.ones_like(j, dtype=torch.bool)

    def causal(self) -> Pattern:
        """Drawn among earlier blocks."""
        return replace(self, past=True)

    @property
    def of_length(self) -> bool:
        """Unless drawn from the past."""
        return not self.past

    def breaks(self, scene: Scene) -> tuple[int, ...]:
        """Every block, those of padded rows that have one, too."""
        return tuple(range(0, (self._n_blocks(scene) + 1) * self.block, self.block))

    def table(self, scene: Scene) -> Tensor:
        """The blocks that each block reads, int64 (H, number of blocks, w), -1 where there are fewer.

        w: `blocks`, or the number of blocks where that is less.
        """
        n_blocks, seed = self._n_blocks(scene), (self.seed + scene.seed) % 2**31
        within = replace(self, seed=seed, blocks=max(1, min(self.blocks, n_blocks)), near=min(self.near, n_blocks))
        return _table(within, scene.n_heads, n_blocks)

    def _n_blocks(self, scene: Scene) -> int:
        # The past of a token is the same whatever follows: then rows of padded tokens exist, too.
        length = max(scene.length, scene.size) if self.past else scene.length
        return (length + self.block - 1) // self.block


@lru_cache(maxsize=64)
def _table(shape: RandomBlocks, n_heads: int, n_blocks: int) -> Tensor:
    rows = torch.arange(n_blocks, device="cpu")
    limit = rows if shape.past else torch.full_like(rows, n_blocks)
    barred = _barred(shape, rows, limit, n_blocks)
    free = limit - (barred < _FAR).sum(1)
    drawn = torch.empty(n_heads, n_blocks, 0, dtype=torch.int64, device="cpu")
    for draw in range(shape.blocks):
        # The draw-th of what is left: a rank among the free blocks that were not drawn before.
        rank = _uniform(shape.seed, n_heads, n_blocks, draw) % (free - draw).clamp(min=1)
        for before in drawn.sort(-1).values.unbind(-1):
            rank = rank + (rank >= before)
        drawn = torch.cat((drawn, torch.where(draw < free, rank, _FAR)[..., None]), -1)
    blocks = drawn
    for barrier in barred.unbind(1):
        blocks = blocks + (blocks >= barrier[None, :, None])
    return torch.where(drawn < _FAR, blocks, -1).sort(-1).values


def _barred(shape: RandomBlocks, rows: Tensor, limit: Tensor, n_blocks: int) -> Tensor:
    """Blocks that must not be drawn, ascending, each once, (rows, w); _FAR where there is none."""
    barred = rows[:, None] + (torch.arange(max(0, 2 * shape.near + 1), device="cpu") - shape.near)
    if shape.ends:
        ends = [torch.zeros_like(rows), torch.full_like(rows, n_blocks - 1)][: 1 if shape.past else 2]
        barred = torch.cat((barred, torch.stack(ends, 1)), 1)
    barred = torch.where((barred >= 0) & (barred < limit[:, None]), barred, _FAR).sort(1).values
    again = torch.zeros_like(barred, dtype=torch.bool)
    again[:, 1:] = barred[:, 1:] == barred[:, :-1]
    return torch.where(again, _FAR, barred).sort(1).values


def _uniform(seed: int, n_heads: int, n_blocks: int, draw: int) -> Tensor:
    """Non-negative integers that look random, a function of their place alone, (H, rows). Source: Steele et al., 2014
    (SplitMix64); shifts are made logical by masks."""
    heads, rows = (torch.arange(n, device="cpu") for n in (n_heads, n_blocks))
    x = heads[:, None] * 1_000_003 + rows * 10_007 + draw * 101
    x = (x + seed * 7_919) * -7046029254386353131
    x = (x ^ (x >> 30 & 2**34 - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & 2**37 - 1)) * -7723592293110705685
    return (x ^ (x >> 31 & 2**33 - 1)) & 2**62 - 1
