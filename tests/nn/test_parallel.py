"""What parallel decoders are built from: draws, copied inputs, lengths, bidirectional layers."""

import itertools
import math

import pytest
import torch

from hasten.attention import FullSpec, LocalSpec
from hasten.errors import UserError
from hasten.nn.decoder_inputs import first, soft_copy, uniform_copy
from hasten.nn.draws import row_draws
from hasten.nn.lengths import LengthHead
from hasten.nn.parallel import ParallelDecoder


def lengths_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def test_a_batch_draws_what_its_rows_draw_one_after_the_other():
    mask = first(lengths_of(3, 0, 5))
    own, each = row_draws(mask, torch.Generator().manual_seed(3), 2)
    one = torch.Generator().manual_seed(3)
    for row, n in enumerate([3, 0, 5]):
        alone, positions = row_draws(torch.ones(1, n, dtype=torch.bool), one, 2)
        assert torch.equal(own[row], alone[0])
        assert torch.equal(each[row, :n], positions[0])
        assert (each[row, n:] == 1).all()
    assert ((own >= 0) & (own < 1)).all()


def test_padding_changes_no_draw():
    mask = first(lengths_of(3, 2))
    own, each = row_draws(mask, torch.Generator().manual_seed(3))
    wide, wide_each = row_draws(first(lengths_of(3, 2), 9), torch.Generator().manual_seed(3))
    assert torch.equal(own, wide)
    assert torch.equal(each, wide_each[:, :3])


@pytest.mark.parametrize(("source", "target"), list(itertools.product([1, 2, 3, 7], [1, 2, 5, 14])))
def test_the_uniform_copy_is_as_defined(source: int, target: int):
    expected = [math.floor(i * (source - 1) / (target - 1) + 0.5) if target > 1 else 0 for i in range(target)]
    found = uniform_copy(lengths_of(source, 9), lengths_of(target, 3))
    assert found[0, :target].tolist() == expected
    assert (found[0, target:] == 0).all()
    if target > 1:
        assert (found[0, 0], found[0, target - 1]) == (0, source - 1)


@pytest.mark.parametrize("tau", [0.3, 2.0])
def test_the_soft_copy_is_as_defined_and_reads_no_padding(tau: float):
    states = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    states[0, 3:] = torch.nan
    sizes, lengths = [3, 5], [4, 2]
    found = soft_copy(states, first(lengths_of(*sizes)), lengths_of(*lengths), tau)
    for row, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
        for i in range(length):
            weights = torch.tensor([math.exp(-abs(j - i * size / length) / tau) for j in range(size)])
            expected = (weights / weights.sum()) @ states[row, :size]
            torch.testing.assert_close(found[row, i], expected, rtol=1e-5, atol=1e-5)


FORMS = [("offset", 3), ("absolute", 6)]


def head_of(form, most: int) -> LengthHead:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LengthHead(4, form, most)


@pytest.mark.parametrize(("form", "most"), FORMS)
def test_lengths_that_classes_stand_for_come_back(form, most: int):
    head, states = head_of(form, most), torch.randn(1, 5, 4)
    mask = torch.ones(1, 5, dtype=torch.bool)
    possible = range(2, 9) if form == "offset" else range(1, 7)
    log_probs = head.log_probs(states, mask)
    found, scores = head.best(states, mask, len(possible))
    assert sorted(found[0].tolist()) == list(possible)
    for length, score in zip(found[0].tolist(), scores[0], strict=True):
        own = -head.loss(states, mask, lengths_of(length)).sum
        torch.testing.assert_close(own, score)
        assert head.clipped(mask, lengths_of(length)) == 0
    torch.testing.assert_close(log_probs.exp().sum(), torch.tensor(1.0))
    assert scores[0].tolist() == sorted(scores[0].tolist(), reverse=True)


@pytest.mark.parametrize(("form", "most"), FORMS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_other_lengths_are_learnt_as_the_nearest_and_counted(form, most: int, n: int):
    head, states = head_of(form, most), torch.randn(1, n, 4)
    mask = torch.ones(1, n, dtype=torch.bool)
    low, high = (max(1, n - most), n + most) if form == "offset" else (1, most)
    for length in range(30):
        nearest = min(max(length, low), high)
        torch.testing.assert_close(
            head.loss(states, mask, lengths_of(length)).sum, head.loss(states, mask, lengths_of(nearest)).sum
        )
        assert head.clipped(mask, lengths_of(length)) == (length != nearest)


@pytest.mark.parametrize(("form", "most"), FORMS)
def test_padding_changes_no_length(form, most: int):
    head, states = head_of(form, most), torch.randn(1, 5, 4)
    wide = torch.cat((states, torch.full((1, 3, 4), torch.nan)), 1)
    found = head.log_probs(wide, first(lengths_of(5), 8))
    torch.testing.assert_close(found, head.log_probs(states, first(lengths_of(5))))


def test_more_lengths_than_there_are_is_an_error():
    head = head_of("offset", 3)
    with pytest.raises(UserError, match="this model knows 4 for one of the sources: use a beam of at most 4"):
        head.best(torch.randn(1, 1, 4), torch.ones(1, 1, dtype=torch.bool), 5)


@pytest.mark.parametrize(("form", "most"), FORMS)
def test_no_length_above_the_longest_is_found(form, most: int):
    head, states = head_of(form, most), torch.randn(1, 5, 4)
    mask = torch.ones(1, 5, dtype=torch.bool)
    every = head.best(states, mask, 7 if form == "offset" else 6)[0][0].tolist()
    found = head.best(states, mask, 3, longest=4)[0][0].tolist()
    assert found == [length for length in every if length <= 4][:3]


def test_the_states_get_no_gradient_where_it_is_detached():
    head, states = head_of("offset", 3), torch.randn(1, 5, 4, requires_grad=True)
    mask = torch.ones(1, 5, dtype=torch.bool)
    head.loss(states, mask, lengths_of(4), detach=True).sum.backward()
    assert states.grad is None
    head.loss(states, mask, lengths_of(4)).sum.backward()
    assert states.grad is not None
    assert states.grad.any()


def decoder(**settings) -> ParallelDecoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        attention = settings.pop("attention", (FullSpec(),))
        return ParallelDecoder(3, 8, 2, 16, 0.0, attention, (FullSpec(),), **settings).eval()


SHARED = {"sharing": (1, 1, 1), "cross_sharing": (1, 1, 3)}


@pytest.mark.parametrize("settings", [{}, SHARED, {"attention": (LocalSpec(left=2, right=2),)}], ids=str)
def test_rows_do_not_know_of_each_other_nor_of_padding(settings):
    model, generator = decoder(**settings), torch.Generator().manual_seed(1)
    x, memory = torch.randn(2, 6, 8, generator=generator), torch.randn(2, 5, 8, generator=generator)
    together = model(x, first(lengths_of(4, 6)), memory, first(lengths_of(5, 2)))
    for row, (t, s) in enumerate([(4, 5), (6, 2)]):
        own = [torch.ones(1, n, dtype=torch.bool) for n in (t, s)]
        alone = model(x[row : row + 1, :t], own[0], memory[row : row + 1, :s], own[1])
        torch.testing.assert_close(together[row, :t], alone[0], rtol=1e-4, atol=1e-5)


def test_every_position_reads_every_other():
    model = decoder()
    x = torch.randn(1, 5, 8, requires_grad=True)
    out = model(x, torch.ones(1, 5, dtype=torch.bool), torch.randn(1, 4, 8), torch.ones(1, 4, dtype=torch.bool))
    for i in range(5):
        [gradient] = torch.autograd.grad(out[0, i].square().sum(), x, retain_graph=True)
        assert gradient.abs().amax(-1).gt(0).all()


def test_followers_have_no_queries_and_keys_of_their_own():
    own, shared = (sum(p.numel() for p in decoder(**s).parameters()) for s in ({}, SHARED))
    d = 8
    follows_self = 2 * (2 * d * d + 2 * d)  # queries and keys with their biases, in two layers
    follows_cross = 4 * d * d + 4 * d + 2 * d  # everything of one, and the normalisation before it
    assert own - shared == follows_self + follows_cross


def test_a_length_of_numbers_that_are_none_says_so():
    head, states = head_of("offset", 3), torch.full((1, 5, 4), torch.nan)
    with pytest.raises(UserError, match="not numbers"):
        head.best(states, torch.ones(1, 5, dtype=torch.bool))
