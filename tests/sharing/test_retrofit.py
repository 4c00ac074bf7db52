"""Weights that go from a model to one whose layers share, and back."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor, nn

from hasten.data.batch import pair_batch
from hasten.errors import UserError
from hasten.models import GenerationModel
from hasten.sharing.retrofit import best_order, reordered, retrofit

PAIRS = [([10, 11, 12, 13], [20, 21, 22]), ([14], [23]), ([15, 16], [24, 25, 26, 27])]
BATCH = pair_batch(PAIRS, [[1, 0, 2, 0, 0], [1, 0], [2, 2, 0]])
MAPS = {"encoder_sharing": (1, 1, 1), "decoder_sharing": (1, 1, 3), "cross_sharing": (1, 2, 1)}
ALONE = {name: (1, 2, 3) for name in MAPS}


def model(tiny_spec, kind: str = "autoregressive", **options) -> GenerationModel:
    depth = "refiner_layers" if kind == "ctc" else "decoder_layers"
    built = tiny_spec(
        kind, encoder_layers=3, **{depth: 3, **{k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}}
    )
    torch.manual_seed(0)
    made = built.model.build(60).double().eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1)
    return made


def loss(one: GenerationModel) -> Tensor:
    terms = one.loss(BATCH, torch.Generator().manual_seed(0)).values()
    return sum(term.sum for term in terms)


def without_scores(one: GenerationModel) -> GenerationModel:
    """With queries of zero: every layer's weights are uniform, so sharing them changes nothing."""
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            if "attention.in_proj" in name and len(parameter) == 3 * one.spec.d_model:
                parameter[: one.spec.d_model] = 0
    return one


@pytest.mark.parametrize("shared", ["weights", "context", "output"])
def test_sharing_nothing_changes_nothing(tiny_spec, shared):
    old, new = model(tiny_spec), model(tiny_spec, **ALONE, shared_of_cross=shared)
    nn.init.zeros_(new.embedding.weight)
    retrofit(old, new)
    assert torch.equal(loss(new), loss(old))


OTHERS = {
    "ctc": {"encoder_sharing": (1, 1, 1), "refiner_sharing": (1, 1, 1)},
    "nat": {**MAPS, "positional_sharing": (1, 2, 2), "shared_of_cross": "weights"},
}


@pytest.mark.parametrize("kind", ["autoregressive", "ctc", "dag", "mask_predict", "nat", "refinement"])
def test_layers_that_read_alike_say_the_same_when_they_share(tiny_spec, kind):
    maps = OTHERS.get(kind, {**MAPS, "shared_of_cross": "weights"})
    old, new = without_scores(model(tiny_spec, kind)), model(tiny_spec, kind, **maps)
    retrofit(old, new)
    torch.testing.assert_close(loss(new), loss(old))
    orders = {
        (k, i, j): [2, 0, 3, 1]
        for k in ("encoder", "decoder", "positional", "cross", "refiner")
        for i in range(3)
        for j in range(3)
    }
    retrofit(old, new, orders)
    torch.testing.assert_close(loss(new), loss(old))


@pytest.mark.parametrize("shared", ["weights", "context", "output"])
@pytest.mark.parametrize("kind", ["autoregressive", "dag", "mask_predict", "nat", "refinement"])
def test_what_was_shared_is_what_each_layer_then_has(tiny_spec, kind, shared):
    maps = {**OTHERS.get(kind, MAPS), "shared_of_cross": shared}
    together, alone = model(tiny_spec, kind, **maps), model(tiny_spec, kind)
    retrofit(together, alone)
    again = model(tiny_spec, kind, **maps)
    nn.init.zeros_(again.embedding.weight)
    retrofit(alone, again)
    assert torch.equal(loss(again), loss(together))


def test_followers_keep_their_values_and_projections_and_leaders_all(tiny_spec):
    old, new = model(tiny_spec), model(tiny_spec, **MAPS, shared_of_cross="context")
    retrofit(old, new)
    own, theirs = new.decoder.layers[1], old.decoder.layers[1]
    assert torch.equal(own.self_attention.in_proj_weight, theirs.self_attention.in_proj_weight[-32:])
    assert torch.equal(own.self_attention.out_proj.weight, theirs.self_attention.out_proj.weight)
    assert torch.equal(
        new.decoder.layers[2].cross_attention.out_proj.bias, old.decoder.layers[2].cross_attention.out_proj.bias
    )
    for name, tensor in new.state_dict().items():
        if ".layers.0." in name:
            assert torch.equal(tensor, old.state_dict()[name])


def test_heads_in_another_order_are_the_same_layer(tiny_spec):
    old = model(tiny_spec)
    attention = old.encoder.layers[0].self_attention
    x, order = torch.randn(2, 5, 32, dtype=torch.float64), [2, 0, 3, 1]
    before = attention(x)
    full = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    moved = reordered(full, order, 4)
    for rows in (slice(0, 32), slice(32, 64)):  # here queries and keys move too
        for name in ("in_proj_weight", "in_proj_bias"):
            moved[name][rows] = full[name][rows].unflatten(0, (4, -1))[order].flatten(0, 1)
    attention.load_state_dict(moved)
    torch.testing.assert_close(attention(x), before)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_best_order_is_the_best_of_all(n):
    for seed in range(20):
        costs = torch.rand(n, n, generator=torch.Generator().manual_seed(seed))
        orders = itertools.permutations(range(n))
        least = min(orders, key=lambda p, costs=costs: sum(float(costs[h, p[h]]) for h in range(n)))
        assert best_order(costs) == list(least)


def test_more_heads_than_can_be_matched_are_told_with_the_way_out():
    with pytest.raises(UserError, match="16 a layer at most, here are 17; give --no-match-heads"):
        best_order(torch.zeros(17, 17))


def test_other_settings_may_not_differ(tiny_spec):
    old = model(tiny_spec)
    new = dataclasses.replace(old.spec, d_ff=32).build(60)
    with pytest.raises(RuntimeError, match="size mismatch"):
        retrofit(old, new)
