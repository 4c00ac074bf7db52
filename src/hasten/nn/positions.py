"""Position encodings."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


def sinusoids(length: int, d_model: int) -> Float[Tensor, "length d_model"]:
    """Sines in the even, cosines in the odd columns, wavelengths from 2 pi to 10000 * 2 pi.

    Source: Vaswani et al., 2017, section 3.5.
    """
    rates = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / d_model))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :d_model].float()


def halves(length: int, d_model: int) -> Float[Tensor, "length d_model"]:
    """The same numbers, all sines before all cosines, as Marian has them (Junczys-Dowmunt et al., 2018)."""
    table = sinusoids(length, d_model)
    return torch.cat((table[:, 0::2], table[:, 1::2]), 1)


class Sinusoids(nn.Module):
    """Adds sinusoidal positions to (B, T, D); any length, since the table grows when needed.

    layout: the order of the columns, `sinusoids` or `halves`.
    """

    table: Tensor

    def __init__(
        self, d_model: int, initial_length: int = 512, *, layout: Callable[[int, int], Tensor] = sinusoids
    ):  # fmt: skip
        super().__init__()
        self.d_model, self.layout = d_model, layout
        self.register_buffer("table", layout(initial_length, d_model), persistent=False)

    def forward(self, x: Float[Tensor, "B T D"], start: int = 0) -> Float[Tensor, "B T D"]:
        """`x` plus the encodings of positions start .. start + T - 1."""
        end = start + x.shape[1]
        self._reach(end)
        return x + self.table[start:end]

    def each(self, x: Float[Tensor, "B T D"], starts: Int[Tensor, "B"]) -> Float[Tensor, "B T D"]:
        """The same where every row has a start of its own."""
        self._reach(int(starts.max()) + x.shape[1])
        return x + self.table[starts[:, None] + torch.arange(x.shape[1], device=starts.device)]

    def _reach(self, end: int) -> None:
        if end > self.table.shape[0]:
            self.table = self.layout(max(end, 2 * self.table.shape[0]), self.d_model).to(self.table)
