"""Masks, against one condition at a time."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from hasten.attention import FullSpec, Mask
from hasten.attention.masks import causal, silence
from hasten.errors import UserError

CPU = torch.device("cpu")


@given(st.integers(0, 6), st.integers(0, 6), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 9))
def test_a_mask_is_the_conjunction_of_its_conditions(
    n_queries: int, n_keys: int, use_causal: bool, use_keys: bool, use_allowed: bool, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(2, n_keys, generator=generator) < 0.5
    allowed = torch.rand(2, 3, n_queries, n_keys, generator=generator) < 0.5
    mask = Mask(causal=use_causal, keys=keys if use_keys else None, allowed=allowed if use_allowed else None)
    dense = mask.dense(n_queries, n_keys, CPU)
    assert (dense is None) == (mask == Mask())
    dense = torch.ones(1, 1, 1, 1, dtype=torch.bool) if dense is None else dense
    dense = dense.expand(2, 3, n_queries, n_keys)
    for b in range(2):
        for h in range(3):
            for i in range(n_queries):
                for j in range(n_keys):
                    may = not (use_causal and j > i + n_keys - n_queries)
                    may = may and not (use_keys and not keys[b, j])
                    may = may and not (use_allowed and not allowed[b, h, i, j])
                    assert bool(dense[b, h, i, j]) == may


def test_the_last_query_sees_every_key():
    assert causal(2, 4, CPU).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert causal(3, 2, CPU).tolist() == [[False, False], [True, False], [True, True]]
    assert causal(1, 3, CPU).all()


def test_silence_removes_what_stands_at_padding_and_its_gradient():
    x = torch.tensor([[[[1.0], [math.nan], [3.0]]], [[[math.inf], [5.0], [6.0]]]], requires_grad=True)
    keys = torch.tensor([[True, False, True], [False, True, True]])
    quiet = silence(x, keys)
    assert quiet.tolist() == [[[[1.0], [0.0], [3.0]]], [[[0.0], [5.0], [6.0]]]]
    (gradient,) = torch.autograd.grad(quiet.square().sum(), x)
    assert gradient.tolist() == [[[[2.0], [0.0], [6.0]]], [[[0.0], [10.0], [12.0]]]]
    assert silence(x, None) is x


def test_shapes_are_enforced_in_tests():
    attention, x = FullSpec().build(), torch.zeros(2, 3, 4, 5)
    with pytest.raises(TypeCheckError):
        attention.operator(x, x[:, :2], Mask())
    with pytest.raises(TypeCheckError):
        attention.operator(x, x, Mask()).apply(x[0])


@pytest.mark.parametrize("what", ["keys", "allowed", "marked"])
def test_a_mask_of_numbers_is_refused(what: str):
    # Where shapes are enforced, as in these tests, the constructor itself refuses earlier.
    given = SimpleNamespace(**{"keys": None, "allowed": None, "marked": None, what: torch.ones(2, 3)})
    with pytest.raises(UserError, match=rf"{what} is of type torch\.float32; give torch\.bool"):
        Mask.__post_init__(given)  # type: ignore[arg-type]
