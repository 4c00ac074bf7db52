"""Performer where the conformance suite does not reach: the statistics of its features, extreme inputs."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hasten.attention import FullSpec, Mask
from hasten.attention.kernels.directions import Directions
from hasten.attention.kernels.performer import PerformerAttention, PerformerSpec

WIDTH = 16
VARIANTS = [{}, {"symmetric": True}]


def close(actual, expected, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def draw(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, WIDTH, generator=generator, dtype=dtype).requires_grad_() for _ in range(3))
    return q, k, v


def build(**options) -> PerformerAttention:
    return PerformerSpec(**{"features": 32, "d_head": WIDTH, **options}).build()


def kernel(x: Tensor, y: Tensor, **options) -> Tensor:
    """phi(x) . phi(y) by the formula, with the directions of the mechanism; x, y (n, width) count as scaled."""
    rows = build(**options).directions.rows.double()
    rows = torch.cat((rows, -rows)) if options.get("symmetric") else rows
    return (
        (x @ rows.T - x.square().sum(-1, keepdim=True) / 2 + y @ rows.T - y.square().sum(-1, keepdim=True) / 2)
        .exp()
        .mean(-1)
    )


def points(n: int = 40) -> tuple[Tensor, Tensor]:
    """Scaled queries and keys of norm about 1."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) / math.sqrt(WIDTH) for _ in range(2))
    return x, y


# The estimate


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_kernel_is_estimated_without_bias(variant: dict):
    x, y = points(20)
    estimates = torch.stack([kernel(x, y, seed=seed, **variant) for seed in range(300)])
    error = estimates.mean(0) / (x * y).sum(-1).exp() - 1
    deviation = estimates.std(0) / (x * y).sum(-1).exp() / math.sqrt(300)
    # 20 means, each within 4 of its standard deviations.
    assert (error.abs() < 4 * deviation).all()
    assert deviation.max() < 0.05


def error(draws: int = 60, **options) -> float:
    """Root mean square of the relative error of the kernel."""
    x, y = points()
    exact = (x * y).sum(-1).exp()
    errors = torch.stack([kernel(x, y, seed=seed, **options) / exact - 1 for seed in range(draws)])
    return errors.square().mean().sqrt().item()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_its_error_falls_with_the_square_root_of_the_features(variant: dict):
    counts = (16, 32, 64, 128, 256, 512, 1024)
    errors = [error(features=m, **variant) for m in counts]
    power = np.polyfit(np.log(counts), np.log(errors), 1)[0]
    assert power == pytest.approx(-0.5, abs=0.05)


def test_opposite_directions_lower_the_error():
    assert error(features=16, symmetric=True) < 0.9 * error(features=32)  # as many features


@pytest.mark.parametrize("m", [8, 16, 64, 256])
def test_orthogonal_directions_are_better_than_independent_ones(m: int):
    # Of norm 1/2: the error of longer vectors is that of a few rare directions.
    x, y = (z / 2 for z in points())
    errors = []
    for orthogonal in (True, False):
        drawn = [Directions(m, WIDTH, seed=seed, orthogonal=orthogonal).rows.double() for seed in range(200)]
        logs = sum(z @ torch.stack(drawn).mT - z.square().sum(-1, keepdim=True) / 2 for z in (x, y))
        errors.append(((logs - (x * y).sum(-1, keepdim=True)).exp().mean(-1) - 1).square().mean().sqrt())
    assert errors[0] < 0.98 * errors[1]


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_attention_comes_near_softmax_as_features_grow(causal: bool):
    q, k, v = (scale * x.detach() for scale, x in zip((0.5, 0.5, 1.0), draw(60), strict=True))
    exact = FullSpec().build().operator(q, k, Mask(causal=causal)).apply(v)
    errors = [
        torch.stack([build(features=m, seed=s).operator(q, k, Mask(causal=causal)).apply(v) - exact for s in range(8)])
        .square()
        .mean()
        .sqrt()
        for m in (16, 256, 4096)
    ]
    assert errors[1] < errors[0] / 2
    assert errors[2] < errors[1] / 2
    assert errors[2] < 0.1


# Numbers


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_long_sequences_make_each_head_apart_and_equal_the_definition(causal: bool):
    q, k, v = (x.detach().float() for x in draw(1200))
    attention, mask = build(features=256), Mask(causal=causal)
    out = attention.operator(q, k, mask).apply(v)
    close(out, attention.reference(q, k, mask) @ v, 1e-5)


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_lone_key_is_read_whatever_its_size_and_direction(variant: dict, causal: bool):
    q, _, v = (x.detach() for x in draw(1, torch.float32))
    for size in (1.0, 30.0, 1000.0):
        for sign in (1, -1):
            out = build(**variant).operator(size * q, sign * size * q, Mask(causal=causal)).apply(v)
            close(out, v, 1e-6)


def test_keys_that_shrink_within_a_chunk_leave_no_row_empty():
    # Large keys have features below exp(-3000), small ones of about 1: rows before the small ones must still read.
    q, k, v = draw(100, torch.float32)
    k = (k.detach() * torch.linspace(100, 1, 100)[:, None]).requires_grad_()
    attention, mask = build(), Mask(causal=True)
    out = attention.operator(q, k, mask).apply(v)
    ones = attention.operator(q, k, mask).apply(torch.ones_like(v))
    close(ones, torch.ones_like(v), 1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().mean(), (q, k, v)))
