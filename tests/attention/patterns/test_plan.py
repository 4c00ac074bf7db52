"""What a plan costs: tiles in the number of what is allowed, never of all pairs; memory that grows with the length."""

import time
import tracemalloc

import pytest
import torch

from hasten.attention import Mask
from hasten.attention.patterns import PatternAttention, Scene, parse
from hasten.attention.patterns.plan import _plan, resolved, terms
from hasten.attention.patterns.work import Plan, Shape

REAL = {
    "Local(64)": 1.05,
    "Local(64) | Global(first=2)": 1.05,
    "Local(16, dilation=4)": 1.05,
    "Blocks(64, 1, 1) | Global(first=64, last=64) | RandomBlocks(3, near=1, ends=True)": 1.1,
}


def plan(text: str, n: int, heads: int = 4) -> Plan:
    shape, scene = Shape(1, heads, n, n, (n,)), Scene(n, heads, size=n)
    return _plan(resolved(parse(text)), shape, scene, 64, torch.float32, torch.device("cpu"))


def scores(made: Plan) -> int:
    return sum(
        (tile.rows[1] - tile.rows[0]) * tile.width * piece.group.classes
        for piece in made.pieces
        for tile in piece.tiles
    )


def masks(made: Plan) -> int:
    """Elements of masks, each tensor once."""
    found = {id(s.mask): s.mask.numel() for piece in made.pieces for tile in piece.tiles for s in tile.masks}
    return sum(found.values())


@pytest.mark.parametrize("text", REAL)
def test_scores_grow_with_the_length(text: str):
    few, many = scores(plan(text, 4096)), scores(plan(text, 16384))
    assert many / few <= 4 ** REAL[text]


def test_a_stride_near_the_root_costs_the_power_of_three_halves():
    few, many = scores(plan("Local(32) | Strided(64)", 4096)), scores(plan("Local(64) | Strided(128)", 16384))
    assert many / few <= 8.5


@pytest.mark.parametrize("text", [*REAL, "Local(64) | Strided(128)", "Blocks(128) | Summary(128, 8)"])
def test_masks_are_few(text: str):
    assert masks(plan(text, 16384)) <= 16384 * 64


def test_no_plan_of_a_long_sequence_forms_all_pairs():
    tracemalloc.start()
    begin = time.perf_counter()
    made = plan("Local(64) | Global(first=2)", 100_000, heads=1)
    seconds, (_, most) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert masks(made) < 10**6
    assert most < 2e8
    assert seconds < 60  # forming 10^10 pairs would not only be slow


def test_a_window_forms_little_more_than_it_needs():
    assert scores(plan("Local(256)", 8192)) <= 1.13 * 8192 * 513


def test_pieces_do_not_share_pairs():
    q, k = torch.randn(2, 1, 2, 50, 4, dtype=torch.float64)
    attention = PatternAttention(parse("Local(3) | Strided(7) | Local(2, dilation=5) | Global(first=1)"), rows=8)
    dense = attention.operator(q, k, Mask()).dense()
    torch.testing.assert_close(dense, attention.reference(q, k, Mask()))
    assert len(plan("Local(3) | Strided(7) | Local(2, dilation=5)", 50).pieces) > 2


def test_the_normal_form_is_a_union_of_restrictions():
    form = [" & ".join(map(str, term)) for term in terms(parse("(Local(1) | Strided(4)) & (Blocks(8) | Causal())"))]
    assert form == [
        "Local(1) & Blocks(block=8)",
        "Local(1) & Causal()",
        "Strided(stride=4) & Blocks(block=8)",
        "Strided(stride=4) & Causal()",
    ]
