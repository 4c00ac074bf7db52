"""Fertilities: what they copy, how they are chosen, capped and drawn."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.nn.decoder_inputs import first
from hasten.nn.fertility import FertilityHead, average, capped, copied, drawn, feasible, most_probable, noise

FERTILITIES = st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4)


def log_probs_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).log_softmax(-1)


@given(FERTILITIES)
def test_source_positions_are_repeated_in_order_as_often_as_their_fertilities_say(rows):
    found = copied(torch.tensor(rows))
    assert found.shape[1] == max(1, *(sum(row) for row in rows))
    for row, places in zip(rows, found.tolist(), strict=True):
        repeated = [*itertools.chain.from_iterable(itertools.repeat(i, f) for i, f in enumerate(row))]
        assert places == repeated + [0] * (len(places) - len(repeated))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 40))
def test_too_many_are_cut_in_proportion(row, limit):
    [found] = capped(torch.tensor([row]), torch.tensor([limit])).tolist()
    if sum(row) <= limit:
        assert found == row
        return
    shares = [f * limit / sum(row) for f in row]
    assert sum(found) == limit
    assert all(math.floor(share) <= one <= math.ceil(share) for share, one in zip(shares, found, strict=True))
    # Largest remainders: whoever is rounded up has no smaller a remainder than whoever is not; ties go to the left.
    rests = [f * limit % sum(row) for f in row]
    up = [one > f * limit // sum(row) for one, f in zip(found, row, strict=True)]
    order = sorted(range(len(row)), key=lambda i: (-rests[i], i))
    assert [up[i] for i in order] == sorted(up, reverse=True)


def test_rows_are_capped_each_by_its_own_limit():
    found = capped(torch.tensor([[6, 0, 6], [6, 0, 6], [1, 1, 1]]), torch.tensor([4, 100, 2]))
    assert found.tolist() == [[2, 0, 2], [6, 0, 6], [1, 1, 0]]


def test_at_least_one_token_is_copied_where_none_is_least_likely():
    log_probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.1, 0.9]]).log()[None]
    mask = first(torch.tensor([3]), 4)
    found = feasible(most_probable(log_probs), log_probs, mask, torch.tensor([9]))
    assert found.tolist() == [[0, 1, 0, 0]]


def test_padding_is_never_copied():
    log_probs = log_probs_of(1, 4, 6)
    fertilities = torch.tensor([[2, 0, 3, 5]])
    assert feasible(fertilities, log_probs, first(torch.tensor([3]), 4), torch.tensor([9])).tolist() == [[2, 0, 3, 0]]


def test_the_average_is_the_expectation_rounded_halves_up():
    log_probs = torch.tensor([[0.5, 0.5, 0.0], [0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.1, 0.5, 0.4]]).log()[None]
    assert average(log_probs).tolist() == [[1, 1 if 0.3 + 0.2 >= 0.5 else 0, 2, 1]]
    assert most_probable(log_probs).tolist() == [[0, 0, 2, 1]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_fertilities_are_drawn_with_their_probabilities(temperature):
    log_probs, n = log_probs_of(1, 1, 5), 20_000
    uniform = torch.linspace(0, 1, n + 1)[:-1].view(1, n)
    found = drawn(log_probs.expand(1, n, 5), uniform, temperature)[0]
    expected = (log_probs[0, 0] / temperature).softmax(-1)
    torch.testing.assert_close(found.bincount(minlength=5) / n, expected, rtol=0, atol=2 / n)


def test_what_is_impossible_is_never_drawn():
    log_probs = torch.tensor([[[0.0, 0.25, 0.0, 0.75, 0.0]]]).log().expand(1, 3, 5)
    assert drawn(log_probs, torch.tensor([[0.0, 0.25, 1 - 2**-24]])).tolist() == [[1, 3, 3]]


def test_noise_is_a_function_of_seed_candidate_and_position_alone():
    long = noise(3, 2, 300)
    assert all(torch.equal(noise(3, 2, n), long[:n]) for n in range(300))
    assert len({tuple(noise(seed, number, 4).tolist()) for seed in range(5) for number in range(5)}) == 25
    before = torch.get_rng_state()
    noise(0, 1, 8)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_loss_is_the_cross_entropy_of_real_positions_and_labels_above_the_most_are_learnt_as_it():
    head, states = FertilityHead(4, 3), torch.randn(2, 3, 4)
    labels, mask = torch.tensor([[2, 0, 1], [7, 9, 9]]), first(torch.tensor([3, 1]))
    log_probs = head.log_probs(states)
    expected = -(log_probs[0, 0, 2] + log_probs[0, 1, 0] + log_probs[0, 2, 1] + log_probs[1, 0, 3])
    term = head.loss(states, mask, labels, 0.5)
    torch.testing.assert_close(term.sum, expected)
    assert (int(term.count), term.weight) == (4, 0.5)
