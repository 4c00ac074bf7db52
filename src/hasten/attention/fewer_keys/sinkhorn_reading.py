"""What the blocks of Sinkhorn attention read: sorted blocks and their own ones, under one softmax."""

import itertools
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hasten.attention.fewer_keys.blocks import blocks, unblocked
from hasten.attention.fewer_keys.sinkhorn_sorting import ABSENT

LEAST = 1e-30
"""Sorted places of less mass than this are not read: divisions by it must stay finite in float32."""


class Mixing:
    """Sorted blocks, place by place: sum_w sort[u, w] x[w, j] / mass[u, j], where mass counts the real tokens only.

    `bias`, the log of the mass, belongs to the scores of the places; a place without mass is not read.
    real (B or 1, n, size): where tokens are real; None: everywhere, and the mass is 1.
    """

    def __init__(self, sort: Float[Tensor, "B H u n"], real: Bool[Tensor, "#B n size"] | None = None):
        self.sort, self.mass = sort, None
        if real is not None:
            mass = sort @ real.to(sort.dtype)[:, None]
            here = mass > LEAST
            self.mass = mass.masked_fill(~here, 1.0)
            self.bias = self.mass.log().masked_fill(~here, ABSENT)[..., None, :]

    def mix(self, x: Float[Tensor, "B H n size D"]) -> Float[Tensor, "B H u size D"]:
        """The sorted blocks of `x`, which is zero where tokens are not real."""
        mixed = (self.sort @ x.flatten(3)).unflatten(3, x.shape[3:])
        return mixed if self.mass is None else mixed / self.mass[..., None]


def bias_of(allowed: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """What is added to scores so that only the allowed ones count."""
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, ABSENT)


def beside(*biases: Tensor) -> Tensor:
    """Biases of keys that follow each other, where they broadcast."""
    return torch.cat(torch.broadcast_tensors(*biases), dim=-1)


def weigh_blocks(
    q: Float[Tensor, "B H n T D"], keys: Float[Tensor, "B H n K D"], bias: Float[Tensor, "#B #H #n #T K"] | None
) -> Float[Tensor, "B H n T K"]:
    """Softmax over keys of the scores and their bias.

    Where all keys are absent the weights mean nothing: there all values are zero.
    """
    scores = _scaled(q.flatten(0, 2), keys.flatten(0, 2).transpose(1, 2), q.shape[4]).unflatten(0, q.shape[:3])
    return (scores if bias is None else scores.add_(bias.to(q.dtype))).softmax(-1)


def _scaled(x: Float[Tensor, "n a b"], y: Float[Tensor, "n b c"], width: int) -> Float[Tensor, "n a c"]:
    """x y / sqrt(width)."""
    return torch.baddbmm(x.new_zeros(1, 1, 1), x, y, beta=0, alpha=1 / math.sqrt(width))


class Reading(ABC):
    """How values given by rank are read."""

    @abstractmethod
    def read(self, v: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H S D"]:
        """Mix the blocks of the values as those of the keys, and weigh."""

    @abstractmethod
    def formed(self) -> "Reading":
        """The same with its weights formed."""


class First(Reading):
    """With weights (B, H, S, cut size) of the first sorted blocks."""

    def __init__(self, weights: Float[Tensor, "B H S K"], mixing: Mixing, size: int):
        self.weights, self.mixing, self.size = weights, mixing, size

    def read(self, v: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H S D"]:
        """The same sorted blocks for all."""
        return self.weights @ self.mixing.mix(blocks(v, self.size)).flatten(2, 3)

    def formed(self) -> "First":
        """Already so."""
        return self


class Both(Reading):
    """With weights (B, H, n, size, 2 size) of the mixed and the own block."""

    def __init__(self, weights: Float[Tensor, "B H n size K"], mixing: Mixing):
        self.weights, self.mixing = weights, mixing

    def read(self, v: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H S D"]:
        """Each block its own two."""
        own = blocks(v, self.weights.shape[3])
        return unblocked(self.weights @ torch.cat((self.mixing.mix(own), own), dim=3), v.shape[2])

    def formed(self) -> "Both":
        """Already so."""
        return self


class BothInTurn(Reading):
    """The same from queries, mixed and own keys and their bias, a few blocks at a time, which is quicker on a CPU."""

    def __init__(
        self,
        q: Float[Tensor, "B H n size D"],
        mixed: Float[Tensor, "B H n size D"],
        own: Float[Tensor, "B H n size D"],
        bias: Float[Tensor, "#B #H n #size K"] | None,
        mixing: Mixing,
    ):
        self.q, self.mixed, self.own, self.bias, self.mixing = q, mixed, own, bias, mixing

    def read(self, v: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H S D"]:
        """Each block its own two."""
        own = blocks(v, self.q.shape[3])
        parts = (self.q, self.mixed, self.own, self.mixing.mix(own), own, self.bias)
        out: Tensor = _InTurn.apply(torch.is_grad_enabled(), *parts)  # type: ignore[no-untyped-call]
        return unblocked(out, v.shape[2])

    def formed(self) -> Both:
        """With the weights of all blocks."""
        return Both(weigh_blocks(self.q, torch.cat((self.mixed, self.own), dim=3), self.bias), self.mixing)


AT_ONCE = 32
"""Blocks that are read together: their scores stay in the cache."""


class _InTurn(torch.autograd.Function):
    """softmax(q [mixed ; own]^T / sqrt(D) + bias) [mixed values ; own values], blocks (B, H, n, size, D) each.

    It keeps the weights for its gradients, but neither the scores nor the keys and values of both blocks together.
    """

    @staticmethod
    def forward(
        ctx: Any, keep: bool, q: Tensor, mixed: Tensor, own: Tensor, v_mixed: Tensor, v_own: Tensor, bias: Tensor | None
    ) -> Tensor:
        out = torch.empty_like(v_own, memory_format=torch.contiguous_format)
        weights = q.new_empty(*q.shape[:4], 2 * q.shape[3]) if keep else None
        spread = None if bias is None else bias.to(q.dtype).expand(*q.shape[:2], -1, -1, -1)
        for at in _turns(q):
            scores = _scaled(q[at], torch.cat((mixed[at], own[at]), dim=1).transpose(1, 2), q.shape[4])
            scores = scores if spread is None else scores.add_(spread[at])
            w = scores.softmax(-1) if weights is None else torch.softmax(scores, -1, out=weights[at])
            torch.bmm(w, torch.cat((v_mixed[at], v_own[at]), dim=1), out=out[at])
        ctx.save_for_backward(q, mixed, own, v_mixed, v_own, weights)
        return out

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = cotangents
        q, mixed, own, v_mixed, v_own, weights = ctx.saved_tensors
        size, scale = q.shape[3], 1 / math.sqrt(q.shape[4])
        of_q, of_mixed, of_own, of_v_mixed, of_v_own = grads = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, mixed, own, v_mixed, v_own)
        ]
        of_bias = q.new_empty(*q.shape[:3], 1, 2 * size) if ctx.needs_input_grad[6] else None
        with torch.autocast(q.device.type, enabled=False):  # whoever calls backward() within autocast
            for at in _turns(q):
                w, g = weights[at], grad[at]
                of_w = g @ torch.cat((v_mixed[at], v_own[at]), dim=1).transpose(1, 2)
                _product(w[:, :, :size].transpose(1, 2), g, 1.0, of_v_mixed[at])
                _product(w[:, :, size:].transpose(1, 2), g, 1.0, of_v_own[at])
                of_scores = of_w.sub_((of_w * w).sum(-1, keepdim=True)).mul_(w)
                _product(of_scores, torch.cat((mixed[at], own[at]), dim=1), scale, of_q[at])
                _product(of_scores[:, :, :size].transpose(1, 2), q[at], scale, of_mixed[at])
                _product(of_scores[:, :, size:].transpose(1, 2), q[at], scale, of_own[at])
                if of_bias is not None:
                    of_bias[at] = of_scores.sum(1, keepdim=True)
        return None, *grads, of_bias


def _turns(q: Float[Tensor, "B H n size D"]) -> list[tuple[int, int, slice]]:
    """All blocks, a few of one head at a time."""
    starts = [slice(i, i + AT_ONCE) for i in range(0, q.shape[2], AT_ONCE)]
    return list(itertools.product(range(q.shape[0]), range(q.shape[1]), starts))


def _product(x: Float[Tensor, "n a b"], y: Float[Tensor, "n b c"], scale: float, out: Float[Tensor, "n a c"]) -> None:
    """scale x y, written to `out`."""
    torch.baddbmm(out, x, y, beta=0, alpha=scale, out=out)
