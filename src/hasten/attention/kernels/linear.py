"""Linear attention: the softmax kernel replaced by a product of positive features."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hasten.attention.base import Attention, State, StepOperator, Traits
from hasten.attention.kernels.kernel import (
    KernelOperator,
    KernelState,
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


@dataclass(frozen=True, kw_only=True)
class LinearSpec(MechanismSpec):
    """Linear attention: weights are products of positive features of query and key."""

    kind: Literal["linear"] = "linear"
    """The mechanism's name."""
    feature: Literal["elu", "relu"] = "elu"
    """Feature map: elu(x) + 1 or relu(x) + 0.001."""

    def build(self) -> "LinearAttention":
        """The mechanism this spec describes."""
        return LinearAttention(self.feature)


class LinearAttention(Attention):
    """out_i = phi(q_i) [sum_j phi(k_j) v_j^T] / (phi(q_i) . sum_j phi(k_j)), over the keys the mask allows.

    phi(x) = elu(x) + 1, or relu(x) + 0.001 (the map of Performer-ReLU, without its random projection), entry by entry:
    positive, so the weights of a row are positive and sum to 1. q (B, H, T, D), k (B, H, S, D); there is no scaling by
    1 / sqrt(D), which the map would not undo. Nothing is added to the denominator. A query that may read nothing gets
    exactly 0; so does one whose weights all underflow (with elu, where every entry of all its keys is below about -87).
    Cost: (T + S) D Dv multiplications, instead of (D + Dv) T S; causal, chunks of 64 keys add 64 (D + Dv) T.
    Decoding keeps D (Dv + 1) numbers a head, whatever the length.
    Does not: approximate softmax (it is another kernel); drop weights, which are never formed; take patterns.
    Source: Katharopoulos et al., 2020, "Transformers are RNNs", section 3. ReLU: Choromanski et al., 2021.
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

    def __init__(self, feature: str = "elu"):
        super().__init__()
        self.feature = _FEATURES[feature]

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> KernelOperator:
        """The linear map; no T x S matrix is formed."""
        self.check(q, k, mask)
        return KernelOperator(by_heads(self._means, mask, q.shape[3], q, k), k, noisy(mask))

    def _means(self, mask: Mask, q: Tensor, k: Tensor) -> Sums:
        read = self.feature(_raised(q.to(wide(q))))
        write = unread(self.feature(silence(k, noisy(mask)).to(wide(k))), mask.keys)
        return Ratio(causal_sums("plain", read, write)) if mask.causal else Means(read, write)

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition: the matrix of products, masked, divided by its row sums."""
        k = silence(k, mask.keys)
        if self.feature is elu_plus_one:
            q_features, k_features = (torch.where(x > 0, x + 1, x.clamp_max(0).exp()) for x in (q.double(), k.double()))
        else:
            q_features, k_features = (x.double().clamp_min(0) + 0.001 for x in (q, k))
        weights = torch.einsum("bhtm,bhsm->bhts", q_features, k_features)
        allowed = mask.dense(q.shape[2], k.shape[2], q.device)
        weights = weights if allowed is None else weights.masked_fill(~allowed, 0.0)
        total = weights.sum(-1, keepdim=True)
        return (weights / total.masked_fill(total == 0, 1.0)).to(q.dtype)

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple[StepOperator, State]:
        """Keys so far are their sum of features."""
        assert keys is None or isinstance(keys, KernelState)
        read, write = self.feature(_raised(q.to(wide(q)))), self.feature(k.to(wide(k)))
        past = write.new_zeros(*write.shape[:2], write.shape[3], 1) if keys is None else keys.total
        after = KernelState(past + write.sum(2)[..., None])
        return KernelStep(causal_sums("plain", read, write), read, write, write.new_ones(()), Normaliser(past)), after


def _raised(q: Tensor) -> Tensor:
    """Queries without a positive entry, raised until the largest is 0.

    With either map that is a common factor of their features, which the ratio cancels; without it they may underflow.
    """
    return q - q.detach().amax(-1, keepdim=True).clamp_max(0)


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 without rounding small values to 0: x + 1 where x > 0, else exp(x)."""
    if torch.compiler.is_compiling():
        return x.clamp_max(0).exp() + x.relu()
    features = _EluPlusOne.apply(x)
    assert isinstance(features, Tensor)
    return features


class _EluPlusOne(torch.autograd.Function):
    """Several times faster than the gradient of its parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        features = x.clamp_max(0).exp_().add_(x.relu())
        ctx.save_for_backward(features)
        return features

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (features,) = ctx.saved_tensors
        return features.clamp_max(1).mul_(grad)


def relu_plus(x: Tensor) -> Tensor:
    """relu(x) + 0.001: no row of weights is empty."""
    return x.relu() + 1e-3


_FEATURES: dict[str, Callable[[Tensor], Tensor]] = {"elu": elu_plus_one, "relu": relu_plus}
