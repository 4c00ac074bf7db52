"""Random compositions of shapes: kernel, gradients, decoding and traced operation against the dense definition."""

import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from hasten.attention import FullAttention, Mask
from hasten.attention.patterns import PatternAttention, parse
from hasten.errors import UserError

SHAPES = st.one_of(
    st.builds("Local({}, {})".format, st.integers(0, 4), st.integers(0, 4)),
    st.builds("Local({}, dilation={})".format, st.integers(0, 2), st.integers(2, 4)),
    st.builds("Blocks({}, {}, {})".format, st.integers(1, 5), st.integers(0, 2), st.integers(0, 1)),
    st.builds("Strided({})".format, st.integers(1, 6)),
    st.builds("Summary({}, 1)".format, st.integers(1, 5)),
    st.builds("Global(first={}, last={}, rows={})".format, st.integers(1, 3), st.integers(0, 2), st.booleans()),
    st.builds("RandomBlocks({}, block={}, seed={})".format, st.integers(1, 2), st.integers(1, 3), st.integers(0, 9)),
    st.just("Marked()"),
    st.just("Causal()"),
)
PATTERNS = st.recursive(
    SHAPES, lambda part: st.builds("({} {} {})".format, part, st.sampled_from("||&"), part), max_leaves=4
)
LENGTHS = st.integers(1, 14)


CALLS = st.fixed_dictionaries(
    {
        "text": PATTERNS,
        "rows": st.integers(1, 5),
        "n_keys": LENGTHS,
        "n_queries": st.none() | LENGTHS,
        "seed": st.integers(0, 2**32),
        "padded": st.booleans(),
        "marks": st.booleans(),
        "causal": st.booleans(),
    }
)
Made = tuple[PatternAttention, tuple[Tensor, Tensor, Tensor], Mask]


def made(call: dict[str, Any]) -> Made:
    """A mechanism in small tiles, its inputs and a mask it takes."""
    attention = PatternAttention(parse(call["text"]), rows=call["rows"]).eval()
    n_keys = call["n_keys"]
    generator = torch.Generator().manual_seed(call["seed"])
    q, k, v = (
        torch.randn(2, 2, n, 3, dtype=torch.float64, generator=generator).requires_grad_()
        for n in (call["n_queries"] or n_keys, n_keys, n_keys)
    )
    keys = torch.rand(2, n_keys, generator=generator) < 0.7
    marked = torch.rand(2, n_keys, generator=generator) < 0.3
    mask = Mask(
        causal=attention.traits.causal is not None and call["causal"],
        keys=keys if call["padded"] else None,
        marked=marked if attention.traits.marked and call["marks"] else None,
    )
    return attention, (q, k, v), mask


@hypothesis.given(call=CALLS)
@hypothesis.settings(max_examples=150)
def test_the_kernel_equals_the_definition_and_so_do_its_gradients(call: dict[str, Any]):
    attention, (q, k, v), mask = made(call)
    operator, weights = attention.operator(q, k, mask), attention.reference(q, k, mask)
    torch.testing.assert_close(operator.dense(), weights, rtol=1e-10, atol=1e-10)
    out, expected = operator.apply(v), weights @ v
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad(out, (q, k, v), cotangent)
    wanted = torch.autograd.grad(expected, (q, k, v), cotangent, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@hypothesis.given(call=CALLS, data=st.data())
@hypothesis.settings(max_examples=60)
def test_steps_equal_the_whole(call: dict[str, Any], data: st.DataObject):
    attention, (_, k, v), _ = made(call)
    hypothesis.assume(attention.traits.step)
    q = k.detach().flip(3)
    whole = attention.operator(q, k, Mask(causal=True)).apply(v)
    at, outs, keys, values = 0, [], None, None
    while at < k.shape[2]:
        now = slice(at, at + data.draw(st.integers(1, 4)))
        step, keys = attention.step(q[:, :, now], k[:, :, now], keys)
        out, values = step.apply(v[:, :, now], values)
        outs.append(out)
        at = now.stop
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-10, atol=1e-10)


@hypothesis.given(call=CALLS)
@hypothesis.settings(max_examples=40)
def test_later_tokens_change_nothing_causally(call: dict[str, Any]):
    attention, (_, k, v), _ = made(call)
    hypothesis.assume(attention.traits.causal)
    q, t = k.detach().flip(3), k.shape[2] // 2
    before = attention.operator(q, k, Mask(causal=True)).apply(v)
    later = [torch.cat((x[:, :, :t], 100 * torch.randn_like(x[:, :, t:])), 2) for x in (q, k, v)]
    after = attention.operator(later[0], later[1], Mask(causal=True)).apply(later[2])
    assert torch.equal(after[:, :, :t], before[:, :, :t])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 130])
@pytest.mark.parametrize("text", ["Local(129)", "Blocks(200)", "Strided(1)", "Global(first=200)", "Summary(3, 3)"])
def test_a_pattern_of_all_pairs_is_full_attention(text: str, length: int, causal: bool):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, length, 8, generator=generator) for _ in range(3))
    mask = Mask(causal=causal)
    full = FullAttention().operator(q, k, mask).apply(v)
    torch.testing.assert_close(PatternAttention(parse(text)).operator(q, k, mask).apply(v), full, rtol=1e-5, atol=1e-6)


def test_windows_wholly_of_padding_disturb_nobody():
    attention = PatternAttention(parse("Local(3)"), rows=4).eval()
    q, k, v = (torch.randn(2, 2, 40, 4) for _ in range(3))
    keys = torch.arange(40) < torch.tensor([[7], [40]])
    k[0, :, 7:], v[0, :, 7:] = math.nan, math.nan
    out = attention.operator(q, k, Mask(keys=keys)).apply(v)
    alone = attention.operator(q[:1, :, :7], k[:1, :, :7], Mask()).apply(v[:1, :, :7])
    torch.testing.assert_close(out[:1, :, :7], alone)
    assert out.isfinite().all()


@pytest.mark.parametrize("rows", [2, 3, 64])
def test_padded_queries_of_several_blocks_read_no_drawn_key_twice(rows: int):
    attention = PatternAttention(parse("RandomBlocks(2, block=1)"), rows=rows).eval()
    generator = torch.Generator().manual_seed(0)
    q, k, _ = (torch.randn(2, 2, 12, 3, dtype=torch.float64, generator=generator) for _ in range(3))
    mask = Mask(causal=True, keys=torch.arange(12).expand(2, -1) < 6)
    torch.testing.assert_close(attention.operator(q, k, mask).dense(), attention.reference(q, k, mask))


def test_each_example_has_its_own_number_of_marked_tokens():
    attention = PatternAttention(parse("Local(1) | Marked()"), rows=4).eval()
    q, k, v = (torch.randn(3, 2, 12, 4, dtype=torch.float64) for _ in range(3))
    marked = torch.zeros(3, 12, dtype=torch.bool)
    marked[0, [2, 9]] = marked[1, 5] = True
    mask = Mask(marked=marked)
    torch.testing.assert_close(attention.operator(q, k, mask).dense(), attention.reference(q, k, mask))
    local = PatternAttention(parse("Local(1)"), rows=4)
    torch.testing.assert_close(attention.operator(q, k, mask).apply(v)[2], local.operator(q, k, Mask()).apply(v)[2])


def test_marked_tokens_behind_external_ones_read_everything():
    attention = PatternAttention(parse("External(2) | Marked() | Blocks(3) | Local(1)"), rows=8).eval()
    q, k, _ = (torch.randn(1, 1, 90, 4, dtype=torch.float64) for _ in range(3))
    marked = torch.zeros(1, 90, dtype=torch.bool)
    marked[0, [17, 55]] = True
    mask = Mask(marked=marked)
    torch.testing.assert_close(attention.operator(q, k, mask).dense(), attention.reference(q, k, mask))
    assert attention.reference(q, k, mask)[0, 0, 55].all()


def test_external_tokens_cannot_be_restricted():
    with pytest.raises(UserError, match="External is a part of a union"):
        PatternAttention(parse("External(2) & Local(3)"))


def test_a_state_of_a_window_stays_small():
    attention = PatternAttention(parse("Local(16) | Global(first=2)")).eval()
    keys = values = None
    for _ in range(100):
        q, k, v = (torch.randn(1, 1, 1, 4) for _ in range(3))
        step, keys = attention.step(q, k, keys)
        _, values = step.apply(v, values)
    assert keys.past.shape[2] == values.past.shape[2] == 18


def test_dropped_weights_are_dropped_in_the_backward_pass_too():
    attention = PatternAttention(parse("Local(2) | Strided(4)"), dropout=0.5, rows=3).train()
    q, k, v = (torch.randn(1, 2, 11, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(7)
        return attention.operator(q, k, Mask()).apply(v)

    assert torch.autograd.gradcheck(dropped, (q, k, v), fast_mode=True)
    assert not torch.equal(dropped(q, k, v), attention.eval().operator(q, k, Mask()).apply(v))


def test_the_draw_of_random_blocks_travels_with_the_weights():
    one, two = (PatternAttention(parse("RandomBlocks(2, block=1)"), seed=seed) for seed in (1, 2))
    q, k, _ = (torch.randn(1, 2, 20, 4) for _ in range(3))
    assert not torch.equal(one.operator(q, k, Mask()).dense(), two.operator(q, k, Mask()).dense())
    two.load_state_dict(one.state_dict())
    assert torch.equal(one.operator(q, k, Mask()).dense(), two.operator(q, k, Mask()).dense())
    assert not PatternAttention(parse("Local(2)")).state_dict()


@pytest.mark.parametrize("text", ["Global(last=1)", "External(1) | Local(2)", "Local(3) | Global(first=1, last=1)"])
def test_what_needs_the_end_cannot_be_causal(text: str):
    attention = PatternAttention(parse(text))
    assert attention.traits.causal is None
    q = torch.randn(1, 1, 5, 4)
    with pytest.raises(UserError, match="causal"):
        attention.operator(q, q, Mask(causal=True))


@pytest.mark.parametrize(
    ("text", "cross"), [("Local(3)", False), ("Global(first=2)", False), ("Global(first=2, rows=False)", True),
                        ("Summary(4, 1)", True), ("Everything()", True), ("Summary(4, 1) | Local(1)", False)]
)  # fmt: skip
def test_only_what_does_not_ask_where_the_query_is_serves_between_two_sequences(text: str, cross: bool):
    assert PatternAttention(parse(text)).traits.cross is cross
