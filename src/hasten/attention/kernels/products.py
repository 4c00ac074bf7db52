"""Products and ratios with gradients of their own, which keep the layout of what they belong to."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function


def summed_up(k: Tensor, v: Tensor) -> Tensor:
    """sum_j k_j v_j^T, (..., m, D), of k (..., S, m) and v (..., S, D)."""
    if torch.compiler.is_compiling():
        return k.transpose(-1, -2) @ v
    total = _SummedUp.apply(k, v)
    assert isinstance(total, Tensor)
    return total


class _SummedUp(Function):
    """torch's own gradient of a transposed operand is transposed, and whoever reads it next copies it."""

    @staticmethod
    def forward(k: Tensor, v: Tensor) -> Tensor:
        return k.transpose(-1, -2) @ v

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        k, v = ctx.saved_tensors
        return v @ grad.transpose(-1, -2), k @ grad


def totals(k: Tensor, v: Tensor) -> Tensor:
    """The same, and in a last column sum_j k_j."""
    return torch.cat((summed_up(k, v), k.sum(-2)[..., None]), dim=-1)


def with_ones(v: Tensor) -> Tensor:
    """`v` with a column of ones, whose sum is the sum of the weights."""
    return torch.cat((v, v.new_ones(()).expand(*v.shape[:-1], 1)), dim=-1)


def divided(sums: Tensor, floor: Tensor | None) -> Tensor:
    """All columns but the last divided by the last, or by the floor where that is larger; 0 where both are 0."""
    if torch.compiler.is_compiling():
        return sums[..., :-1] * _inverse(sums, floor)
    out = _Divided.apply(sums, floor)
    assert isinstance(out, Tensor)
    return out


def _inverse(sums: Tensor, floor: Tensor | None) -> Tensor:
    total = sums[..., -1:] if floor is None else torch.maximum(sums[..., -1:], floor)
    return torch.where(total > 0, total, 1.0).reciprocal()


class _Divided(Function):
    """torch's own gradient of a slice is as large as what it was cut from, and there are two slices."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, floor: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(sums, floor)
        return sums[..., :-1] * _inverse(sums, floor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        sums, floor = ctx.saved_tensors
        inverse, last = _inverse(sums, floor), sums[..., -1:]
        slope = -(grad * sums[..., :-1]).sum(-1, keepdim=True) * inverse.square()
        least = torch.zeros_like(last) if floor is None else floor
        at_last = torch.where(last > least, slope, 0.0)
        at_floor = None if floor is None else torch.where(last > floor, 0.0, slope).sum_to_size(floor.shape)
        grad_sums = F.pad(grad, (0, 1)).mul_(inverse)
        grad_sums[..., -1:] = at_last
        return grad_sums, at_floor
