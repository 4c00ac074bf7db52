"""Performer: softmax attention estimated with positive random features (FAVOR+)."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hasten.attention.base import Attention, State, StepOperator, Traits
from hasten.attention.kernels.directions import Directions
from hasten.attention.kernels.kernel import (
    KernelOperator,
    LogState,
    Means,
    Ratio,
    by_heads,
    log_levels,
    log_step,
    noisy,
    unread,
    wide,
)
from hasten.attention.kernels.prefix_sums import LOWEST
from hasten.attention.kernels.traced_sums import Sums, causal_sums
from hasten.attention.masks import Mask, silence
from hasten.attention.mechanism import MechanismSpec
from hasten.fields import NonNegativeInt, PositiveInt, Seed


@dataclass(frozen=True, kw_only=True)
class PerformerSpec(MechanismSpec):
    """FAVOR+: softmax attention estimated in linear time by positive random features."""

    kind: Literal["performer"] = "performer"
    """The mechanism's name."""
    features: PositiveInt = 256
    """Random directions; the error of the estimated kernel falls with their square root."""
    d_head: PositiveInt | None = None
    """Width of the heads; a model sets it."""
    regularised: bool = False
    """Directions of equal length: a little bias for less variance."""
    symmetric: bool = False
    """Each direction and its opposite: twice the features, less variance (hyperbolic cosine)."""
    redraw_every: NonNegativeInt = 0
    """Draw new directions after every so many updates in training; 0: never."""
    seed: Seed = 0
    """Draws the directions; each layer of a model has draws of its own."""

    def build(self) -> "PerformerAttention":
        """The mechanism this spec describes."""
        return PerformerAttention(self)


class PerformerAttention(Attention):
    """An unbiased estimate of the softmax kernel exp(q . k / sqrt(D)), and the attention with these weights.

    phi(x)_r = m^-1/2 exp(w_r . x - |x|^2 / 2) of x = q / D^(1/4) or k / D^(1/4), with m directions w_r; E phi(x) .
    phi(y) = exp(x . y). symmetric: phi has exp(w_r . x - |x|^2 / 2) and exp(-w_r . x - |x|^2 / 2), with (2 m)^-1/2.
    out_i = phi(q_i) [sum_j phi(k_j) v_j^T] / (phi(q_i) . sum_j phi(k_j)) over the keys the mask allows; a query that
    may read nothing gets exactly 0. Weights are positive and sum to 1. The kernel is estimated without bias, the ratio
    is not. Variance grows as exp(|x + y|^2): for queries and keys with large products many features are needed.
    Numbers: features are handled by their logarithms. Each is divided by its largest value among the keys, in causal
    attention among the keys so far, which the ratio cancels exactly; nothing is added to features or denominators.
    However far keys differ in size, no sum overflows, no row is emptied, and nothing later shows in what is earlier.
    The logarithms grow as |k|^2, and lose digits with it.
    Cost: (T + S) m (D + Dv) multiplications and (T + S) m exponentials; causal, chunks of 64 keys add about
    32 (m + Dv) T multiplications and about as many exponentials again. Decoding keeps m (Dv + 1) numbers a head.
    Randomness: the directions are drawn when built, from `seed`, and again by `redraw()` only, or on a schedule that
    `after_update(model)` counts in training. A forward pass never draws.
    Source: Choromanski et al., 2021, "Rethinking Attention with Performers", sections 2.3 and 2.4.
    Does not: drop weights, which are never formed; take patterns. The ReLU variant is `LinearSpec(feature="relu")`.
    """

    def __init__(self, spec: PerformerSpec):
        super().__init__()
        d_head = spec.size("d_head")
        self.traits = Traits(
            causal="strict",
            cross=True,
            step=True,
            normalised=True,
            key_padding=True,
            dropout=False,
            suffix=True,
            d_head=d_head,
            memory=1.0,
        )
        self.signs = (1, -1) if spec.symmetric else (1,)
        self.directions = Directions(
            spec.features,
            d_head,
            seed=spec.seed,
            orthogonal=True,
            regularised=spec.regularised,
            redraw_every=spec.redraw_every,
        )

    def redraw(self) -> None:
        """Draw all directions anew."""
        self.directions.redraw()

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> KernelOperator:
        """The linear map; no T x S matrix is formed."""
        self.check(q, k, mask)
        with torch.autocast(q.device.type, enabled=False):
            n_features = len(self.signs) * self.directions.rows.shape[0]
            means = by_heads(self._means, mask, n_features, q, k)
        return KernelOperator(means, k, noisy(mask))

    def _means(self, mask: Mask, q: Tensor, k: Tensor) -> Sums:
        a, b = self._of_queries(q), unread(self._of_keys(silence(k, noisy(mask))), mask.keys, -torch.inf)
        return Ratio(causal_sums("scaled", a, b)) if mask.causal else _over_all(a, b)

    def _of_queries(self, q: Tensor) -> Tensor:
        """Logarithms of features, up to a term for each query that the ratio cancels."""
        projected = self.directions.project(q.to(wide(q)) * q.shape[-1] ** -0.25)
        return torch.cat([sign * projected for sign in self.signs], dim=-1) if len(self.signs) > 1 else projected

    def _of_keys(self, k: Tensor) -> Tensor:
        """Logarithms of features, up to a constant that the ratio cancels."""
        half_square = k.to(wide(k)).square().sum(-1, keepdim=True) / (2 * math.sqrt(k.shape[-1]))
        return self._of_queries(k).add_(-half_square)  # the gradient of a difference is negated, entry by entry

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition: the matrix of products of features, masked, divided by its row sums."""
        rows = self.directions.rows.double()
        rows = torch.cat((rows, -rows)) if len(self.signs) > 1 else rows
        features = []
        for x in (q, silence(k, mask.keys)):
            x = x.double() / x.shape[-1] ** 0.25
            features.append((x @ rows.T - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(len(rows)))
        weights = torch.einsum("bhtm,bhsm->bhts", *features)
        allowed = mask.dense(q.shape[2], k.shape[2], q.device)
        weights = weights if allowed is None else weights.masked_fill(~allowed, 0.0)
        total = weights.sum(-1, keepdim=True)
        return (weights / total.masked_fill(total == 0, 1.0)).to(q.dtype)

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple[StepOperator, State]:
        """Keys so far are the logarithm of their sum, a feature."""
        assert keys is None or isinstance(keys, LogState)
        with torch.autocast(q.device.type, enabled=False):
            a, b = self._of_queries(q), self._of_keys(k)
            before, levels = log_levels(b, keys)
            return log_step((a + levels).log_softmax(-1), b, before, levels)


def _over_all(a: Tensor, b: Tensor) -> Means:
    largest = b.detach().amax(2, keepdim=True).clamp_min(LOWEST)
    a = a + largest
    return Means(a.sub_(a.detach().amax(-1, keepdim=True)).exp_(), (b - largest).exp_())
