"""Efficient attention where the conformance suite does not reach: its two softmaxes, long and extreme inputs."""

import pytest
import torch
from torch import Tensor

from hasten.attention import Mask
from hasten.attention.kernels.efficient import EfficientSpec


def close(actual, expected, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def draw(n: int, width: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, width, generator=generator, dtype=dtype).requires_grad_() for _ in range(3))
    return q, k, v


def test_it_is_a_softmax_over_features_times_one_over_positions():
    q, k, v = draw(9)
    out = EfficientSpec().build().operator(q, k, Mask()).apply(v)
    close(out, q.softmax(-1) @ (k.softmax(2).mT @ v))


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_the_weights_of_a_row_sum_to_one_and_none_is_negative(causal: bool):
    q, k, _ = (5 * x for x in draw(200))
    weights = EfficientSpec().build().operator(q, k, Mask(causal=causal)).dense()
    close(weights.sum(-1), torch.ones(1, 2, 200, dtype=torch.float64))
    assert (weights >= 0).all()


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_entries_of_hundreds_neither_overflow_nor_empty_a_row(causal: bool):
    q, k, v = ((200 * x).detach().requires_grad_() for x in draw(150, dtype=torch.float32))
    attention, mask = EfficientSpec().build(), Mask(causal=causal)
    out = attention.operator(q, k, mask).apply(v)
    exact = attention.reference(q.double(), k.double(), mask) @ v.double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-1)  # v is of the order of 200
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().mean(), (q, k, v)))
