"""Sums over the keys up to each query, in chunks: the causal core of kernel attention.

No loop runs over the length, chunks being a dimension of the tensors, and nothing grows faster than the length.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.attention.kernels.products import summed_up

# Positions of a chunk, a power of two, by measurement: products within chunks against states between them.
CHUNK = 64
# Chunks that `states_before` relates pair by pair: its pairs grow with (length / (chunk * GROUP))^2.
GROUP = 16
# The logarithm of nothing. Finite, so that the difference of two of them is 0 and not NaN.
LOWEST = -1e30


@dataclass(frozen=True)
class Grid:
    """T queries and S keys, aligned at their ends and cut into chunks: both are padded in front to a common length."""

    n_queries: int
    length: int
    chunk: int

    def cut(self, x: Tensor, filling: float = 0.0) -> Tensor:
        """(B, H, n, m) as (B, H, chunks, chunk, m); positions before the first hold `filling`."""
        if x.shape[2] != self.length:
            x = F.pad(x, (0, 0, self.length - x.shape[2], 0), value=filling)
        return x.unflatten(2, (-1, self.chunk))

    def join(self, x: Tensor) -> Tensor:
        """(B, H, chunks, chunk, m) as (B, H, T, m): what stands at the queries."""
        return x.flatten(2, 3)[:, :, self.length - self.n_queries :]

    def is_one_chunk(self) -> bool:
        """One chunk holds everything."""
        return self.length == self.chunk


def grid_of(n_queries: int, n_keys: int, chunk: int = CHUNK) -> Grid:
    """The grid of chunks of `chunk` positions, a power of two; a short sequence gets one chunk that is shorter."""
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk is {chunk}; give a power of two")
    longest = max(n_queries, n_keys)
    chunk = min(chunk, 1 << (longest - 1).bit_length())
    return Grid(n_queries, (longest + chunk - 1) // chunk * chunk, chunk)


@dataclass(frozen=True)
class PrefixSums:
    """v -> sum_(j <= i) (q_i . k_j) v_j. Features are cut, and zero at keys that are not to be read.

    Within a chunk the masked products are formed; what came before a chunk is read from the sum of k_j v_j^T there.
    """

    grid: Grid
    q: Tensor
    k: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        """Values (B, H, S, D) to sums (B, H, T, D)."""
        v = self.grid.cut(v)
        out = (self.q @ self.k.transpose(-1, -2)).tril() @ v
        if not self.grid.is_one_chunk():
            states = summed_up(self.k, v).cumsum(2)
            out = out + self.q @ F.pad(states, (0, 0, 0, 0, 1, -1))
        return self.grid.join(out)


def prefix_sums(q: Tensor, k: Tensor, chunk: int = CHUNK) -> PrefixSums:
    """Of features q (B, H, T, m), k (B, H, S, m)."""
    grid = grid_of(q.shape[2], k.shape[2], chunk)
    return PrefixSums(grid, grid.cut(q), grid.cut(k))


@dataclass(frozen=True)
class DecayedPrefixSums:
    """v -> sum_(j <= i) exp(sum_(j < l <= i) decay_l + entry_j) (q_i . k_j) v_j, for decay_l <= 0 and entry_j <= 0.

    q, k (B, H, chunks, chunk, m), decay, entry (B, H, chunks, chunk, 1), all cut.
    """

    grid: Grid
    q: Tensor
    k: Tensor
    decay: Tensor
    entry: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        """Values (B, H, S, D) to sums (B, H, T, D)."""
        v, so_far = self.grid.cut(v), self.decay.cumsum(-2)
        # Every exponent is formed as a difference, so that none is positive: nothing overflows, however fast the decay.
        later = torch.ones(self.grid.chunk, self.grid.chunk, dtype=torch.bool, device=v.device).triu(1)
        within = (so_far - (so_far - self.entry).transpose(-1, -2)).masked_fill(later, -torch.inf).exp()
        out = (within * (self.q @ self.k.transpose(-1, -2))) @ v
        if not self.grid.is_one_chunk():
            whole = so_far[..., -1:, :]
            states = summed_up(self.k * (whole - so_far + self.entry).exp(), v)
            before, _ = states_before(states.flatten(-2)[..., None, :], -whole.squeeze(-1).cumsum(2))
            out = out + (self.q * so_far.exp()) @ before.squeeze(-2).unflatten(-1, (-1, v.shape[-1]))
        return self.grid.join(out)


def decayed_prefix_sums(q: Tensor, k: Tensor, decay: Tensor, entry: Tensor, chunk: int = CHUNK) -> DecayedPrefixSums:
    """Of features q (B, H, T, m), k (B, H, S, m), and logarithms decay, entry (B, H, S, 1)."""
    grid = grid_of(q.shape[2], k.shape[2], chunk)
    return DecayedPrefixSums(grid, grid.cut(q), grid.cut(k), grid.cut(decay), grid.cut(entry))


def states_before(states: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """sum_(l < n) exp(level_l - reference_n) states_l for every n, and the reference: the largest level before n.

    states (..., n, m, d), level (..., n, m). The first is 0, at reference LOWEST. Groups of GROUP states are summed
    pair by pair, and so are their totals.
    """
    n = states.shape[-3]
    group = min(GROUP, n)
    missing = -n % group
    states = F.pad(states, (0, 0, 0, 0, 0, missing)).unflatten(-3, (-1, group))
    level = F.pad(level, (0, 0, 0, missing), value=LOWEST).unflatten(-2, (-1, group))
    inner, inner_reference = _pairwise(states, level)
    outer, outer_reference = _pairwise(inner[..., -1, :, :], inner_reference[..., -1, :])
    outer, outer_reference = outer[..., :-1, None, :, :], outer_reference[..., :-1, None, :]
    inner, inner_reference = inner[..., :-1, :, :], inner_reference[..., :-1, :]
    reference = torch.maximum(inner_reference, outer_reference)
    before = (inner_reference - reference).exp()[..., None] * inner
    before = before + (outer_reference - reference).exp()[..., None] * outer
    return before.flatten(-4, -3)[..., :n, :, :], reference.flatten(-3, -2)[..., :n, :]


def _pairwise(states: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """As `states_before`, every pair at once; with one row more, for the sum of all."""
    n = level.shape[-2]
    reference = F.pad(level.cummax(-2).values, (0, 0, 1, 0), value=LOWEST)
    exponent = level.mT[..., None, :] - reference.mT[..., None]
    later = torch.ones(n + 1, n, dtype=torch.bool, device=level.device).triu()
    before = exponent.masked_fill(later, -torch.inf).exp() @ states.transpose(-3, -2)
    return before.transpose(-3, -2), reference
