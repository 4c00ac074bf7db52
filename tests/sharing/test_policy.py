"""Which layers share, by hand-made similarities, and that searching again keeps what was found."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.errors import UserError
from hasten.nn.sharing import SourceMap
from hasten.sharing.policy import blocks, group_similarity, groups, is_blocks, of_sizes, sizes, source_map

Matrix = list[list[float]]


def matrix(n_layers: int, *, other: float = 0.5, **pairs: float) -> Matrix:
    """`other` for different layers, except for pairs named by their numbers from 1: m12=0.4."""
    mu = np.full((n_layers, n_layers), other)
    np.fill_diagonal(mu, 1)
    for name, value in pairs.items():
        i, j = int(name[1]) - 1, int(name[2]) - 1
        mu[i, j] = mu[j, i] = value
    return mu.tolist()


def drawn(n_layers: int, seed: int) -> np.ndarray:
    mu = np.random.default_rng(seed).random((n_layers, n_layers))
    mu = (mu + mu.T) / 2
    np.fill_diagonal(mu, 1)
    return mu


def shared(mu: np.ndarray, plan: SourceMap) -> np.ndarray:
    """What is measured of layers that share, if nothing else changes."""
    after = mu.copy()
    for group in groups(plan):
        after[np.ix_(group, group)] = 1
    return after


def plain_sim(mu, m: int, n: int) -> float:
    """The published sum over a block m .. n, from 1, with the diagonal taken out."""
    if m == n:
        return 1.0
    total = sum((i != j) * mu[i - 1][j - 1] for i in range(m, n + 1) for j in range(m, n + 1))
    return total / ((n - m + 1) * (n - m))


def plain_blocks(mu, theta: float, largest: int) -> list[int]:
    """Sizes: try every end, keep the last that passes."""
    found, first = [], 1
    while first <= len(mu):
        ends = range(first, min(len(mu), first + largest - 1) + 1)
        end = max([first, *(n for n in ends if plain_sim(mu, first, n) > theta)])
        found.append(end - first + 1)
        first = end + 1
    return found


# Similarity of a block


def test_the_diagonal_does_not_count_and_one_layer_is_wholly_alike():
    mu = matrix(3, m12=0.2, m13=0.4, m23=0.9)
    assert group_similarity(mu, [0, 1]) == pytest.approx(0.2)
    assert group_similarity(mu, [0, 1, 2]) == pytest.approx(0.5)
    assert group_similarity(mu, [0, 2]) == pytest.approx(0.4)
    assert group_similarity(mu, [1]) == 1


def test_two_blocks_of_three_and_two_with_half_between_them():
    mu = shared(np.array(matrix(5)), of_sizes((3, 2)))
    assert group_similarity(mu, range(4)) == pytest.approx(0.75)
    assert group_similarity(mu, range(5)) == pytest.approx(0.70)
    assert sizes(blocks(mu.tolist(), 0.72)) == (4, 1)  # a later block can be cut
    assert sizes(blocks(mu.tolist(), 0.76)) == (3, 2)


# Blocks


def test_a_block_goes_to_the_largest_end_that_passes_over_one_that_fails():
    mu = matrix(4, other=0.1, m12=0.4, m13=0.9, m23=0.9)
    assert (plain_sim(mu, 1, 2), plain_sim(mu, 1, 3)) == (0.4, pytest.approx(0.7333, abs=1e-4))
    assert blocks(mu, 0.6).numbers == (1, 1, 1, 4)
    assert blocks(mu, 0.6, largest=2).numbers == (1, 2, 2, 4)


def test_blocks_go_on_after_the_first():
    mu = matrix(6, other=0.3, m12=0.9, m34=0.9, m35=0.9, m36=0.9, m45=0.8, m46=0.8, m56=0.8)
    assert blocks(mu, 0.8).numbers == (1, 1, 3, 3, 3, 3)
    assert sizes(blocks(mu, 0.8)) == (2, 4)


@pytest.mark.parametrize("search", [blocks, source_map])
@pytest.mark.parametrize(
    ("theta", "expected"),
    [(1.0, (1, 2, 3)), (1.5, (1, 2, 3)), (math.inf, (1, 2, 3)), (-0.01, (1, 1, 1)), (-math.inf, (1, 1, 1))],
)
def test_thresholds_beyond_the_range_leave_all_alone_or_take_all(search, theta: float, expected: tuple[int, ...]):
    for mu in (matrix(3, other=0.0), matrix(3, other=1.0), matrix(3, m12=0.0)):
        assert search(mu, theta).numbers == expected


@pytest.mark.parametrize("search", [blocks, source_map])
def test_a_similarity_equal_to_the_threshold_does_not_pass(search):
    assert search(matrix(2, other=0.5), 0.5).numbers == (1, 2)
    assert search(matrix(2, other=0.5), 0.499).numbers == (1, 1)
    assert search([[1.0]], 0.5).numbers == (1,)


@given(st.integers(1, 8), st.integers(0, 2**31), st.floats(-0.1, 1.1), st.integers(1, 8))
def test_blocks_are_those_of_the_plain_search(n_layers: int, seed: int, theta: float, largest: int):
    mu = drawn(n_layers, seed)
    assert list(sizes(blocks(mu.tolist(), theta, largest))) == plain_blocks(mu, theta, largest)
    assert sizes(blocks(mu.tolist(), theta)) == tuple(plain_blocks(mu, theta, n_layers))


# Maps


def test_layers_may_point_over_others():
    mu = matrix(6, other=0.2, m13=0.9, m14=0.9, m15=0.9, m16=0.9)
    assert source_map(mu, 0.8).numbers == (1, 2, 1, 1, 1, 1)


def test_only_layers_that_compute_their_own_are_sources_and_the_most_similar_is_taken():
    mu = matrix(4, other=0.1, m12=0.9, m23=0.9, m13=0.3, m14=0.6, m34=0.7)
    # 3 is like 2, but 2 uses 1; 4 may use 1 or 3, and is more like 3.
    assert source_map(mu, 0.5).numbers == (1, 1, 3, 3)
    assert source_map(mu, 0.5, largest=1).numbers == (1, 2, 3, 4)


def test_a_full_source_sends_layers_to_the_next_best():
    mu = matrix(4, other=0.1, m12=0.3, m13=0.9, m14=0.8, m24=0.7)
    assert source_map(mu, 0.5).numbers == (1, 2, 1, 1)
    assert source_map(mu, 0.5, largest=2).numbers == (1, 2, 1, 2)


@given(st.integers(1, 8), st.integers(0, 2**31), st.floats(-0.1, 1.1), st.none() | st.integers(1, 4))
def test_a_map_is_one_that_stacks_take(n_layers: int, seed: int, theta: float, largest: int | None):
    plan = source_map(drawn(n_layers, seed).tolist(), theta, largest)
    assert SourceMap.of(plan.numbers, n_layers, "x") == plan
    assert max(map(len, groups(plan))) <= (largest or n_layers)


# Searching again


@given(st.integers(1, 8), st.integers(0, 2**31), st.floats(-0.1, 0.999), st.none() | st.integers(1, 4))
def test_after_sharing_block_ends_never_move_back(n_layers: int, seed: int, theta: float, largest: int | None):
    found = blocks(drawn(n_layers, seed).tolist(), theta, largest)
    after = shared(drawn(n_layers, seed + 1), found)  # between blocks, training may change everything
    again = blocks(after.tolist(), theta, largest)
    assert tuple(np.cumsum(sizes(again))) >= tuple(np.cumsum(sizes(found)))
    assert sizes(again)[0] >= sizes(found)[0]


def test_a_later_block_may_lose_its_first_layer_to_the_one_before():
    shared = (0, 0, 0, 1, 1)
    mu = [[1.0 if one == other else 0.5 for other in shared] for one in shared]
    assert blocks(mu, 0.72).numbers == (1, 1, 1, 1, 5)


@given(st.integers(1, 8), st.integers(0, 2**31), st.floats(-0.1, 0.999))
def test_a_map_is_found_again_after_sharing(n_layers: int, seed: int, theta: float):
    mu = drawn(n_layers, seed)
    found = source_map(mu.tolist(), theta)
    assert source_map(shared(mu, found).tolist(), theta) == found


# Sizes of blocks


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_sizes_and_maps_are_one_another(numbers: list[int]):
    plan = of_sizes(numbers)
    assert sizes(plan) == tuple(numbers)
    assert SourceMap.of(plan.numbers, sum(numbers), "x") == plan


def test_the_example_of_sizes():
    assert of_sizes((2, 4)).numbers == (1, 1, 3, 3, 3, 3)
    assert groups(of_sizes((2, 4))) == [(0, 1), (2, 3, 4, 5)]
    assert groups(SourceMap((0, 1, 0, 0))) == [(0, 2, 3), (1,)]


@pytest.mark.parametrize("numbers", [(1, 2, 1, 1, 1, 1), (1, 2, 1), (1, 1, 3, 1)])
def test_a_map_over_others_is_no_sequence_of_blocks(numbers: tuple[int, ...]):
    plan = SourceMap.of(numbers, len(numbers), "x")
    assert not is_blocks(plan)
    with pytest.raises(UserError, match="is no sequence of blocks"):
        sizes(plan)


# Mistakes


@pytest.mark.parametrize("search", [blocks, source_map])
@pytest.mark.parametrize(
    ("mu", "theta", "largest", "said"),
    [
        ([], 0.5, None, "give a square matrix"),
        ([[1.0, 0.5]], 0.5, None, "give a square matrix"),
        ([[1.0, math.nan], [math.nan, 1.0]], 0.5, None, "layers 1 and 2 have nan; allowed 0 to 1"),
        ([[1.0, 1.2], [1.2, 1.0]], 0.5, None, "layers 1 and 2 have 1.2"),
        ([[1.0, 0.2], [0.3, 1.0]], 0.5, None, "give a symmetric matrix"),
        ([[1.0]], math.nan, None, "theta is nan"),
        ([[1.0]], 0.5, 0, "the largest block has 0 layers"),
    ],
)
def test_what_means_nothing_is_an_error(search, mu: Matrix, theta: float, largest: int | None, said: str):
    with pytest.raises(UserError, match=said):
        search(mu, theta, largest)


@pytest.mark.parametrize("numbers", [(), (2, 0), (-1,)])
def test_sizes_below_one_are_an_error(numbers: tuple[int, ...]):
    with pytest.raises(UserError, match="give one or more, each 1 or more"):
        of_sizes(numbers)
