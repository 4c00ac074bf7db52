"""How Sinkhorn attention sorts: from summaries of blocks to a soft permutation of them."""

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hasten.attention.adapting import Adapting
from hasten.attention.fewer_keys.blocks import weigh

ABSENT = -1e30
"""Logit of what is not there: exp of it is 0, and differences of two are finite."""


class SortNet(nn.Module, ABC):
    """What makes logits of the summaries of blocks of queries and of keys; None: for any heads or number of blocks."""

    n_heads: int | None
    d_head: int | None
    max_blocks: int | None

    @abstractmethod
    def forward(self, q: Float[Tensor, "B H u D"], k: Float[Tensor, "B H w D"]) -> Float[Tensor, "B H u w"]:
        """How much the queries of block u want block w."""


class MeanProducts(SortNet):
    """q k^T / sqrt(D): no parameters."""

    n_heads, d_head, max_blocks = None, None, None

    def forward(self, q: Float[Tensor, "B H u D"], k: Float[Tensor, "B H w D"]) -> Float[Tensor, "B H u w"]:
        """Products of all pairs."""
        return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


class SortNetwork(SortNet):
    """relu(q W) V, with a column of V for each block."""

    def __init__(self, n_heads: int, d_head: int, max_blocks: int):
        super().__init__()
        self.n_heads, self.d_head, self.max_blocks = n_heads, d_head, max_blocks
        self.hidden = nn.Parameter(torch.randn(n_heads, d_head, d_head) / math.sqrt(d_head))
        self.blocks = nn.Parameter(torch.randn(n_heads, d_head, max_blocks) / math.sqrt(d_head))

    def forward(self, q: Float[Tensor, "B H u D"], k: Float[Tensor, "B H w D"]) -> Float[Tensor, "B H u w"]:
        """As many columns as there are blocks."""
        logits = (q @ self.hidden.to(q.dtype)).relu() @ self.blocks.to(q.dtype)
        return F.pad(logits, (0, k.shape[2] - logits.shape[3]))


def sinkhorn(
    logits: Float[Tensor, "B H n n"], real: Bool[Tensor, "#B n"], iterations: int, tolerance: float
) -> Float[Tensor, "B H n n"]:
    """exp(logits + f_u + g_w) with rows, and within the tolerance columns, that sum to 1, over the real blocks.

    Rows and columns are normalised in turn, in log space, rows last, until all columns are within the tolerance, or
    for so many rounds. Each matrix stops by itself.
    """
    pairs = (real[:, :, None] & real[:, None, :])[:, None]
    logits, real = logits.masked_fill(~pairs, ABSENT), real[:, None]
    f = -logits.logsumexp(-1).masked_fill(~real, 0.0)
    g = torch.zeros_like(f)
    for _ in range(iterations):
        columns = -(logits + f[..., None]).logsumexp(-2).masked_fill(~real, 0.0)
        moving = (g - columns).expm1().abs().amax(-1, keepdim=True) > tolerance
        if moving.device.type == "cpu" and not torch.compiler.is_compiling() and not moving.any():
            break  # further rounds would change nothing; elsewhere looking costs more than it saves
        g = torch.where(moving, columns, g)
        f = torch.where(moving, -(logits + g[..., None, :]).logsumexp(-1).masked_fill(~real, 0.0), f)
    return weigh(logits + g[..., None, :], pairs)


class Sorting(Adapting):
    """The soft permutation of blocks: rows u are the sorted places, columns w the blocks.

    Logits are divided by tau after the noise is added. Causally a row is a softmax over earlier blocks only: columns
    cannot be normalised without a look at later rows, and what is normalised both ways and triangular is the identity.
    The noise is a function of (seed, draws), where `draws` counts updates of the weights.
    """

    seed: Tensor
    draws: Tensor

    def __init__(
        self, sort: SortNet, *, block: int, tau: float, iterations: int, tolerance: float, noise: float, seed: int
    ):
        super().__init__()
        self.sort, self.block, self.tau, self.iterations, self.tolerance = sort, block, tau, iterations, tolerance
        self.noise = noise
        self.register_buffer("seed", torch.tensor(seed))
        self.register_buffer("draws", torch.tensor(0))

    def after_update(self) -> None:
        """New noise."""
        if self.training and self.noise:
            self.draws += 1

    def balanced(self, q: Tensor, k: Tensor, count: Int[Tensor, "#B"]) -> Float[Tensor, "B H n n"]:
        """From blocks (B, H, n, size, D) of the first `count` tokens, summarised by their means."""
        begins = torch.arange(q.shape[2], device=q.device) * self.block
        tokens = (count[:, None] - begins).clamp(1, self.block)[:, None, :, None]
        logits = self.logits(q.sum(3) / tokens, k.sum(3) / tokens)
        return sinkhorn(logits, begins < count[:, None], self.iterations, self.tolerance)

    def causal(self, q: Tensor, k: Tensor, count: Int[Tensor, "#B"]) -> Float[Tensor, "B H n n"]:
        """The same; queries are summarised by the mean of all up to the first of the block."""
        places = torch.arange(q.shape[2], device=q.device)
        sums = q.sum(3)
        before = (sums.cumsum(2) - sums + q[:, :, :, 0]) / (places * self.block + 1)[:, None]
        real = places * self.block < count[:, None]
        allowed = (places[None, :] < places[:, None]) & real[:, :, None]
        return weigh(self.logits(before, k.mean(3)), allowed[:, None])

    def logits(self, q: Float[Tensor, "B H u D"], k: Float[Tensor, "B H w D"]) -> Float[Tensor, "B H u w"]:
        """Logits of the summaries, with noise in training."""
        logits = self.sort(q, k)
        if self.training and self.noise:
            logits = logits + self.noise * gumbel(logits, self.seed, self.draws)
        return logits / self.tau


def gumbel(like: Tensor, seed: Int[Tensor, ""], draw: Int[Tensor, ""]) -> Tensor:
    """Gumbel noise of the shape of `like`, which is a function of seed and number of the draw on any device.

    A hash (the mixing function of splitmix64, Steele et al., 2014) in place of a generator, which cannot be traced.
    """
    places = torch.arange(like.numel(), device=like.device).view(like.shape)
    bits = _mix(places + _mix(draw + _mix(seed)))
    uniform = ((bits >> 12 & (1 << 52) - 1).double() + 0.5) / (1 << 52)
    return -(-uniform.log()).log().to(like.dtype)


def _mix(x: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    x = x * -7046029254386353131
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return x ^ (x >> 31 & (1 << 33) - 1)
