from itertools import groupby, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.decoding.ctc_beam import collapse, collapse_scored, greedy, prefix_beam_search
from hasten.decoding.ctc_loss import ctc_loss

A, B = 1, 2


def read(path, blank):
    """The definition: merge adjacent equal tokens, then drop blanks."""
    return tuple(token for token, _ in groupby(path) if token != blank)


def posterior(log_probs, blank, banned=()):
    """Every token sequence with the log probability summed over all its paths, by enumeration."""
    allowed = [token for token in range(log_probs.shape[1]) if token not in banned]
    total = {}
    for path in product(allowed, repeat=len(log_probs)):
        score = sum(float(log_probs[t, token]) for t, token in enumerate(path))
        key = read(path, blank)
        total[key] = np.logaddexp(total.get(key, -np.inf), score)
    return total


def random_log_probs(*shape, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).log_softmax(-1)


def log_of(rows):
    return torch.tensor(rows, dtype=torch.float64).log()


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 7),
)
@settings(max_examples=100, deadline=None)
def test_collapse_merges_equal_neighbours_then_drops_blanks(rows, blank, n_frames):
    frames, lengths = torch.tensor(rows), torch.tensor([n_frames] + [7] * (len(rows) - 1))
    expected = [list(read(row[:n], blank)) for row, n in zip(rows, lengths.tolist(), strict=True)]
    scores = random_log_probs(len(rows), 7)
    assert collapse(frames, lengths, blank=blank) == expected
    result = collapse_scored(frames, scores, lengths, blank=blank, pad=9)
    assert [row[keep].tolist() for row, keep in zip(result.tokens, result.mask, strict=True)] == expected
    assert bool((result.tokens[~result.mask] == 9).all())
    assert result.scores[~result.mask].count_nonzero() == 0
    for index, (row, n) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        runs = [(token, [t for t, _ in run]) for token, run in groupby(enumerate(row[:n]), key=lambda pair: pair[1])]
        best = [max(scores[index, t].item() for t in where) for token, where in runs if token != blank]
        assert result.scores[index][result.mask[index]].tolist() == best


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ([A, A, 0, A, A], [A, A]),
        ([A, A, A], [A]),
        ([0, 0], []),
        ([A, B, A], [A, B, A]),
        ([0, A, 0, 0, A, 0], [A, A]),
    ],
)
def test_equal_tokens_stay_apart_only_across_a_blank(path, expected):
    assert collapse(torch.tensor([path]), torch.tensor([len(path)]), blank=0) == [expected]


def test_the_gradient_of_a_token_score_reaches_the_best_frame_of_its_run():
    scores = torch.tensor([[-3.0, -1.0, -2.0, -0.5, torch.nan]], requires_grad=True)
    result = collapse_scored(torch.tensor([[A, A, 0, B, A]]), scores, torch.tensor([4]), blank=0)
    assert result.scores.tolist() == [[-1.0, -0.5]]
    result.scores.sum().backward()
    assert scores.grad.tolist() == [[0, 1, 0, 1, 0]]


def test_no_frames_and_no_rows_collapse_to_nothing():
    empty = torch.zeros(2, 0, dtype=torch.int64)
    assert collapse(empty, torch.tensor([0, 0]), blank=0) == [[], []]
    assert collapse_scored(empty, torch.zeros(2, 0), torch.tensor([0, 0]), blank=0).tokens.shape == (2, 0)
    none = torch.zeros(0, dtype=torch.int64)
    assert collapse_scored(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3), none, blank=0).tokens.shape == (
        0,
        0,
    )


def test_greedy_reads_the_best_frame_tokens_and_ignores_padding_and_banned_tokens():
    log_probs = random_log_probs(3, 8, 6, seed=4)
    lengths = torch.tensor([8, 3, 0])
    log_probs[1, 3:] = torch.nan
    result = greedy(log_probs, lengths, blank=5, pad=0, banned=(0, 1))
    for index, n in enumerate(lengths.tolist()):
        frames = [2 + int(row[2:].argmax()) for row in log_probs[index, :n]]
        assert result.tokens[index][result.mask[index]].tolist() == list(read(frames, 5))
        alone = greedy(log_probs[index : index + 1, :n], lengths[index : index + 1], blank=5, banned=(0, 1))
        n_tokens = alone.tokens.shape[1]
        assert torch.equal(alone.tokens[0], result.tokens[index, :n_tokens])
        assert torch.equal(alone.scores[0], result.scores[index, :n_tokens])
    assert result.scores.isfinite().all()


def test_greedy_refuses_to_ban_the_blank():
    with pytest.raises(ValueError, match="blank 1 is among the banned"):
        greedy(torch.zeros(1, 2, 3), torch.tensor([2]), blank=1, banned=(1,))


@pytest.mark.parametrize(("n_frames", "vocabulary"), [(1, 2), (2, 3), (4, 3), (5, 4), (6, 3), (6, 4)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_full_width_gives_the_exact_posterior_of_every_sequence(n_frames, vocabulary, seed):
    log_probs, blank = random_log_probs(n_frames, vocabulary, seed=seed), seed % vocabulary
    expected = posterior(log_probs, blank)
    found = prefix_beam_search(log_probs, blank=blank, beam=10**6, n_best=10**6)
    assert dict(found).keys() == expected.keys()
    assert len(found) == len(expected)
    for tokens, score in found:
        assert score == pytest.approx(expected[tokens], abs=1e-11)
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True)


def test_the_sum_over_paths_beats_the_best_path():
    found = prefix_beam_search(log_of([[0.6, 0.4], [0.6, 0.4]]), blank=0, beam=5, n_best=5)
    assert [tokens for tokens, _ in found] == [(A,), ()]  # the best path, two blanks, has 0.36; "A" has 0.64
    assert [np.exp(score) for _, score in found] == pytest.approx([0.64, 0.36])


def test_a_repeat_across_a_blank_comes_out_twice():
    sure = log_of([[0.05, 0.9, 0.05], [0.05, 0.9, 0.05], [0.9, 0.05, 0.05], [0.05, 0.9, 0.05], [0.05, 0.9, 0.05]])
    assert prefix_beam_search(sure, blank=0, beam=4)[0][0] == (A, A)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(2, 5), st.integers(1, 6), st.integers(0, 10**6), st.integers(1, 4))
def test_a_narrow_beam_never_counts_a_path_twice(n_frames, vocabulary, beam, seed, top_tokens):
    log_probs = random_log_probs(n_frames, vocabulary, seed=seed, scale=1)
    expected = posterior(log_probs, 0)
    for top in (None, top_tokens):
        found = prefix_beam_search(log_probs, blank=0, beam=beam, n_best=beam, top_tokens=top)
        assert 1 <= len(found) <= beam
        assert len(dict(found)) == len(found)
        assert all(score <= expected[tokens] + 1e-9 for tokens, score in found)
        assert [s for _, s in found] == sorted((s for _, s in found), reverse=True)


def plain_search(log_probs, blank, beam):
    """The textbook algorithm with dictionaries, the beam's meaning at any width."""
    alive = {(): (0.0, -np.inf)}
    for frame in log_probs.tolist():
        mass = {}
        for prefix, (ends_blank, ends_token) in alive.items():
            total = np.logaddexp(ends_blank, ends_token)
            for token, score in enumerate(frame):
                if token == blank:
                    arrivals = [(prefix, total + score, -np.inf)]
                elif prefix[-1:] == (token,):
                    arrivals = [(prefix, -np.inf, ends_token + score), ((*prefix, token), -np.inf, ends_blank + score)]
                else:
                    arrivals = [((*prefix, token), -np.inf, total + score)]
                for key, *parts in arrivals:
                    mass[key] = tuple(np.logaddexp(mass.get(key, (-np.inf, -np.inf)), parts))
        alive = dict(sorted(mass.items(), key=lambda item: -np.logaddexp(*item[1]))[:beam])
    return [(prefix, np.logaddexp(*parts)) for prefix, parts in alive.items()]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(2, 5), st.integers(1, 6), st.integers(0, 10**6))
def test_every_width_equals_the_textbook_algorithm(n_frames, vocabulary, beam, seed):
    log_probs = random_log_probs(n_frames, vocabulary, seed=seed, scale=1)
    found = prefix_beam_search(log_probs, blank=vocabulary - 1, beam=beam, n_best=beam)
    expected = plain_search(log_probs, vocabulary - 1, beam)
    expected = [(tokens, score) for tokens, score in expected if score > -np.inf]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([s for _, s in found], [s for _, s in expected], atol=1e-10)


def test_a_prefix_that_falls_out_of_the_beam_and_comes_back_is_still_one_prefix():
    for seed in range(40):
        log_probs = random_log_probs(25, 3, seed=seed, scale=1)
        found = prefix_beam_search(log_probs, blank=0, beam=5, n_best=5)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain_search(log_probs, 0, 5)]


def test_scores_equal_the_loss_of_the_same_sequence():
    log_probs = random_log_probs(7, 4, seed=9)
    for tokens, score in prefix_beam_search(log_probs, blank=2, beam=10**6, n_best=20):
        target = torch.tensor([tokens], dtype=torch.int64)
        loss = ctc_loss(log_probs[None], torch.tensor([7]), target, torch.tensor([len(tokens)]), blank=2)
        assert -loss.item() == pytest.approx(score, abs=1e-11)


def test_banned_tokens_never_come_out_and_the_rest_keeps_its_mass():
    log_probs = random_log_probs(5, 5, seed=3)
    expected = posterior(log_probs, 0, banned=(1, 4))
    found = dict(prefix_beam_search(log_probs, blank=0, beam=10**6, n_best=10**6, banned=(1, 4)))
    assert found.keys() == expected.keys()
    assert all(found[tokens] == pytest.approx(expected[tokens], abs=1e-11) for tokens in found)
    assert prefix_beam_search(log_probs, blank=0, beam=3, banned=(1, 2, 3, 4))[0][0] == ()


def test_top_tokens_of_the_whole_vocabulary_change_nothing_and_a_single_one_is_the_best():
    log_probs = random_log_probs(6, 5, seed=6)
    full = prefix_beam_search(log_probs, blank=0, beam=8, n_best=8)
    assert prefix_beam_search(log_probs, blank=0, beam=8, n_best=8, top_tokens=4) == full
    best = {1 + int(row[1:].argmax()) for row in log_probs}
    assert all(
        set(tokens) <= best for tokens, _ in prefix_beam_search(log_probs, blank=0, beam=8, n_best=8, top_tokens=1)
    )


def test_a_length_bonus_ranks_by_score_plus_bonus_and_leaves_the_log_probability():
    log_probs = random_log_probs(5, 3, seed=8)
    expected = posterior(log_probs, 0)
    found = prefix_beam_search(log_probs, blank=0, beam=10**6, n_best=10**6, length_bonus=1.5)
    assert [t for t, _ in found] == sorted(expected, key=lambda t: expected[t] + 1.5 * len(t), reverse=True)
    assert all(score == pytest.approx(expected[tokens], abs=1e-11) for tokens, score in found)


def test_ties_go_to_the_shorter_prefix_then_the_lower_token():
    uniform = torch.zeros(1, 4, dtype=torch.float64)
    assert [t for t, _ in prefix_beam_search(uniform, blank=2, beam=3, n_best=3)] == [(), (0,), (1,)]
    assert [t for t, _ in prefix_beam_search(uniform, blank=2, beam=3, n_best=3, top_tokens=1)] == [(), (0,)]


def test_arrays_and_tensors_of_any_precision_are_taken_and_runs_repeat_exactly():
    log_probs = random_log_probs(20, 30, seed=2).float()
    first = prefix_beam_search(log_probs, blank=5, beam=6, n_best=6, top_tokens=8)
    assert prefix_beam_search(log_probs.numpy(), blank=5, beam=6, n_best=6, top_tokens=8) == first
    assert len(prefix_beam_search(log_probs.bfloat16(), blank=5, beam=6)) == 1


def test_no_frames_give_the_empty_sequence_with_certainty():
    assert prefix_beam_search(torch.zeros(0, 3), blank=0, beam=2) == [((), 0.0)]


def test_frames_without_any_possible_token_give_nothing():
    dead = torch.full((3, 3), -torch.inf, dtype=torch.float64)
    assert prefix_beam_search(dead, blank=0, beam=2) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blank": 4}, "blank is 4, the vocabulary with blank has 4"),
        ({"beam": 0}, "beam is 0, allowed 1 or more"),
        ({"n_best": 0}, "n_best is 0"),
        ({"top_tokens": 0}, "top_tokens is 0"),
        ({"banned": (7,)}, "banned token is 7"),
        ({"banned": (0,)}, "blank 0 is among the banned"),
        ({"log_probs": np.zeros((1, 2, 4))}, "need \\(frames, vocabulary\\)"),
        ({"log_probs": torch.full((2, 4), torch.nan)}, "NaN"),
    ],
)
def test_arguments_out_of_range_are_named(changes, message):
    arguments = {"log_probs": torch.zeros(2, 4), "blank": 0, "beam": 2}
    arguments = {**arguments, **changes}
    with pytest.raises(ValueError, match=message):
        prefix_beam_search(arguments.pop("log_probs"), **arguments)
