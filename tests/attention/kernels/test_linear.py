"""Linear attention where the conformance suite does not reach: its maps, long sequences, extreme inputs."""

import math

import pytest
import torch
from torch import Tensor

from hasten.attention import Mask, MultiHeadAttention
from hasten.attention.kernels.linear import LinearSpec, elu_plus_one, relu_plus

FEATURES = ["elu", "relu"]


def close(actual, expected, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def draw(n: int, seed: int = 0, width: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, width, generator=generator, dtype=dtype).requires_grad_() for _ in range(3))
    return q, k, v


def test_the_maps_are_their_formulas():
    x = torch.tensor([-800.0, -30.0, -1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    close(elu_plus_one(x), torch.tensor([0.0, math.exp(-30), math.exp(-1), 1.0, 3.0], dtype=torch.float64), 1e-15)
    close(relu_plus(x), torch.tensor([0.001, 0.001, 0.001, 0.001, 2.001], dtype=torch.float64))
    (slope,) = torch.autograd.grad(elu_plus_one(x).sum(), x)
    close(slope, torch.tensor([0.0, math.exp(-30), math.exp(-1), 1.0, 1.0], dtype=torch.float64), 1e-15)


def test_small_features_keep_their_digits_in_float32():
    x = torch.tensor([-17.5, -40.0, -80.0])
    torch.testing.assert_close(elu_plus_one(x).double(), x.double().exp(), rtol=1e-5, atol=0.0)


def test_two_keys_are_weighed_by_products_of_features():
    q, k = torch.tensor([[[[1.0, -1.0]]]]), torch.tensor([[[[0.0, 0.0], [1.0, 0.0]]]])
    first, second = 2 + math.exp(-1), 4 + math.exp(-1)
    weights = LinearSpec().build().operator(q, k, Mask()).dense()[0, 0, 0]
    close(weights, torch.tensor([first, second]) / (first + second), 1e-6)


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("feature", FEATURES)
def test_constant_values_come_back_at_any_length(feature: str, causal: bool):
    q, k, _ = draw(3000, dtype=torch.float32)
    v = torch.full((1, 2, 3000, 3), 0.7)
    out = LinearSpec(feature=feature).build().operator(q, k, Mask(causal=causal)).apply(v)
    close(out, v, 1e-5)


@pytest.mark.parametrize("feature", FEATURES)
def test_queries_far_below_zero_still_read(feature: str):
    q, k, v = draw(5, dtype=torch.float32)
    low = (q - 300).detach().requires_grad_()
    attention = LinearSpec(feature=feature).build()
    for mask in (Mask(), Mask(causal=True)):
        out = attention.operator(low, k, mask).apply(v)
        exact = attention.reference(low.double(), k.double(), mask) @ v.double()
        close(out.double(), exact, 1e-5)
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (low, k, v)))


def test_it_stands_where_softmax_attention_stands():
    layer = MultiHeadAttention(16, 4, LinearSpec().build())
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    whole, state = layer(x, Mask(causal=True)), None
    for t in range(9):
        out, state = layer.step(x[:, t : t + 1], state)
        close(out, whole[:, t : t + 1], 1e-5)
