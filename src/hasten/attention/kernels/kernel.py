"""What every kernel attention shares: operators that mix values by products of features, and their decoding steps."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hasten.attention.base import Operator, State, StepOperator, Weights
from hasten.attention.kernels.log_sums import LogPrefixSums
from hasten.attention.kernels.prefix_sums import LOWEST, grid_of
from hasten.attention.kernels.products import divided, totals, with_ones
from hasten.attention.kernels.traced_sums import Sums
from hasten.attention.masks import Mask, silence

# Numbers few enough to be made for all heads at once, by measurement: 16 MB in float32.
SMALL = 1 << 22


@dataclass(frozen=True)
class Means:
    """v -> sum_j (q_i . k_j) v_j over all keys, divided by the sum of these weights or by a floor where that is larger.

    As q (k^T v): the S keys are summed up once, before the T queries come. q (B, H, T, m), k (B, H, S, m): features,
    zero at keys that are not to be read. (T + S) m D multiplications. Where nothing may be read the result is 0.
    """

    q: Tensor
    k: Tensor
    floor: Tensor | None = None

    def __call__(self, v: Tensor) -> Tensor:
        """Values to means."""
        return divided(self.q @ totals(self.k, v), self.floor)


@dataclass(frozen=True)
class ByHeads:
    """Sums of every head, or of every few heads, made apart."""

    parts: tuple[Sums, ...]

    def __call__(self, v: Tensor) -> Tensor:
        """Values to sums."""
        return torch.cat(
            [part(x) for part, x in zip(self.parts, v.split(v.shape[1] // len(self.parts), 1), strict=True)], 1
        )


def by_heads(make: Callable[..., Sums], mask: Mask, n_features: int, *inputs: Tensor) -> Sums:
    """make(mask, *inputs), of inputs (B, H, n, ...); for long sequences on a CPU one head after another.

    The features of one head fit into memory that was in use just before; for larger blocks the allocator asks the
    system for pages, again and again. Causal sums hold about four times as much as features.
    """
    size = inputs[0].shape[:2].numel() * max(x.shape[2] for x in inputs) * n_features * (4 if mask.causal else 1)
    if torch.compiler.is_compiling() or inputs[0].device.type != "cpu" or size <= SMALL:
        return make(mask, *inputs)
    return ByHeads(tuple(make(mask, *one) for one in zip(*(x.split(1, 1) for x in inputs), strict=True)))


@dataclass(frozen=True)
class Ratio:
    """v -> sums(v) / max(sums(1), floor): weights over their sum, or over a floor (B, H, T, 1) where that is larger.

    Where nothing may be read both are 0, and so is the result.
    """

    sums: Sums
    floor: Tensor | None = None

    def __call__(self, v: Tensor) -> Tensor:
        """Values to means."""
        return divided(self.sums(with_ones(v)), self.floor)


class KernelOperator(Operator):
    """The map `sums`, computed in float32 or wider even under autocast.

    `keys` (B, S) are False where values are not read; None where they are zero, or weigh nothing and are finite.
    """

    def __init__(self, sums: Sums, like: Float[Tensor, "B H S D"], keys: Bool[Tensor, "B S"] | None):
        self.sums, self.like, self.keys = sums, like, keys

    def apply(self, v: Float[Tensor, "B H S Dv"]) -> Float[Tensor, "B H T Dv"]:
        """Weighted sums of the values, without forming a weight."""
        with torch.autocast(v.device.type, enabled=False):
            return self.sums(silence(v, self.keys).to(wide(self.like))).to(v.dtype)

    def dense(self) -> Float[Tensor, "B H T S"]:
        """The weights, as what the identity is mapped to: T x S, for tests and pictures."""
        eye = torch.eye(self.like.shape[2], dtype=self.like.dtype, device=self.like.device)
        return self.apply(eye.expand(*self.like.shape[:2], -1, -1))

    def materialised(self) -> Weights:
        """The weights, to be applied many times; padded values stay unread."""
        return Weights(self.dense(), self.keys)


@dataclass(frozen=True)
class KernelState:
    """Sums over the past, (B, H, m, D): of features times values, or with D = 1 of features alone."""

    total: Float[Tensor, "B H m D"]

    def select(self, rows: Tensor) -> "KernelState":
        """Batch rows by index."""
        return KernelState(self.total.index_select(0, rows))


@dataclass(frozen=True)
class Normaliser:
    """The sum of weights of a decoding step: what the past's features add up to (B, H, m, 1), and a floor."""

    total: Tensor
    floor: Tensor | None = None


class KernelStep(StepOperator):
    """n new positions. The past is one sum a feature and head, whatever its length: values in it cost nothing any more.

    out_i = among_i(v) + read_i . past;  past <- keep past + write^T v
    among: the sums over the new positions. read, write (B, H, n, m); keep (B, H, m, 1) or broadcast to it. With a
    normaliser both sums are divided by the sum of their weights.
    """

    def __init__(self, among: Sums, read: Tensor, write: Tensor, keep: Tensor, normaliser: Normaliser | None):
        self.among, self.read, self.write, self.keep, self.normaliser = among, read, write, keep, normaliser

    def apply(self, v: Float[Tensor, "B H n Dv"], values: State | None) -> tuple[Float[Tensor, "B H n Dv"], State]:
        """Outputs of the new positions and the past with their values added."""
        assert values is None or isinstance(values, KernelState)
        with torch.autocast(v.device.type, enabled=False):
            x = v.to(self.read.dtype)
            past = x.new_zeros(*self.read.shape[:2], self.read.shape[3], x.shape[3]) if values is None else values.total
            after = KernelState(self.keep * past + self.write.transpose(-1, -2) @ x)
            if self.normaliser is None:
                out = self.among(x) + self.read @ past
            else:
                sums = self.among(with_ones(x)) + self.read @ torch.cat((past, self.normaliser.total), dim=-1)
                out = divided(sums, self.normaliser.floor)
            return out.to(v.dtype), after


@dataclass(frozen=True)
class LogState:
    """log sum_j exp(b_jr) over the past, (B, H, m), of features that are given by their logarithms b."""

    level: Float[Tensor, "B H m"]

    def select(self, rows: Tensor) -> "LogState":
        """Batch rows by index."""
        return LogState(self.level.index_select(0, rows))


def log_levels(b: Tensor, keys: LogState | None) -> tuple[Tensor, Tensor]:
    """log sum exp(b) over all positions before the new ones, (B, H, 1, m), and up to each of them, (B, H, n, m)."""
    before = torch.full_like(b[:, :, :1], LOWEST) if keys is None else keys.level[:, :, None]
    return before, torch.cat((before, b), dim=2).logcumsumexp(2)[:, :, 1:]


def log_step(a: Tensor, b: Tensor, before: Tensor, levels: Tensor) -> tuple[KernelStep, LogState]:
    """The step of weights sum_r exp(a_ir + b_jr - level_ir) that sum to 1 as they are, and the key state after it.

    a, b (B, H, n, m). The past values are kept as averages with the weights exp(b_jr - level_r), which cannot overflow.
    """
    grid, after = grid_of(a.shape[2], a.shape[2]), levels[:, :, -1:]
    among = LogPrefixSums(grid, grid.cut(a), grid.cut(b, -torch.inf), grid.cut(levels, LOWEST))
    keep = (before - after).exp().transpose(-1, -2)
    step = KernelStep(among, (a + (before - levels)).exp(), (b - after).exp(), keep, None)
    return step, LogState(after.squeeze(2).clone())  # a view would keep the levels of all n positions


def noisy(mask: Mask) -> Bool[Tensor, "B S"] | None:
    """The keys to silence: none where the mask promises that padding holds zeros."""
    return None if mask.silent else mask.keys


def wide(x: Tensor) -> torch.dtype:
    """The type to compute in: that of `x`, or float32 where `x` is narrower."""
    return torch.promote_types(x.dtype, torch.float32)


def unread(features: Tensor, keys: Bool[Tensor, "B S"] | None, value: float = 0.0) -> Tensor:
    """`features` (B, H, S, m) with `value` at padded keys, after the feature map: a map need not send 0 to 0."""
    return features if keys is None else features.masked_fill(~keys[:, None, :, None], value)
