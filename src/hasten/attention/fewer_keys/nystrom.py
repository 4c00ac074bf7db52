"""Nystrom attention: softmax attention through a few landmarks, by a pseudoinverse that is iterated."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hasten.attention.base import Attention, Operator, Traits
from hasten.attention.fewer_keys.blocks import Packing, alone, identity, of_heads, weigh, wide
from hasten.attention.fewer_keys.time_convolution import TimeConvolution
from hasten.attention.full import FullOperator
from hasten.attention.masks import Mask, silence
from hasten.attention.mechanism import MechanismSpec
from hasten.errors import UserError
from hasten.fields import PositiveInt


@dataclass(frozen=True, kw_only=True)
class NystromSpec(MechanismSpec):
    """Nystrom attention: all queries read all keys through a few landmarks, in time linear in the length."""

    kind: Literal["nystrom"] = "nystrom"
    """The mechanism's name."""
    landmarks: PositiveInt = 64
    """Means of segments that stand for all queries and keys; shorter sequences have one for each token."""
    iterations: PositiveInt = 6
    """Rounds of the iteration for the pseudoinverse."""
    residual: PositiveInt | None = None
    """Add a convolution of the values over so many tokens (an odd number; the paper's code has 33); by default none."""
    n_heads: PositiveInt | None = None
    """Attention heads, each with a kernel of its own; a model sets it."""

    def build(self) -> "NystromAttention":
        """The mechanism this spec describes; `UserError` for a kernel without a middle."""
        if self.residual is None:
            return NystromAttention(self.landmarks, self.iterations, None)
        if self.residual % 2 == 0:
            raise UserError(f"nystrom attention: residual {self.residual} is even; give an odd number of tokens")
        return NystromAttention(self.landmarks, self.iterations, TimeConvolution(self.residual, self.size("n_heads")))


def pseudoinverse(a: Float[Tensor, "*batch m m"], iterations: int) -> Float[Tensor, "*batch m m"]:
    """Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4, from Z = A^T / (largest row sum * largest column sum).

    For A of weights, with rows that sum to 1 (or are zero): only columns need be summed. Each matrix has its own scale.
    Source: Razavi et al., 2014, as used by Xiong et al., 2021, section 3.2.
    """
    largest = a.sum(-2).amax(-1)[..., None, None]
    z = a.transpose(-1, -2) / largest.masked_fill(largest == 0, 1.0)
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z


class NystromAttention(Attention):
    """F Z B v (+ convolution of v): F = softmax(q k_^T), B = softmax(q_ k^T), Z near the inverse of softmax(q_ k_^T).

    q, k (B, H, S, D); scores are divided by sqrt(D). Landmarks q_ and k_ are means of m segments of the real tokens, as
    equal in length as may be: padding, wherever it stands, is as good as dropped. Fewer than m tokens are their own
    landmarks. Neither causal (landmarks mix the whole sequence, and a triangular mask over them would not change that)
    nor between sequences. Rows do not sum to 1 and weights may be negative, as long as Z is no exact inverse: after six
    rounds errors of rows reach from 0.001 to 0.7 as scores grow. Cost O(S m). Not offered: dropout of weights.
    Source: Xiong et al., 2021, sections 3.1 to 3.3.
    """

    def __init__(self, landmarks: int, iterations: int, residual: TimeConvolution | None):
        super().__init__()
        self.landmarks, self.iterations, self.residual = landmarks, iterations, residual
        self.traits = Traits(
            causal=None,
            not_strict="its landmarks mix the whole sequence, what comes later too",
            cross=False,
            step=False,
            normalised=False,
            key_padding=True,
            dropout=False,
            n_heads=None if residual is None else residual.n_heads,
            memory=1.0,
        )

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> "NystromOperator":
        """The landmarks and the pseudoinverse; the long maps are not formed unless asked for."""
        self.check(q, k, mask)
        packing, real_q, k = Packing(mask.keys, k.shape[2], k.device), *(silence(wide(x), mask.keys) for x in (q, k))
        with torch.autocast(q.device.type, enabled=False):
            q_mean, k_mean = (self._means(x, packing, mask) for x in (real_q, k))
            there = torch.arange(self.landmarks, device=k.device) < packing.count[:, None]
            pairs = there[:, None, :, None] & there[:, None, None, :]
            scores = q_mean @ k_mean.transpose(-1, -2) / math.sqrt(q.shape[3])
            inverse = pseudoinverse(weigh(scores, pairs), self.iterations)
        if not torch.compiler.is_compiling() and mask.keys is None and k.shape[2] >= self.landmarks:
            far_mask = Mask()  # every landmark is there, and the kernel is quicker without a mask
        else:
            far_mask = Mask(allowed=of_heads(there, q.shape)[:, None, None])
        near_mask = Mask() if mask.keys is None else Mask(keys=of_heads(mask.keys, q.shape))
        far = FullOperator(alone(wide(q)), alone(k_mean), far_mask, 0.0)
        near = FullOperator(alone(q_mean), alone(k), near_mask, 0.0)
        return NystromOperator(far, inverse, near, self.residual, packing, q)

    def _means(self, x: Float[Tensor, "B H S D"], packing: Packing, mask: Mask) -> Float[Tensor, "B H m D"]:
        """Means of segments; rank r of n is in segment r min(m, n) // n, and segments without a token are zero."""
        length, m = x.shape[2], self.landmarks
        if not torch.compiler.is_compiling() and mask.keys is None and length % m == 0:
            return x.unflatten(2, (m, length // m)).mean(3)
        count = packing.count[:, None]
        if mask.keys is None:
            ranks, real = packing.order, packing.order >= 0
        else:
            ranks, real = mask.keys.cumsum(1) - 1, mask.keys
        segments = ranks * count.clamp(max=m) // count.clamp(min=1)
        members = (segments[:, None] == torch.arange(m, device=x.device)[:, None]) & real[:, None]
        members = members.to(x.dtype)
        return (members / members.sum(2, keepdim=True).clamp(min=1))[:, None] @ x

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition, one sequence and head at a time."""
        batch, heads, length, width = q.shape
        weights = q.new_zeros(batch, heads, length, length)
        for b in range(batch):
            keep = torch.ones(length, dtype=torch.bool) if mask.keys is None else mask.keys[b]
            real, padding = keep.nonzero()[:, 0].tolist(), (~keep).nonzero()[:, 0].tolist()
            m = min(self.landmarks, len(real))
            segments = [[j for rank, j in enumerate(real) if rank * m // len(real) == s] for s in range(m)]
            for h in range(heads):
                if m:
                    q_mean, k_mean = (torch.stack([x[b, h, s].mean(0) for s in segments]) for x in (q, k))
                    f, a, near = (
                        (x @ y.T / math.sqrt(width)).softmax(-1)
                        for x, y in ((q[b, h], k_mean), (q_mean, k_mean), (q_mean, k[b, h, real]))
                    )
                    one = torch.eye(m).to(q)
                    z = a.T / (a.sum(0).max() * a.sum(1).max())
                    for _ in range(self.iterations):
                        z = z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z))) / 4
                    weights[b, h, :, real] = f @ z @ near
                if self.residual is not None:
                    kernel = self.residual.weight[h % len(self.residual.weight)].to(q)
                    for i, place in enumerate(real + padding):
                        for j in range(max(0, i - len(kernel) // 2), min(len(real), i + len(kernel) // 2 + 1)):
                            weights[b, h, place, real[j]] += kernel[j - i + len(kernel) // 2]
        return weights


class NystromOperator(Operator):
    """far (inverse (near v)), plus a convolution of v where there is one; far and near take heads as sequences."""

    def __init__(
        self,
        far: Operator,
        inverse: Float[Tensor, "B H m m"],
        near: Operator,
        residual: TimeConvolution | None,
        packing: Packing,
        like: Float[Tensor, "B H S D"],
    ):
        self.far, self.inverse, self.near, self.residual = far, inverse, near, residual
        self.packing, self.like = packing, like

    def apply(self, v: Float[Tensor, "B H S Dv"]) -> Float[Tensor, "B H S Dv"]:
        """From right to left, in float32 or wider."""
        with torch.autocast(v.device.type, enabled=False):
            near = self.near.apply(alone(wide(v))).unflatten(0, v.shape[:2])[:, :, 0]
            out = self.far.apply(alone(self.inverse @ near)).reshape(v.shape)
            if self.residual is not None:
                out = out + self.packing.unpack(self.residual(self.packing.pack(wide(v))))
            return out.to(v.dtype)

    def dense(self) -> Float[Tensor, "B H S S"]:
        """The map of single tokens."""
        return self.apply(identity(self.like, self.like.shape[2]))

    def materialised(self) -> "NystromOperator":
        """The two long maps, formed."""
        parts = self.far.materialised(), self.inverse, self.near.materialised()
        return NystromOperator(*parts, self.residual, self.packing, self.like)
