"""Stacks of layers that take one attention spec per layer, and may share attention between layers."""

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, final

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hasten.attention import Attention, AttentionSpec, Mask, Traits
from hasten.attention.masks import padding
from hasten.attention.multihead import Attended
from hasten.errors import UserError
from hasten.nn.layers import DecoderLayer, DecoderLayerState, EncoderLayer
from hasten.nn.mechanisms import build, longest, tokens_before
from hasten.nn.sharing import Carry, Shared, SourceMap, attention_layers

Observer = Callable[[str, int, Attended], None]
"""Told, for every layer, the kind of attention ("self" or "cross"), the layer from 0, and what it left."""


def unobserved(kind: str, layer: int, attended: Attended) -> None:
    """Nobody looks."""


class Encoder(nn.Module):
    """Bidirectional layers and a final normalisation: (B, S, D) to (B, S, D).

    Where the layers' mechanisms want learnt tokens before the sequence (`traits.external`), it has them.
    sharing: for each layer, from 1, the layer whose attention weights it uses; empty: its own.
    """

    def __init__(
        self,
        n_layers: int,
        d_model: int,
        n_heads: int,
        d_ff: int,
        dropout: float,
        attention: Sequence[AttentionSpec],
        sharing: Sequence[int] = (),
        *,
        name: str = "encoder",
    ):
        super().__init__()
        self.plan = SourceMap.of(sharing, n_layers, f"{name}_sharing")
        own = build(
            attention,
            (d_model, n_heads),
            n_layers,
            f"{name} attention",
            lambda traits: traits.key_padding,
            "sentences are padded",
            plan=self.plan,
            external=True,
        )
        self.external = tokens_before(own, d_model, f"{name} attention")
        self.longest = longest(own)
        layers = attention_layers(own, self.plan, d_model, n_heads, "weights", f"{name} attention")
        self.layers: nn.ModuleList = nn.ModuleList(EncoderLayer(d_model, d_ff, dropout, layer) for layer in layers)
        self.norm = nn.LayerNorm(d_model)

    def forward(
        self,
        x: Float[Tensor, "B S D"],
        mask: Tensor,
        marked: Bool[Tensor, "B S"] | None = None,
        observe: Observer = unobserved,
    ) -> Float[Tensor, "B S D"]:
        """`mask` (B, S) is True on real positions, `marked` on tokens that are global (`Mask.marked`)."""
        x, own = self.external.put(x, replace(padding(mask), marked=marked))
        carry = Carry(self.plan)
        for i, layer in enumerate(self.layers):
            x, attended = layer(x, own, carry.take(i))
            carry.put(i, attended)
            observe("self", i, attended)
        return self.norm(self.external.strip(x))


class DecoderStack(nn.Module, ABC):
    """Layers that read their own positions and an encoder's states, and a final normalisation.

    sharing, cross_sharing: for each layer, from 1, the layer whose attention it uses; empty: its own. Of self-attention
    the weights are shared, of attention over the encoder what `shared_of_cross` says.
    """

    able: ClassVar[Callable[[Traits], bool]]
    """What the traits of its self-attention must be."""
    need: ClassVar[str]
    """Why."""

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
        cross_sharing: Sequence[int] = (),
        shared_of_cross: Shared = "output",
    ):
        super().__init__()
        self.plan = SourceMap.of(sharing, n_layers, "decoder_sharing")
        self.cross_plan = SourceMap.of(cross_sharing, n_layers, "cross_sharing")
        shape = (d_model, n_heads)
        own = build(attention, shape, n_layers, "decoder attention", type(self).able, self.need, plan=self.plan)
        cross = over_encoder(cross_attention, shape, n_layers, self.cross_plan)
        self.longest, self.longest_memory = longest(own), longest(cross)
        pairs = zip(
            attention_layers(own, self.plan, *shape, "weights", "decoder attention"),
            attention_layers(cross, self.cross_plan, *shape, shared_of_cross, "cross attention"),
            strict=True,
        )
        self.layers: nn.ModuleList = nn.ModuleList(DecoderLayer(d_model, d_ff, dropout, a, b) for a, b in pairs)
        self.norm = nn.LayerNorm(d_model)

    def through(
        self, x: Float[Tensor, "B T D"], memory: Float[Tensor, "B S D"], mask: Mask, keys: Mask, observe: Observer
    ) -> Float[Tensor, "B T D"]:
        """x after all layers. `mask` is that of its own positions, `keys` that of the encoder's."""
        own, cross = Carry(self.plan), Carry(self.cross_plan)
        for i, layer in enumerate(self.layers):
            x, attended, read = layer(x, memory, mask, keys, own.take(i), cross.take(i))
            own.put(i, attended)
            cross.put(i, read)
            observe("self", i, attended)
            observe("cross", i, read)
        return self.norm(x)


def over_encoder(
    specs: Sequence[AttentionSpec], shape: tuple[int, int], n_layers: int, plan: SourceMap
) -> list[Attention | None]:
    """The mechanisms of a decoder's attention over the encoder; those of layers that use another's are None."""
    able, need = lambda traits: traits.cross and traits.key_padding, "queries read another, padded sequence"
    return build(specs, shape, n_layers, "cross attention", able, need, plan=plan)


@final
class Decoder(DecoderStack):
    """Causal layers over an encoder's states; whole sequences or step by step."""

    able = staticmethod(lambda traits: traits.causal == "strict" and traits.step)
    need = "outputs are made step by step: the mechanism must be strictly causal"

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"],
        memory_mask: Tensor,
        observe: Observer = unobserved,
    ) -> Float[Tensor, "B T D"]:
        """Teacher forcing. `memory_mask` (B, S) is True on real source positions."""
        # Padding in x stands on the right, where no earlier position can read it: causality is mask enough.
        return self.through(x, memory, Mask(causal=True), padding(memory_mask), observe)

    def begin(self, memory: Float[Tensor, "B S D"], memory_mask: Tensor) -> tuple[DecoderLayerState, ...]:
        """The state before the first step."""
        return tuple(layer.begin(memory, memory_mask) for layer in self.layers)  # type: ignore[operator]

    def step(
        self, x: Float[Tensor, "B n D"], state: tuple[DecoderLayerState, ...]
    ) -> tuple[Float[Tensor, "B n D"], tuple[DecoderLayerState, ...]]:
        """Outputs at n new positions, equal to `forward` there, and the state after them."""
        after = []
        own, cross = Carry(self.plan), Carry(self.cross_plan)
        for i, (layer, before) in enumerate(zip(self.layers, state, strict=True)):
            x, new, attended, read = layer.step(x, before, own.take(i), cross.take(i))  # type: ignore[operator]
            own.put(i, attended)
            cross.put(i, read)
            after.append(new)
        return self.norm(x), tuple(after)

    def check_rewinds(self) -> None:
        """`UserError` naming the first layer whose mechanism cannot drop positions of its state again."""
        for i, layer in enumerate(self.layers):
            if self.plan.follows(i):
                continue
            attention: Any = layer.self_attention.attention  # type: ignore[union-attr]
            if not attention.traits.rewind:
                raise UserError(
                    f"decoder attention, layer {i + 1}: {type(attention).__name__} cannot take back positions once "
                    "decoded (traits.rewind); FullAttention can"
                )

    def rewind(
        self, state: tuple[DecoderLayerState, ...], dropped: Int[Tensor, "B"]
    ) -> tuple[DecoderLayerState, ...]:  # fmt: skip
        """The state without the last positions, so many of each row; only where `check_rewinds` lets it."""
        return tuple(layer.rewind(dropped) for layer in state)
