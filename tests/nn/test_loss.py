"""Label-smoothed cross-entropy, against its formula in plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.nn.loss import cross_entropy


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(1, 6), st.floats(0, 0.9), st.integers(0, 99))
def test_the_sum_is_the_formula(rows: int, vocabulary: int, smoothing: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    target = torch.randint(vocabulary, (rows,), generator=generator)
    wanted = 0.0
    for row, label in zip(logits.tolist(), target.tolist(), strict=True):
        total = math.log(sum(math.exp(x) for x in row))
        surprises = [total - x for x in row]
        wanted += (1 - smoothing) * surprises[label] + smoothing * sum(surprises) / vocabulary
    assert cross_entropy(logits, target, smoothing).item() == pytest.approx(wanted, abs=1e-9)


def test_the_gradient_is_probability_minus_smoothed_target():
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    target, smoothing = torch.tensor([0, 3, 3]), 0.1
    (gradient,) = torch.autograd.grad(cross_entropy(logits, target, smoothing), logits)
    wanted = torch.full((3, 4), smoothing / 4, dtype=torch.float64)
    wanted[range(3), target] += 1 - smoothing
    torch.testing.assert_close(gradient, (logits.softmax(-1) - wanted).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_adds_up_in_float32(dtype: torch.dtype):
    # The sum, 4000 log 8, has no neighbour within 1 in either half precision.
    loss = cross_entropy(torch.zeros(4000, 8, dtype=dtype), torch.zeros(4000, dtype=torch.int64), 0.1)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(4000 * math.log(8), rel=1e-6)


def test_nothing_to_predict_costs_nothing():
    logits = torch.empty(0, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.empty(0, dtype=torch.int64), 0.1)
    assert loss.item() == 0
    loss.backward()
