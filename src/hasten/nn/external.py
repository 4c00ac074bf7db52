"""Learnt tokens before a sequence, for mechanisms that gather and spread what they know through them."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from hasten.attention.masks import Mask


class ExternalTokens(nn.Module):
    """`tokens` learnt states that stand before every sequence, real and without positions, and are taken off again.

    They start with the variance of embedded tokens, 1. Source: Ainslie et al., 2020, section 2 (ETC); Zaheer et al.,
    2020. Structure between them and parts of the text, and their pre-training, are not here.
    """

    def __init__(self, tokens: int, d_model: int):
        super().__init__()
        self.states = Parameter(torch.randn(tokens, d_model))

    def put(self, x: Float[Tensor, "B S D"], mask: Mask) -> tuple[Float[Tensor, "B n D"], Mask]:
        """The sequence with the tokens before it, and its mask."""
        tokens = len(self.states)
        states = self.states.to(x.dtype).expand(len(x), -1, -1)
        keys = None if mask.keys is None else F.pad(mask.keys, (tokens, 0), value=True)
        marked = None if mask.marked is None else F.pad(mask.marked, (tokens, 0), value=False)
        return torch.cat((states, x), 1), replace(mask, keys=keys, marked=marked)

    def strip(self, x: Float[Tensor, "B n D"]) -> Float[Tensor, "B S D"]:
        """The sequence without the tokens."""
        return x[:, len(self.states) :]


class NoTokens(nn.Module):
    """Nothing before the sequence."""

    def put(self, x: Float[Tensor, "B S D"], mask: Mask) -> tuple[Float[Tensor, "B S D"], Mask]:
        """The sequence itself."""
        return x, mask

    def strip(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B S D"]:
        """The sequence itself."""
        return x
