"""Stacks of layers that take one attention spec per layer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from jaxtyping import Bool, Float
from torch import Tensor, nn

from hasten.attention import Attention, AttentionSpec, Mask, Traits
from hasten.attention.masks import padding
from hasten.errors import UserError
from hasten.nn.external import ExternalTokens, NoTokens
from hasten.nn.layers import DecoderLayer, DecoderLayerState, EncoderLayer

T = TypeVar("T")


def per_layer(specs: Sequence[T], n_layers: int, name: str) -> list[T]:
    """One spec for each layer: a single one stands for all."""
    if len(specs) not in (1, n_layers):
        raise UserError(f"{name} has {len(specs)} entries; give 1 for all layers or {n_layers}, one per layer")
    return list(specs) * (n_layers if len(specs) == 1 else 1)


def build(
    specs: Sequence[AttentionSpec],
    n_layers: int,
    name: str,
    able: Callable[[Traits], bool],
    need: str,
    *,
    external: bool = False,
) -> list[Attention]:
    """One mechanism for each layer; `UserError` naming the layer whose mechanism's traits are not `able`.

    external: the stack puts learnt tokens before the sequence where mechanisms want them.
    """
    specs = [spec.at_layer(i) for i, spec in enumerate(per_layer(specs, n_layers, name))]
    attentions: list[Attention] = [spec.build() for spec in specs]
    for i, (spec, attention) in enumerate(zip(specs, attentions, strict=True)):
        cannot = f"{name}, layer {i + 1}: {spec.kind} attention cannot serve here"
        if attention.traits.external and not external:
            raise UserError(
                f"{cannot}: it wants {attention.traits.external} learnt tokens before the sequence (external), which "
                "read all of it; only an encoder has them"
            )
        if not able(attention.traits):
            raise UserError(f"{cannot}, where {need}")
    return attentions


def tokens_before(attentions: Sequence[Attention], d_model: int, name: str) -> ExternalTokens | NoTokens:
    """The learnt tokens that all layers want before the sequence; `UserError` where they want different numbers."""
    wanted: dict[int, list[int]] = {}
    for i, attention in enumerate(attentions):
        wanted.setdefault(attention.traits.external, []).append(i + 1)
    if len(wanted) > 1:
        parts = [f"{tokens} by layer {', '.join(map(str, layers))}" for tokens, layers in wanted.items()]
        raise UserError(
            f"{name}: the number of learnt tokens before the sequence (external) must be the same in all layers; "
            f"wanted are {'; '.join(parts)}"
        )
    tokens = max(wanted, default=0)
    return ExternalTokens(tokens, d_model) if tokens else NoTokens()


class Encoder(nn.Module):
    """Bidirectional layers and a final normalisation: (B, S, D) to (B, S, D).

    Where the layers' mechanisms want learnt tokens before the sequence (`traits.external`), it has them.
    """

    def __init__(
        self, n_layers: int, d_model: int, n_heads: int, d_ff: int, dropout: float, attention: Sequence[AttentionSpec]
    ):
        super().__init__()
        name, need = "encoder attention", "sentences are padded"
        own = build(attention, n_layers, name, lambda traits: traits.key_padding, need, external=True)
        self.external = tokens_before(own, d_model, name)
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
            n_layers,
            "decoder attention",
            lambda traits: traits.causal == "strict" and traits.step,
            "outputs are made step by step: the mechanism must be strictly causal",
        )
        cross = build(
            cross_attention,
            n_layers,
            "cross attention",
            lambda traits: traits.cross and traits.key_padding,
            "queries read another, padded sequence",
        )
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
