"""Parallel decoders whose layers attend by position, too, and whose positions do not attend to themselves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from hasten.attention import AttentionSpec, Mask
from hasten.attention.base import Operator
from hasten.attention.full import FullAttention
from hasten.attention.masks import padding
from hasten.attention.multihead import Attended, MultiHeadAttention, cut
from hasten.nn.dropout import Dropout
from hasten.nn.following import ReuseWeights
from hasten.nn.layers import FeedForward, add
from hasten.nn.mechanisms import build, longest
from hasten.nn.positions import Sinusoids
from hasten.nn.sharing import Carry, Shared, SourceMap, attention_layers
from hasten.nn.stack import Observer, over_encoder, unobserved


def others(mask: Bool[Tensor, "B T"]) -> Mask:
    """Every real position but the own one; a sequence of one position reads nothing. `mask` is True on real ones."""
    alien = ~torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    return replace(padding(mask), allowed=alien[None, None])


class PositionalAttention(nn.Module):
    """out = W_o concat_h(softmax((W_q p)(W_k p)^T / sqrt(d_head)) W_v x): positions p decide, states x are read.

    So a layer can move what stands at a place without knowing what it is, which helps with local word order. The
    parameters have the names and shapes of `torch.nn.MultiheadAttention`. Source: Gu et al., 2018, section 3.1.
    """

    def __init__(self, d_model: int, n_heads: int, positions: Sinusoids):
        super().__init__()
        cut(d_model, n_heads)
        self.d_model, self.n_heads, self.positions = d_model, n_heads, positions
        self.attention = FullAttention()
        self._form: Callable[[Operator], Operator] = _as_it_is
        self.in_proj_weight = Parameter(torch.empty(3 * d_model, d_model))
        self.in_proj_bias = Parameter(torch.zeros(3 * d_model))
        self.out_proj = nn.Linear(d_model, d_model)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def lead(self) -> None:
        """Let other layers apply this one's weights: they are computed once, then."""
        self._form = Operator.materialised

    def attend(
        self, x: Float[Tensor, "B T D"], mask: Mask, memory: None = None, carried: Attended | None = None
    ) -> Attended:
        """One reading of x, and what other layers can share; the other arguments are those of layers that follow."""
        places = self.positions(x.new_zeros(1, *x.shape[1:]))
        rows = 2 * self.d_model
        q, k = (
            self._heads(part).expand(len(x), -1, -1, -1)
            for part in F.linear(places, self.in_proj_weight[:rows], self.in_proj_bias[:rows]).chunk(2, -1)
        )
        v = self._heads(F.linear(x, self.in_proj_weight[rows:], self.in_proj_bias[rows:]))
        operator = self._form(self.attention.operator(q, k, mask))
        context = operator.apply(v).transpose(1, 2).flatten(2)
        return Attended(self.out_proj(context), context, operator)

    def _heads(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T d"]:
        return x.unflatten(2, (self.n_heads, -1)).transpose(1, 2)


def _as_it_is(operator: Operator) -> Operator:
    return operator


class PositionalLayer(nn.Module):
    """Self-attention, attention by position, attention over the encoder's states, a feed-forward network.

    Each is normalised before and added to its input. Any attention may reuse that of another layer, as in
    `DecoderLayer`, whose names the common parts have.
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float, attentions: tuple[nn.Module, nn.Module, nn.Module]):
        super().__init__()
        self.self_attention: Any
        self.positional_attention: Any
        self.cross_attention: Any
        self.self_attention, self.positional_attention, self.cross_attention = attentions
        self.self_norm = nn.LayerNorm(d_model)
        self.positional_norm = nn.LayerNorm(d_model)
        reads = isinstance(self.cross_attention, MultiHeadAttention)
        self.cross_norm = nn.LayerNorm(d_model) if reads else nn.Identity()
        self.feed_forward = FeedForward(d_model, d_ff, dropout)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"],
        masks: tuple[Mask, Mask, Mask],
        carried: tuple[Attended | None, Attended | None, Attended | None],
    ) -> tuple[Float[Tensor, "B T D"], tuple[Attended, Attended, Attended]]:
        """One layer; masks and what other layers left are those of the three kinds of attention, in their order."""
        own = self.self_attention.attend(self.self_norm(x), masks[0], None, carried[0])
        x = add(x, self.dropout(own.output))
        placed = self.positional_attention.attend(self.positional_norm(x), masks[1], None, carried[1])
        x = add(x, self.dropout(placed.output))
        found = self.cross_attention.attend(self.cross_norm(x), masks[2], memory, carried[2])
        x = add(x, self.dropout(found.output))
        return add(x, self.dropout(self.feed_forward(self.feed_forward_norm(x)))), (own, placed, found)


class PositionalDecoder(nn.Module):
    """Bidirectional layers with attention by position, and a final normalisation: (B, T, D) to (B, T, D).

    No position attends to itself in self-attention, so that it says what its neighbours leave for it to say; other
    kinds of attention let it through. A single position reads nothing there: its context is exactly 0.

    sharing, positional_sharing, cross_sharing: for each layer, from 1, the layer whose attention it uses; empty: its
    own. Weights are shared, of attention over the encoder what `shared_of_cross` says.
    Source: Gu et al., 2018, section 3.1.
    """

    kinds = ("self", "positional", "cross")

    def __init__(
        self,
        n_layers: int,
        d_model: int,
        n_heads: int,
        d_ff: int,
        dropout: float,
        attention: Sequence[AttentionSpec],
        cross_attention: Sequence[AttentionSpec],
        sharing: Sequence[int] = (),
        positional_sharing: Sequence[int] = (),
        cross_sharing: Sequence[int] = (),
        shared_of_cross: Shared = "output",
    ):
        super().__init__()
        shape = (d_model, n_heads)
        self.plan = SourceMap.of(sharing, n_layers, "decoder_sharing")
        self.positional_plan = SourceMap.of(positional_sharing, n_layers, "positional_sharing")
        self.cross_plan = SourceMap.of(cross_sharing, n_layers, "cross_sharing")
        self.plans = (self.plan, self.positional_plan, self.cross_plan)
        own = build(
            attention,
            shape,
            n_layers,
            "decoder attention",
            lambda traits: traits.allowed and traits.key_padding,
            "no position may attend to itself (Mask.allowed) and sentences are padded",
            plan=self.plan,
        )
        cross = over_encoder(cross_attention, shape, n_layers, self.cross_plan)
        self.longest, self.longest_memory = longest(own), longest(cross)
        attentions = zip(
            attention_layers(own, self.plan, *shape, "weights", "decoder attention"),
            _by_position(self.positional_plan, n_layers, d_model, n_heads),
            attention_layers(cross, self.cross_plan, *shape, shared_of_cross, "cross attention"),
            strict=True,
        )
        self.layers: nn.ModuleList = nn.ModuleList(PositionalLayer(d_model, d_ff, dropout, a) for a in attentions)
        self.norm = nn.LayerNorm(d_model)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"],
        memory: Float[Tensor, "B S D"],
        memory_mask: Bool[Tensor, "B S"],
        observe: Observer = unobserved,
    ) -> Float[Tensor, "B T D"]:
        """Both masks are True on real positions. `observe` is told of "self", "positional" and "cross"."""
        masks = (others(mask), padding(mask), padding(memory_mask))
        carries = [Carry(plan) for plan in self.plans]
        for i, layer in enumerate(self.layers):
            x, left = layer(x, memory, masks, tuple(carry.take(i) for carry in carries))
            for kind, carry, attended in zip(self.kinds, carries, left, strict=True):
                carry.put(i, attended)
                observe(kind, i, attended)
        return self.norm(x)


def _by_position(plan: SourceMap, n_layers: int, d_model: int, n_heads: int) -> Iterator[nn.Module]:
    """The attention by position of every layer; their table of positions is one."""
    positions = Sinusoids(d_model)
    for layer in range(n_layers):
        if plan.follows(layer):
            yield ReuseWeights(d_model, n_heads)
            continue
        own = PositionalAttention(d_model, n_heads, positions)
        if plan.leads(layer):
            own.lead()
        yield own
