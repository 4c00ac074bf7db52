"""Sinkhorn attention added to full attention."""

import pytest
import torch

from conformance import test_attention_causality as causality
from conformance import test_attention_definition as definition
from conformance import test_attention_independence as independence
from conformance import test_attention_precision as precision
from conformance.mechanisms import Case, assert_equal, inputs
from hasten.attention import FullAttention, Mask, SinkhornSpec

CASE = Case("sinkhorn, mixture", SinkhornSpec(block=3, iterations=3, mixture=True), prefix=False)
CUT = Case("sinkhorn, cut, mixture", SinkhornSpec(block=2, cut=2, iterations=3, mixture=True))


@pytest.mark.parametrize("causal", [False, True])
def test_one_block_and_full_attention_are_full_attention_twice(causal: bool):
    (q, k, v), mask = inputs(8), Mask(causal=causal)
    operator = SinkhornSpec(block=8, mixture=True).build().eval().operator(q, k, mask)
    full = FullAttention().operator(q, k, mask)
    assert_equal(operator.apply(v), 2 * full.apply(v))
    assert_equal(operator.dense(), 2 * full.dense())


def test_rows_sum_to_two():
    q, k, _ = inputs(9)
    attention = CASE.build()
    assert_equal(attention.operator(q, k, Mask()).dense().sum(3), torch.full((2, 2, 9), 2.0, dtype=torch.float64))
    assert not attention.traits.normalised


@pytest.mark.parametrize("mask", ["no mask", "causal", "padded keys", "causal, padded keys"])
def test_it_keeps_the_laws_of_definition_and_batch(mask: str):
    for case in (CASE, CUT) if "causal" not in mask else (CASE,):
        definition.test_the_operator_equals_the_definition_and_so_do_its_gradients(case, mask, torch.float64, 1e-10)
        definition.test_gradients_are_those_of_finite_differences(case, mask)
        independence.test_a_row_of_a_batch_does_not_see_the_others(case, mask)
        precision.test_training_in_half_precision_is_finite_and_accurate_at_ordinary_scores(case, mask)


@pytest.mark.parametrize("chunks", [[1] * 7, [3, 1, 3]], ids=str)
def test_steps_equal_the_sequence(chunks: list[int]):
    attention, (q, k, v) = CASE.build(), inputs(7)
    whole = attention.operator(q, k, Mask(causal=True)).apply(v)
    outs, keys, values = [], None, None
    for parts in zip(*(x.split(chunks, dim=2) for x in (q, k, v)), strict=True):
        step, keys = attention.step(*parts[:2], keys)
        out, values = step.apply(parts[2], values)
        outs.append(out)
    assert_equal(torch.cat(outs, dim=2), whole)


@pytest.mark.usefixtures("unchecked")
def test_it_is_causal_padded_and_exported():
    causality.test_what_comes_later_changes_nothing(CASE)
    causality.test_states_follow_their_rows(CASE)
    for side in ("left", "interior", "right"):
        independence.test_padding_is_the_same_as_dropping(CASE, side, True)
        independence.test_padding_is_the_same_as_dropping(CUT, side, False)
    for case in (CASE, CUT):
        definition.test_what_is_not_claimed_is_refused(case)
        precision.test_it_exports_with_a_dynamic_length(case)
