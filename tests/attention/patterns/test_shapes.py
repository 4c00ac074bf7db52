"""Each shape against its definition, pair by pair, in plain Python; and what shapes say without looking at pairs."""

import random
from collections.abc import Callable

import pytest
import torch

from hasten.attention.patterns import Pattern, RandomBlocks, Scene, parse
from hasten.attention.patterns.algebra import ALL, NONE
from hasten.attention.patterns.cover import Cover, clipped

DEFINITIONS: dict[str, Callable[[int, int, int], bool]] = {
    "Everything()": lambda i, j, n: True,
    "Causal()": lambda i, j, n: j <= i,
    "Local(3)": lambda i, j, n: abs(i - j) <= 3,
    "Local(0)": lambda i, j, n: i == j,
    "Local(4, 1)": lambda i, j, n: i - 4 <= j <= i + 1,
    "Local(2, dilation=3)": lambda i, j, n: j - i in (-6, -3, 0, 3, 6),
    "Blocks(4)": lambda i, j, n: i // 4 == j // 4,
    "Blocks(3, 2, 1)": lambda i, j, n: -2 <= j // 3 - i // 3 <= 1,
    "Strided(1)": lambda i, j, n: True,
    "Strided(4)": lambda i, j, n: (i - j) % 4 == 0,
    "Summary(5, 2)": lambda i, j, n: j % 5 in (3, 4),
    "Summary(3, 3)": lambda i, j, n: True,
    "Global(first=2)": lambda i, j, n: i < 2 or j < 2,
    "Global(last=3)": lambda i, j, n: i >= n - 3 or j >= n - 3,
    "Global(first=1, last=1, rows=False)": lambda i, j, n: j in (0, n - 1),
    "External(2)": lambda i, j, n: i < 2 or j < 2,
    "Local(1) | Strided(5)": lambda i, j, n: abs(i - j) <= 1 or (i - j) % 5 == 0,
    "Local(6) & Strided(2)": lambda i, j, n: abs(i - j) in (0, 2, 4, 6),
    "(Local(1) | Strided(5)) & Causal()": lambda i, j, n: j <= i and (i - j <= 1 or (i - j) % 5 == 0),
}
MORE = (
    "RandomBlocks(2, block=3)",
    "RandomBlocks(2, block=3, near=1, ends=True)",
    "RandomBlocks(2, block=3, past=True)",
)


def grid(pattern: Pattern, n: int, scene: Scene | None = None) -> torch.Tensor:
    """(H, n, n)."""
    at = torch.arange(n)
    allowed = pattern.allows(at[None, None, :, None], at[None, None, None, :], scene or Scene(n, 2))
    return torch.broadcast_to(allowed, (1, 2, n, n))[0]


@pytest.mark.parametrize("n", [1, 2, 5, 13, 16])
@pytest.mark.parametrize("text", DEFINITIONS)
def test_a_shape_allows_what_its_definition_says(text: str, n: int):
    expected = torch.tensor([[DEFINITIONS[text](i, j, n) for j in range(n)] for i in range(n)])
    assert torch.equal(grid(parse(text), n)[0], expected)


@pytest.mark.parametrize("left", [0, 1, 4, 30])
@pytest.mark.parametrize("right", [0, 2, 30])
def test_a_window_has_the_degree_of_its_sides(left: int, right: int):
    n = 17
    degrees = grid(parse(f"Local({left}, {right})"), n)[0].sum(1).tolist()
    assert degrees == [min(i, left) + min(n - 1 - i, right) + 1 for i in range(n)]


def test_two_strided_layers_connect_every_pair_causally():
    n, stride = 30, 5
    near, far = (grid(parse(text), n)[0].float() for text in (f"Local({stride}, 0)", f"Strided({stride}) & Causal()"))
    assert torch.equal((far @ near) > 0, torch.ones(n, n).tril().bool())


@pytest.mark.parametrize("text", [*DEFINITIONS, *MORE])
def test_a_cover_leaves_out_no_pair(text: str):
    pattern, n = parse(text), 19
    allowed = grid(pattern, n)
    for low in range(n):
        for high in range(low + 1, n + 1):
            cover = pattern.cover(low, high, Scene(n, 2))
            for head in range(2):
                missed = allowed[head, low:high].any(0).nonzero()[:, 0]
                assert set(missed.tolist()) <= covered(cover, head, n)


def covered(cover: Cover, head: int, n: int) -> set[int]:
    keys = {j for low, high in clipped(cover.ranges, n) for j in range(low, high)}
    for pick in cover.picks:
        own = pick.positions[0, min(head, pick.positions.shape[1] - 1)].tolist()
        low, high = cover.hull or (0, n)
        keys |= {j for j in own if j >= 0 and (not pick.ascending or low <= j < high)}
    return keys


@pytest.mark.parametrize("text", [*DEFINITIONS, *MORE, "External(3) | Local(1) | Global(first=2)"])
def test_equal_signatures_mean_equal_tiles(text: str):
    pattern, n, draw, seen = parse(text), 24, random.Random(1), {}
    allowed, found = grid(pattern, n), 0
    for _ in range(3000):
        rows, columns = draw.randint(1, 6), draw.randint(1, 6)
        low, first = draw.randint(0, n - rows), draw.randint(0, n - columns)
        tile = allowed[:, low : low + rows, first : first + columns]
        signature = pattern.signature(low, low + rows, (first, first + columns), Scene(n, 2))
        if signature == ALL:
            assert tile.all()
        elif signature == NONE:
            assert not tile.any()
        elif signature is not None:
            found += 1
            assert torch.equal(seen.setdefault((signature, rows, columns), tile), tile)
    silent = ("Everything()", "Strided(1)", "Summary(3, 3)", *MORE)
    assert found or text in silent


@pytest.mark.parametrize("text", [*DEFINITIONS, MORE[2]])
def test_decoding_keeps_every_key_that_is_read_later(text: str):
    try:
        pattern = parse(text).causal()
    except ValueError:
        pytest.skip("cannot be causal")
    n = 24
    allowed = grid(pattern, n)
    for now in range(n):
        needed = pattern.needed(torch.arange(now), now)
        assert not allowed[:, now:, :now][..., ~needed].any()


def test_a_window_and_a_summary_let_go_of_the_rest():
    at = torch.arange(1000)
    for text, most in (("Local(16)", 16), ("Local(4, dilation=4)", 16), ("Blocks(16, 1)", 32)):
        assert parse(text).causal().needed(at, 1000).sum() <= most
    kept = parse("Blocks(50) | Summary(50, 2)").causal().needed(at, 1000)
    assert kept.sum() == 20 * 2


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize(("near", "ends"), [(-1, False), (0, False), (1, True)])
def test_random_blocks_are_drawn_from_what_is_free_each_once(past: bool, near: int, ends: bool):
    shape = RandomBlocks(3, block=2, near=near, ends=ends, past=past)
    for n_blocks in (1, 2, 5, 12):
        table = shape.table(Scene(2 * n_blocks, 4))
        for row in range(n_blocks):
            free = set(range(row if past else n_blocks)) - set(range(row - near, row + near + 1))
            free -= ({0} if past else {0, n_blocks - 1}) if ends else set()
            for drawn in table[:, row].tolist():
                real = [block for block in drawn if block >= 0]
                assert len(set(real)) == len(real) == min(3, len(free))
                assert set(real) <= free


def test_random_blocks_spread_evenly():
    table = RandomBlocks(2, block=1, near=0).table(Scene(9, 4000))
    for row in range(9):
        counts = table[:, row].flatten().bincount(minlength=9)
        assert counts[row] == 0
        # 8000 draws among 8: 1000 each, give or take four standard deviations.
        assert (counts[[j for j in range(9) if j != row]] - 1000).abs().max() < 4 * (2 * 4000 * 0.125 * 0.875) ** 0.5


def test_random_blocks_depend_on_seed_and_head_and_touch_no_global_state():
    state, scene = torch.get_rng_state(), Scene(64, 2)
    one, two = RandomBlocks(3, block=2, seed=1).table(scene), RandomBlocks(3, block=2, seed=2).table(scene)
    assert not torch.equal(one, two)
    assert not torch.equal(one[0], one[1])
    assert torch.equal(one, RandomBlocks(3, block=2, seed=1).table(scene))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_past_of_a_block_does_not_depend_on_the_length():
    shape = RandomBlocks(2, block=2, past=True)
    assert torch.equal(shape.table(Scene(40, 2))[:, :10], shape.table(Scene(20, 2)))


def test_as_many_random_blocks_as_there_are_is_everything():
    assert grid(RandomBlocks(8, block=3), 20).all()
