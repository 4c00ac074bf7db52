"""Longformer against transformers: equal where that is right, and where it is not, how."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten.attention import LongformerSpec, Mask, MultiHeadAttention
from huggingface_attention import (
    SIZES,
    STILL,
    as_found,
    assert_equal,
    differs,
    gradients,
    like,
    seeded,
    sequence,
    texts,
    transformers,
)

longformer = pytest.importorskip("transformers.models.longformer.modeling_longformer")

N = 24
# In single precision, which is that of their softmax whatever the inputs are.
SINGLE = 1e-5
KEYS = torch.tensor([[True] * N, [True] * 15 + [False] * 9, [True] * 2 + [False] * 22])
MARKED = torch.zeros(3, N, dtype=torch.bool)
MARKED[0, [0, 5, 9]] = MARKED[1, 3] = True


def their_longformer(total: int) -> Any:
    sizes = {**SIZES, **STILL, "attention_window": [total], "num_hidden_layers": 1}
    return seeded(longformer.LongformerSelfAttention(transformers.LongformerConfig(**sizes), 0))


def run_longformer(theirs: Any, x: Tensor, keys: Tensor, marked: Tensor) -> Tensor:
    added = torch.zeros(x.shape[:2]).masked_fill(marked, 1e4).masked_fill(~keys, -1e4)
    return with_mask(theirs, x, added)


def with_mask(theirs: Any, x: Tensor, mask: Tensor) -> Tensor:
    is_global = mask > 0
    return theirs(x, mask, mask < 0, is_global, bool(is_global.any()))[0]


def our_longformer(theirs: Any, total: int) -> MultiHeadAttention:
    return like(theirs, LongformerSpec(window=total // 2, first=0, marked=True)).to(theirs.query.weight.dtype)


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("global_tokens", [False, True], ids=["no globals", "globals"])
@pytest.mark.parametrize("total", [4, 6, 8, 12])
def test_longformer_is_theirs_with_half_their_window_on_each_side(total: int, global_tokens: bool, side: str):
    theirs, x = their_longformer(total), sequence(N, 3).float().requires_grad_()
    ours = our_longformer(theirs, total)
    keys = {"none": torch.ones_like(KEYS), "right": KEYS, "left": KEYS.flip(1)}[side]
    marked = (MARKED if side != "left" else MARKED.flip(1)) & global_tokens
    out, expected = ours(x, Mask(keys=keys, marked=marked))[keys], run_longformer(theirs, x, keys, marked)[keys]
    assert_equal(out, expected, SINGLE)
    sets = [[theirs.query, theirs.key, theirs.value], [theirs.query_global, theirs.key_global, theirs.value_global]]
    for own, linears in zip((ours.in_proj_weight, ours.second_proj_weight), sets, strict=True):
        weights = [linear.weight for linear in linears]
        found = gradients(out, [x, own])
        wanted = gradients(expected, [x, *weights])
        assert_equal(found, (wanted[0], torch.cat(wanted[1:])), 10 * SINGLE)


@as_found
def test_their_longformer_computes_its_softmax_in_single_precision():
    theirs, x, everything = their_longformer(4).double(), sequence(N, 3).requires_grad_(), torch.ones_like(KEYS)
    ours = our_longformer(theirs, 4)
    q, k, v = ours._project(x, ours._all)
    exact = (ours.attention.reference(q, k, Mask()) @ v).transpose(1, 2).flatten(2)
    assert_equal(ours(x), exact, 1e-12)
    assert (run_longformer(theirs, x, everything, ~everything) - exact).abs().max() > 1e-8
    # What stands for minus infinity in double precision is more than single precision holds.
    assert gradients(run_longformer(theirs, x, KEYS, MARKED)[KEYS], [x])[0].isnan().any()


@as_found
def test_their_longformer_takes_even_windows_from_4_and_lengths_that_are_multiples():
    with pytest.raises(AssertionError, match="even"):
        their_longformer(3)
    everything = torch.ones(3, N, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="expanded size"):
        run_longformer(their_longformer(2), sequence(N, 3).float(), everything, ~everything)
    odd = sequence(N - 1, 3).float()
    with pytest.raises(AssertionError, match="multiple"):
        run_longformer(their_longformer(4), odd, everything[:, 1:], ~everything[:, 1:])
    assert our_longformer(their_longformer(4), 2)(odd).isfinite().all()


@as_found
def test_their_longformer_gives_zeros_at_padding_but_lets_what_stands_there_into_real_tokens():
    theirs, x = their_longformer(4), sequence(N, 3).float()
    assert not run_longformer(theirs, x, KEYS, MARKED)[~KEYS].any()
    junk = x.masked_fill(~KEYS[..., None], math.nan)
    assert run_longformer(theirs, junk, KEYS, MARKED)[KEYS].isnan().any()
    ours = our_longformer(theirs, 4)
    assert torch.equal(*(ours(given, Mask(keys=KEYS, marked=MARKED))[KEYS] for given in (junk, x)))


@as_found
def test_their_longformer_counts_distance_over_padding_inside_a_sequence():
    theirs, x, keys = their_longformer(4), sequence(N, 3).float(), torch.ones_like(KEYS)
    keys[1, 5:9] = False
    ours, mask = our_longformer(theirs, 4), Mask(keys=keys, marked=MARKED & keys)
    different = differs(run_longformer(theirs, x, keys, MARKED & keys), ours(x, mask)) & keys
    # Tokens within a window of the gap; token 3 is global.
    assert different[1].nonzero()[:, 0].tolist() == [4, 9, 10]
    assert not different[[0, 2]].any()
    alone = ours(x[1:2, keys[1]], Mask(marked=MARKED[1:2, keys[1]]))
    assert_equal(ours(x, mask)[1:2, keys[1]], alone, SINGLE)


@as_found
def test_a_mask_of_ones_and_zeros_makes_every_token_of_their_layer_global_and_padding_readable():
    theirs, x = their_longformer(4), sequence(N, 3).float()
    out = with_mask(theirs, x, KEYS.float())
    assert_equal(out, our_longformer(theirs, 4)(x, Mask(marked=KEYS)), SINGLE)


def longformer_model() -> Any:
    sizes = {**SIZES, **STILL, "attention_window": 8, "num_hidden_layers": 1, "max_position_embeddings": 64}
    return seeded(transformers.LongformerModel(transformers.LongformerConfig(**sizes)))


@as_found
@torch.no_grad()
def test_their_longformer_model_takes_any_number_but_1_silently_for_no_global_token_or_none_at_all():
    model, (ids, mask) = longformer_model(), texts(9, 16)
    first = torch.zeros_like(mask)
    first[:, 0] = 1

    def run(attention: Tensor, marks: Tensor | None = None) -> Tensor:
        return model(ids, attention_mask=attention, global_attention_mask=marks).last_hidden_state[mask.bool()]

    none, right = run(mask), run(mask, first)
    assert not torch.allclose(right, none, atol=1e-3)
    for number in (2, 3):
        assert torch.equal(run(mask, number * first), none)
    without = mask * (1 - first)
    assert torch.equal(run(mask, -first), run(without))
    assert torch.equal(run(mask + first), right)
    # The additive form of a mask, 0 and -10000, passes for one without padding.
    assert not torch.allclose(run((1 - mask) * -10000), none, atol=1e-3)


@as_found
@torch.no_grad()
def test_mixed_lengths_are_right_in_their_longformer_model():
    model, lengths = longformer_model(), (1, 3, 21)
    ids, mask = texts(*lengths)
    together = model(ids, attention_mask=mask).last_hidden_state
    for b, length in enumerate(lengths):
        alone = model(ids[b : b + 1, :length], attention_mask=mask[b : b + 1, :length]).last_hidden_state
        assert_equal(together[b : b + 1, :length], alone, SINGLE)
