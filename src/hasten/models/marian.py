"""Marian's Transformer, as OPUS-MT models have it: normalised after every sub-layer, for weights made elsewhere."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hasten.attention.full import FullAttention
from hasten.attention.masks import Mask, padding
from hasten.attention.multihead import Attended, MultiHeadAttention
from hasten.fields import Depth, PositiveInt, Share, Spec
from hasten.models.left_to_right import DecoderState, LeftToRight
from hasten.nn.dropout import Dropout
from hasten.nn.layers import DecoderLayerState, FeedForward, add
from hasten.nn.positions import Sinusoids, halves
from hasten.nn.stack import Observer, unobserved

ACTIVATIONS = {"swish": F.silu, "relu": torch.relu}


@dataclass(frozen=True, kw_only=True)
class MarianSpec(Spec):
    """A Transformer as the toolkit Marian builds it; `hasten import marian` makes one of an OPUS-MT model."""

    kind: Literal["marian"] = "marian"
    """The model's name."""
    d_model: PositiveInt = 512
    """Width of the states."""
    n_heads: PositiveInt = 8
    """Attention heads; divides d_model."""
    d_ff: PositiveInt = 2048
    """Width inside the feed-forward networks."""
    encoder_layers: Depth = 6
    """Layers of the encoder."""
    decoder_layers: Depth = 6
    """Layers of the decoder."""
    activation: Literal["swish", "relu"] = "swish"
    """Inside the feed-forward networks."""
    scale_embedding: bool = True
    """Embeddings times sqrt(d_model) on the way in."""
    dropout: Share = 0.1
    """Dropout after every sub-layer and inside the feed-forward networks."""
    label_smoothing: Share = 0.1
    """Share of the target probability that is spread over the vocabulary."""

    def build(self, vocab_size: int) -> "Marian":
        """A model with fresh weights."""
        return Marian(self, vocab_size)

    def learnable(self, source: object, target: object) -> bool:
        """Every pair of sequences can be learnt."""
        return True


class Marian(LeftToRight):
    """The Transformer of Marian: layers normalised after their residual sum, a bias for every word of the output.

    Source: Junczys-Dowmunt et al., 2018, "Marian: Fast Neural Machine Translation in C++"; the layers: Vaswani et al.,
    2017; models of this shape: Tiedemann and Thottingal, 2020, "OPUS-MT".
    """

    def __init__(self, spec: MarianSpec, vocab_size: int):
        super().__init__(spec, vocab_size)
        self.output_bias = nn.Parameter(torch.zeros(vocab_size))
        self.scale = self.scale if spec.scale_embedding else 1.0
        self.positions = Sinusoids(spec.d_model, layout=halves)
        self.encoder = MarianEncoder(spec)
        self.decoder = MarianDecoder(spec)

    def projection(self) -> tuple[Float[Tensor, "V D"], Float[Tensor, "V"] | None]:
        """The embeddings, and a bias for every word."""
        return self.embedding.weight, self.output_bias

    def logits(self, states: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """Scores of every vocabulary entry, from decoder states."""
        return F.linear(states, self.embedding.weight, self.output_bias)


class MarianEncoder(nn.Module):
    """Layers over the source, without a normalisation after the last."""

    def __init__(self, spec: MarianSpec):
        super().__init__()
        self.layers = nn.ModuleList(MarianEncoderLayer(spec) for _ in range(spec.encoder_layers))

    def forward(
        self, x: Float[Tensor, "B S D"], mask: Tensor, observe: Observer = unobserved
    ) -> Float[Tensor, "B S D"]:
        """`mask` (B, S) is True on real positions."""
        own = padding(mask)
        for i, layer in enumerate(self.layers):
            x, attended = layer(x, own)
            observe("self", i, attended)
        return x


class MarianDecoder(nn.Module):
    """Causal layers over an encoder's states; whole sequences or step by step, as `hasten.nn.stack.Decoder`."""

    def __init__(self, spec: MarianSpec):
        super().__init__()
        self.layers = nn.ModuleList(MarianDecoderLayer(spec) for _ in range(spec.decoder_layers))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"],
        memory_mask: Tensor,
        observe: Observer = unobserved,
    ) -> Float[Tensor, "B T D"]:
        """Teacher forcing. `memory_mask` (B, S) is True on real source positions."""
        own, keys = Mask(causal=True), padding(memory_mask)
        for i, layer in enumerate(self.layers):
            x, attended, found = layer(x, memory, own, keys)
            observe("self", i, attended)
            observe("cross", i, found)
        return x

    def begin(self, memory: Float[Tensor, "B S D"], memory_mask: Tensor) -> DecoderState:
        """The state before the first step."""
        return tuple(
            DecoderLayerState(None, layer.cross_attention.remember(memory, memory_mask))  # type: ignore[union-attr,operator]
            for layer in self.layers
        )

    def step(self, x: Float[Tensor, "B n D"], state: DecoderState) -> tuple[Float[Tensor, "B n D"], DecoderState]:
        """Outputs at n new positions, equal to `forward` there, and the state after them."""
        after = []
        for layer, before in zip(self.layers, state, strict=True):
            x, new = layer.step(x, before)  # type: ignore[operator]
            after.append(new)
        return x, tuple(after)

    def check_rewinds(self) -> None:
        """Nothing to object: full attention takes back positions."""

    def rewind(self, state: DecoderState, dropped: Int[Tensor, "B"]) -> DecoderState:
        """The state without the last positions, so many of each row."""
        return tuple(layer.rewind(dropped) for layer in state)


class MarianEncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each added to its input and normalised then."""

    def __init__(self, spec: MarianSpec):
        super().__init__()
        self.self_attention = _attention(spec)
        self.self_norm = nn.LayerNorm(spec.d_model)
        self.feed_forward = _feed_forward(spec)
        self.feed_forward_norm = nn.LayerNorm(spec.d_model)
        self.dropout = Dropout(spec.dropout)

    def forward(self, x: Float[Tensor, "B S D"], mask: Mask) -> tuple[Float[Tensor, "B S D"], Attended]:
        """One layer over the whole sequence."""
        attended = self.self_attention.attend(x, mask)
        x = self.self_norm(add(x, self.dropout(attended.output)))
        return self.feed_forward_norm(add(x, self.dropout(self.feed_forward(x)))), attended


class MarianDecoderLayer(nn.Module):
    """Causal self-attention, attention over the encoder's states, a feed-forward network; each normalised after."""

    def __init__(self, spec: MarianSpec):
        super().__init__()
        self.self_attention = _attention(spec)
        self.self_norm = nn.LayerNorm(spec.d_model)
        self.cross_attention = _attention(spec)
        self.cross_norm = nn.LayerNorm(spec.d_model)
        self.feed_forward = _feed_forward(spec)
        self.feed_forward_norm = nn.LayerNorm(spec.d_model)
        self.dropout = Dropout(spec.dropout)

    def forward(
        self, x: Float[Tensor, "B T D"], memory: Float[Tensor, "B S D"], mask: Mask, memory_mask: Mask
    ) -> tuple[Float[Tensor, "B T D"], Attended, Attended]:
        """One layer over the whole sequence (teacher forcing)."""
        attended = self.self_attention.attend(x, mask)
        x = self.self_norm(add(x, self.dropout(attended.output)))
        found = self.cross_attention.attend(x, memory_mask, memory)
        x = self.cross_norm(add(x, self.dropout(found.output)))
        return self.feed_forward_norm(add(x, self.dropout(self.feed_forward(x)))), attended, found

    def step(
        self, x: Float[Tensor, "B n D"], state: DecoderLayerState
    ) -> tuple[Float[Tensor, "B n D"], DecoderLayerState]:
        """The layer at n new positions; equal to `forward` at those positions."""
        attended, past = self.self_attention.attend_step(x, state.past)  # type: ignore[arg-type]
        x = self.self_norm(x + attended.output)
        x = self.cross_norm(x + self.cross_attention.recall(x, state.memory))  # type: ignore[arg-type]
        return self.feed_forward_norm(x + self.feed_forward.step(x)), DecoderLayerState(past, state.memory)


def _attention(spec: MarianSpec) -> MultiHeadAttention:
    return MultiHeadAttention(spec.d_model, spec.n_heads, FullAttention())


def _feed_forward(spec: MarianSpec) -> FeedForward:
    return FeedForward(spec.d_model, spec.d_ff, spec.dropout, activation=ACTIVATIONS[spec.activation])
