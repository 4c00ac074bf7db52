"""Stacks of layers that take one attention spec per layer."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxtyping import Bool, Float
from torch import Tensor, nn

from hasten.attention import AttentionSpec, Mask, Traits
from hasten.attention.masks import padding
from hasten.nn.layers import DecoderLayer, DecoderLayerState, EncoderLayer
from hasten.nn.mechanisms import build, longest, tokens_before


class Encoder(nn.Module):
    """Bidirectional layers and a final normalisation: (B, S, D) to (B, S, D).

    Where the layers' mechanisms want learnt tokens before the sequence (`traits.external`), it has them.
    """

    def __init__(
        self, n_layers: int, d_model: int, n_heads: int, d_ff: int, dropout: float, attention: Sequence[AttentionSpec]
    ):
        super().__init__()
        name, need = "encoder attention", "sentences are padded"
        able: Callable[[Traits], bool] = lambda traits: traits.key_padding  # noqa: E731
        own = build(attention, (d_model, n_heads), n_layers, name, able, need, external=True)
        self.external = tokens_before(own, d_model, name)
        self.longest = longest(own)
        self.layers = nn.ModuleList(EncoderLayer(d_model, n_heads, d_ff, dropout, a) for a in own)
        self.norm = nn.LayerNorm(d_model)

    def forward(
        self, x: Float[Tensor, "B S D"], mask: Tensor, marked: Bool[Tensor, "B S"] | None = None
    ) -> Float[Tensor, "B S D"]:
        """`mask` (B, S) is True on real positions, `marked` on tokens that are global (`Mask.marked`)."""
        x, own = self.external.put(x, replace(padding(mask), marked=marked))
        for layer in self.layers:
            x = layer(x, own)
        return self.norm(self.external.strip(x))


class Decoder(nn.Module):
    """Causal layers over an encoder's states and a final normalisation; whole sequences or step by step."""

    def __init__(
        self,
        n_layers: int,
        d_model: int,
        n_heads: int,
        d_ff: int,
        dropout: float,
        attention: Sequence[AttentionSpec],
        cross_attention: Sequence[AttentionSpec],
    ):
        super().__init__()
        own = build(
            attention,
            (d_model, n_heads),
            n_layers,
            "decoder attention",
            lambda traits: traits.causal == "strict" and traits.step,
            "outputs are made step by step: the mechanism must be strictly causal",
        )
        cross = build(
            cross_attention,
            (d_model, n_heads),
            n_layers,
            "cross attention",
            lambda traits: traits.cross and traits.key_padding,
            "queries read another, padded sequence",
        )
        self.longest, self.longest_memory = longest(own), longest(cross)
        self.layers: nn.ModuleList = nn.ModuleList(
            DecoderLayer(d_model, n_heads, d_ff, dropout, a, b) for a, b in zip(own, cross, strict=True)
        )
        self.norm = nn.LayerNorm(d_model)

    def forward(
        self, x: Float[Tensor, "B T D"], memory: Float[Tensor, "B S D"], memory_mask: Tensor
    ) -> Float[Tensor, "B T D"]:
        """Teacher forcing. `memory_mask` (B, S) is True on real source positions."""
        # Padding in x stands on the right, where no earlier position can read it: causality is mask enough.
        causal, keys = Mask(causal=True), padding(memory_mask)
        for layer in self.layers:
            x = layer(x, memory, causal, keys)
        return self.norm(x)

    def begin(self, memory: Float[Tensor, "B S D"], memory_mask: Tensor) -> tuple[DecoderLayerState, ...]:
        """The state before the first step."""
        return tuple(layer.begin(memory, memory_mask) for layer in self.layers)  # type: ignore[operator]

    def step(
        self, x: Float[Tensor, "B n D"], state: tuple[DecoderLayerState, ...]
    ) -> tuple[Float[Tensor, "B n D"], tuple[DecoderLayerState, ...]]:
        """Outputs at n new positions, equal to `forward` there, and the state after them."""
        after = []
        for layer, before in zip(self.layers, state, strict=True):
            x, new = layer.step(x, before)  # type: ignore[operator]
            after.append(new)
        return self.norm(x), tuple(after)
