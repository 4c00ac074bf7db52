"""Sums over the keys up to each query, for features that are given by their logarithms and may have any magnitude.

Such features cannot be exponentiated as they are, nor scaled by their largest value over the whole sequence: one large
key would empty the rows before it. Every product is scaled by what came before its query alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from hasten.attention.kernels.prefix_sums import LOWEST, Grid, grid_of, states_before
from hasten.attention.kernels.products import summed_up

# Positions of a chunk, by measurement.
LOG_CHUNK = 64


@dataclass(frozen=True)
class LogPrefixSums:
    """v -> sum_(j <= i) sum_r exp(a_ir + b_jr - level_ir) v_j.

    a, b, level are cut; b is -inf at keys that are not to be read. a must not be large, and level is a bound of the
    past that never falls: level_i >= b_j for all j <= i. Every product of two exponentials is taken relative to the
    level of some position between its key and its query: then nothing overflows, what underflows is that much smaller
    than 1, no later key has a part in it, and large numbers only meet in differences.
    """

    grid: Grid
    a: Tensor
    b: Tensor
    level: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        """Values (B, H, S, D) to sums (B, H, T, D)."""
        v = self.grid.cut(v)
        within = _WithinChunks.apply(self.a, self.b, self.level, v)
        assert isinstance(within, tuple)
        out, q, k = within
        if not self.grid.is_one_chunk():
            before, _ = states_before(summed_up(k, v), self.level.detach()[..., -1, :])
            out = out + q @ before
        return self.grid.join(out)


def scaled_log_sums(a: Tensor, b: Tensor, chunk: int = LOG_CHUNK) -> LogPrefixSums:
    """Sums with a common factor for each query that makes their largest weight about 1; a ratio of sums cancels it.

    a (B, H, T, m), b (B, H, S, m), -inf at keys that are not to be read.
    """
    grid = grid_of(a.shape[2], b.shape[2], chunk)
    a, b = grid.cut(a), grid.cut(b, -torch.inf)
    level = running_max(b)
    a = a + level
    return LogPrefixSums(grid, a.sub_(a.detach().amax(-1, keepdim=True)), b, level)


def averaging_log_sums(a: Tensor, b: Tensor, chunk: int = LOG_CHUNK) -> LogPrefixSums:
    """v -> sum_r exp(a_ir) times the average of v_j over j <= i with the weights exp(b_jr); a and b likewise."""
    grid = grid_of(a.shape[2], b.shape[2], chunk)
    a, b = grid.cut(a), grid.cut(b, -torch.inf)
    return LogPrefixSums(grid, a, b, running_logsumexp(b))


class _WithinChunks(Function):
    """LogPrefixSums of each chunk (..., chunk, m) alone, and the features with which chunks read each other.

    Later halves read earlier halves, from single positions up to halves of the chunk. On the way up queries are brought
    from the level before their block to that before the block of twice the size, keys from the level at the end of
    theirs to that at the end of the other: by factors of at most 1. The exponentials of every size are made again for
    the gradient instead of being kept.
    """

    @staticmethod
    def forward(a: Tensor, b: Tensor, level: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(v.device.type, enabled=False):
            start = _before(level)
            q, own, k = _exponentials(a, b, level, start)
            out = own.sum(-1, keepdim=True) * v
            for size in _sizes(a):
                late_q, early_k, early_v = _halves(q, size)[1], _halves(k, size)[0], _halves(v, size)[0]
                _halves(out, size)[1].add_(_times(_products(late_q, early_k), early_v))
                _double(late_q, early_k, start, level, size)
        return out, q, k

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, b, level, v = ctx.saved_tensors
        with torch.autocast(v.device.type, enabled=False):
            start = _before(level)
            q, own, k = _exponentials(a, b, level, start)
            grad_v = own.sum(-1, keepdim=True) * grad
            grad_a = own.mul_((grad * v).sum(-1, keepdim=True))
            grad_b = grad_a.clone()
            for size in _sizes(a):
                late_q, early_k, early_v = _halves(q, size)[1], _halves(k, size)[0], _halves(v, size)[0]
                late_grad = _halves(grad, size)[1]
                scores = _products(late_grad, early_v)
                _halves(grad_a, size)[1].addcmul_(late_q, _times(scores, early_k))
                _halves(grad_b, size)[0].addcmul_(early_k, _times(scores.transpose(-1, -2), late_q))
                _halves(grad_v, size)[0].add_(_times(_products(early_k, late_q), late_grad))
                _double(late_q, early_k, start, level, size)
            grad_a.addcmul_(q, grad_q)
            grad_b.addcmul_(k, grad_k)
        return grad_a, grad_b, -grad_a if ctx.needs_input_grad[2] else None, grad_v


def _exponentials(a: Tensor, b: Tensor, level: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries at the level before them, their products with their own keys, and keys at their own level."""
    k = b - level
    own = (a + k).exp_()
    return (start - level).add_(a).exp_(), own, k.exp_()


def _double(late_q: Tensor, early_k: Tensor, start: Tensor, level: Tensor, size: int) -> None:
    """Bring features from the levels around blocks of `size` to those around blocks of 2 * size, in place."""
    middle, end = level[..., size - 1 :: 2 * size, None, :], level[..., 2 * size - 1 :: 2 * size, None, :]
    late_q.mul_((start[..., :: 2 * size, None, :] - middle).exp_())
    early_k.mul_((middle - end).exp_())


def _before(level: Tensor) -> Tensor:
    """The level of the position before each."""
    return F.pad(level.flatten(2, 3), (0, 0, 1, -1), value=LOWEST).unflatten(2, level.shape[2:4])


def _products(x: Tensor, y: Tensor) -> Tensor:
    """x y^T; of single rows without a matrix product, which is slow for very many very small ones."""
    return (x * y).sum(-1, keepdim=True) if x.shape[-2] == 1 else x @ y.transpose(-1, -2)


def _times(scores: Tensor, x: Tensor) -> Tensor:
    """scores x, likewise."""
    return scores * x if x.shape[-2] == 1 else scores @ x


def running_max(x: Tensor) -> Tensor:
    """The maximum over all positions up to each, of x (B, H, chunks, chunk, m); at least LOWEST. It has no gradient.

    As `torch.cummax`, which walks down a column at a time, many times slower.
    """
    top = x.detach().clamp_min(LOWEST)
    for size in _sizes(top):
        early, late = _halves(top, size)
        late.copy_(torch.maximum(late, early[..., -1:, :]))
    before = F.pad(top[:, :, :, -1].cummax(2).values, (0, 0, 1, -1), value=LOWEST)
    return torch.maximum(top, before[..., None, :])


def running_logsumexp(b: Tensor) -> Tensor:
    """log sum_(j <= i) exp(b_j) over all positions up to each, of b (B, H, chunks, chunk, m); LOWEST where all is -inf.

    As `torch.logcumsumexp`, many times faster, with finite gradients where nothing has been added yet.
    """
    level = _RunningLogSumExp.apply(b)
    assert isinstance(level, Tensor)
    return level


class _RunningLogSumExp(Function):
    @staticmethod
    def forward(b: Tensor) -> Tensor:
        level = b.clamp_min(LOWEST)
        for size in _sizes(level):
            early, late = _halves(level, size)
            late.copy_(torch.logaddexp(late, early[..., -1:, :]))
        before = F.pad(level[:, :, :, -1].logcumsumexp(2), (0, 0, 1, -1), value=LOWEST)
        return torch.logaddexp(level, before[..., None, :])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """sum_(i >= j) exp(b_j - level_i) grad_i, as exp(b_j - level_j) later_j."""
        b, level = ctx.saved_tensors
        # later_j = sum_(i >= j) exp(level_j - level_i) grad_i: within blocks of doubling size, then over chunks.
        later = grad.clone(memory_format=torch.contiguous_format)
        for size in _sizes(level):
            (early, late), (early_level, late_level) = _halves(later, size), _halves(level, size)
            early.addcmul_((early_level - late_level[..., :1, :]).exp_(), late[..., :1, :])
        first, first_level = later[..., 0, :, None].flip(2), -level[..., 0, :].flip(2)
        chunks, reference = (x.flip(2) for x in states_before(first, first_level))
        later.addcmul_((level + reference[..., None, :]).exp_(), chunks.transpose(-1, -2))
        return later.mul_((b - level).exp_())


def _sizes(x: Tensor) -> Sequence[int]:
    """1, 2, 4, ... half of the chunk."""
    return [1 << bit for bit in range(x.shape[-2].bit_length() - 1)]


def _halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Views of the first and the second `size` positions of every 2 * size."""
    early, late = x.unflatten(-2, (-1, 2, size)).unbind(-3)
    return early, late
