"""Pre-norm Transformer layers. Source: Vaswani et al., 2017; pre-norm as in Xiong et al., 2020."""

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hasten.attention.base import Attention
from hasten.attention.masks import Mask
from hasten.attention.multihead import CrossState, SelfState
from hasten.attention.second_projections import multi_head
from hasten.nn.dropout import Dropout


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y in x's type. Under autocast y is in half precision, and a sum of two types is not vectorised on a CPU."""
    return x + y.to(x.dtype)


class FeedForward(nn.Module):
    """W_2 relu(W_1 x); x (..., d_model)."""

    def __init__(self, d_model: int, d_ff: int, dropout: float):
        super().__init__()
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)
        self.dropout = Dropout(dropout)
        for linear in (self.inner, self.outer):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Position-wise."""
        return self.outer(self.dropout(self.inner(x).relu()))

    def step(self, x: Tensor) -> Tensor:
        """`forward` without dropout, for a few rows: there a module call costs as much as its arithmetic."""
        inner = F.linear(x, self.inner.weight, self.inner.bias).relu()
        return F.linear(inner, self.outer.weight, self.outer.bias)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each normalised before and added to its input."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int, dropout: float, attention: Attention):
        super().__init__()
        self.self_attention = multi_head(d_model, n_heads, attention)
        self.self_norm = nn.LayerNorm(d_model)
        self.feed_forward = FeedForward(d_model, d_ff, dropout)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(self, x: Float[Tensor, "B T D"], mask: Mask) -> Float[Tensor, "B T D"]:
        """One layer over the whole sequence."""
        x = add(x, self.dropout(self.self_attention(self.self_norm(x), mask)))
        return add(x, self.dropout(self.feed_forward(self.feed_forward_norm(x))))


@dataclass(frozen=True)
class DecoderLayerState:
    """What a decoder layer carries from step to step."""

    past: SelfState | None
    memory: CrossState

    def select(self, rows: Tensor) -> "DecoderLayerState":
        """Batch rows by index."""
        return DecoderLayerState(self.past and self.past.select(rows), self.memory.select(rows))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the encoder's states, and a feed-forward network."""

    def __init__(
        self, d_model: int, n_heads: int, d_ff: int, dropout: float, attention: Attention, cross_attention: Attention
    ):
        super().__init__()
        self.self_attention = multi_head(d_model, n_heads, attention)
        self.self_norm = nn.LayerNorm(d_model)
        self.cross_attention = multi_head(d_model, n_heads, cross_attention)
        self.cross_norm = nn.LayerNorm(d_model)
        self.feed_forward = FeedForward(d_model, d_ff, dropout)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B T D"], memory: Float[Tensor, "B S D"], mask: Mask, memory_mask: Mask
    ) -> Float[Tensor, "B T D"]:
        """One layer over the whole sequence (teacher forcing)."""
        x = add(x, self.dropout(self.self_attention(self.self_norm(x), mask)))
        x = add(x, self.dropout(self.cross_attention(self.cross_norm(x), memory_mask, memory)))
        return add(x, self.dropout(self.feed_forward(self.feed_forward_norm(x))))

    def begin(self, memory: Float[Tensor, "B S D"], mask: Tensor) -> DecoderLayerState:
        """The state before the first step; `mask` (B, S) is True on real source positions."""
        return DecoderLayerState(None, self.cross_attention.remember(memory, mask))

    def step(
        self, x: Float[Tensor, "B n D"], state: DecoderLayerState
    ) -> tuple[Float[Tensor, "B n D"], DecoderLayerState]:
        """The layer at n new positions; equal to `forward` at those positions."""
        y, past = self.self_attention.step(_normalise(self.self_norm, x), state.past)
        x = x + y
        x = x + self.cross_attention.recall(_normalise(self.cross_norm, x), state.memory)
        x = x + self.feed_forward.step(_normalise(self.feed_forward_norm, x))
        return x, DecoderLayerState(past, state.memory)


def _normalise(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """`norm(x)` without the cost of a module call."""
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
