"""Random feature attention where the conformance suite does not reach: its kernel, its gate, its denominators."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.attention import Mask
from hasten.attention.kernels.rfa import FLOOR, RandomFeatureAttention, RFASpec
from hasten.errors import UserError

WIDTH = 8


def close(actual, expected, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def draw(n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, WIDTH, generator=generator, dtype=dtype).requires_grad_() for _ in range(3))
    return q, k, v


def build(**options) -> RandomFeatureAttention:
    return RFASpec(**{"features": 32, "d_head": WIDTH, "n_heads": 2, **options}).build()


def pairs(n: int = 20) -> tuple[Tensor, Tensor]:
    """Unit vectors, (1, 1, n, WIDTH) each."""
    generator = torch.Generator().manual_seed(3)
    x, y = (F.normalize(torch.randn(1, 1, n, WIDTH, generator=generator, dtype=torch.float64), dim=-1) for _ in "xy")
    return x, y


# The kernel


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_the_kernel_is_the_gaussian_one_in_the_mean(sigma: float):
    x, y = pairs()
    estimates = []
    for seed in range(300):
        attention = build(seed=seed, sigma=sigma)
        estimates.append((attention.features(x) * attention.features(y)).sum(-1).flatten())
    exact = (-(sigma**2) * (x - y).square().sum(-1) / 2).exp().flatten()
    deviation = torch.stack(estimates).std(0) / math.sqrt(300)
    assert ((torch.stack(estimates).mean(0) - exact).abs() < 4 * deviation).all()
    assert deviation.max() < 0.01


def test_its_error_falls_with_the_square_root_of_the_waves():
    x, y = pairs()
    exact, counts, errors = (-(x - y).square().sum(-1) / 2).exp(), (16, 32, 64, 128, 256, 512, 1024), []
    for m in counts:
        drawn = [build(seed=seed, features=m) for seed in range(60)]
        found = torch.stack([(attention.features(x) * attention.features(y)).sum(-1) - exact for attention in drawn])
        errors.append(found.square().mean().sqrt().item())
    assert np.polyfit(np.log(counts), np.log(errors), 1)[0] == pytest.approx(-0.5, abs=0.05)


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_attention_comes_near_the_gaussian_kernel_as_waves_grow(causal: bool):
    q, k, v = (x.detach() for x in draw(60))
    directions = [F.normalize(x, dim=-1) for x in (q, k)]
    weights = (-torch.cdist(*directions).square() / 2).exp()
    weights = weights.tril() if causal else weights
    exact, errors = weights / weights.sum(-1, keepdim=True) @ v, []
    for m in (16, 256, 4096):
        outs = [build(features=m, seed=s).operator(q, k, Mask(causal=causal)).apply(v) for s in range(8)]
        errors.append((torch.stack(outs) - exact).square().mean().sqrt())
    assert errors[1] < errors[0] / 2
    assert errors[2] < errors[1] / 2
    assert errors[2] < 0.03


def test_only_directions_of_queries_and_keys_are_compared():
    q, k, v = draw(9)
    out = build().operator(q, k, Mask()).apply(v)
    close(build().operator(3 * q, 0.2 * k, Mask()).apply(v), out)


def test_the_sharpness_is_learnt_for_every_entry():
    attention = build()
    with torch.no_grad():
        attention.sigma.copy_(torch.linspace(0.0, 2.0, WIDTH))
    q, k, v = draw(9)
    exact = (attention.sigma * (F.normalize(q, dim=-1)[:, :, :, None] - F.normalize(k, dim=-1)[:, :, None])).square()
    many = build(features=20000)
    many.load_state_dict({"sigma": attention.sigma.detach()}, strict=False)
    kernel = (many.features(q) @ many.features(k).mT).detach()
    close(kernel, (-exact.sum(-1) / 2).exp().detach(), 0.03)
    (gradient,) = torch.autograd.grad(attention.operator(q, k, Mask()).apply(v).square().sum(), attention.sigma)
    assert gradient.ne(0).all()


# The gate


def with_gate(bias: float, **options) -> RandomFeatureAttention:
    attention = build(gate=True, **options)
    with torch.no_grad():
        attention.past.bias.fill_(bias)  # type: ignore[union-attr]
    return attention


def test_a_constant_gate_is_exponential_decay():
    q, k, _ = draw(150)
    bias = 1.0
    gate = 1 / (1 + math.exp(-bias))
    attention = with_gate(bias)
    i, j = torch.arange(150)[:, None], torch.arange(150)
    decay = torch.where(j <= i, (1 - gate) * gate ** (i - j).double(), 0.0)
    weights = decay * (attention.features(q) @ attention.features(k).mT)
    total = torch.maximum(weights.sum(-1, keepdim=True), FLOOR * decay.sum(-1, keepdim=True))
    close(attention.operator(q, k, Mask(causal=True)).dense(), weights / total)


def test_a_gate_that_lets_everything_pass_is_no_gate():
    q, k, v = draw(150)
    ungated = build().operator(q, k, Mask(causal=True)).apply(v)
    close(with_gate(25.0).operator(q, k, Mask(causal=True)).apply(v), ungated, 1e-7)


def test_a_gate_that_lets_nothing_pass_reads_the_present_alone():
    # Each key resembles its own query, so that no weight is near the floor.
    q, _, v = draw(150)
    close(with_gate(-40.0).operator(q, q, Mask(causal=True)).apply(v), v)


def test_the_gate_reads_the_key():
    attention = build(gate=True)
    q, k, v = draw(20)
    with torch.no_grad():
        attention.past.weight[0, 0] = 2.0  # type: ignore[union-attr]
    before = attention.operator(q, k, Mask(causal=True)).apply(v)
    longer = k.detach().clone()
    longer[:, :, 10] *= 3.0  # the kernel does not see lengths
    after = attention.operator(q, longer, Mask(causal=True)).apply(v)
    close(after[:, :, :10], before[:, :, :10])
    close(after[:, 1], before[:, 1])  # the second head has no weights
    assert not torch.isclose(after[:, 0, 10:], before[:, 0, 10:]).any()


def test_without_a_causal_mask_all_queries_read_the_state_after_the_last_key():
    attention = with_gate(1.0)
    q, k, v = draw(30)
    last = attention.operator(q[:, :, 3:4], k, Mask(causal=True)).apply(v)
    close(attention.operator(q, k, Mask()).apply(v)[:, :, 3:4], last)


def test_the_gate_is_made_for_its_heads():
    with pytest.raises(UserError, match="made for n_heads = 2, got 3; give both the same"):
        build(gate=True).operator(torch.ones(1, 3, 4, WIDTH), torch.ones(1, 3, 4, WIDTH), Mask(causal=True))


# The denominator


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_a_denominator_near_zero_is_held_at_the_floor(causal: bool):
    # So sharp a kernel is 0 for all pairs here: its estimate is noise of both signs.
    q, k, v = draw(100)
    attention, mask = build(sigma=20.0), Mask(causal=causal)
    weights = attention.features(q) @ attention.features(k).mT
    number = torch.full((100,), 100.0, dtype=torch.float64)
    if causal:
        weights, number = weights.tril(), torch.arange(1, 101, dtype=torch.float64)
    total = weights.sum(-1)
    assert (total < 0).any()
    assert (total > FLOOR * number).any()
    operator = attention.operator(q, k, mask)
    close(operator.dense(), weights / torch.maximum(total, FLOOR * number)[..., None])
    close(
        operator.dense().sum(-1)[total > FLOOR * number],
        torch.tensor(1.0, dtype=torch.float64).expand((total > FLOOR * number).sum()),
    )
    assert operator.dense().abs().max() <= 1 / FLOOR
    assert all(x.isfinite().all() for x in torch.autograd.grad(operator.apply(v).sum(), (q, k, v)))


def test_a_fast_gate_over_a_long_sequence_neither_overflows_nor_forgets_the_present():
    q, k, v = (x.detach() for x in draw(5000, torch.float32))
    attention = with_gate(-3.0)  # what came before is divided by 20 at every step
    out = attention.operator(q, k, Mask(causal=True)).apply(v)
    tail = attention.double().operator(q[:, :, -60:].double(), k[:, :, -60:].double(), Mask(causal=True))
    close(out[:, :, -1].double(), tail.apply(v[:, :, -60:].double())[:, :, -1], 1e-3)
