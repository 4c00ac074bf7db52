"""Pre-norm Transformer layers. Source: Vaswani et al., 2017; pre-norm as in Xiong et al., 2020."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hasten.attention.base import Rewinding, State
from hasten.attention.masks import Mask
from hasten.attention.multihead import Attended, MultiHeadAttention
from hasten.nn.dropout import Dropout


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y in x's type. Under autocast y is in half precision, and a sum of two types is not vectorised on a CPU."""
    return x + y.to(x.dtype)


class FeedForward(nn.Module):
    """W_2 relu(W_1 x), or with another activation in relu's place; x (..., d_model)."""

    def __init__(
        self, d_model: int, d_ff: int, dropout: float, *, activation: Callable[[Tensor], Tensor] = torch.relu
    ):  # fmt: skip
        super().__init__()
        self.activation = activation
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)
        self.dropout = Dropout(dropout)
        for linear in (self.inner, self.outer):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Position-wise."""
        return self.outer(self.dropout(self.activation(self.inner(x))))

    def step(self, x: Tensor) -> Tensor:
        """`forward` without dropout, for a few rows: there a module call costs as much as its arithmetic."""
        inner = self.activation(F.linear(x, self.inner.weight, self.inner.bias))
        return F.linear(inner, self.outer.weight, self.outer.bias)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each normalised before and added to its input.

    Attention is a `MultiHeadAttention`, or what reuses that of another layer: calls hand over what this other layer
    left (`carried`) and give back what this one leaves.
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float, self_attention: nn.Module):
        super().__init__()
        self.self_attention: Any = self_attention
        self.self_norm = nn.LayerNorm(d_model)
        self.feed_forward = FeedForward(d_model, d_ff, dropout)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B T D"], mask: Mask, carried: Attended | None = None
    ) -> tuple[Float[Tensor, "B T D"], Attended]:
        """One layer over the whole sequence."""
        attended = self.self_attention.attend(self.self_norm(x), mask, None, carried)
        x = add(x, self.dropout(attended.output))
        return add(x, self.dropout(self.feed_forward(self.feed_forward_norm(x)))), attended


@dataclass(frozen=True)
class DecoderLayerState:
    """What a decoder layer carries from step to step; past is None before the first."""

    past: State | None
    memory: State

    def select(self, rows: Tensor) -> "DecoderLayerState":
        """Batch rows by index."""
        return DecoderLayerState(self.past and self.past.select(rows), self.memory.select(rows))

    def rewind(self, dropped: Int[Tensor, "B"]) -> "DecoderLayerState":
        """Without the last positions of each row; the memory stays."""
        assert isinstance(self.past, Rewinding)
        return DecoderLayerState(self.past.rewind(dropped), self.memory)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the encoder's states, and a feed-forward network.

    Either attention may reuse that of another layer, as in `EncoderLayer`. Where attention over the encoder does, it
    reads nothing of this layer's states, so there is no `cross_norm`.
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float, self_attention: nn.Module, cross_attention: nn.Module):
        super().__init__()
        self.self_attention: Any = self_attention
        self.self_norm = nn.LayerNorm(d_model)
        self.cross_attention: Any = cross_attention
        reads = isinstance(cross_attention, MultiHeadAttention)
        self.cross_norm = nn.LayerNorm(d_model) if reads else nn.Identity()
        self._before_cross: Callable[[Any, Tensor], Tensor] = _normalise if reads else _unread
        self.feed_forward = FeedForward(d_model, d_ff, dropout)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"],
        mask: Mask,
        memory_mask: Mask,
        carried: Attended | None,
        read: Attended | None,
    ) -> tuple[Float[Tensor, "B T D"], Attended, Attended]:
        """One layer over the whole sequence (teacher forcing)."""
        attended = self.self_attention.attend(self.self_norm(x), mask, None, carried)
        x = add(x, self.dropout(attended.output))
        found = self.cross_attention.attend(self.cross_norm(x), memory_mask, memory, read)
        x = add(x, self.dropout(found.output))
        return add(x, self.dropout(self.feed_forward(self.feed_forward_norm(x)))), attended, found

    def begin(self, memory: Float[Tensor, "B S D"], mask: Tensor) -> DecoderLayerState:
        """The state before the first step; `mask` (B, S) is True on real source positions."""
        return DecoderLayerState(None, self.cross_attention.remember(memory, mask))

    def step(
        self, x: Float[Tensor, "B n D"], state: DecoderLayerState, carried: Attended | None, read: Attended | None
    ) -> tuple[Float[Tensor, "B n D"], DecoderLayerState, Attended, Attended]:
        """The layer at n new positions; equal to `forward` at those positions."""
        attended, past = self.self_attention.attend_step(_normalise(self.self_norm, x), state.past, carried)
        x = x + attended.output
        found = self.cross_attention.attend_memory(self._before_cross(self.cross_norm, x), state.memory, read)
        x = x + found.output
        x = x + self.feed_forward.step(_normalise(self.feed_forward_norm, x))
        return x, DecoderLayerState(past, state.memory), attended, found


def _normalise(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """`norm(x)` without the cost of a module call."""
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _unread(norm: nn.Module, x: Tensor) -> Tensor:
    """x as it is: nobody reads it."""
    return x
