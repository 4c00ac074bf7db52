"""What must not be seen is not seen: padding, other rows of the batch, other heads, the order of positions."""

import math

import pytest
import torch

from conformance.mechanisms import SIDES, Case, assert_equal, each, each_mask, gradients, inputs, make_mask, those
from hasten.attention import Mask

# O4


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("side", SIDES)
@those(lambda case: case.traits.key_padding)
def test_padding_is_the_same_as_dropping(case: Case, side: str, causal: bool):
    attention = case.build()
    if side not in case.sides or (causal and attention.traits.causal is None):
        pytest.skip("not claimed")
    real = {"right": [0, 1, 2, 3, 4], "left": [3, 4, 5, 6, 7], "interior": [0, 2, 3, 6, 7]}[side]
    keys = torch.zeros(2, 8, dtype=torch.bool)
    keys[:, real] = True
    qkv = inputs(5)
    alone = attention.operator(*qkv[:2], Mask(causal=causal)).apply(qkv[2])
    expected = gradients(alone, qkv)
    seen = []
    for junk in (math.nan, 1e10, 0.0):
        # The queries of padding are finite: their outputs are nobody's concern, but they are computed.
        padded = [torch.full((2, 2, 8, 4), x, dtype=torch.float64) for x in (1.0, junk, junk)]
        for whole, part in zip(padded, qkv, strict=True):
            whole[:, :, real] = part.detach()
            whole.requires_grad_()
        operator = attention.operator(padded[0], padded[1], Mask(causal=causal, keys=keys))
        assert_equal(operator.materialised().apply(padded[2])[:, :, real], alone)
        out = operator.apply(padded[2])[:, :, real]
        seen.append(out)
        assert_equal(out, alone)
        for gradient, wanted in zip(gradients(out, tuple(padded)), expected, strict=True):
            assert_equal(gradient[:, :, real], wanted)
            assert not gradient.masked_fill(keys[:, None, :, None], 0.0).any()
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


@those(lambda case: case.traits.key_padding)
def test_a_promise_of_silence_changes_nothing_when_it_is_kept(case: Case):
    attention, keys = case.build(), make_mask("padded keys", 7, 7).keys
    assert keys is not None
    q, k, v = inputs()
    qkv = q, *(x.detach().masked_fill(~keys[:, None, :, None], 0.0).requires_grad_() for x in (k, v))
    out, expected = (
        attention.operator(*qkv[:2], Mask(keys=keys, silent=silent)).apply(qkv[2]) for silent in (True, False)
    )
    assert_equal(out, expected)
    assert_equal(gradients(out, qkv), gradients(expected, qkv))


# O5


@each_mask
def test_a_row_of_a_batch_does_not_see_the_others(case: Case, mask: str):
    attention, given = case.build(), make_mask(mask, 7, 7)
    q, k, v = inputs()
    together = attention.operator(q, k, given).apply(v)
    for i in range(2):
        one = slice(i, i + 1)
        own = Mask(
            causal=given.causal,
            keys=None if given.keys is None else given.keys[one],
            allowed=None if given.allowed is None else given.allowed[one],
            marked=None if given.marked is None else given.marked[one],
        )
        assert_equal(attention.operator(q[one], k[one], own).apply(v[one]), together[one])


@each
def test_a_head_does_not_see_the_others(case: Case):
    attention = case.build()
    q, k, v = inputs()
    out = attention.operator(q, k, Mask()).apply(v)
    changed = [x.detach().clone() for x in (q, k, v)]
    for x in changed:
        x[:, 0] += 1.0
    again = attention.operator(changed[0], changed[1], Mask()).apply(changed[2])
    assert torch.equal(again[:, 1], out[:, 1])
    assert not torch.equal(again[:, 0], out[:, 0])


# O8


@those(lambda case: case.equivariant)
def test_order_means_nothing(case: Case):
    attention, order = case.build(), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    q, k, v = inputs()
    moved = attention.operator(q[:, :, order], k[:, :, order], Mask()).apply(v[:, :, order])
    assert_equal(moved, attention.operator(q, k, Mask()).apply(v)[:, :, order])
