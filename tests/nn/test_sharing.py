"""Layers that share attention: what they compute, what they keep, and what they own."""

import itertools
import random

import pytest
import torch
from torch import Tensor, nn

from hasten.attention import (
    AverageSpec,
    BigBirdSpec,
    EfficientSpec,
    FullSpec,
    HeadsSpec,
    LinearSpec,
    LinformerSpec,
    LocalSpec,
    LongformerSpec,
    LSHSpec,
    NystromSpec,
    PatternSpec,
    PerformerSpec,
    RFASpec,
    RoutingSpec,
    SinkhornSpec,
    SynthesizerSpec,
)
from hasten.attention.base import Weights
from hasten.attention.masks import padding
from hasten.attention.multihead import Attended
from hasten.attention.specs import HeadGroup
from hasten.errors import UserError
from hasten.nn.following import ReuseContext, ReuseOutput, ReuseWeights
from hasten.nn.sharing import Carry, SourceMap
from hasten.nn.stack import Decoder, Encoder

D, H = 8, 2
SHAPE = (D, H, 16, 0.0)
MASK = torch.tensor([[True] * 6, [True, True, True, False, False, False], [True] * 5 + [False]])
MAPS = [(1, 1, 1, 1), (1, 1, 3, 3), (1, 2, 1, 1), (1, 2, 1, 2)]
SHARED = ["weights", "context", "output"]


def randomised(stack: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.3)
    return stack.double().eval()


def decoder(own=(), cross=(), shared="output", spec=None, memory=None) -> Decoder:
    return randomised(Decoder(4, *SHAPE, (spec or FullSpec(),), (memory or FullSpec(),), own, cross, shared))


def states(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Source maps


def test_a_map_of_nothing_is_every_layer_for_itself():
    assert SourceMap.of((), 3, "x") == SourceMap.of((1, 2, 3), 3, "x") == SourceMap((0, 1, 2))
    assert SourceMap.of((1, 1, 3, 1), 4, "x").numbers == (1, 1, 3, 1)


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ((1, 1), r"x has 2 entries; give one for each of the 3 layers"),
        ((2, 2, 3), r"layer 1 cannot use the attention of layer 2"),
        ((1, 1, 2), r"layer 3 cannot use the attention of layer 2"),
        ((1, 4, 3), r"layer 2 cannot use the attention of layer 4"),
    ],
)
def test_impossible_maps_are_refused(numbers, problem):
    with pytest.raises(UserError, match=problem):
        SourceMap.of(numbers, 3, "x")


@pytest.mark.parametrize("numbers", [m for m in itertools.product(range(1, 5), repeat=4) if m[0] == 1])
def test_what_is_carried_is_there_when_used_and_gone_after(numbers):
    try:
        plan = SourceMap.of(numbers, 4, "x")
    except UserError:
        return
    carry, made = Carry(plan), [Attended(*torch.zeros(2, 1, 1, 1), Weights(torch.zeros(1, 1, 1, 1))) for _ in range(4)]
    for layer in range(4):
        taken = carry.take(layer)
        assert taken is (made[plan.sources[layer]] if plan.follows(layer) else None)
        carry.put(layer, made[layer])
        later = {plan.sources[i] for i in range(layer + 1, 4) if plan.sources[i] <= layer}
        assert set(carry.held) == later


# What is computed


def test_the_identity_map_is_the_unshared_stack_bit_for_bit():
    x, memory = states(3, 5), states(3, 6, 1)
    plain, mapped = decoder(), decoder((1, 2, 3, 4), (1, 2, 3, 4))
    assert plain.state_dict().keys() == mapped.state_dict().keys()
    assert torch.equal(plain(x, memory, MASK), mapped(x, memory, MASK))


def test_without_sharing_seeds_give_the_weights_that_they_gave_before():
    torch.manual_seed(3)
    one = Encoder(2, *SHAPE, (FullSpec(),)).state_dict()
    torch.manual_seed(3)
    other = Encoder(2, *SHAPE, (FullSpec(),), (1, 2)).state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def softmax_rows(x: Tensor, weight: Tensor, bias: Tensor, keys: Tensor, allowed: Tensor) -> Tensor:
    """Weights (B, H, T, S) by the definition, from rows q and k of a projection."""
    q, k = (
        (y @ weight[i * D : (i + 1) * D].T + bias[i * D : (i + 1) * D]).unflatten(2, (H, -1)).transpose(1, 2)
        for i, y in ((0, x), (1, keys))
    )
    scores = q @ k.transpose(2, 3) / (D // H) ** 0.5
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1)


def mixed(weights: Tensor, values: Tensor) -> Tensor:
    return (weights @ values.unflatten(2, (H, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)


def test_an_encoder_with_shared_weights_is_its_definition():
    stack, x = randomised(Encoder(3, *SHAPE, (FullSpec(),), (1, 1, 1))), states(3, 6)
    found, weights = x, None
    for layer in stack.layers:
        own, y = layer.self_attention, layer.self_norm(found)
        if weights is None:
            weights = softmax_rows(y, own.in_proj_weight, own.in_proj_bias, y, MASK[:, None, None])
        values = y @ own.in_proj_weight[-D:].T + own.in_proj_bias[-D:]
        found = found + own.out_proj(mixed(weights, values))
        found = found + layer.feed_forward(layer.feed_forward_norm(found))
    torch.testing.assert_close(stack(x, MASK)[MASK], stack.norm(found)[MASK], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared", SHARED)
def test_a_decoder_with_shared_cross_attention_is_its_definition(shared):
    stack = decoder(cross=(1, 1, 1, 1), shared=shared)
    x, memory = states(3, 5), states(3, 6, 1)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    found, weights, context, output = x, None, None, None
    for layer in stack.layers:
        own, y = layer.self_attention, layer.self_norm(found)
        rows = softmax_rows(y, own.in_proj_weight, own.in_proj_bias, y, causal)
        found = found + own.out_proj(mixed(rows, y @ own.in_proj_weight[-D:].T + own.in_proj_bias[-D:]))
        cross = layer.cross_attention
        if weights is None:
            y = layer.cross_norm(found)
            weights = softmax_rows(y, cross.in_proj_weight, cross.in_proj_bias, memory, MASK[:, None, None])
        if context is None or shared == "weights":
            context = mixed(weights, memory @ cross.in_proj_weight[-D:].T + cross.in_proj_bias[-D:])
        if output is None or shared != "output":
            output = cross.out_proj(context)
        found = found + output
        found = found + layer.feed_forward(layer.feed_forward_norm(found))
    torch.testing.assert_close(stack(x, memory, MASK), stack.norm(found), rtol=1e-12, atol=1e-12)


# Step by step


def stepped(stack: Decoder, x: Tensor, memory: Tensor, mask: Tensor, order: Tensor | None = None) -> Tensor:
    state, outs = stack.begin(memory, mask), []
    for t in range(x.shape[1]):
        out, state = stack.step(x[:, t : t + 1], state)
        outs.append(out)
    return torch.cat(outs, 1)


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("own", MAPS)
@pytest.mark.parametrize("cross", [(), *MAPS])
def test_steps_equal_the_whole_for_every_policy(own, cross, shared):
    stack, x, memory = decoder(own, cross, shared), states(3, 5), states(3, 6, 1)
    whole = stack(x, memory, MASK)
    torch.testing.assert_close(stepped(stack, x, memory, MASK), whole, rtol=1e-11, atol=1e-11)
    rows = torch.tensor([2, 0, 1])
    torch.testing.assert_close(stepped(stack, x[rows], memory[rows], MASK[rows]), whole[rows], rtol=1e-11, atol=1e-11)
    alone = stepped(stack, x[1:2], memory[1:2, :3], MASK[1:2, :3])
    torch.testing.assert_close(alone, whole[1:2], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shared", SHARED)
def test_states_are_reordered_and_cut_with_their_rows(shared):
    stack, x, memory = decoder((1, 1, 3, 3), (1, 1, 1, 4), shared), states(3, 4), states(3, 6, 1)
    state = stack.begin(memory, MASK)
    for t in range(2):
        _, state = stack.step(x[:, t : t + 1], state)
    rows = torch.tensor([2, 2, 0])
    state = tuple(layer.select(rows) for layer in state)
    for t in range(2, 4):
        out, state = stack.step(x[rows, t : t + 1], state)
    torch.testing.assert_close(out, stack(x, memory, MASK)[rows, -1:], rtol=1e-11, atol=1e-11)


def test_padding_of_the_memory_may_hold_anything():
    for shared in SHARED:
        stack, x, memory = decoder((1, 1, 1, 1), (1, 1, 1, 1), shared), states(3, 4), states(3, 6, 1)
        noisy = memory.masked_fill(~MASK[..., None], torch.nan)
        torch.testing.assert_close(stack(x, noisy, MASK), stack(x, memory, MASK))
        torch.testing.assert_close(stepped(stack, x, noisy, MASK), stack(x, memory, MASK), rtol=1e-11, atol=1e-11)


def test_followers_keep_no_keys_and_context_followers_nothing():
    def numbers(state) -> int:
        if isinstance(state, Tensor):
            return state.numel()
        return sum(map(numbers, vars(state).values())) if hasattr(state, "__dict__") else 0

    x, memory = states(1, 5), states(1, 6, 1)
    kept = {}
    for shared in ("alone", *SHARED):
        own, cross = ((), ()) if shared == "alone" else ((1, 1, 1, 1), (1, 1, 1, 1))
        stack = decoder(own, cross, "output" if shared == "alone" else shared)
        state = stack.begin(memory, torch.ones(1, 6, dtype=torch.bool))
        _, state = stack.step(x, state)
        kept[shared] = sum(numbers(layer) for layer in state)
    alone, own_part = 4 * 2 * (5 + 6) * D, (2 + 3) * 5 * D  # keys and values; of self-attention 1 leader, 3 followers
    assert kept == {
        "alone": alone,
        "weights": own_part + (2 + 3) * 6 * D,
        "context": own_part + 2 * 6 * D,
        "output": own_part + 2 * 6 * D,
    }


# What layers own


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("own", [(), *MAPS])
@pytest.mark.parametrize("cross", [(), *MAPS])
def test_the_number_of_parameters_is_the_formula(own, cross, shared):
    def count(stack: nn.Module) -> int:
        return sum(p.numel() for p in stack.parameters())

    followers, cross_followers = (sum(s != i for i, s in enumerate(m, 1)) for m in (own, cross))
    projection, norm = D * D + D, 2 * D
    saved = {"weights": 2 * projection + norm, "context": 3 * projection + norm, "output": 4 * projection + norm}
    less = followers * 2 * projection + cross_followers * saved[shared]
    assert count(decoder()) - count(decoder(own, cross, shared)) == less


def test_followers_are_of_the_kind_that_was_asked_for():
    for shared, kind in zip(SHARED, (ReuseWeights, ReuseContext, ReuseOutput), strict=True):
        stack = decoder((1, 1, 3, 3), (1, 1, 1, 4), shared)
        assert [isinstance(layer.self_attention, ReuseWeights) for layer in stack.layers] == [False, True, False, True]
        assert [isinstance(layer.cross_attention, kind) for layer in stack.layers] == [False, True, True, False]


def test_every_parameter_gets_a_gradient():
    for shared in SHARED:
        stack = decoder((1, 1, 3, 3), (1, 1, 1, 4), shared)
        stack(states(3, 5), states(3, 6, 1), MASK).square().sum().backward()
        assert [name for name, p in stack.named_parameters() if p.grad is None or not p.grad.any()] == []


# Every mechanism


ENCODERS = [
    FullSpec(),
    LocalSpec(left=1),
    LSHSpec(chunk=2, rounds=2),
    RoutingSpec(clusters=2),
    SinkhornSpec(block=2),
    LinformerSpec(max_length=9, rank=3),
    NystromSpec(landmarks=3),
    LinearSpec(),
    EfficientSpec(),
    PerformerSpec(features=8),
    SynthesizerSpec(max_length=9),
]
DECODERS = [
    LocalSpec(left=1),
    LSHSpec(chunk=2, strict=True),
    RoutingSpec(clusters=2, strict=True, window=2),
    SinkhornSpec(block=2),
    LinearSpec(),
    EfficientSpec(),
    RFASpec(gate=True),
    PerformerSpec(features=8),
    SynthesizerSpec(max_length=9),
]


OTHER_DECODERS = [
    FullSpec(),
    AverageSpec(),
    AverageSpec(gate=False, feed_forward=True),
    PatternSpec(pattern="Local(1) | Global(first=1)"),
    HeadsSpec(groups=(HeadGroup(heads=1, attention=FullSpec()), HeadGroup(heads=1, attention=LocalSpec(left=1)))),
]


@pytest.mark.parametrize("spec", ENCODERS, ids=lambda spec: spec.kind)
def test_the_weights_of_any_mechanism_are_applied_to_the_values_of_followers(spec):
    stack, x = randomised(Encoder(2, *SHAPE, (spec,), (1, 1))), states(3, 6)
    seen = []
    stack(x, MASK, observe=lambda kind, layer, attended: seen.append((kind, layer, attended)))
    assert [(kind, layer) for kind, layer, _ in seen] == [("self", 0), ("self", 1)]
    first, second = (attended for _, _, attended in seen)
    torch.testing.assert_close(first.operator.dense(), second.operator.dense())
    y = stack.layers[0](x, padding(MASK))[0]
    values = stack.layers[1].self_norm(y) @ stack.layers[1].self_attention.in_proj_weight.T
    values = values + stack.layers[1].self_attention.in_proj_bias
    expected = mixed(first.operator.dense(), values.masked_fill(~MASK[..., None], 0.0))
    torch.testing.assert_close(second.context[MASK], expected[MASK], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("spec", DECODERS, ids=lambda spec: spec.kind)
def test_shared_steps_of_any_mechanism_equal_the_whole(spec):
    stack, x, memory = decoder((1, 1, 3, 3), (), spec=spec), states(3, 7), states(3, 6, 1)
    torch.testing.assert_close(stepped(stack, x, memory, MASK), stack(x, memory, MASK), rtol=1e-9, atol=1e-9)


def test_a_layer_with_second_projections_leads_nobody():
    with pytest.raises(UserError, match="encoder attention, layer 1: weights of a layer with second projections"):
        Encoder(2, *SHAPE, (LongformerSpec(window=1),), (1, 1))


def drawn_map(draw: random.Random, n_layers: int) -> tuple[int, ...]:
    """Any map: a layer uses an earlier one that computes its own, or does so itself."""
    numbers: list[int] = []
    for number in range(1, n_layers + 1):
        numbers.append(draw.choice([number, *(n for i, n in enumerate(numbers, 1) if n == i)]))
    return tuple(numbers)


@pytest.mark.parametrize("seed", range(12))
def test_layers_of_any_mechanisms_under_any_maps_decode_as_the_whole(seed):
    draw = random.Random(seed)
    own = draw.choices([*DECODERS, *OTHER_DECODERS], k=5)
    cross = draw.choices([FullSpec(), LinearSpec(), EfficientSpec(), PerformerSpec(features=8)], k=5)
    maps = drawn_map(draw, 5), drawn_map(draw, 5)
    stack = randomised(Decoder(5, *SHAPE, own, cross, *maps, draw.choice(SHARED)))
    x, memory = states(3, 7), states(3, 6, 1)
    whole = stack(x, memory, MASK)
    torch.testing.assert_close(stepped(stack, x, memory, MASK), whole, rtol=1e-8, atol=1e-8)
    rows = torch.tensor([2, 0, 1])
    torch.testing.assert_close(stack(x[rows], memory[rows], MASK[rows]), whole[rows], rtol=1e-8, atol=1e-8)
    noisy = memory.masked_fill(~MASK[..., None], torch.nan)
    torch.testing.assert_close(stepped(stack, x, noisy, MASK), whole, rtol=1e-8, atol=1e-8)
    alone = stepped(stack, x[1:2], memory[1:2, :3], MASK[1:2, :3])
    torch.testing.assert_close(alone, whole[1:2], rtol=1e-8, atol=1e-8)


MIXED = [
    (BigBirdSpec(external=2, block=2), LocalSpec(left=1), BigBirdSpec(external=2, block=2)),  # a follower has no tokens
    (FullSpec(), LongformerSpec(window=1), LocalSpec(left=1)),  # a layer with second projections between the others
]


@pytest.mark.parametrize("specs", MIXED, ids=["external tokens", "second projections"])
def test_other_layers_tokens_and_second_projections_stand_beside_sharing(specs):
    sharing = (1, 1, 3) if specs[0].kind == "bigbird" else (1, 2, 1)
    stack, x = randomised(Encoder(3, *SHAPE, specs, sharing)), states(3, 6)
    whole = stack(x, MASK)
    noisy = x.masked_fill(~MASK[..., None], 1e3)
    torch.testing.assert_close(stack(noisy, MASK)[MASK], whole[MASK], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(stack(x[1:2, :3], MASK[1:2, :3]), whole[1:2, :3], rtol=1e-9, atol=1e-9)
    whole[MASK].square().sum().backward()
    assert [name for name, p in stack.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_only_leaders_mechanisms_are_built_and_judged():
    stack = Encoder(3, *SHAPE, (LinformerSpec(max_length=9), FullSpec(), FullSpec()), (1, 1, 3))
    assert not hasattr(stack.layers[1].self_attention, "attention")
    Decoder(2, *SHAPE, (FullSpec(), LinformerSpec()), (FullSpec(),), (1, 1))
