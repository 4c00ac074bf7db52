"""A convolution of values along time, one kernel a head, as products of small matrices."""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hasten.attention.fewer_keys.blocks import n_blocks, unblocked

TILE = 32
"""Outputs that are made together: the more of them, the larger the share of zeros in the band matrix."""


class TimeConvolution(nn.Module):
    """sum_t w_t v[i + t - kernel // 2], with one kernel w a head for all channels and zeros beyond the ends.

    Tiles of outputs are a band matrix times what they read: on a CPU half the time of torch's grouped convolution.
    """

    def __init__(self, kernel: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.weight = nn.Parameter(torch.empty(n_heads, kernel).uniform_(-1, 1) / math.sqrt(kernel))

    def forward(self, v: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H S D"]:
        """Convolve along time."""
        weight = self.weight.to(v.dtype)
        if v.device.type != "cpu" or torch.compiler.is_compiling():
            return unblocked(_band(weight)[:, None] @ _reads(v, weight.shape[1]).transpose(-1, -2), v.shape[2])
        out: Tensor = _ByHeads.apply(v, weight)  # type: ignore[no-untyped-call]
        return out


def _band(weight: Float[Tensor, "H kernel"]) -> Float[Tensor, "H tile reach"]:
    """Row i of a matrix has the kernel from column i on.

    Rows of one kernel and `TILE` zeros, laid end to end and cut one place too early, move by one place a row.
    """
    reach = TILE + weight.shape[1] - 1
    return F.pad(weight, (0, TILE)).repeat(1, TILE)[:, : TILE * reach].unflatten(1, (TILE, reach))


def _of_band(band: Float[Tensor, "H tile reach"], kernel: int) -> Float[Tensor, "H kernel"]:
    """The gradient of a kernel from that of its band matrix: sums along the diagonals."""
    return F.pad(band.flatten(1), (0, TILE)).unflatten(1, (TILE, kernel + TILE))[:, :, :kernel].sum(1)


def _reads(v: Float[Tensor, "B H S D"], kernel: int) -> Float[Tensor, "B H n D reach"]:
    """What each tile of outputs reads, a view of one padded copy."""
    after = n_blocks(v.shape[2], TILE) * TILE - v.shape[2] + kernel // 2
    return F.pad(v, (0, 0, kernel // 2, after)).unfold(2, TILE + kernel - 1, TILE)


class _ByHeads(torch.autograd.Function):
    """The convolution, one head at a time: no head copies what its tiles read, which overlaps."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(v, weight)
        return _convolved(v, weight)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (v, weight) = cotangents, ctx.saved_tensors
        reads, kernel = _reads(v, weight.shape[1]), weight.shape[1]
        tiles = F.pad(grad, (0, 0, 0, reads.shape[2] * TILE - v.shape[2])).unflatten(2, (reads.shape[2], TILE))
        of_band = v.new_zeros(len(weight), TILE, reads.shape[4])
        for b, h in itertools.product(*map(range, v.shape[:2])):
            of_band[h] += (tiles[b, h] @ reads[b, h]).sum(0)
        return _convolved(grad, weight.flip(1)), _of_band(of_band, kernel)


def _convolved(v: Float[Tensor, "B H S D"], weight: Float[Tensor, "H kernel"]) -> Float[Tensor, "B H S D"]:
    band, reads = _band(weight), _reads(v, weight.shape[1]).transpose(-1, -2)
    out = v.new_empty(*reads.shape[:3], TILE, v.shape[3])
    for b, h in itertools.product(*map(range, v.shape[:2])):
        torch.matmul(band[h], reads[b, h], out=out[b, h])
    return unblocked(out, v.shape[2])
