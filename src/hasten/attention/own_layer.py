"""Mechanisms that come with a layer of their own instead of projections around heads."""

from abc import ABC, abstractmethod

import torch.nn as nn
from jaxtyping import Float, Int
from torch import Tensor

from hasten.attention.base import Attention
from hasten.attention.masks import Mask, padding
from hasten.attention.multihead import Attended, CrossState, SelfState
from hasten.attention.packed import unpack
from hasten.errors import UserError

_EVERYTHING = Mask()


class SelfLayer(nn.Module, ABC):
    """A layer of self-attention with the calls of `MultiHeadAttention`. Over a memory it refuses to work."""

    attention: Attention

    def forward(
        self, x: Float[Tensor, "B T D"], mask: Mask = _EVERYTHING, memory: Float[Tensor, "B S D"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Self-attention over `x`; without a mask every token reads everything."""
        return self.attend(x, mask, memory).output

    def attend(
        self,
        x: Float[Tensor, "B T D"],
        mask: Mask = _EVERYTHING,
        memory: Float[Tensor, "B S D"] | None = None,
        carried: Attended | None = None,
    ) -> Attended:
        """`forward`, and what other layers can share. `carried` is not read."""
        if memory is not None:
            raise self._no_memory()
        if not isinstance(mask, Mask):
            raise TypeError(
                f"mask is a {type(mask).__name__}; give a Mask, for example Mask(keys=mask), True = may attend"
            )
        return self.read(x, mask)

    @abstractmethod
    def read(self, x: Float[Tensor, "B T D"], mask: Mask) -> Attended:
        """The whole sequence at once."""

    def packed(
        self, x: Float[Tensor, "total D"], lengths: Int[Tensor, " B"], causal: bool = False
    ) -> Float[Tensor, "total D"]:
        """Self-attention within sequences laid end to end; they are padded to the longest."""
        padded, keys = unpack(x, lengths)
        return self.forward(padded, Mask(causal=causal, keys=padding(keys).keys))[keys]

    def step(self, x: Float[Tensor, "B n D"], state: SelfState | None) -> tuple[Float[Tensor, "B n D"], SelfState]:
        """Causal self-attention of n new positions after `state` (None: the beginning)."""
        attended, after = self.attend_step(x, state)
        return attended.output, after

    @abstractmethod
    def attend_step(
        self, x: Float[Tensor, "B n D"], state: SelfState | None, carried: Attended | None = None
    ) -> tuple[Attended, SelfState]:
        """`step`, and what other layers can share."""

    def remember(self, memory: Float[Tensor, "B S D"], mask: Tensor) -> CrossState:
        """Refused."""
        raise self._no_memory()

    @abstractmethod
    def lead(self) -> None:
        """Let other layers apply this one's weights; `UserError` where they cannot."""

    def _no_memory(self) -> UserError:
        return UserError(
            f"{type(self.attention).__name__} is for self-attention, it reads no memory; take another mechanism, for "
            "example FullAttention"
        )


class Layered(Attention):
    """A mechanism that can build its own layer; it is asked to where `traits.unprojected`."""

    @abstractmethod
    def layer(self, d_model: int, n_heads: int, *, bias: bool) -> SelfLayer:
        """The layer, with this mechanism in it."""
