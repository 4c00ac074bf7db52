"""Decoders that say all positions at once: bidirectional layers over an encoder's states."""

from typing import final

from jaxtyping import Bool, Float
from torch import Tensor

from hasten.attention.masks import padding
from hasten.nn.stack import DecoderStack, Observer, unobserved


@final
class ParallelDecoder(DecoderStack):
    """Bidirectional layers over an encoder's states: (B, T, D) to (B, T, D)."""

    able = staticmethod(lambda traits: traits.key_padding)
    need = "sentences are padded"

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"],
        memory: Float[Tensor, "B S D"],
        memory_mask: Bool[Tensor, "B S"],
        observe: Observer = unobserved,
    ) -> Float[Tensor, "B T D"]:
        """Both masks are True on real positions."""
        return self.through(x, memory, padding(mask), padding(memory_mask), observe)
