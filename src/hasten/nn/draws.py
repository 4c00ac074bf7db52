"""Uniform numbers for sampling inside a loss: what padding a batch has changes nothing."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def row_draws(
    mask: Bool[Tensor, "B T"], generator: torch.Generator, per_row: int = 1
) -> tuple[Float[Tensor, "B n"], Float[Tensor, "B T"]]:
    """Numbers from [0, 1): `per_row` for each row, and one for each real position (1 at padding).

    They are drawn row by row, first a row's own, then those of its positions. So a batch draws what its rows would draw
    one after the other, whatever padding stands between them.
    """
    real = torch.nn.functional.pad(mask, (per_row, 0), value=True)
    drawn = torch.rand(int(real.sum()), generator=generator, device=generator.device).to(mask.device)
    numbers = torch.ones(real.shape, device=mask.device).masked_scatter(real, drawn)
    return numbers[:, :per_row], numbers[:, per_row:]
