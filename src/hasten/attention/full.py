"""Full softmax attention through `scaled_dot_product_attention`."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hasten.attention.base import Attention, Cache, Operator, State, StepOperator, Traits, Weights
from hasten.attention.masks import Mask, silence
from hasten.attention.mechanism import MechanismSpec
from hasten.fields import Share


@dataclass(frozen=True, kw_only=True)
class FullSpec(MechanismSpec):
    """Full softmax attention: every query reads every key."""

    kind: Literal["full"] = "full"
    """The mechanism's name."""
    dropout: Share = 0.0
    """Share of attention weights dropped in training."""

    def build(self) -> "FullAttention":
        """The mechanism this spec describes."""
        return FullAttention(dropout=self.dropout)


class FullAttention(Attention):
    """softmax(q k^T / sqrt(D)) over the keys the mask allows; a query that may read nothing gets exactly 0.

    q (B, H, T, D), k (B, H, S, D). Scores and softmax are computed in float32 or wider by the kernel; only training in
    half precision on a CPU rounds scores to half precision before the softmax (an error of |score| / 256 in bfloat16).
    Source: Vaswani et al., 2017, section 3.2.1.
    """

    traits = Traits(
        causal="strict",
        cross=True,
        step=True,
        normalised=True,
        key_padding=True,
        empty=True,
        dropout=True,
        suffix=True,
        allowed=True,
        rewind=True,
    )

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> "FullOperator":
        """The softmax map; weights are never formed unless asked for."""
        self.check(q, k, mask)
        return FullOperator(
            q, silence(k, None if mask.silent else mask.keys), mask, self.dropout if self.training else 0.0
        )

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition, one query at a time."""
        (batch, heads, n_queries, width), n_keys = q.shape, k.shape[2]
        allowed = torch.ones(batch, heads, n_queries, n_keys, dtype=torch.bool, device=q.device)
        dense = mask.dense(n_queries, n_keys, q.device)
        allowed = allowed if dense is None else allowed & dense
        weights = q.new_zeros(batch, heads, n_queries, n_keys)
        for b in range(batch):
            for h in range(heads):
                for i in range(n_queries):
                    readable = allowed[b, h, i].nonzero()[:, 0]
                    if len(readable):
                        scores = k[b, h, readable] @ q[b, h, i] / math.sqrt(width)
                        weights[b, h, i, readable] = scores.softmax(-1)
        return weights

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple[StepOperator, State]:
        """All keys so far are kept; n new queries read them and, causally, each other."""
        assert keys is None or isinstance(keys, Cache)
        keys = Cache(k) if keys is None else keys.append(k)
        return FullStep(q, keys), keys


class FullOperator(Operator):
    """Softmax attention that runs as one fused kernel in `apply`."""

    def __init__(self, q: Tensor, k: Tensor, mask: Mask, dropout: float):
        self.q, self.k, self.mask, self.dropout = q, k, mask, dropout

    def apply(self, v: Float[Tensor, "B H S Dv"]) -> Float[Tensor, "B H T Dv"]:
        """Fused softmax(q k^T / sqrt(D)) v."""
        mask, v = self.mask, silence(v, None if self.mask.silent else self.mask.keys)
        if self._prefers_weights():
            return F.dropout(self.dense(), self.dropout) @ v
        # The kernel's own causal flag is aligned to the top left: the same only for equal lengths.
        if mask.keys is None and mask.allowed is None and (not mask.causal or self.q.shape[2] == self.k.shape[2]):
            return F.scaled_dot_product_attention(self.q, self.k, v, dropout_p=self.dropout, is_causal=mask.causal)
        dense = mask.dense(self.q.shape[2], self.k.shape[2], self.q.device)
        assert dense is not None
        # Rows that may read nothing read everything and are then zeroed: no kernel sees an empty row, gradients are 0.
        empty = ~dense.any(-1, keepdim=True)
        out = F.scaled_dot_product_attention(self.q, self.k, v, attn_mask=dense | empty, dropout_p=self.dropout)
        return out.masked_fill(empty, 0.0)

    def _prefers_weights(self) -> bool:
        """torch's fused CPU kernel has a slow backward in half precision: forming short rows is five times faster."""
        q, n_scores = self.q, self.q.shape[2] * self.k.shape[2]
        return q.device.type == "cpu" and q.dtype.itemsize < 4 and torch.is_grad_enabled() and n_scores <= 512 * 512

    def dense(self) -> Float[Tensor, "B H T S"]:
        """The softmax weights, formed, from float32 scores or wider; without dropout."""
        scores = self._scores()
        allowed = self.mask.dense(self.q.shape[2], self.k.shape[2], self.q.device)
        if allowed is None:
            return scores.softmax(-1).to(self.q.dtype)
        empty = ~allowed.any(-1, keepdim=True)
        weights = scores.masked_fill(~(allowed | empty), -torch.inf).softmax(-1)
        return weights.masked_fill(~allowed, 0.0).to(self.q.dtype)

    def materialised(self) -> Weights:
        """The softmax weights, to be applied many times; padded values stay unread."""
        return Weights(self.dense(), None if self.mask.silent else self.mask.keys)

    def _scores(self) -> Float[Tensor, "B H T S"]:
        q, k = self.q, self.k
        if q.dtype.itemsize >= 4:
            return (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
        with torch.autocast(q.device.type, enabled=False):
            return (q.float() / math.sqrt(q.shape[-1])) @ k.float().transpose(-1, -2)


class WeightsStep(StepOperator):
    """New rows of weights, formed, for all values so far."""

    def __init__(self, weights: Float[Tensor, "B H n t"]):
        self.weights = weights

    def apply(self, v: Float[Tensor, "B H n Dv"], values: State | None) -> tuple[Float[Tensor, "B H n Dv"], State]:
        """Append the new values and mix all of them."""
        assert values is None or isinstance(values, Cache)
        values = Cache(v) if values is None else values.append(v)
        return self.weights @ values.past, values


class FullStep(StepOperator):
    """The new queries against all keys so far."""

    def __init__(self, q: Tensor, keys: Cache):
        self.q, self.keys = q, keys

    def apply(self, v: Float[Tensor, "B H n Dv"], values: State | None) -> tuple[Float[Tensor, "B H n Dv"], State]:
        """Append the new values and read all of them."""
        assert values is None or isinstance(values, Cache)
        values = Cache(v) if values is None else values.append(v)
        return self._operator().apply(values.past), values

    def materialised(self) -> WeightsStep:
        """The softmax weights of the new queries."""
        return WeightsStep(self._operator().dense())

    def _operator(self) -> FullOperator:
        mask = Mask(causal=self.q.shape[2] > 1, keys=self.keys.real, silent=True)
        return FullOperator(self.q, self.keys.past, mask, 0.0)
