"""FlexAttention: a pattern as a `BlockMask` that is built by analysis, and attention by it.

The list of blocks comes from what shapes say of themselves (`block_grid`), so making one costs the number of blocks,
never the number of pairs; within blocks that are allowed in part, pairs are checked by a predicate of indices.
Sources: Dong et al., 2024 (FlexAttention); those of the shapes.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention

from hasten.attention.base import Operator, Weights
from hasten.attention.masks import Mask, silence
from hasten.attention.patterns.algebra import Pattern, Restriction, Scene, Union, walk
from hasten.attention.patterns.block_grid import FULL, SOME, BlockGrid
from hasten.attention.patterns.global_shapes import External, Global, Marked, MarkedRows, Shifted
from hasten.attention.patterns.plan import resolved
from hasten.attention.patterns.random_blocks import RandomBlocks
from hasten.errors import UserError

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether query i reads key j in example b and head h, (b, h, i, j): numbers, or tensors of one shape."""


def block_mask(
    pattern: Pattern,
    n_queries: int,
    n_keys: int,
    *,
    n_heads: int = 1,
    batch: int = 1,
    seed: int = 0,
    causal: bool = False,
    lengths: Sequence[int] | None = None,
    marked: Bool[Tensor, "B S"] | None = None,
    block: int = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """The pattern for `flex_attention`: what `PatternAttention` allows, for sequences padded at the end.

    lengths: real tokens of each example, None: all. marked: for patterns with `Marked`. block: pairs along a side of a
    block. The mask has one row for all examples, or heads, that do not differ. Raises `UserError` where the pattern
    cannot be causal or marked tokens are missing.
    """
    pattern = resolved(pattern.causal() if causal else pattern)
    shapes = list(walk_all(pattern))
    if any(isinstance(shape, Marked) for shape in shapes) and marked is None:
        raise UserError(f"{pattern}: which tokens are marked? give `marked`, True on them")
    own = [n_keys] * batch if lengths is None else [int(n) for n in lengths]
    if len(own) != batch or not all(0 <= n <= n_keys for n in own):
        raise UserError(f"lengths are {own}; give {batch} numbers from 0 to {n_keys}, one for each example")
    call = _Call(n_queries, n_keys, n_heads, seed, tuple(own), marked, torch.device(device))
    return (_kept if marked is None and len(set(own)) == 1 else _made)(pattern, call, block)


def _made(pattern: Pattern, call: "_Call", block: int) -> BlockMask:
    kinds = call.kinds(pattern, block).to(call.device)
    return BlockMask.from_kv_blocks(
        *_listed(kinds == SOME),
        *_listed(kinds == FULL),
        BLOCK_SIZE=block,
        mask_mod=call.predicate(pattern),
        seq_lengths=(call.n_queries, call.n_keys),
    )


_kept = lru_cache(maxsize=32)(_made)
"""Masks that depend on nothing but sizes are kept."""


def walk_all(pattern: Pattern) -> list[Pattern]:
    """The shapes that a pattern is made of, also those that are shifted behind external tokens."""
    return [
        inner
        for shape in walk(pattern)
        for inner in (walk_all(shape.pattern) if isinstance(shape, Shifted) else [shape])
    ]


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers (B, H, R) of the chosen blocks, and their columns, the chosen ones first, (B, H, R, C)."""
    columns = chosen.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    return chosen.sum(-1).to(torch.int32), columns.to(torch.int32)


@dataclass(frozen=True)
class _Call:
    """Everything that a mask depends on besides the pattern."""

    n_queries: int
    n_keys: int
    n_heads: int
    seed: int
    lengths: tuple[int, ...]
    marked: Tensor | None
    device: torch.device

    def scene(self, example: int) -> Scene:
        """What the pattern may know of one example."""
        marked = None
        if self.marked is not None:
            real = torch.arange(self.n_keys, device=self.marked.device) < self.lengths[example]
            marked = (self.marked[example] & real)[None]
        return Scene(self.lengths[example], self.n_heads, self.seed, marked, self.n_keys)

    @property
    def examples(self) -> list[int]:
        """Those that may differ; one for all where none does."""
        return [0] if self.marked is None and len(set(self.lengths)) == 1 else list(range(len(self.lengths)))

    def kinds(self, pattern: Pattern, block: int) -> Tensor:
        """Kinds of blocks, (1 or B, 1 or H, R, C)."""
        found: dict[int, Tensor] = {}
        keys = [self.lengths[e] if self.marked is None else -1 - e for e in self.examples]
        for example, key in zip(self.examples, keys, strict=True):
            if key not in found:
                found[key] = BlockGrid(self.scene(example), self.n_queries, self.n_keys, block).kinds(pattern)
        # Of an example without tokens nothing is drawn, so that its heads do not differ.
        heads = max(len(kinds) for kinds in found.values())
        return torch.stack([found[key].expand(heads, -1, -1) for key in keys])

    def predicate(self, pattern: Pattern) -> Predicate:
        """Of indices of the call: queries counted from 0, padded keys refused."""
        inner = _predicate(pattern, [self.scene(e) for e in self.examples], self.device)
        offset, lengths = _scalar(self.n_keys - self.n_queries, self.device), self._lengths()
        # Lambdas: `flex_attention` counts arguments, which a function checked at run time hides. What changes from call
        # to call is a tensor, for numbers become part of the compiled kernel.
        if self.n_queries == self.n_keys:
            if all(n == self.n_keys for n in self.lengths):
                return lambda b, h, q, j: inner(b, h, q, j)
            return lambda b, h, q, j: inner(b, h, q, j) & (j < lengths[b])
        return lambda b, h, q, j: inner(b, h, q + offset, j) & (j < lengths[b])

    def _lengths(self) -> Tensor:
        """(B,), whether examples differ or not."""
        return torch.tensor(self.lengths, device=self.device)


def _scalar(value: int, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


def _predicate(pattern: Pattern, scenes: list[Scene], device: torch.device) -> Predicate:
    """A pattern as a function of single positions. `flex_attention` wants it without reductions."""
    if isinstance(pattern, Union | Restriction):
        parts = [_predicate(part, scenes, device) for part in pattern.parts]
        join = torch.logical_or if isinstance(pattern, Union) else torch.logical_and
        return lambda b, h, i, j: reduce(join, [part(b, h, i, j) for part in parts])
    if isinstance(pattern, Shifted):
        by = pattern.by
        inner = _predicate(pattern.pattern, [_shifted(scene, by) for scene in scenes], device)
        return lambda b, h, i, j: inner(b, h, i - by, j - by) & (i >= by) & (j >= by)
    if isinstance(pattern, External):
        return _global(Global(first=pattern.tokens), scenes, device)
    if isinstance(pattern, Global):
        return _global(pattern, scenes, device)
    if isinstance(pattern, Marked | MarkedRows):
        return _marked(pattern, scenes, device)
    if isinstance(pattern, RandomBlocks):
        return _random(pattern, scenes, device)
    return lambda b, h, i, j: pattern.allows(i, j, scenes[0])


def _shifted(scene: Scene, by: int) -> Scene:
    marked = None if scene.marked is None else scene.marked[:, by:]
    return replace(scene, length=max(0, scene.length - by), marked=marked, size=max(0, scene.size - by))


def _global(pattern: Global, scenes: list[Scene], device: torch.device) -> Predicate:
    first, last = pattern.first, pattern.last
    ends, of = torch.tensor([scene.length for scene in scenes], device=device), _chosen(scenes)

    def is_global(b: Tensor, x: Tensor) -> Tensor:
        early = (x >= 0) & (x < first)
        return early | ((x >= ends[of(b)] - last) & (x < ends[of(b)])) if last else early

    if pattern.rows:
        return lambda b, h, i, j: is_global(b, i) | is_global(b, j)
    return lambda b, h, i, j: is_global(b, j) & (i == i)


def _marked(pattern: Marked | MarkedRows, scenes: list[Scene], device: torch.device) -> Predicate:
    table = torch.cat([scene.marked for scene in scenes if scene.marked is not None]).to(device)
    most, of = _scalar(table.shape[1] - 1, device), _chosen(scenes)

    def is_marked(b: Tensor, x: Tensor) -> Tensor:
        return table[of(b), x.clamp(min=0).minimum(most)] & (x >= 0) & (x <= most)

    if isinstance(pattern, MarkedRows):
        return lambda b, h, i, j: is_marked(b, i) & (j == j)
    if pattern.rows:
        return lambda b, h, i, j: is_marked(b, i) | is_marked(b, j)
    return lambda b, h, i, j: is_marked(b, j) & (i == i)


def _random(pattern: RandomBlocks, scenes: list[Scene], device: torch.device) -> Predicate:
    size, of = pattern.block, _chosen(scenes)
    tables = [pattern.table(scene) for scene in scenes]
    drawn = max(table.shape[2] for table in tables)
    rows = max(1, *(table.shape[1] for table in tables), 1)
    whole = torch.full((len(tables), tables[0].shape[0], rows, drawn), -1)
    for example, table in enumerate(tables):
        whole[example, :, : table.shape[1], : table.shape[2]] = table
    whole, most = whole.to(device), _scalar(rows - 1, device)

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row, column = i // size, j // size
        at = row.clamp(min=0).minimum(most)
        found = [whole[of(b), h, at, n] == column for n in range(drawn)]
        return reduce(torch.logical_or, found) & (row >= 0) & (row <= most) & (j >= 0)

    return allows


def _chosen(scenes: list[Scene]) -> Callable[[Tensor], Tensor]:
    """The scene of an example: its own, or the only one."""
    return (lambda b: b) if len(scenes) > 1 else (lambda b: b * 0)


class FlexOperator(Operator):
    """Softmax attention over a pattern by `flex_attention`; what `PatternOperator` computes, without dropout.

    For GPUs; float64 is not for its kernels. On a CPU the compiled kernel is for inference alone and slower than
    `PatternOperator`. The first two shapes compile, which takes many seconds. compiled False: the plain computation,
    which forms all pairs, for tests.
    """

    def __init__(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B H S D"],
        mask: Mask,
        pattern: Pattern,
        *,
        seed: int = 0,
        block: int = 128,
        compiled: bool = True,
    ):
        self.mask, self.compiled = mask, compiled
        (batch, n_heads, n_queries, _), n_keys = q.shape, k.shape[2]
        self.order = _order(mask)
        # With every token among the queries, so that each has one that can change places with it.
        self.front = 0 if self.order is None else max(0, n_keys - n_queries)
        self.q = self._take(F.pad(q, (0, 0, self.front, 0)) if self.front else q)
        self.k = self._take(silence(k, None if mask.silent else mask.keys))
        marked = mask.marked
        if marked is not None and self.order is not None:
            marked = marked.gather(1, self.order)
        self.blocks = block_mask(
            pattern,
            self.q.shape[2],
            n_keys,
            n_heads=n_heads,
            batch=batch,
            seed=seed,
            causal=mask.causal,
            lengths=None if mask.keys is None else mask.keys.sum(1).tolist(),
            marked=marked,
            block=block,
            device=q.device,
        )

    def apply(self, v: Float[Tensor, "B H S Dv"]) -> Float[Tensor, "B H T Dv"]:
        """softmax over the pattern, times v."""
        v = self._take(silence(v, None if self.mask.silent else self.mask.keys))
        if self.compiled:
            out = _compiled()(self.q, self.k, v, block_mask=self.blocks)
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
                out = flex_attention(self.q, self.k, v, block_mask=self.blocks)
        return self._put(out)

    def dense(self) -> Float[Tensor, "B H T S"]:
        """The weights, as one matrix."""
        (batch, n_heads, n_queries, width), n_keys = self.q.shape, self.k.shape[2]
        allowed = create_mask(self.blocks.mask_mod, batch, n_heads, n_queries, n_keys, device=self.q.device)
        wide = torch.promote_types(self.q.dtype, torch.float32)
        scores = self.q.to(wide) @ self.k.to(wide).transpose(2, 3) / math.sqrt(width)
        empty = ~allowed.any(-1, keepdim=True)
        weights = scores.masked_fill(~(allowed | empty), -torch.inf).softmax(-1).masked_fill(~allowed, 0.0)
        if self.order is not None:
            weights = weights.gather(3, self.order.argsort(1)[:, None, None].expand(weights.shape))
        return self._put(weights.to(self.q.dtype))

    def materialised(self) -> Weights:
        """The weights as one matrix, T x S; padded values stay unread."""
        return Weights(self.dense(), None if self.mask.silent else self.mask.keys)

    def _take(self, x: Tensor) -> Tensor:
        """(B, H, n, D) with real tokens first."""
        return x if self.order is None else x.gather(2, self._places(x, self.order))

    def _put(self, out: Tensor) -> Tensor:
        """Rows back in their places, without those added in front."""
        if self.order is None:
            return out
        return torch.empty_like(out).scatter(2, self._places(out, self.order), out)[:, :, self.front :]

    def _places(self, x: Tensor, order: Tensor) -> Tensor:
        """Where each row comes from: rows before the first token stay."""
        before = x.shape[2] - order.shape[1]
        stay = torch.arange(before, device=x.device).expand(len(order), -1)
        return torch.cat((stay, order + before), 1)[:, None, :, None].expand(x.shape)


def _order(mask: Mask) -> Tensor | None:
    """Tokens (B, S) with the real ones first; None where they are."""
    if mask.keys is None or not bool((mask.keys[:, 1:] & ~mask.keys[:, :-1]).any()):
        return None
    return (~mask.keys).to(torch.uint8).sort(dim=1, stable=True).indices


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    # Whole graphs only: what exceeds the compiler's limits must fail, not form all pairs instead.
    return torch.compile(flex_attention, fullgraph=True)
