"""Random directions for random features: drawn from a seed, kept in the state dict, drawn anew only when asked to."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hasten.errors import UserError


class Directions(nn.Module):
    """n random rows w of width d_head, each distributed as N(0, I).

    orthogonal: rows come in blocks of d_head that are orthogonal within a block; their lengths are drawn apart, so that
    each row alone stays N(0, I). regularised: such rows all have length sqrt(d_head) instead.
    A narrower head counts as padded with zeros, which leaves products as they are: it reads the first entries of rows.
    State: `seed`, `draws` (how often drawn again), `calls` (of `advance`), `rows`. Rows are a function of seed, draws
    and shape alone, drawn on the CPU: every process and every device has the same.
    Source: Choromanski et al., 2021, "Rethinking Attention with Performers", section 2.4.
    """

    rows: Tensor
    seed: Tensor
    draws: Tensor
    calls: Tensor

    def __init__(
        self, n: int, d_head: int, *, seed: int, orthogonal: bool, regularised: bool = False, redraw_every: int = 0
    ):
        super().__init__()
        self.orthogonal, self.regularised, self.redraw_every = orthogonal, regularised, redraw_every
        self.register_buffer("seed", torch.tensor(seed))
        self.register_buffer("draws", torch.tensor(0))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("rows", torch.empty(n, d_head))
        self._draw()

    def redraw(self) -> None:
        """Draw all rows anew: the next of the seed's sequence. Decoding states made before are void."""
        self.draws += 1
        self._draw()

    def advance(self) -> None:
        """Count one step of training, and draw anew at every `redraw_every`-th; does nothing in evaluation."""
        if self.training and self.redraw_every:
            self.calls += 1
            if self.calls % self.redraw_every == 0:
                self.redraw()

    def project(self, x: Float[Tensor, "B H n D"]) -> Float[Tensor, "B H n m"]:
        """w . x for every row, in the type of x."""
        return x @ self.of_width(x.shape[-1]).to(x.dtype).T

    def of_width(self, width: int) -> Float[Tensor, "m D"]:
        """The rows as heads of a width read them; `UserError` where they are too short."""
        if width > self.rows.shape[1]:
            raise UserError(
                f"random features for heads of width {self.rows.shape[1]} at most, got {width}; set d_head = {width}"
            )
        return self.rows[:, :width]

    def _draw(self) -> None:
        # Seeds of the draws are a random sequence: the generator reads 32 bits of a seed, too few for two numbers.
        seeds = torch.randint(2**32, (int(self.draws) + 1,), generator=torch.Generator().manual_seed(int(self.seed)))
        generator = torch.Generator().manual_seed(int(seeds[-1]))
        n, width = self.rows.shape
        rows = torch.randn(n, width, generator=generator, dtype=torch.float64)
        if self.orthogonal:
            lengths = rows.norm(dim=1, keepdim=True)
            if self.regularised:
                lengths = torch.full_like(lengths, width**0.5)
            n_blocks = (n + width - 1) // width
            blocks = torch.randn(n_blocks, width, width, generator=generator, dtype=torch.float64)
            rows = lengths * _orthogonal(blocks).flatten(0, 1)[:n]
        self.rows.copy_(rows)


def advance(model: nn.Module) -> None:
    """Call after each step of training: redraws the random features of a model whose schedule says so."""
    for module in model.modules():
        if isinstance(module, Directions):
            module.advance()


def _orthogonal(blocks: Tensor) -> Tensor:
    """Gaussian matrices to uniformly distributed orthogonal ones: without the signs QR prefers some over others."""
    q, r = torch.linalg.qr(blocks)
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
