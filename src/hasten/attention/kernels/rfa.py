"""Random feature attention: a Gaussian kernel estimated with random waves, and a gate that lets the past fade."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from hasten.attention.base import Attention, State, StepOperator, Traits
from hasten.attention.kernels.directions import Directions
from hasten.attention.kernels.kernel import (
    KernelOperator,
    KernelStep,
    Means,
    Normaliser,
    Ratio,
    by_heads,
    noisy,
    unread,
    wide,
)
from hasten.attention.kernels.traced_sums import Sums, causal_sums
from hasten.attention.masks import Mask, silence
from hasten.attention.mechanism import MechanismSpec
from hasten.fields import NonNegativeInt, PositiveFactor, PositiveInt, Seed

# The least that an average weight counts for in a denominator. Estimates of the kernel err by about 1 / sqrt(features).
FLOOR = 0.01


@dataclass(frozen=True, kw_only=True)
class RFASpec(MechanismSpec):
    """Random feature attention: directions of query and key are compared by a Gaussian kernel, in linear time."""

    kind: Literal["rfa"] = "rfa"
    """The mechanism's name."""
    features: PositiveInt = 64
    """Random waves, a sine and a cosine each; the error of the estimated kernel falls with their square root."""
    d_head: PositiveInt | None = None
    """Width of the heads; a model sets it."""
    sigma: PositiveFactor = 1.0
    """Sharpness of the kernel at the start, exp(-sigma^2 |x - y|^2 / 2); learnt, for every entry of a head."""
    gate: bool = False
    """Let the past fade by a learnt gate; for causal self-attention."""
    n_heads: PositiveInt | None = None
    """Attention heads, each with a gate of its own; a model sets it."""
    redraw_every: NonNegativeInt = 0
    """Draw new waves after every so many updates in training; 0: never."""
    seed: Seed = 0
    """Draws the waves; each layer of a model has draws of its own."""

    def build(self) -> "RandomFeatureAttention":
        """The mechanism this spec describes."""
        return RandomFeatureAttention(self)


class RandomFeatureAttention(Attention):
    """out_i = phi(q_i) [sum_j c_ij phi(k_j) v_j^T] / (phi(q_i) . sum_j c_ij phi(k_j)), over the keys the mask allows.

    phi(x) = m^-1/2 [sin(w_1 . y), ..., sin(w_m . y), cos(w_1 . y), ..., cos(w_m . y)] of y = sigma x / |x|, with rows w
    from N(0, I) and a learnt sigma (one number for every entry of a head, shared by the heads). So phi(x) . phi(y)
    estimates exp(-|sigma (x - y)|^2 / 2) of the directions of x and y without bias. c_ij = 1, or with a gate
    g_j = sigmoid(u_h . k_j + b_h), for every head h, c_ij = (1 - g_j) g_(j+1) ... g_i: the weight of key j in
    S_i = g_i S_(i-1) + (1 - g_i) phi(k_i) v_i^T. Numerator and denominator fade alike. A mechanism sees no layer input,
    so the gate reads the key, whose length the kernel does not use. Without a causal mask every query reads the state
    after the last key.
    q (B, H, T, D), k (B, H, S, D); a zero vector stays zero, and its gradient is that of division by 1e-12.
    Denominators: the estimate may be near 0 or negative, where the kernel is small. It is replaced by 0.01 sum_j c_ij
    where it is less; there the weights of a row sum to less than 1, or to less than 0, so this is no average of values.
    Weights can be negative. A query that may read nothing gets exactly 0.
    Cost: (T + S) m (D + 2 Dv) multiplications; causal, chunks of 64 keys add 64 (2 m + Dv) T. Decoding keeps
    2 m (Dv + 1) numbers a head.
    Randomness: the waves are drawn when built, from `seed`, and again by `redraw()` only, or on a schedule that
    `after_update(model)` counts in training. A forward pass never draws.
    Source: Peng et al., 2021, "Random Feature Attention", section 3.
    Does not: drop weights, which are never formed; take patterns.
    """

    def __init__(self, spec: RFASpec):
        super().__init__()
        d_head = spec.size("d_head")
        self.traits = Traits(
            causal="strict",
            cross=True,
            step=True,
            normalised=False,
            key_padding=True,
            dropout=False,
            suffix=True,
            n_heads=spec.size("n_heads") if spec.gate else None,
            d_head=d_head,
            memory=1.0,
        )
        self.sigma = Parameter(torch.full((d_head,), float(spec.sigma)))
        self.directions = Directions(
            spec.features, d_head, seed=spec.seed, orthogonal=False, redraw_every=spec.redraw_every
        )
        self.past = Fading(spec.size("n_heads"), d_head) if spec.gate else Lasting()

    def redraw(self) -> None:
        """Draw all waves anew."""
        self.directions.redraw()

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> KernelOperator:
        """The linear map; no T x S matrix is formed."""
        self.check(q, k, mask)
        with torch.autocast(q.device.type, enabled=False):
            k = silence(k, noisy(mask))
            n_features = 2 * self.directions.rows.shape[0]
            means = by_heads(self._means, mask, n_features, q, k, *self.past.factors(k, mask.keys))
            return KernelOperator(means, k, noisy(mask))

    def _means(self, mask: Mask, q: Tensor, k: Tensor, *factors: Tensor) -> Sums:
        make = self.past.up_to_each if mask.causal else self.past.over_all
        return make(self.features(q), unread(self.features(k), mask.keys), *factors)

    def features(self, x: Float[Tensor, "B H n D"]) -> Float[Tensor, "B H n M"]:
        """phi(x), of twice as many entries as there are waves."""
        x = x.to(wide(x))
        rows = self.directions.rows.to(x.dtype) * self.sigma.to(x.dtype)
        waves = F.normalize(x, dim=-1) @ rows.T
        return torch.cat((waves.sin(), waves.cos()), dim=-1) / math.sqrt(waves.shape[-1])

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition: means of cosines, the gates one position after another, the floor."""
        keys, n_queries, n_keys = mask.keys, q.shape[2], k.shape[2]
        dtype, q, k = q.dtype, q.double(), silence(k, keys).double()
        rows = self.directions.rows.double() * self.sigma.double()
        x, y = (F.normalize(z, dim=-1) for z in (q, k))
        kernel = ((x[:, :, :, None] - y[:, :, None]) @ rows.T).cos().mean(-1)
        coefficients = self.past.coefficients(k, keys)
        if mask.causal:
            empty = k.new_zeros(*k.shape[:2], n_queries, n_keys)
            # Query i stands at position i + S - T.
            coefficients = torch.cat((empty, coefficients), dim=2)[:, :, -n_queries:]
        else:
            coefficients = coefficients[:, :, -1:].expand(-1, -1, n_queries, -1)
        weights = coefficients * kernel
        total = torch.maximum(weights.sum(-1, keepdim=True), FLOOR * coefficients.sum(-1, keepdim=True))
        return (weights / total.masked_fill(total == 0, 1.0)).to(dtype)

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple[StepOperator, State]:
        """Keys so far are the sum of their features and of their coefficients."""
        assert keys is None or isinstance(keys, RFAState)
        with torch.autocast(q.device.type, enabled=False):
            q_features, k_features = self.features(q), self.features(k)
            if keys is None:
                total = k_features.new_zeros(*k_features.shape[:2], k_features.shape[3], 1)
                keys = RFAState(total, total[:, :, :1])
            return self.past.step(q_features, k_features, k, keys)


@dataclass(frozen=True)
class RFAState:
    """sum_j c_ij phi(k_j), (B, H, M, 1), and sum_j c_ij, (B, H, 1, 1), over the past."""

    total: Float[Tensor, "B H M 1"]
    mass: Float[Tensor, "B H 1 1"]

    def select(self, rows: Tensor) -> "RFAState":
        """Batch rows by index."""
        return RFAState(self.total.index_select(0, rows), self.mass.index_select(0, rows))


class Lasting(nn.Module):
    """c_ij = 1: every key counts the same for ever."""

    def factors(self, raw: Tensor, keys: Bool[Tensor, "B S"] | None) -> tuple[Tensor]:
        """How much every key counts, (B, H, S, 1): 1, or 0 where it is padding."""
        return (unread(torch.ones_like(raw[..., :1], dtype=wide(raw)), keys),)

    def over_all(self, q: Tensor, k: Tensor, number: Tensor) -> Means:
        """Means over all keys."""
        return Means(q, k, FLOOR * number.sum(2, keepdim=True))

    def up_to_each(self, q: Tensor, k: Tensor, number: Tensor) -> Ratio:
        """Means over the keys up to each query."""
        return Ratio(causal_sums("plain", q, k), FLOOR * _at_queries(number.cumsum(2), q))

    def coefficients(self, raw: Tensor, keys: Bool[Tensor, "B S"] | None) -> Tensor:
        """c (B, H, S, S) by its definition; zero for padded keys."""
        n_keys = raw.shape[2]
        return unread(torch.ones_like(raw[..., :1]), keys).transpose(2, 3).expand(-1, -1, n_keys, -1).tril()

    def step(self, q: Tensor, k: Tensor, raw: Tensor, state: RFAState) -> tuple[KernelStep, RFAState]:
        """n more keys."""
        mass = state.mass + torch.ones_like(k[..., :1]).cumsum(2)
        normaliser = Normaliser(state.total, FLOOR * mass)
        after = RFAState(state.total + k.sum(2)[..., None], mass[:, :, -1:].clone())
        return KernelStep(causal_sums("plain", q, k), q, k, k.new_ones(()), normaliser), after


class Fading(nn.Module):
    """c_ij = (1 - g_j) g_(j+1) ... g_i, with g_j = sigmoid(u_h . k_j + b_h). At the start g is 0.95 everywhere."""

    def __init__(self, n_heads: int, d_head: int):
        super().__init__()
        self.weight = Parameter(torch.zeros(n_heads, d_head))
        self.bias = Parameter(torch.full((n_heads,), 3.0))

    def factors(self, raw: Tensor, keys: Bool[Tensor, "B S"] | None) -> tuple[Tensor, Tensor]:
        """log g and log(1 - g), (B, H, S, 1); padded keys let everything pass."""
        raw = raw.to(wide(raw))
        weight, bias = (x.to(raw.dtype) for x in (self.weight[:, None], self.bias[:, None, None]))
        logits = (raw * weight).sum(-1, keepdim=True) + bias
        return unread(F.logsigmoid(logits), keys), unread(F.logsigmoid(-logits), keys)

    def over_all(self, q: Tensor, k: Tensor, decay: Tensor, entry: Tensor) -> Means:
        """The state after the last key, for every query."""
        after = decay.flip(2).cumsum(2).flip(2) - decay
        return Means(q, k * (after + entry).exp(), -FLOOR * torch.expm1(decay.sum(2, keepdim=True)))

    def up_to_each(self, q: Tensor, k: Tensor, decay: Tensor, entry: Tensor) -> Ratio:
        """The state at every query."""
        mass = -torch.expm1(decay.cumsum(2))
        return Ratio(causal_sums("decayed", q, k, decay, entry), FLOOR * _at_queries(mass, q))

    def coefficients(self, raw: Tensor, keys: Bool[Tensor, "B S"] | None) -> Tensor:
        """c (B, H, S, S) by its definition, one position after another; zero for padded keys."""
        logits = torch.einsum("bhsd,hd->bhs", raw, self.weight.to(raw)) + self.bias[:, None].to(raw)
        gates = logits.sigmoid()
        row, rows = torch.zeros_like(gates), []
        for j in range(raw.shape[2]):
            gate = gates[..., j] if keys is None else torch.where(keys[:, None, j], gates[..., j], 1.0)
            row = row * gate[..., None]
            row = torch.cat((row[..., :j], (1 - gate)[..., None], row[..., j + 1 :]), dim=-1)
            rows.append(row)
        return torch.stack(rows, dim=2)

    def step(self, q: Tensor, k: Tensor, raw: Tensor, state: RFAState) -> tuple[KernelStep, RFAState]:
        """n more keys: what came before fades by their gates."""
        decay, entry = self.factors(raw, None)
        so_far = decay.cumsum(2)
        keep = so_far[:, :, -1:].exp()
        write = k * (so_far[:, :, -1:] - so_far + entry).exp()
        mass = state.mass * so_far.exp() - torch.expm1(so_far)
        after = RFAState(keep * state.total + write.sum(2)[..., None], mass[:, :, -1:].clone())
        return KernelStep(
            causal_sums("decayed", q, k, decay, entry),
            q * so_far.exp(),
            write,
            keep,
            Normaliser(state.total, FLOOR * mass),
        ), after


def _at_queries(x: Tensor, q: Tensor) -> Tensor:
    """Of x (B, H, S, 1) what stands at the T queries, the last at the last; 0 before the first key."""
    return F.pad(x, (0, 0, q.shape[2] - x.shape[2], 0))
