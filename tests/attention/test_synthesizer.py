"""Synthesizers against their definitions; what they cost; what they refuse."""

import dataclasses
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance.mechanisms import assert_equal, gradients, inputs
from hasten.attention import Mask, MultiHeadAttention, Place, multi_head
from hasten.attention.synthesizer import PartName, Synthesizer, SynthesizerSpec
from hasten.errors import UserError

N, H, D = 12, 2, 4


def spec(*parts: Any, **options: Any) -> SynthesizerSpec:
    return SynthesizerSpec(parts=parts, max_length=N, n_heads=H, d_head=D, **options)


def build(*parts: Any, **options: Any) -> Synthesizer:
    return spec(*parts, **options).build().double().eval()


def test_random_attention_is_the_softmax_of_a_table_times_values():
    attention, (q, k, v) = build("random"), inputs(7)
    table = attention.parts[0].table
    out = attention.operator(q, k, Mask()).apply(v)
    expected = table[:, :7, :7].softmax(-1) @ v
    assert_equal(out, expected)
    assert_equal(gradients(out, (v, table)), gradients(expected, (v, table)))


def test_dense_attention_is_a_two_layer_network_of_the_layers_input():
    attention = build("dense")
    layer = MultiHeadAttention(H * D, H, attention).double()
    x = torch.randn(2, 5, H * D, dtype=torch.float64)
    (w1, wv), (b1, bv) = layer.in_proj_weight.chunk(2), layer.in_proj_bias.chunk(2)
    w2, b2 = attention.parts[0].network.weight, attention.parts[0].network.bias
    outs = []
    for h in range(H):
        rows = slice(h * D, (h + 1) * D)
        hidden = (x @ w1[rows].T + b1[rows]).relu()
        scores = (hidden @ w2[h].T + b2[h])[..., :5]
        outs.append(scores.softmax(-1) @ (x @ wv[rows].T + bv[rows]))
    assert_equal(layer(x), layer.out_proj(torch.cat(outs, -1)))


def test_factors_are_tiled_and_repeated():
    attention, (q, k, _) = build("factorised_dense", factor=5), inputs(N)
    part = attention.parts[0]
    tiled, repeated = part.tiled(q, 5), part.repeated(q, 3)
    expected = torch.cat([tiled] * 3, -1) * repeated.repeat_interleave(5, -1)
    assert_equal(part(q, k), expected[..., :N])
    assert not torch.allclose(part(q, k)[..., :5], part(q, k)[..., 5:10])


def test_a_factorised_table_has_the_rank_it_is_given():
    attention, (q, k, _) = build("factorised_random", rank=3), inputs(N)
    scores = attention.parts[0](q, k)[0]
    assert torch.linalg.matrix_rank(scores).tolist() == [3, 3]
    assert torch.linalg.matrix_rank(build("random").parts[0](q, k)[0]).tolist() == [N, N]


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_random_scores_start_with_variance_one_at_any_rank(rank: int):
    large = SynthesizerSpec(parts=("factorised_random", "random"), max_length=100, n_heads=8, d_head=D, rank=rank)
    q = torch.zeros(1, 8, 100, D)
    for part in large.build().parts:
        assert part(q, q).var().item() == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("chosen", range(5))
def test_a_mixture_with_all_weight_on_one_part_is_that_part(chosen: int):
    names = get_args(PartName)
    attention, (q, k, v) = build(*names), inputs(7)
    with torch.no_grad():
        attention.mixture.logits.copy_(torch.where(torch.arange(5) == chosen, 0.0, -torch.inf))
    scores = attention.parts[chosen](q, k)
    assert_equal(attention.operator(q, k, Mask()).apply(v), scores.softmax(-1) @ v)


def test_a_mixture_begins_with_equal_shares_and_mixes_scores_before_the_softmax():
    attention, (q, k, v) = build("dense", "random"), inputs(7)
    dense, table = (part(q, k) for part in attention.parts)
    assert_equal(attention.operator(q, k, Mask()).apply(v), ((dense + table) / 2).softmax(-1) @ v)
    with torch.no_grad():
        attention.mixture.logits.copy_(torch.tensor([1.0, -1.0]))
    share = torch.tensor(2.0, dtype=torch.float64).sigmoid()
    expected = (share * dense + (1 - share) * table).softmax(-1) @ v
    assert_equal(attention.operator(q, k, Mask()).apply(v), expected)


@pytest.mark.parametrize("part", ["random", "factorised_random"])
def test_frozen_tables_are_saved_but_not_learnt(part: Any):
    frozen, learnt = build(part, frozen=True), build(part)
    assert list(frozen.parameters()) == []
    assert list(frozen.state_dict()) == list(learnt.state_dict()) != []
    assert all(not tensor.requires_grad for tensor in frozen.state_dict(keep_vars=True).values())
    q, k, v = inputs(7)
    frozen.operator(q, k, Mask()).apply(v).sum().backward()
    assert all(tensor.grad is None for tensor in frozen.buffers())


@pytest.mark.parametrize(
    ("parts", "projections", "own"),
    [
        (("dense",), 2, H * N * (D + 1)),
        (("random",), 1, H * N * N),
        (("factorised_dense",), 2, H * (5 + 3) * (D + 1)),
        (("factorised_random",), 1, 2 * H * N * 3),
        (("random", "factorised_random"), 1, H * N * N + 2 * H * N * 3 + 2),
        (("dense", "random"), 2, H * N * (D + 1) + H * N * N + 2),
        (("random", "dot_product"), 3, H * N * N + 2),
    ],
    ids=str,
)
def test_a_layer_has_no_parameters_it_does_not_read(parts: tuple[Any, ...], projections: int, own: int):
    d_model = H * D
    layer = multi_head(d_model, H, SynthesizerSpec(parts=parts, max_length=N, factor=5, rank=3))
    projected = (projections + 1) * (d_model * d_model + d_model)  # one more: the output's
    assert sum(parameter.numel() for parameter in layer.parameters()) == projected + own


@pytest.mark.parametrize("factor", [1, 4, 5, 12, 40, None])
def test_any_period_covers_the_longest_sequence(factor: int | None):
    attention, (q, k, v) = build("factorised_dense", factor=factor), inputs(N)
    weights = attention.reference(q, k, Mask())
    assert_equal(attention.operator(q, k, Mask()).apply(v), weights @ v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 9), (4, 9)])
def test_fewer_queries_are_the_last_of_their_sequence(n_queries: int, n_keys: int, causal: bool):
    for part in get_args(PartName)[:4]:
        attention, (q, k, v) = build(part), inputs(n_keys)
        whole = attention.operator(q, k, Mask(causal=causal)).apply(v)
        last = attention.operator(q[:, :, -n_queries:], k, Mask(causal=causal)).apply(v)
        assert_equal(last, whole[:, :, -n_queries:])


@pytest.mark.parametrize("part", ["dense", "factorised_dense"])
def test_columns_are_as_many_as_keys_and_not_as_queries(part: Any):
    attention = build(part, factor=5)
    (q, _, _), (_, k, v) = inputs(3), inputs(9, seed=1)
    operator = attention.operator(q, k, Mask())
    scores = attention.parts[0](q, torch.zeros(2, H, N, D, dtype=torch.float64))
    assert operator.dense().shape == (2, H, 3, 9)
    assert_equal(operator.apply(v), scores[..., :9].softmax(-1) @ v)


MIXTURES = (("dense",), ("factorised_dense", "random"), ("factorised_random", "dot_product"), get_args(PartName))


@pytest.mark.parametrize("parts", MIXTURES, ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_any_call_gives_the_definition_and_its_gradients(parts: tuple[Any, ...], data: st.DataObject):
    heads, width, batch = (data.draw(st.integers(1, 3)) for _ in range(3))
    length, factor, rank = data.draw(st.integers(1, N)), data.draw(st.none() | st.integers(1, 14)), 2
    one = SynthesizerSpec(parts=parts, max_length=N, factor=factor, rank=rank).at(Place(n_heads=heads, d_head=width))
    attention = one.build().double().eval()
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter += torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    q, k, v = (torch.randn(batch, heads, length, width, generator=generator).double().requires_grad_() for _ in "qkv")
    row = st.lists(st.booleans(), min_size=length, max_size=length)
    keys = data.draw(st.none() | st.lists(row, min_size=batch, max_size=batch).map(torch.tensor))
    mask = Mask(causal=data.draw(st.booleans()), keys=keys)
    out, expected = attention.operator(q, k, mask).apply(v), attention.reference(q, k, mask) @ v
    assert_equal(out, expected)
    wrt = (q, k, v, *attention.parameters())
    assert_equal(gradients(out, wrt), gradients(expected, wrt))


@pytest.mark.parametrize("parts", MIXTURES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_of_forty_in_half_precision_are_finite(parts: tuple[Any, ...], dtype: torch.dtype):
    attention = spec(*parts).build()
    with torch.no_grad():
        for parameter in attention.parts.parameters():
            parameter.copy_(40 * parameter.sign() if parameter.ndim == 3 and parameter.shape[2] == N else parameter)
    qkv = q, k, v = tuple((4.5 * x.detach().sign()).to(dtype).requires_grad_() for x in inputs(N))
    for mask in (Mask(), Mask(causal=True)):
        out = attention.operator(q, k, mask).apply(v)
        assert out.dtype == dtype
        assert all(x.isfinite().all() for x in (out, *gradients(out, (*qkv, *attention.parameters()))))


@pytest.mark.parametrize("frozen", [False, True])
def test_it_is_built_without_storage_and_filled_later(frozen: bool):
    one = spec("dense", "random", "factorised_random", frozen=frozen)
    real = one.build().eval()
    with torch.device("meta"):
        empty = one.build().eval()
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(real.state_dict())
    q, k, v = (x.float() for x in inputs(7))
    assert torch.equal(filled.operator(q, k, Mask()).apply(v), real.operator(q, k, Mask()).apply(v))


def test_tables_are_for_self_attention_only():
    for part in get_args(PartName)[:4]:
        assert spec(part).build().traits.cross is ("random" not in part)


def test_a_table_is_formed_once_for_the_whole_batch_and_dropout_still_differs_within():
    attention, (q, k, v) = build("random"), inputs(7)
    assert attention.operator(q, k, Mask(causal=True)).weights.shape == (1, H, 7, 7)
    dropping = build("random", dropout=0.5).train()
    same = v[:1].expand(2, H, 7, D)
    out = dropping.operator(q, k, Mask()).apply(same)
    assert not torch.equal(out[0], out[1])


def test_decoding_keeps_no_keys_that_nobody_reads():
    q, k, _ = inputs(7)
    assert build("dense", "random").step(q, k, None)[1].past.shape[3] == 1
    assert build("dense", "dot_product").step(q, k, None)[1].past.shape[3] == D


def test_another_seed_draws_other_weights_and_the_same_the_same():
    def drawn(seed: int) -> dict[str, Tensor]:
        mechanism = spec("dense", "random", "factorised_random", seed=seed).build()
        return {name: p for name, p in mechanism.named_parameters() if "bias" not in name and "mixture" not in name}

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert len(first) == 4
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ((), {}, "choose one or more"),
        (("dense", "dense"), {}, "each once"),
        (("sparse",), {}, "sparse.* of dense, random"),
        (("dot_product",), {}, "kind full"),
        (("dense", "dot_product"), {"frozen": True}, "frozen"),
    ],
    ids=str,
)
def test_specs_that_contradict_themselves_are_refused(parts: tuple[Any, ...], options: Any, message: str):
    with pytest.raises(UserError, match=message) as caught:
        spec(*parts, **options).build()
    assert "\n" not in str(caught.value)


def test_heads_of_another_width_or_number_and_longer_sequences_are_refused():
    q, k, _ = inputs(7, width=6)
    with pytest.raises(UserError, match="d_head = 4, got 6"):
        build("dense").operator(q, k, Mask())
    build("random").operator(q, k, Mask())
    with pytest.raises(UserError, match="at most 12 positions, got 13"):
        build("random").operator(*inputs(13)[:2], Mask())
    with pytest.raises(UserError, match="n_heads = 2, got 4"):
        MultiHeadAttention(16, 4, build("random"))
    longest = inputs(12)
    attention = build("dense")
    _, keys = attention.step(longest[0], longest[1], None)
    with pytest.raises(UserError, match="at most 12 positions, got 13"):
        attention.step(longest[0][:, :, :1], longest[1][:, :, :1], keys)


def test_a_spec_can_be_written_and_read():
    from pydantic import TypeAdapter

    written = TypeAdapter(SynthesizerSpec).dump_json(spec("random", "dot_product", frozen=True))
    read = TypeAdapter(SynthesizerSpec).validate_json(written, strict=True)
    assert dataclasses.asdict(read) == dataclasses.asdict(spec("random", "dot_product", frozen=True))
