"""Random directions for random features: drawn from a seed, kept in the state dict, drawn anew only when asked to."""

import torch
from jaxtyping import Float
from torch import Tensor

from hasten.attention.adapting import Drawn, numbers


class Directions(Drawn):
    """n random rows w of width d_head, each distributed as N(0, I).

    orthogonal: rows come in blocks of d_head that are orthogonal within a block; their lengths are drawn apart, so that
    each row alone stays N(0, I). regularised: such rows all have length sqrt(d_head) instead.
    Source: Choromanski et al., 2021, "Rethinking Attention with Performers", section 2.4.
    """

    rows: Tensor

    def __init__(
        self, n: int, d_head: int, *, seed: int, orthogonal: bool, regularised: bool = False, redraw_every: int = 0
    ):
        super().__init__(seed, redraw_every)
        self.orthogonal, self.regularised = orthogonal, regularised
        self.register_buffer("rows", torch.empty(n, d_head))
        self.draw(numbers(seed, 0))

    def project(self, x: Float[Tensor, "B H n D"]) -> Float[Tensor, "B H n m"]:
        """w . x for every row, in the type of x."""
        return x @ self.rows.to(x.dtype).T

    def draw(self, generator: torch.Generator) -> None:
        """Gaussian rows, or orthogonal ones."""
        n, width = self.rows.shape
        rows = _normal((n, width), generator)
        if self.orthogonal:
            lengths = rows.norm(dim=1, keepdim=True)
            if self.regularised:
                lengths = torch.full_like(lengths, width**0.5)
            n_blocks = (n + width - 1) // width
            blocks = _normal((n_blocks, width, width), generator)
            rows = lengths * _orthogonal(blocks).flatten(0, 1)[:n]
        self.rows.copy_(rows)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _orthogonal(blocks: Tensor) -> Tensor:
    """Gaussian matrices to uniformly distributed orthogonal ones: without the signs QR prefers some over others."""
    q, r = torch.linalg.qr(blocks)
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
