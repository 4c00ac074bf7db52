"""Decoders that say all positions at once: bidirectional layers over an encoder's states."""

from collections.abc import Sequence

from jaxtyping import Bool, Float
from torch import Tensor, nn

from hasten.attention import AttentionSpec
from hasten.attention.masks import padding
from hasten.nn.sharing import Shared, SourceMap
from hasten.nn.stack import Observer, Own, decoder_layers, through, unobserved


class ParallelDecoder(nn.Module):
    """Bidirectional layers over an encoder's states and a final normalisation: (B, T, D) to (B, T, D).

    sharing, cross_sharing: for each layer, from 1, the layer whose attention it uses; empty: its own. Of self-attention
    the weights are shared, of attention over the encoder what `shared_of_cross` says.
    """

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
        own = Own(attention, lambda traits: traits.key_padding, "sentences are padded")
        shape = (d_model, n_heads, d_ff, dropout)
        plans = (self.plan, self.cross_plan)
        self.layers, self.longest, self.longest_memory = decoder_layers(
            n_layers, *shape, own, cross_attention, plans, shared_of_cross
        )
        self.norm = nn.LayerNorm(d_model)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"],
        memory: Float[Tensor, "B S D"],
        memory_mask: Bool[Tensor, "B S"],
        observe: Observer = unobserved,
    ) -> Float[Tensor, "B T D"]:
        """Both masks are True on real positions."""
        masks, plans = (padding(mask), padding(memory_mask)), (self.plan, self.cross_plan)
        return self.norm(through(self.layers, x, memory, masks, plans, observe))
