"""Full attention where the conformance suite does not reach: random shapes, and the choice among its computations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hasten.attention import FullAttention, FullSpec, Mask
from hasten.attention.full import FullOperator

LENGTHS = st.integers(1, 6)


def operands(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, Tensor, Mask]:
    """q, k, v and a mask of keys, a pattern, neither or both."""
    batch, heads, n_queries, n_keys, width, kind = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, heads, n, width, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (n_queries, n_keys, n_keys)
    )
    keys = torch.rand(batch, n_keys, generator=generator) < 0.6
    allowed = torch.rand(1 + kind % 2 * (batch - 1), 1, n_queries, n_keys, generator=generator) < 0.6
    return q, k, v, Mask(causal=kind >= 4, keys=keys if kind & 1 else None, allowed=allowed if kind & 2 else None)


@settings(max_examples=60, deadline=None)
@given(st.tuples(st.integers(1, 3), st.integers(1, 3), LENGTHS, LENGTHS, st.integers(1, 5), st.integers(0, 7)), LENGTHS)
def test_any_shape_and_mask_give_the_definition(shape: tuple[int, ...], seed: int):
    q, k, v, mask = operands(shape, seed)
    attention = FullSpec().build()
    operator, weights = attention.operator(q, k, mask), attention.reference(q, k, mask)
    torch.testing.assert_close(operator.apply(v), weights @ v, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(operator.dense(), weights, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(v[:, :, :1]).expand(*q.shape)
    expected = torch.autograd.grad(weights @ v, (q, k, v), cotangent, allow_unused=True, materialize_grads=True)
    actual = torch.autograd.grad(operator.apply(v), (q, k, v), cotangent, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_the_definition_is_a_softmax_of_scaled_products():
    q, k = torch.tensor([[[[2.0, 0.0, 0.0, 0.0]]]]), torch.tensor([[[[1.0, 0, 0, 0], [0, 1.0, 0, 0]]]])
    share = math.e / (math.e + 1)
    torch.testing.assert_close(FullSpec().build().reference(q, k, Mask())[0, 0, 0], torch.tensor([share, 1 - share]))


@pytest.mark.parametrize("kind", range(8))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_training_in_half_precision_on_a_cpu_forms_weights_and_equals_the_fused_kernel(
    monkeypatch: pytest.MonkeyPatch, kind: int, dtype: torch.dtype
):
    q, k, v, mask = operands((2, 2, 5, 5, 4, kind), 3)
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    operator = FullOperator(q, k, mask, 0.0)
    assert operator._prefers_weights()
    formed = operator.apply(v)
    formed_gradients = torch.autograd.grad(formed.float().square().sum(), (q, k, v))
    monkeypatch.setattr(FullOperator, "_prefers_weights", lambda self: False)
    fused = operator.apply(v)
    gradients = torch.autograd.grad(fused.float().square().sum(), (q, k, v))
    assert formed.dtype == fused.dtype == dtype
    torch.testing.assert_close(formed, fused, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(formed_gradients, gradients, rtol=5e-2, atol=5e-2)


def test_weights_are_formed_only_where_that_is_faster():
    def prefers(dtype: torch.dtype, length: int) -> bool:
        x = torch.empty(1, 1, length, 1, dtype=dtype)
        return FullOperator(x, x, Mask(), 0.0)._prefers_weights()

    assert prefers(torch.bfloat16, 512)
    assert not prefers(torch.bfloat16, 513)
    assert not prefers(torch.float32, 4)
    with torch.no_grad():
        assert not prefers(torch.bfloat16, 4)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(keys=torch.ones(2, 0, dtype=torch.bool))], ids=str)
def test_without_any_key_the_output_is_nothing(mask: Mask):
    q, k = torch.ones(2, 1, 3, 4, requires_grad=True), torch.ones(2, 1, 0, 4)
    out = FullSpec().build().operator(q, k, mask).apply(k)
    assert out.shape == (2, 1, 3, 4)
    assert out.eq(0).all()
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert gradient.eq(0).all()


def test_scores_beyond_the_range_of_exp_are_no_problem():
    q, k, v = torch.full((1, 1, 2, 4), 1e3), torch.full((1, 1, 2, 4), 1e3), torch.tensor([[[[1.0] * 4, [3.0] * 4]]])
    operator = FullSpec().build().operator(q, k, Mask(keys=torch.tensor([[True, True]])))
    assert operator.apply(v).eq(2).all()
    assert operator.dense().eq(0.5).all()


def test_dropout_stands_only_in_training():
    x = torch.randn(1, 1, 6, 4)
    attention = FullAttention(dropout=0.5)
    assert not torch.equal(attention.operator(x, x, Mask()).apply(x), attention.eval().operator(x, x, Mask()).apply(x))
    assert torch.equal(attention.operator(x, x, Mask()).apply(x), FullAttention().operator(x, x, Mask()).apply(x))
