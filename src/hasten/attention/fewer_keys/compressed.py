"""Memory-compressed attention: keys and values are convolved along time with a stride before they are read."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hasten.attention.base import Attention, Operator, State, StepOperator, Traits
from hasten.attention.fewer_keys.blocks import Packing, blocks, identity, n_blocks, unblocked, weigh, wide
from hasten.attention.full import FullOperator
from hasten.attention.masks import Mask
from hasten.attention.mechanism import MechanismSpec
from hasten.errors import UserError
from hasten.fields import PositiveInt


@dataclass(frozen=True, kw_only=True)
class CompressedSpec(MechanismSpec):
    """Memory-compressed attention: every query reads groups of tokens, each pooled into one key and one value."""

    kind: Literal["compressed"] = "compressed"
    """The mechanism's name."""
    stride: PositiveInt = 3
    """Tokens from the beginning of one group to the beginning of the next: how many times fewer keys are read."""
    kernel: PositiveInt | None = None
    """Tokens of a group; at least the stride, which it is by default."""
    values: Literal["convolution", "average"] = "convolution"
    """How values are pooled: by any learnt weights, or by learnt weights that are positive and sum to 1."""
    local: PositiveInt | None = None
    """Read besides, uncompressed, the own block of this many tokens; by default none."""
    per_head: bool = False
    """Learn a convolution for each head, instead of one for all."""
    over_channels: bool = False
    """Convolve keys over all channels of a head as well, not only over time."""
    n_heads: PositiveInt | None = None
    """Attention heads, read with `per_head`; a model sets it."""
    d_head: PositiveInt | None = None
    """Width of the heads, read with `over_channels`; a model sets it."""

    def build(self) -> "CompressedAttention | CompressedLocalAttention":
        """The mechanism this spec describes; `UserError` where groups would leave tokens out."""
        kernel = self.stride if self.kernel is None else self.kernel
        if kernel < self.stride:
            raise UserError(
                f"compressed attention: with kernel {kernel} below stride {self.stride} some tokens would be read by "
                "nobody; give a kernel of at least the stride"
            )
        n_heads = self.size("n_heads") if self.per_head else None
        d_head = self.size("d_head") if self.over_channels else None
        compressor = Compressor(kernel, self.stride, n_heads, d_head, self.values == "average")
        if self.local is None:
            return CompressedAttention(compressor)
        return CompressedLocalAttention(compressor, self.local)


class Compressor(nn.Module):
    """Strided convolutions along time, without a bias: one for keys and one for values, means of groups at first.

    Keys: sum_t k[c stride + t] W_t, with W_t a matrix over the head's channels (d_head given) or a number.
    Values: sum_t w_t v[c stride + t] with numbers w_t, so that the map stays linear in v and has one matrix per head;
    with `average`, w is a softmax over the real tokens of the group. Beyond the end stand zeros.
    A bias of the keys would move all scores of a query alike; one of the values would not be linear.
    """

    def __init__(self, kernel: int, stride: int, n_heads: int | None, d_head: int | None, average: bool):
        super().__init__()
        self.kernel, self.stride, self.n_heads, self.d_head = kernel, stride, n_heads, d_head
        self.average, taps = average, torch.full((n_heads or 1, kernel), 1 / kernel)
        self.key_weight = nn.Parameter(taps if d_head is None else taps[..., None, None] * torch.eye(d_head))
        self.value_weight = nn.Parameter(torch.zeros_like(taps) if average else taps.clone())
        self._convolve = _over_time if d_head is None else _over_channels
        self._shares = _average if average else _convolution

    def n_groups(self, length: int) -> int:
        """Groups that hold a token, of so many."""
        return n_blocks(length, self.stride)

    def n_complete(self, length: int) -> int:
        """Groups whose tokens are all there."""
        return max(0, (length - self.kernel) // self.stride + 1)

    def keys(self, k: Float[Tensor, "B H S D"], n_groups: int) -> Float[Tensor, "B H C D"]:
        """One key a group."""
        return self._convolve(self._windows(k, n_groups), self.key_weight.to(k.dtype))

    def values(self, v: Float[Tensor, "B H S D"], n_groups: int, count: Int[Tensor, "#B"]) -> Float[Tensor, "B H C D"]:
        """One value a group, of the first `count` tokens of each row."""
        begins = torch.arange(n_groups, device=v.device)[:, None] * self.stride
        real = begins + torch.arange(self.kernel, device=v.device) < count[:, None, None]
        shares = self._shares(self.value_weight.to(v.dtype)[:, None], real[:, None])
        return _over_time(self._windows(v, n_groups), shares)

    def _windows(self, x: Tensor, n_groups: int) -> Float[Tensor, "B H C D kernel"]:
        end = (n_groups - 1) * self.stride + self.kernel
        return F.pad(x, (0, 0, 0, end - x.shape[2])).unfold(2, self.kernel, self.stride)


def _over_time(windows: Float[Tensor, "B H C D kernel"], weight: Tensor) -> Float[Tensor, "B H C D"]:
    """`weight` is (H or 1, kernel), or differs from group to group: (B or 1, H or 1, C, kernel)."""
    weight = weight[:, None] if weight.ndim == 2 else weight
    return (windows * weight[..., None, :]).sum(-1)


def _over_channels(windows: Float[Tensor, "B H C D kernel"], weight: Tensor) -> Float[Tensor, "B H C D"]:
    return windows.transpose(-1, -2).flatten(-2) @ weight.flatten(1, 2)


def _convolution(weight: Float[Tensor, "H 1 kernel"], real: Bool[Tensor, "B 1 C kernel"]) -> Tensor:
    return weight * real


def _average(weight: Float[Tensor, "H 1 kernel"], real: Bool[Tensor, "B 1 C kernel"]) -> Tensor:
    return weigh(weight.expand(real.shape[0], -1, real.shape[2], -1), real)


class CompressedAttention(Attention):
    """softmax(q K^T / sqrt(D)) V, with K and V convolutions of k and v along time, with a stride.

    q (B, H, T, D), k (B, H, S, D). Group c holds the tokens c stride .. c stride + kernel - 1, counted over real ones:
    padding, wherever it stands, is as good as dropped. The last groups may run over the end, where zeros stand.
    Causal: a group is readable from its last token on, so the first kernel - 1 queries read nothing and get exactly 0.
    Values are pooled by one kernel over time a head rather than over channels as in the paper: what the paper's
    mixes across channels, the projections around do. Cost O(T S / stride). Decoding keeps S / stride keys and values.
    Not offered: dropout of weights, since a weight here is that of a group.
    Source: Liu et al., 2018, section 4.2.3.
    """

    def __init__(self, compressor: Compressor):
        super().__init__()
        self.compressor, self.traits = compressor, _traits(compressor, elsewhere=True)

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> "CompressedOperator":
        """The softmax map over groups; its weights are not formed unless asked for."""
        self.check(q, k, mask)
        packing, n_keys = Packing(mask.keys, k.shape[2], k.device), k.shape[2]
        with torch.autocast(q.device.type, enabled=False):
            far = self.compressor.keys(packing.pack(wide(k)), self.compressor.n_groups(n_keys))
        places = torch.arange(q.shape[2], device=q.device)[None, None] + (n_keys - q.shape[2])
        allowed = _readable(self.compressor, packing, mask.causal, places)
        read = _Groups(FullOperator(wide(q), far, Mask(allowed=allowed), 0.0))
        return CompressedOperator(read, self.compressor, packing, Packing(None, q.shape[2], q.device), q)

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition, one query at a time."""
        return _definition(self.compressor, q, k, mask, 0)

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple["CompressedStep", "Groups"]:
        """Complete groups are kept compressed, the tokens of the others as they are."""
        self.fits(q.shape[1], q.shape[3])
        with torch.autocast(q.device.type, enabled=False):
            keys, _ = _grow(self.compressor, 1, keys, wide(k), self.compressor.keys)
        mask = Mask(allowed=_complete(self.compressor, keys, q.shape[2])[None, None])
        return CompressedStep(_Groups(FullOperator(wide(q), keys.done, mask, 0.0)), self.compressor, 1), keys


class CompressedLocalAttention(Attention):
    """softmax(q [K ; k of the own block]^T / sqrt(D)) [V ; v of the own block]: compressed attention that sees near.

    Block u holds the tokens u local .. (u + 1) local - 1, counted over real ones, of which a causal query reads those
    up to itself; K and V are as in `CompressedAttention`, and one softmax runs over both. Self-attention only.
    Cost O(S^2 / stride + S local); memory O(S^2 D / (stride local)), since each block has the groups beside its tokens.
    Source: Liu et al., 2018, section 4.2.3, which alternates layers of the two kinds.
    """

    def __init__(self, compressor: Compressor, local: int):
        super().__init__()
        self.compressor, self.local, self.traits = compressor, local, _traits(compressor, elsewhere=False)

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> "CompressedOperator":
        """The softmax map over groups and own blocks; its weights are not formed unless asked for."""
        self.check(q, k, mask)
        packing, size, length = Packing(mask.keys, k.shape[2], k.device), self.local, k.shape[2]
        with torch.autocast(q.device.type, enabled=False):
            packed, queries = packing.pack(wide(k)), blocks(packing.rank(wide(q)), size)
            far, near = self.compressor.keys(packed, self.compressor.n_groups(length)), blocks(packed, size)
        shape = (near.shape[2], size)
        places = F.pad(packing.order, (0, shape[0] * size - length), value=-1).unflatten(1, shape)
        ranks = torch.arange(shape[0] * size, device=q.device).unflatten(0, shape)
        own = (ranks < packing.count[:, None, None])[:, :, None]
        own = own & (places[:, :, None] <= places[..., None]) if mask.causal else own
        groups = _readable(self.compressor, packing, mask.causal, places)
        allowed = torch.cat([x.expand(-1, *shape, -1) for x in (groups, own)], dim=-1)
        if mask.keys is not None:
            allowed = allowed[:, None].expand(-1, q.shape[1], -1, -1, -1).flatten(0, 1)
        read = _Both(FullOperator(queries.flatten(0, 1), _join(far, near), Mask(allowed=allowed), 0.0), size, length)
        return CompressedOperator(read, self.compressor, packing, packing, q)

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition, one query at a time."""
        return _definition(self.compressor, q, k, mask, self.local)

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple["CompressedStep", "Groups"]:
        """Kept besides the groups: the tokens of the block that is not complete."""
        self.fits(q.shape[1], q.shape[3])
        with torch.autocast(q.device.type, enabled=False):
            keys, near = _grow(self.compressor, self.local, keys, wide(k), self.compressor.keys)
        places = torch.arange(near.shape[2], device=q.device)  # from the beginning of a block
        reader = places[-q.shape[2] :, None]
        own = (places <= reader) & (places // self.local == reader // self.local)
        allowed = torch.cat((_complete(self.compressor, keys, q.shape[2]), own), dim=-1)[None, None]
        joined = _join(keys.done, near[:, :, None])
        read = FullOperator(wide(q).flatten(0, 1)[:, None], joined, Mask(allowed=allowed), 0.0)
        return CompressedStep(_Both(read, near.shape[2], q.shape[2]), self.compressor, self.local), keys


def _traits(compressor: Compressor, elsewhere: bool) -> Traits:
    """`elsewhere`: queries may be those of another sequence."""
    return Traits(
        causal="strict",
        cross=elsewhere,
        suffix=elsewhere,
        step=True,
        normalised=compressor.average,
        key_padding=True,
        dropout=False,
        n_heads=compressor.n_heads,
        d_head=compressor.d_head,
    )


def _readable(
    compressor: Compressor, packing: Packing, causal: bool, places: Int[Tensor, "#B n T"]
) -> Bool[Tensor, "#B #n #T C"]:
    """Which groups are read by queries that stand at `places`."""
    length = packing.order.shape[1]
    begins = torch.arange(compressor.n_groups(length), device=places.device) * compressor.stride
    if not causal:
        return (begins < packing.count[:, None])[:, None, None]
    ends = begins + compressor.kernel - 1
    last = packing.order[:, ends.clamp(max=length - 1)].masked_fill(ends >= packing.count[:, None], length)
    return last[:, None, None] <= places[..., None]


def _join(far: Float[Tensor, "B H C D"], near: Float[Tensor, "B H n size D"]) -> Float[Tensor, "BH n keys D"]:
    """What the queries of each block read: all groups, and the tokens of the block."""
    return torch.cat((far[:, :, None].expand(-1, -1, near.shape[2], -1, -1), near), dim=3).flatten(0, 1)


class _Groups:
    """Reads groups only."""

    def __init__(self, operator: Operator):
        self.operator = operator

    def mix(self, far: Float[Tensor, "B H C D"], near: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H T D"]:
        return self.operator.apply(far)

    def formed(self) -> "_Groups":
        return _Groups(self.operator.materialised())


class _Both:
    """Reads groups and tokens, for `n_queries` queries in blocks, and tokens in blocks of `size`."""

    def __init__(self, operator: Operator, size: int, n_queries: int):
        self.operator, self.size, self.n_queries = operator, size, n_queries

    def mix(self, far: Float[Tensor, "B H C D"], near: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H T D"]:
        out = self.operator.apply(_join(far, blocks(near, self.size)))
        return unblocked(out.unflatten(0, far.shape[:2]), self.n_queries)

    def formed(self) -> "_Both":
        return _Both(self.operator.materialised(), self.size, self.n_queries)


class CompressedOperator(Operator):
    """Softmax weights of groups (and own blocks), applied to the values of groups (and tokens)."""

    def __init__(
        self,
        read: _Groups | _Both,
        compressor: Compressor,
        keys: Packing,
        queries: Packing,
        like: Float[Tensor, "B H T D"],
    ):
        self.read, self.compressor, self.keys, self.queries, self.like = read, compressor, keys, queries, like

    def apply(self, v: Float[Tensor, "B H S Dv"]) -> Float[Tensor, "B H T Dv"]:
        """Pool the values and mix, in float32 or wider."""
        with torch.autocast(v.device.type, enabled=False):
            near = self.keys.pack(wide(v))
            far = self.compressor.values(near, self.compressor.n_groups(v.shape[2]), self.keys.count)
            return self.queries.unpack(self.read.mix(far, near)).to(v.dtype)

    def dense(self) -> Float[Tensor, "B H T S"]:
        """The map of single tokens."""
        return self.apply(identity(self.like, self.keys.order.shape[1]))

    def materialised(self) -> "CompressedOperator":
        """The weights of groups, formed."""
        return CompressedOperator(self.read.formed(), self.compressor, self.keys, self.queries, self.like)


@dataclass(frozen=True)
class Groups:
    """Decoding state.

    done (B, H, C, D): complete groups. open (B, H, n, D): the tokens that later groups still need.
    block (B, H, m, D): the tokens so far of the block that is not complete.
    """

    done: Float[Tensor, "B H C D"]
    open: Float[Tensor, "B H n D"]
    block: Float[Tensor, "B H m D"]

    def select(self, rows: Tensor) -> "Groups":
        """Batch rows by index."""
        return Groups(*(x.index_select(0, rows) for x in (self.done, self.open, self.block)))


def _grow(
    compressor: Compressor, size: int, state: State | None, new: Tensor, pool: Callable[[Tensor, int], Tensor]
) -> tuple[Groups, Tensor]:
    """The state after `new` tokens, pooled where they complete groups; and all tokens since a block of `size` began."""
    assert state is None or isinstance(state, Groups)
    none = new[:, :, :0]
    state = Groups(none, none, none) if state is None else state
    tail, near = torch.cat((state.open, new), dim=2), torch.cat((state.block, new), dim=2)
    n_new, block = compressor.n_complete(tail.shape[2]), near[:, :, near.shape[2] // size * size :]
    if not n_new:
        return Groups(state.done, tail, block), near
    done = torch.cat((state.done, pool(tail, n_new)), dim=2)
    return Groups(done, tail[:, :, n_new * compressor.stride :], block), near


def _complete(compressor: Compressor, groups: Groups, n_new: int) -> Bool[Tensor, "n C"]:
    """Which groups are complete at each of the last `n_new` tokens."""
    n_groups, device = groups.done.shape[2], groups.done.device
    length = n_groups * compressor.stride + groups.open.shape[2]
    last = torch.arange(n_groups, device=device) * compressor.stride + compressor.kernel - 1
    return last <= torch.arange(length - n_new, length, device=device)[:, None]


class CompressedStep(StepOperator):
    """The new queries against all complete groups (and their own blocks of `size` tokens)."""

    def __init__(self, read: _Groups | _Both, compressor: Compressor, size: int):
        self.read, self.compressor, self.size = read, compressor, size

    def apply(self, v: Float[Tensor, "B H n Dv"], values: State | None) -> tuple[Float[Tensor, "B H n Dv"], Groups]:
        """Complete the groups that the new values complete, and read."""

        def pool(tail: Tensor, n_groups: int) -> Tensor:
            return self.compressor.values(tail, n_groups, torch.full((1,), tail.shape[2], device=tail.device))

        with torch.autocast(v.device.type, enabled=False):
            grown, near = _grow(self.compressor, self.size, values, wide(v), pool)
            return self.read.mix(grown.done, near).to(v.dtype), grown


def _definition(compressor: Compressor, q: Tensor, k: Tensor, mask: Mask, local: int) -> Tensor:
    """The matrix of compressed attention, one query at a time; local 0: groups only."""
    (batch, heads, n_queries, width), n_keys = q.shape, k.shape[2]
    key_weight, value_weight = (x.to(q).expand(heads, *x.shape[1:]) for x in compressor.parameters())
    if compressor.d_head is None:
        key_weight = key_weight[..., None, None] * torch.eye(width).to(q)
    weights = q.new_zeros(batch, heads, n_queries, n_keys)
    for b in range(batch):
        keep = [True] * n_keys if mask.keys is None else mask.keys[b].tolist()
        real = [j for j in range(n_keys) if keep[j]]
        ranked = real + [j for j in range(n_keys) if not keep[j]]
        groups = [real[c : c + compressor.kernel] for c in range(0, len(real), compressor.stride)]
        for h in range(heads):
            keys, rows = list(k[b, h]), list(torch.eye(n_keys).to(q))  # of tokens, then of groups
            for group in groups:
                taps = value_weight[h, : len(group)]
                taps = taps.softmax(0) if compressor.average else taps
                keys.append(torch.stack([k[b, h, j] @ key_weight[h, t] for t, j in enumerate(group)]).sum(0))
                rows.append(torch.stack([tap * rows[j] for tap, j in zip(taps, group, strict=True)]).sum(0))
            for i in range(n_queries):
                place = i + n_keys - n_queries
                begin = ranked.index(place) // local * local if local else n_keys
                reads = [j for j in real[begin : begin + local] if j <= place or not mask.causal]
                for c, group in enumerate(groups):
                    if not mask.causal or (len(group) == compressor.kernel and group[-1] <= place):
                        reads.append(n_keys + c)
                if reads:
                    scores = torch.stack([keys[j] for j in reads]) @ q[b, h, i] / math.sqrt(width)
                    weights[b, h, i] = scores.softmax(0) @ torch.stack([rows[j] for j in reads])
    return weights
