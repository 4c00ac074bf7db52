"""Random directions: their distribution, and that they follow from the seed and the number of draws alone."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys

import pytest
import torch

from hasten.attention import PerformerSpec, Place, RFASpec
from hasten.attention.kernels.directions import Directions
from hasten.errors import UserError

WIDTH = 16
SPECS = [PerformerSpec(features=40), PerformerSpec(features=8, regularised=True), RFASpec(features=12)]
each = pytest.mark.parametrize("spec", SPECS, ids=["performer", "regularised", "rfa"])
PLACE = Place(n_heads=2, d_head=WIDTH)
IN_ANOTHER_PROCESS = """
import json, sys, torch
from hasten.attention import PerformerSpec, RFASpec
torch.set_num_threads(1)
attentions = [PerformerSpec(features=40, d_head=16, seed=3).build(), RFASpec(features=12, d_head=16, seed=3).build()]
drawn = []
for attention in attentions:
    for _ in range(3):
        drawn.append(attention.directions.rows.tolist())
        attention.redraw()
json.dump(drawn, sys.stdout)
"""


def close(actual, expected, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# How they are distributed


def test_orthogonal_ones_are_so_within_a_block_and_gaussian_in_length():
    rows = Directions(5 * WIDTH + 3, WIDTH, seed=1, orthogonal=True).rows.double()
    units = rows / rows.norm(dim=1, keepdim=True)
    for block in units.split(WIDTH):
        close(block @ block.T, torch.eye(len(block), dtype=torch.float64))
    squares = Directions(4000, WIDTH, seed=1, orthogonal=True).rows.square().sum(1)
    assert squares.mean() == pytest.approx(WIDTH, rel=0.03)
    assert squares.var() == pytest.approx(2 * WIDTH, rel=0.1)


def test_the_first_of_a_block_has_no_preferred_sign():
    first = torch.stack([Directions(WIDTH, WIDTH, seed=s, orthogonal=True).rows for s in range(400)])
    assert (first.sign().mean(0).abs() < 4 / math.sqrt(400)).all()


def test_regularised_ones_have_one_length():
    rows = Directions(32, WIDTH, seed=0, orthogonal=True, regularised=True).rows
    close(rows.norm(dim=1), torch.full((32,), math.sqrt(WIDTH)))


def test_independent_ones_are_gaussian():
    rows = Directions(4000, WIDTH, seed=0, orthogonal=False).rows
    assert rows.mean().abs() < 0.02
    close(rows.T @ rows / 4000, torch.eye(WIDTH), 0.08)


# What they follow from


@each
def test_equal_seeds_draw_equal_directions_and_other_seeds_and_layers_others(spec):
    first, again, layer = (spec.at(Place(layer=n, n_heads=2, d_head=WIDTH)).build() for n in (0, 0, 1))
    other = dataclasses.replace(spec, seed=1).at(PLACE).build()
    assert torch.equal(first.directions.rows, again.directions.rows)
    for drawn in (layer, other):
        assert not torch.isclose(first.directions.rows, drawn.directions.rows).all(1).any()


def test_another_process_draws_the_same():
    printed = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS], capture_output=True, text=True, check=True
    ).stdout
    attentions = [
        PerformerSpec(features=40, d_head=16, seed=3).build(),
        RFASpec(features=12, d_head=16, seed=3).build(),
    ]
    drawn = []
    for attention in attentions:
        for _ in range(3):
            drawn.append(attention.directions.rows.tolist())
            attention.redraw()
    assert json.loads(printed) == drawn


@each
def test_the_draw_touches_no_global_generator(spec):
    state = torch.get_rng_state()
    spec.at(PLACE).build().redraw()
    assert torch.equal(torch.get_rng_state(), state)


@each
def test_redrawing_is_a_sequence_that_continues_after_loading(spec):
    first, second = spec.at(PLACE).build(), spec.at(Place(layer=7, n_heads=2, d_head=WIDTH)).build()
    seen = [first.directions.rows.clone()]
    for _ in range(2):
        first.redraw()
        seen.append(first.directions.rows.clone())
    assert not any(torch.isclose(a, b).all() for a, b in itertools.combinations(seen, 2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.directions.rows, seen[-1])
    first.redraw()
    second.redraw()
    assert torch.equal(first.directions.rows, second.directions.rows)


@each
def test_a_head_of_another_width_is_refused_with_what_to_do(spec):
    for width in (WIDTH - 1, WIDTH + 1):
        with pytest.raises(UserError, match=f"made for d_head = {WIDTH}, got {width}; give both the same"):
            spec.at(PLACE).build().fits(2, width)
