"""Sinkhorn attention: blocks of keys are sorted softly, so that every query reads its own block and one more."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.attention.base import Attention, Operator, State, StepOperator, Traits
from hasten.attention.fewer_keys.blocks import Packing, blocks, identity, weigh, wide
from hasten.attention.fewer_keys.sinkhorn_mixture import SinkhornMixture
from hasten.attention.fewer_keys.sinkhorn_reading import (
    LEAST,
    BothInTurn,
    First,
    Mixing,
    Reading,
    beside,
    bias_of,
    weigh_blocks,
)
from hasten.attention.fewer_keys.sinkhorn_sorting import MeanProducts, Sorting, SortNet, SortNetwork
from hasten.attention.masks import Mask
from hasten.attention.mechanism import MechanismSpec
from hasten.fields import Factor, PositiveFactor, PositiveFloat, PositiveInt, Seed


@dataclass(frozen=True, kw_only=True)
class SinkhornSpec(MechanismSpec):
    """Sinkhorn attention: every query reads its own block of keys and one mixture of blocks, chosen by sorting."""

    kind: Literal["sinkhorn"] = "sinkhorn"
    """The mechanism's name."""
    block: PositiveInt = 64
    """Tokens of a block."""
    cut: PositiveInt | None = None
    """Read, instead of own and sorted block, the first so many sorted blocks (SortCut); not causal."""
    mixture: bool = False
    """Add what full attention reads, at its cost."""
    tau: PositiveFactor = 0.75
    """Temperature of the sorting: the lower, the nearer to a permutation."""
    iterations: PositiveInt = 16
    """Most rounds of normalising rows and columns; at lower temperatures more are needed."""
    tolerance: PositiveFloat = 1e-3
    """Rounds end when every column sums to 1 within this."""
    noise: Factor = 1.0
    """Scale of the Gumbel noise on the logits in training."""
    seed: Seed = 0
    """Draws the noise; each layer of a model has draws of its own."""
    max_blocks: PositiveInt | None = None
    """Sort at most so many blocks by a learnt network; by default any number, by products of means."""
    n_heads: PositiveInt | None = None
    """Attention heads, for the learnt network; a model sets it."""
    d_head: PositiveInt | None = None
    """Width of the heads, for the learnt network; a model sets it."""

    def build(self) -> "SinkhornAttention | SortCutAttention | SinkhornMixture":
        """The mechanism this spec describes."""
        sorting = Sorting(
            self._sort(),
            block=self.block,
            tau=self.tau,
            iterations=self.iterations,
            tolerance=self.tolerance,
            noise=self.noise,
            seed=self.seed,
        )
        attention = SinkhornAttention(sorting) if self.cut is None else SortCutAttention(sorting, self.cut)
        return SinkhornMixture(attention) if self.mixture else attention

    def _sort(self) -> SortNet:
        if self.max_blocks is None:
            return MeanProducts()
        return SortNetwork(self.size("n_heads"), self.size("d_head"), self.max_blocks)


class SinkhornAttention(Attention):
    """softmax(q [K_u ; k_u]^T / sqrt(D)) [V_u ; v_u] for the queries of block u, with K = P k and V = P v by blocks.

    q, k (B, H, S, D). P (n, n) is a soft permutation of n blocks, the same for keys and values, from the summaries of
    blocks (`Sorting`). Tokens are counted over real ones, so padding, wherever it stands, is as good as dropped.
    A place of a mixed block of which only the share m lies on real tokens is their mean, weighted by P, read with
    log m added to its score: a place without any is not read, and rows sum to 1. The first block of a causal sequence
    reads itself only. Cost O(S block + (S / block)^2 block). Decoding keeps all keys and reads 2 block of them; once a
    block it mixes all. Not offered: dropout of weights, since a key is read along two ways.
    In training noise is added to the logits, the same until `after_update(model)` moves on (`Sorting.draws` counts).
    Source: Tay et al., 2020, sections 3 and 4.
    """

    def __init__(self, sorting: Sorting):
        super().__init__()
        self.sorting, self.traits = sorting, _traits(sorting, "strict")

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> "SinkhornOperator":
        """Sort, and form the weights of mixed and own blocks."""
        self.check(q, k, mask)
        packing, size = Packing(mask.keys, k.shape[2], k.device), self.sorting.block
        with torch.autocast(q.device.type, enabled=False):
            queries, keys = (blocks(packing.pack(wide(x)), size) for x in (q, k))
            real = _real(packing.count, keys.shape[2], size)
            if mask.causal:
                mixing = Mixing(self.sorting.causal(queries, keys, packing.count))
                begun = (torch.arange(real.shape[1], device=q.device) > 0)[:, None, None]
                bias = beside(bias_of(begun), bias_of(real[:, None, :, None] & _triangle(size, q.device)))
            elif _whole(mask, k.shape[2], size):
                mixing, bias = Mixing(self.sorting.balanced(queries, keys, packing.count)), None
            else:
                mixing = Mixing(self.sorting.balanced(queries, keys, packing.count), real)
                bias = beside(mixing.bias, bias_of(real[:, None, :, None]))
            reading = BothInTurn(queries, mixing.mix(keys), keys, bias, mixing)
            in_turn = q.device.type == "cpu" and not torch.compiler.is_compiling()
        return SinkhornOperator(reading if in_turn else reading.formed(), packing, q)

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition, one query at a time."""
        return _definition(self.sorting, q, k, mask, None)

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple["SinkhornStep", "SortedKeys"]:
        """New rows of the sort matrix are made where blocks begin."""
        self.fits(q.shape[1], q.shape[3])
        assert keys is None or isinstance(keys, SortedKeys)
        q, k, size = wide(q), wide(k), self.sorting.block
        none, total = Sorted(k[:, :, :0], k[:, :, :0]), torch.zeros_like(q[:, :, :1])
        with torch.autocast(q.device.type, enabled=False):
            state, total = (none, total) if keys is None else (keys.keys, keys.total)
            done, sums = state.past.shape[2], total + q.cumsum(2)
            begun = torch.arange((done + size - 1) // size, (done + q.shape[2] + size - 1) // size, device=q.device)
            before = sums[:, :, begun * size - done] / (begun * size + 1)[:, None]
            n_past = (done + q.shape[2]) // size if len(begun) else 0
            past = torch.cat((state.past, k), dim=2)[:, :, : n_past * size].unflatten(2, (n_past, size)).mean(3)
            sort = weigh(self.sorting.logits(before, past), torch.arange(n_past, device=q.device) < begun[:, None])
            mixed, own, grown = _grow(state, k, sort, size)
            places = torch.arange(done // size, done // size + own.shape[2], device=q.device)
            bias = beside(bias_of((places > 0)[:, None, None]), bias_of(_triangle(size, q.device)))
            queries = blocks(F.pad(q, (0, 0, done % size, 0)), size)
            weights = weigh_blocks(queries, torch.cat((mixed, own), dim=3), bias[None, None])
        return SinkhornStep(weights, sort, size), SortedKeys(grown, sums[:, :, -1:])


class SortCutAttention(Attention):
    """softmax(q K^T / sqrt(D)) V, with K and V the first few of the sorted blocks, the same for all queries.

    Sorting, padding and places of partial mass are as in `SinkhornAttention`. Not causal: a sorted block mixes the
    whole sequence. Cost O(S cut block + (S / block)^2 block). Source: Tay et al., 2020, section 3.4.
    """

    def __init__(self, sorting: Sorting, cut: int):
        super().__init__()
        self.sorting, self.cut, self.traits = sorting, cut, _traits(sorting, None)

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> "SinkhornOperator":
        """Sort, and form the weights of the first sorted blocks."""
        self.check(q, k, mask)
        packing, size = Packing(mask.keys, k.shape[2], k.device), self.sorting.block
        with torch.autocast(q.device.type, enabled=False):
            queries, keys = packing.pack(wide(q)), blocks(packing.pack(wide(k)), size)
            sort = self.sorting.balanced(blocks(queries, size), keys, packing.count)
            sort = F.pad(sort, (0, 0, 0, self.cut - sort.shape[2]))  # fewer rows, or some of no mass
            mixing = Mixing(sort, _real(packing.count, keys.shape[2], size))
            bias = mixing.bias.transpose(2, 3).flatten(3)[:, :, None]
            weights = weigh_blocks(queries[:, :, None], mixing.mix(keys).flatten(2, 3)[:, :, None], bias)
        return SinkhornOperator(First(weights[:, :, 0], mixing, size), packing, q)

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition, one query at a time."""
        return _definition(self.sorting, q, k, mask, self.cut)


def _traits(sorting: Sorting, causal: Literal["strict"] | None) -> Traits:
    max_blocks = sorting.sort.max_blocks
    return Traits(
        causal=causal,
        not_strict="" if causal else "with cut, sorted blocks mix the whole sequence; without cut it can",
        cross=False,
        step=causal is not None,
        normalised=True,
        key_padding=True,
        dropout=False,
        max_length=None if max_blocks is None else max_blocks * sorting.block,
        n_heads=sorting.sort.n_heads,
        d_head=sorting.sort.d_head,
    )


def _whole(mask: Mask, length: int, size: int) -> bool:
    """Whether all places of all blocks are known to hold real tokens, which saves a third of the time."""
    return not torch.compiler.is_compiling() and mask.keys is None and length % size == 0


def _real(count: Int[Tensor, "#B"], n: int, size: int) -> Bool[Tensor, "#B n size"]:
    """Which places of blocks hold one of the first `count` tokens."""
    return torch.arange(n * size, device=count.device).unflatten(0, (n, size)) < count[:, None, None]


def _triangle(size: int, device: torch.device) -> Bool[Tensor, "size size"]:
    return torch.ones(size, size, dtype=torch.bool, device=device).tril()


class SinkhornOperator(Operator):
    """A reading of values given by rank."""

    def __init__(self, reading: Reading, packing: Packing, like: Float[Tensor, "B H S D"]):
        self.reading, self.packing, self.like = reading, packing, like

    def apply(self, v: Float[Tensor, "B H S Dv"]) -> Float[Tensor, "B H S Dv"]:
        """Mix the blocks of the values as those of the keys, and read, in float32 or wider."""
        with torch.autocast(v.device.type, enabled=False):
            return self.packing.unpack(self.reading.read(self.packing.pack(wide(v)))).to(v.dtype)

    def dense(self) -> Float[Tensor, "B H S S"]:
        """The map of single tokens."""
        return self.apply(identity(self.like, self.like.shape[2]))

    def materialised(self) -> "SinkhornOperator":
        """The weights of blocks, formed."""
        return SinkhornOperator(self.reading.formed(), self.packing, self.like)


@dataclass(frozen=True)
class Sorted:
    """Decoding state: all keys or values (B, H, t, D), and the mixed block (B, H, size, D) of the last block."""

    past: Float[Tensor, "B H t D"]
    mixed: Float[Tensor, "B H size D"]

    def select(self, rows: Tensor) -> "Sorted":
        """Batch rows by index."""
        return Sorted(self.past.index_select(0, rows), self.mixed.index_select(0, rows))


@dataclass(frozen=True)
class SortedKeys:
    """Decoding state of the keys, and the sum of all queries (B, H, 1, D)."""

    keys: Sorted
    total: Float[Tensor, "B H 1 D"]

    def select(self, rows: Tensor) -> "SortedKeys":
        """Batch rows by index."""
        return SortedKeys(self.keys.select(rows), self.total.index_select(0, rows))


def _grow(
    state: Sorted, new: Float[Tensor, "B H n D"], sort: Float[Tensor, "B H u w"], size: int
) -> tuple[Float[Tensor, "B H b size D"], Float[Tensor, "B H b size D"], Sorted]:
    """Mixed and own blocks of the new tokens, and the state after them; `sort` has a row for each block that begins."""
    done, past = state.past.shape[2], torch.cat((state.past, new), dim=2)
    begun = Mixing(sort).mix(past[:, :, : sort.shape[3] * size].unflatten(2, (sort.shape[3], size)))
    mixed = torch.cat((state.mixed[:, :, None], begun), dim=2) if done % size else begun
    return mixed, blocks(past[:, :, done // size * size :], size), Sorted(past, mixed[:, :, -1])


class SinkhornStep(StepOperator):
    """Weights (B, H, b, size, 2 size) of the blocks in which the new tokens stand, and the new rows of the sorting."""

    def __init__(self, weights: Tensor, sort: Float[Tensor, "B H u w"], size: int):
        self.weights, self.sort, self.size = weights, sort, size

    def apply(self, v: Float[Tensor, "B H n Dv"], values: State | None) -> tuple[Float[Tensor, "B H n Dv"], Sorted]:
        """Mix blocks for those that begin, and read."""
        assert values is None or isinstance(values, Sorted)
        new = wide(v)
        state = Sorted(new[:, :, :0], new[:, :, :0]) if values is None else values
        with torch.autocast(v.device.type, enabled=False):
            mixed, own, grown = _grow(state, new, self.sort, self.size)
            first = state.past.shape[2] % self.size
            out = (self.weights @ torch.cat((mixed, own), dim=3)).flatten(2, 3)
        return out[:, :, first : first + v.shape[2]].to(v.dtype), grown


def _definition(sorting: Sorting, q: Tensor, k: Tensor, mask: Mask, cut: int | None) -> Tensor:
    """The matrix of Sinkhorn attention, one query at a time."""
    batch, heads, length, width = q.shape
    weights, eye = q.new_zeros(batch, heads, length, length), torch.eye(length).to(q)
    for b in range(batch):
        keep = torch.ones(length, dtype=torch.bool) if mask.keys is None else mask.keys[b]
        real, padding = keep.nonzero()[:, 0], (~keep).nonzero()[:, 0]
        members = real.split(sorting.block) if len(real) else ()
        sort = _sort_by_definition(sorting, q[b], k[b], members, mask.causal) if members else q.new_zeros(heads, 0, 0)
        for h in range(heads):
            for rank, i in enumerate(torch.cat((real, padding)).tolist()):
                reads, u = [], rank // sorting.block
                for row in sort[h, u : u + 1] if cut is None else sort[h, :cut]:
                    for j in range(sorting.block):
                        there = [w for w, block in enumerate(members) if j < len(block)]
                        reads.append(sum((row[w] * eye[members[w][j]] for w in there), q.new_zeros(length)))
                own = members[u] if cut is None and u < len(members) else real[:0]
                reads += eye[own[: rank + 1 - u * sorting.block] if mask.causal else own]
                reads = [read for read in reads if read.sum() > LEAST]
                if reads:
                    query = q[b, h, i] * keep[i]
                    means = torch.stack(reads) / torch.stack(reads).sum(1, keepdim=True)
                    scores = means @ k[b, h].masked_fill(~keep[:, None], 0.0) @ query / math.sqrt(width)
                    scores = scores + torch.stack(reads).sum(1).log()
                    weights[b, h, i] = scores.softmax(0) @ means
    return weights


def _sort_by_definition(
    sorting: Sorting, q: Tensor, k: Tensor, members: tuple[Tensor, ...], causal: bool
) -> Float[Tensor, "H n n"]:
    """The sort matrix of one sequence, with rows and columns divided by their sums in turn."""
    keys = torch.stack([k[:, block].mean(1) for block in members], dim=1)
    seen = [torch.cat((*members[:u], block[:1])) if causal else block for u, block in enumerate(members)]
    queries = torch.stack([q[:, tokens].mean(1) for tokens in seen], dim=1)
    sort = (sorting.sort(queries[None], keys[None])[0] / sorting.tau).exp()
    if causal:
        sort = sort.tril(-1)
        return torch.cat((sort[:, :1], sort[:, 1:] / sort[:, 1:].sum(2, keepdim=True)), dim=1)
    sort = sort / sort.sum(2, keepdim=True)
    for _ in range(sorting.iterations):
        columns = sort.sum(1, keepdim=True)
        again = sort / columns
        moving = ((columns - 1).abs() > sorting.tolerance).any(2, keepdim=True)
        sort = torch.where(moving, again / again.sum(2, keepdim=True), sort)
    return sort
