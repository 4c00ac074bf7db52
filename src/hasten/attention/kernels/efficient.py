"""Efficient attention: one softmax over the features of a query, one over the positions of the keys."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hasten.attention.base import Attention, State, StepOperator, Traits
from hasten.attention.kernels.kernel import (
    KernelOperator,
    LogState,
    by_heads,
    log_levels,
    log_step,
    noisy,
    unread,
    wide,
)
from hasten.attention.kernels.prefix_sums import LOWEST
from hasten.attention.kernels.products import divided, totals
from hasten.attention.kernels.traced_sums import Sums, causal_sums
from hasten.attention.masks import Mask, silence
from hasten.attention.mechanism import MechanismSpec


@dataclass(frozen=True, kw_only=True)
class EfficientSpec(MechanismSpec):
    """Efficient attention: queries choose among features, each of which is an average over positions."""

    kind: Literal["efficient"] = "efficient"
    """The mechanism's name."""

    def build(self) -> "EfficientAttention":
        """The mechanism this spec describes."""
        return EfficientAttention()


@dataclass(frozen=True)
class AveragesOfAll:
    """v -> sum_r q_ir sum_j k_jr v_j / sum_j k_jr: every feature of the keys is a weight of its own over them."""

    q: Tensor
    k: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        """Values to sums of averages."""
        return self.q @ divided(totals(self.k, v), None)


class EfficientAttention(Attention):
    """out_i = sum_r softmax_r(q_i)_r [sum_j softmax_j(k_jr) v_j]: every feature r holds an average of the values.

    The softmax of a query runs over its D features, that of a key's feature over the positions the mask allows; causal,
    over the positions up to i, as exp(k_jr - log sum_(l <= i) exp(k_lr)). Both sum to 1, so without a denominator the
    weights of a row do too: sum_j w_ij = sum_r softmax_r(q_i)_r sum_j softmax_j(k_jr) = 1. A query that may read
    nothing gets exactly 0. q (B, H, T, D), k (B, H, S, D), without scaling, as in the source.
    Cost: (T + S) D Dv multiplications and (T + S) D exponentials; causal, chunks of 64 keys add about 32 (D + Dv) T
    multiplications and several times the exponentials. Decoding keeps D (Dv + 1) numbers a head: averages, and
    logarithms of their weight, so that no length and no magnitude overflows.
    Does not: approximate softmax(q k^T); drop weights, which are never formed; take patterns.
    Source: Shen et al., 2021, "Efficient Attention: Attention with Linear Complexities", section 3. The causal form and
    its decoding are derived here; the source has none.
    """

    traits = Traits(
        causal="strict",
        cross=True,
        step=True,
        normalised=True,
        key_padding=True,
        dropout=False,
        suffix=True,
        memory=1.0,
    )

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> KernelOperator:
        """The linear map; no T x S matrix is formed."""
        self.check(q, k, mask)
        return KernelOperator(by_heads(self._averages, mask, q.shape[3], q, k), k, noisy(mask))

    def _averages(self, mask: Mask, q: Tensor, k: Tensor) -> Sums:
        q, k = q.to(wide(q)), unread(silence(k, noisy(mask)).to(wide(k)), mask.keys, -torch.inf)
        if mask.causal:
            return causal_sums("averaging", q.log_softmax(-1), k)
        return AveragesOfAll(q.softmax(-1), _exponentials(k))

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition, one query at a time: its softmax times that of every feature over the keys it may read."""
        allowed = mask.dense(q.shape[2], k.shape[2], q.device)
        rows = []
        for i in range(q.shape[2]):
            scores = silence(k, mask.keys).double()
            if allowed is not None:
                readable = allowed[:, :, min(i, allowed.shape[2] - 1), :, None]
                scores = scores.masked_fill(~readable, -torch.inf).masked_fill(~readable.any(2, keepdim=True), 0.0)
                over_keys = scores.softmax(2).masked_fill(~readable, 0.0)
            else:
                over_keys = scores.softmax(2)
            rows.append(torch.einsum("bhd,bhsd->bhs", q[:, :, i].double().softmax(-1), over_keys))
        return torch.stack(rows, dim=2).to(q.dtype)

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple[StepOperator, State]:
        """Keys so far are the logarithm of their sum of exponentials, a feature."""
        assert keys is None or isinstance(keys, LogState)
        logs = k.to(wide(k))
        before, levels = log_levels(logs, keys)
        return log_step(q.to(wide(q)).log_softmax(-1), logs, before, levels)


def _exponentials(x: Tensor) -> Tensor:
    """exp(x), of every feature divided by its largest one over all positions."""
    return (x - x.detach().amax(2, keepdim=True).clamp_min(LOWEST)).exp_()
