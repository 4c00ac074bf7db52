"""Packed batches: every sequence as if it were alone, with little padding."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conformance.mechanisms import Case, those
from hasten.attention import FullAttention, FullSpec, Mask, MultiHeadAttention, Operator, Traits
from hasten.attention.packed import attend_packed, groups, pack, unpack
from hasten.errors import UserError

LENGTHS = [5, 1, 7, 3, 7, 11, 2, 6]
D, H = 8, 2


def packed_input(width: int = D) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(LENGTHS), width, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), torch.tensor(LENGTHS)


def layer(attention: Any) -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(D, H, attention).double().eval()


def may_be_padded(case: Case) -> bool:
    return not case.traits.key_padding or "right" in case.sides


def plain(traits: Traits) -> bool:
    """Whether `MultiHeadAttention` is its layer."""
    return not (traits.external or traits.second_projections or traits.unprojected)


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@those(lambda case: may_be_padded(case) and plain(case.traits))
def test_a_packed_sequence_is_as_it_is_alone(case: Case, causal: bool):
    if causal and case.traits.causal is None:
        pytest.skip("not claimed")
    attention, (x, lengths) = layer(case.build()), packed_input()
    out = attention.packed(x, lengths, causal)
    alone = torch.cat([attention(part[None], Mask(causal=causal))[0] for part in x.split(LENGTHS)])
    torch.testing.assert_close(out, alone, rtol=1e-10, atol=1e-10)
    wrt = [x, *attention.parameters()]
    found, expected = (torch.autograd.grad(y.square().sum(), wrt, materialize_grads=True) for y in (out, alone))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


class Watched(FullAttention):
    """Keeps the shapes and masks it is called with."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[tuple[int, ...], Mask]] = []

    def operator(self, q: Tensor, k: Tensor, mask: Mask) -> Operator:
        self.calls.append((tuple(q.shape), mask))
        return super().operator(q, k, mask)


def test_at_most_a_quarter_is_padding_and_equal_lengths_carry_no_mask():
    attention, (x, lengths) = layer(Watched()), packed_input()
    attention.packed(x, lengths)
    calls = attention.attention.calls
    places = [shape[0] * shape[2] for shape, _ in calls]
    tokens = [n if mask.keys is None else int(mask.keys.sum()) for n, (_, mask) in zip(places, calls, strict=True)]
    assert sum(tokens) == len(x)
    assert all(n >= 0.75 * of for n, of in zip(tokens, places, strict=True))
    assert 1 < len(calls) < len(LENGTHS) - 1
    assert all(mask.keys is None or not mask.keys.all() for _, mask in calls)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.sampled_from([0.0, 0.1, 0.25]))
def test_groups_hold_every_sequence_once_with_little_padding(lengths: list[int], most: float):
    found = groups(lengths, most)
    assert sorted(i for group in found for i in group) == list(range(len(lengths)))
    for group in found:
        longest, n_tokens = max(lengths[i] for i in group), sum(lengths[i] for i in group)
        assert lengths[group[0]] == longest
        assert n_tokens >= (1 - most) * longest * len(group)
    if not most:
        assert len(found) == len(set(lengths))


def test_values_may_have_a_width_of_their_own():
    (q, lengths), (v, _) = packed_input(), packed_input(6 * H)
    q, v = q.view(-1, H, 4), v.view(-1, H, 6)
    attention = FullAttention()
    out = attend_packed(attention, q, q, v, lengths, causal=True)
    for part, q_one, v_one in zip(*(x.split(LENGTHS) for x in (out, q, v)), strict=True):
        q_one, v_one = q_one.transpose(0, 1)[None], v_one.transpose(0, 1)[None]
        alone = attention.operator(q_one, q_one, Mask(causal=True)).apply(v_one)[0].transpose(0, 1)
        torch.testing.assert_close(part, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rest", [(), (3,), (2, 3)], ids=str)
def test_packing_and_unpacking_give_back_what_was_there(rest: tuple[int, ...]):
    x = torch.randn(3, 5, *rest, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(5) < torch.tensor([[3], [5], [1]])
    rows, lengths = pack(x, mask)
    assert lengths.tolist() == [3, 5, 1]
    assert torch.equal(rows, torch.cat([x[0, :3], x[1], x[2, :1]]))
    again, again_mask = unpack(rows, lengths)
    assert torch.equal(again_mask, mask)
    real = mask.view(3, 5, *[1] * len(rest))
    assert torch.equal(again, torch.where(real, x, 0.0))
    (gradient,) = torch.autograd.grad((again * x.detach()).sum(), x)
    assert torch.equal(gradient, torch.where(real, x, 0.0))


def test_padding_on_any_side_is_left_out_and_order_kept():
    mask = torch.tensor([[False, True, True, False], [True, False, True, True]])
    rows, lengths = pack(torch.arange(8).view(2, 4), mask)
    assert rows.tolist() == [1, 2, 4, 6, 7]
    assert unpack(rows, lengths)[0].tolist() == [[1, 2, 0], [4, 6, 7]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([5, 4]), "lengths sum to 9, but there are 10 rows"),
        (torch.tensor([5, 0, 5]), "sequence 1 has length 0"),
        (torch.tensor([12, -2]), "sequence 1 has length -2"),
        (torch.tensor([5.0, 5.0]), "of torch.float32"),
        (torch.tensor([True] * 10), "of torch.bool"),
        (torch.tensor([[5, 5]]), r"\(1, 2\)"),
        (torch.tensor(10), r"\(\) of torch.int64"),
        (torch.tensor([], dtype=torch.int64), r"\(0,\)"),
        ([5, 5], "lengths is list"),
    ],
    ids=str,
)
def test_lengths_that_do_not_fit_are_refused(lengths: Any, message: str):
    x = torch.randn(10, D, dtype=torch.float64)
    for call in (lambda: unpack(x, lengths), lambda: layer(FullSpec().build()).packed(x, lengths)):
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("unchecked")
def test_masks_that_do_not_fit_are_refused():
    x, mask = torch.randn(2, 3, D), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(UserError, match=r"of torch.float32; give torch.bool of shape \(2, 3\)"):
        pack(x, mask.float())
    with pytest.raises(UserError, match=r"mask is \(2, 2\)"):
        pack(x, mask[:, :2])
    with pytest.raises(UserError, match=r"mask is \(2,\)"):
        pack(x[:, 0, 0], mask[:, 0])
    mask[1] = False
    with pytest.raises(UserError, match="sequence 1 has length 0"):
        pack(x, mask)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("rows", [8, 6, 0])
def test_keys_and_values_of_more_or_fewer_tokens_are_refused(name: str, rows: int):
    x = {other: torch.randn(7, H, 4) for other in "qkv"} | {name: torch.randn(rows, H, 4)}
    with pytest.raises(UserError, match=f"{name} has {rows} rows"):
        attend_packed(FullAttention(), x["q"], x["k"], x["v"], torch.tensor([3, 4]))


def test_lengths_may_be_short_integers():
    attention, (x, lengths) = layer(FullSpec().build()), packed_input()
    assert torch.equal(attention.packed(x, lengths.int()), attention.packed(x, lengths))
