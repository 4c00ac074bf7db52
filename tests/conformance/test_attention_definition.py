"""The operator is its definition: values, gradients, lengths, empty rows; and the traits are true."""

import pytest
import torch
from torch import Tensor

from conformance.mechanisms import (
    CASES,
    SUPPORT,
    Case,
    assert_equal,
    each,
    each_mask,
    gradients,
    inputs,
    make_mask,
    those,
)
from hasten.attention import ATTENTIONS, Mask
from hasten.errors import UserError


def test_every_mechanism_of_the_library_is_a_case():
    missing = set(ATTENTIONS) - {type(case.spec) for case in CASES if not case.twin}
    assert not missing, "add a Case to CASES that is no twin"


# O1, O2: the operator is its definition


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
@each_mask
def test_the_operator_equals_the_definition_and_so_do_its_gradients(
    case: Case, mask: str, dtype: torch.dtype, tolerance: float
):
    attention, given = case.build(), make_mask(mask, 7, 7)
    qkv = q, k, v = tuple(x.detach().to(dtype).requires_grad_() for x in inputs())
    operator, weights = attention.operator(q, k, given), attention.reference(q, k, given)
    expected = gradients(weights @ v, qkv)
    assert_equal(operator.dense(), weights, tolerance)
    assert_equal(gradients(operator.dense(), (q, k)), gradients(weights, (q, k)), tolerance)
    for same in (operator, operator.materialised()):
        assert_equal(same.apply(v), weights @ v, tolerance)
        assert_equal(gradients(same.apply(v), qkv), expected, tolerance)


@each_mask
def test_any_length_will_do(case: Case, mask: str):
    attention = case.build()
    for length in (1, 2, 3, 8, 11):
        given, (q, k, v) = make_mask(mask, length, length), inputs(length)
        weights = attention.reference(q, k, given)
        out = attention.operator(q, k, given).apply(v)
        assert_equal(out, weights @ v)
        assert_equal(gradients(out, (q, k, v)), gradients(weights @ v, (q, k, v)))


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (0, 0), (2, 0)])
@each
def test_nothing_has_no_outputs_or_is_refused(case: Case, batch: int, length: int):
    attention = case.build()
    traits = attention.traits
    q = k = v = torch.zeros(batch, 2, length, 4, dtype=torch.float64)
    keys = torch.zeros(batch, length, dtype=torch.bool) if traits.key_padding else None
    causal = traits.causal is not None
    # Neither, the one, the other, both, as far as the mechanism takes them.
    for mask in (Mask(), Mask(causal=causal), Mask(keys=keys), Mask(causal=causal, keys=keys)):
        if length or traits.empty:
            assert attention.operator(q, k, mask).apply(v).shape == q.shape
        else:
            with pytest.raises(UserError, match="got 0 queries and 0 keys; give at least one of each"):
                attention.operator(q, k, mask)


@each_mask
def test_values_may_have_a_width_of_their_own(case: Case, mask: str):
    attention, given = case.build(), make_mask(mask, 7, 7)
    q, k, v = inputs()
    wide = torch.cat((v, v.flip(2), v.sin()), dim=3)
    assert_equal(attention.operator(q, k, given).apply(wide), attention.reference(q, k, given) @ wide)


@each_mask
def test_gradients_are_those_of_finite_differences(case: Case, mask: str):
    attention, given = case.build(d_head=2), make_mask(mask, 7, 7)

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.operator(q, k, given).apply(v)

    assert torch.autograd.gradcheck(mixed, inputs(width=2), fast_mode=True)


@each
def test_a_gradient_reaches_every_parameter(case: Case):
    attention = case.build()
    q, k, v = inputs(attention.traits.max_length or 7)
    attention.operator(q, k, Mask()).apply(v).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in attention.parameters())


# O3


@each_mask
def test_a_shift_of_all_values_shifts_the_output(case: Case, mask: str):
    attention, given = case.build(), make_mask(mask, 7, 7)
    if not attention.traits.normalised:
        pytest.skip("not claimed: rows need not sum to 1")
    q, k, v = inputs()
    operator, shift = attention.operator(q, k, given), torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    sums = attention.reference(q, k, given).sum(-1, keepdim=True)
    assert ((sums == 0) | ((sums - 1).abs() < 1e-12)).all()
    assert_equal(operator.apply(v + shift) - operator.apply(v), sums.round() * shift)


# O9


@those(lambda case: case.traits.normalised and case.itself)
def test_a_single_key_is_read_as_it_is(case: Case):
    q, k, v = inputs(1)
    assert_equal(case.build().operator(q, k, Mask()).apply(v), v)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["keys", "pattern"])
@those(lambda case: case.itself and (case.traits.key_padding or case.traits.allowed))
def test_a_query_that_may_read_nothing_gets_exactly_nothing(case: Case, how: str, dtype: torch.dtype):
    attention = case.build()
    if not (attention.traits.key_padding if how == "keys" else attention.traits.allowed):
        pytest.skip("not claimed")
    keys = torch.tensor([[False] * 7, [True] * 7])
    masks = {"keys": Mask(keys=keys), "pattern": Mask(allowed=keys[:, None, None, :].expand(2, 1, 7, 7))}
    qkv = q, k, v = tuple(x.detach().to(dtype).requires_grad_() for x in inputs())
    operator = attention.operator(q, k, masks[how])
    for out in (operator.apply(v), operator.dense(), operator.materialised().apply(v)):
        assert out[0].eq(0).all()
        assert out[1].ne(0).any(-1).all()
        for gradient in gradients(out, qkv):
            assert gradient.isfinite().all()
            assert gradient[0].eq(0).all()
    assert attention.reference(q, k, masks[how])[0].eq(0).all()


@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 10), (2, 10), (10, 2), (10, 1)])
@those(lambda case: case.traits.cross or case.traits.suffix)
def test_queries_and_keys_of_different_lengths(case: Case, n_queries: int, n_keys: int):
    attention = case.build()
    qkv = q, k, v = inputs(n_queries, n_keys)
    for name, takes in SUPPORT.items():
        if takes(attention.traits):
            given = make_mask(name, n_queries, n_keys)
            out, weights = attention.operator(q, k, given).apply(v), attention.reference(q, k, given)
            assert_equal(out, weights @ v)
            assert_equal(gradients(out, qkv), gradients(weights @ v, qkv))


@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 10), (2, 10), (10, 2)])
@those(lambda case: case.traits.suffix and case.traits.causal == "strict" and case.prefix)
def test_the_last_query_is_aligned_with_the_last_key(case: Case, n_queries: int, n_keys: int):
    attention = case.build()
    q, k, v = inputs(n_queries, n_keys)
    out = attention.operator(q, k, Mask(causal=True)).apply(v)
    for i in range(n_queries):
        seen = max(0, i + n_keys - n_queries + 1)
        alone = attention.operator(q[:, :, i : i + 1], k[:, :, :seen], Mask()).apply(v[:, :, :seen]) if seen else 0.0
        assert_equal(out[:, :, i : i + 1], torch.zeros(2, 2, 1, 4, dtype=torch.float64) + alone)


# The traits are true


@each
def test_what_is_not_claimed_is_refused(case: Case):
    attention, traits = case.build(), case.traits
    q, k, _ = inputs()
    refused = {name: make_mask(name, 7, 7) for name, takes in SUPPORT.items() if not takes(traits)}
    for mask in refused.values():
        with pytest.raises(UserError):
            attention.operator(q, k, mask)
    if not traits.cross and not traits.suffix:
        with pytest.raises(UserError):
            attention.operator(q, k[:, :, :3], Mask())
    if traits.n_heads is not None:
        with pytest.raises(UserError):
            attention.operator(q.repeat(1, 2, 1, 1), k.repeat(1, 2, 1, 1), Mask())
    if traits.max_length is not None:
        with pytest.raises(UserError):
            attention.operator(*inputs(traits.max_length + 1)[:2], Mask())
    if not traits.step:
        with pytest.raises(TypeError, match=type(attention).__name__):
            attention.step(q, k, None)


@each
def test_only_what_is_needed_is_read(case: Case):
    qkv = inputs()
    moved = gradients(case.build().operator(*qkv[:2], Mask()).apply(qkv[2]), qkv)
    for name, gradient in zip(("query", "key"), moved[:2], strict=True):
        assert bool(gradient.any()) is (name in case.traits.needs)
