"""Specs at their places: sizes that were left open, and draws of each layer's own."""

import dataclasses

import pytest
import torch

from hasten.attention import (
    ATTENTIONS,
    FullSpec,
    HeadGroup,
    HeadsSpec,
    LocalSpec,
    Mask,
    MultiHeadAttention,
    PatternSpec,
    PerformerSpec,
    Place,
    SecondProjections,
    SynthesizerSpec,
    multi_head,
)
from hasten.attention.mechanism import seed_of_layer
from hasten.errors import UserError
from hasten.spec_errors import kind_of

EVERYTHING = Mask()
NEEDING = {"pattern": {"pattern": "Local(2)"}, "heads": {"groups": (HeadGroup(heads=4, attention=FullSpec()),)}}


def make(kind: type, **settings):
    return kind(**NEEDING.get(kind_of(kind), {}), **settings)


@pytest.mark.parametrize("kind", ATTENTIONS, ids=kind_of)
def test_every_kind_is_built_for_the_heads_of_its_place(kind):
    attention = make(kind).at(Place(layer=2, n_heads=4, d_head=6)).build()
    attention.fits(4, 6)
    assert multi_head(24, 4, make(kind), layer=2).attention.state_dict().keys() == attention.state_dict().keys()


@pytest.mark.parametrize("kind", ATTENTIONS, ids=kind_of)
def test_every_kind_is_described_before_memory_is_taken(kind):
    placed = make(kind).at(Place(n_heads=4, d_head=6))
    with torch.device("meta"):
        described = placed.build().state_dict()
    assert {n: x.shape for n, x in described.items()} == {n: x.shape for n, x in placed.build().state_dict().items()}


@pytest.mark.parametrize("kind", ATTENTIONS, ids=kind_of)
def test_sizes_that_are_given_stay(kind):
    own = {field.name for field in dataclasses.fields(kind)} & {"n_heads", "d_head"}
    spec = make(kind, **dict.fromkeys(own, 5))
    placed = spec.at(Place(n_heads=4, d_head=6))
    assert all(getattr(placed, name) == 5 for name in own)


def test_a_size_that_is_left_open_and_needed_is_named():
    with pytest.raises(UserError, match="performer: d_head is not set; give it, or let multi_head or a model"):
        PerformerSpec().build()
    with pytest.raises(UserError, match="synthesizer: n_heads is not set"):
        SynthesizerSpec(d_head=4).at(Place(d_head=4)).build()


def test_layers_draw_differently_and_each_the_same_again():
    first, second = (PerformerSpec(features=4, seed=3).at(Place(layer=i, d_head=4)).build() for i in (0, 1))
    again = PerformerSpec(features=4, seed=3).at(Place(layer=1, d_head=4)).build()
    assert not torch.equal(first.directions.rows, second.directions.rows)
    assert torch.equal(again.directions.rows, second.directions.rows)
    assert torch.equal(first.directions.rows, PerformerSpec(features=4, seed=3, d_head=4).build().directions.rows)


def test_seeds_of_layers_do_not_meet_those_of_neighbouring_seeds():
    seeds = [seed_of_layer(seed, layer) for seed in range(30) for layer in range(30)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_random_patterns_differ_between_layers():
    spec = PatternSpec(pattern="RandomBlocks(1, block=2)")
    masks = [spec.at(Place(layer=i)).build().operator(*torch.zeros(2, 1, 1, 20, 4), EVERYTHING).dense() for i in (0, 1)]
    assert not torch.equal(*masks)


def test_groups_of_heads_are_placed_with_their_own_heads():
    performer, local = PerformerSpec(features=4), LocalSpec(left=1)
    spec = HeadsSpec(groups=(HeadGroup(heads=3, attention=SynthesizerSpec(max_length=9)),
                             HeadGroup(heads=1, attention=performer), HeadGroup(heads=2, attention=local)))  # fmt: skip
    layer = multi_head(24, 6, spec)
    assert layer.attention.traits.n_heads == 6
    assert layer.attention.traits.d_head == 4
    assert layer.attention.traits.max_length == 9
    assert layer(torch.randn(2, 9, 24)).shape == (2, 9, 24)


def test_a_layer_is_made_of_a_spec_or_of_a_mechanism():
    assert type(multi_head(8, 2, FullSpec())) is MultiHeadAttention
    assert type(multi_head(8, 2, FullSpec().build())) is MultiHeadAttention
    longformer = next(kind for kind in ATTENTIONS if kind_of(kind) == "longformer")
    assert type(multi_head(8, 2, longformer())) is SecondProjections
    with pytest.raises(UserError, match="d_model 8 cannot be cut into 3 heads"):
        multi_head(8, 3, PerformerSpec())
    with pytest.raises(UserError, match="made for d_head = 8, got 4"):
        multi_head(8, 2, PerformerSpec(d_head=8))
