"""The sampler of masked outputs against its definition: one row at a time, in lists."""

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from decoding.masked_definition import Passes, Predictor, plainly
from hasten.data.tokenizer import MASK, PAD
from hasten.decoding.canvas import Canvas
from hasten.decoding.masked import FAST_DLLM, LLADA, MASK_PREDICT, MaskedSampler, MaskedSpec, still_masked
from hasten.errors import UserError

LOG_PROBS = [-0.125 * step for step in range(1, 12)] + [0.0]  # few values: many ties; exact in float32


def predictor(seed: int, values: Sequence[float] = LOG_PROBS) -> Predictor:
    """A token and its log probability for every position, drawn for every row of tokens anew."""

    def predict(row: Sequence[int]) -> list[tuple[int, float]]:
        draw = random.Random(f"{seed} {list(row)}")
        return [(draw.randrange(7, 40), draw.choice(values)) for _ in row]

    return predict


def run(spec: MaskedSpec, lengths: Sequence[int], predict: Predictor, extra: int = 0) -> list[tuple[Passes, Canvas]]:
    """The same by the sampler, a batch at once; rows that are finished leave it."""
    sampler = MaskedSampler(spec)
    canvas = sampler.start(torch.tensor(lengths), max(lengths) + extra)
    rows = torch.arange(len(lengths))
    passes: list[Passes] = [[] for _ in lengths]
    last: dict[int, Canvas] = {}
    while len(rows):
        assert len(passes[rows[0]]) < 200, "it goes on for ever"
        where = sampler.open(canvas)
        texts = [[int(token) for token in row if token != PAD] for row in canvas.tokens]
        found = [predict(text) for text in texts]
        picked = [found[b][i] for b, i in where.nonzero().tolist()]
        tokens, scores = torch.tensor([token for token, _ in picked]), torch.tensor([score for _, score in picked])
        filled = sampler.fill(canvas, tokens, scores)
        masked = sampler.mask(filled)
        for b, row in enumerate(rows.tolist()):
            n = lengths[row]
            assert (masked.tokens[b, n:] == PAD).all()
            passes[row].append((filled.tokens[b, :n].tolist(), masked.tokens[b, :n].tolist()))
            last[row] = masked.select(torch.tensor([b]))
        left = (~sampler.finished(masked)).nonzero()[:, 0]
        canvas, rows = masked.select(left), rows[left]
    return [(passes[row], last[row]) for row in range(len(lengths))]


specs = st.builds(
    MaskedSpec,
    iterations=st.integers(1, 12),
    remask=st.sampled_from(["worst", "none"]),
    threshold=st.sampled_from([1.0, 0.9, 0.5, 0.3]),
    block=st.sampled_from([None, 1, 2, 3, 5]),
)


@given(specs, st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(0, 10**6), st.integers(0, 3))
@settings(max_examples=100)
def test_a_batch_is_sampled_as_the_definition_does_row_by_row(spec, lengths, seed, extra):
    predict = predictor(seed)
    for n, (passes, canvas) in zip(lengths, run(spec, lengths, predict, extra), strict=True):
        expected, scores = plainly(spec, n, predict)
        assert passes == expected
        assert canvas.scores[0, :n].tolist() == scores


# The published algorithms, each told on its own.


def mask_predict(n: int, iterations: int, predict: Predictor) -> list[list[int]]:
    """Ghazvininejad et al., 2019; masks are never forced where the schedule gives none."""
    row, scores, seen = [MASK] * n, [0.0] * n, []
    for t in range(iterations):
        if t:
            worst = sorted(range(n), key=lambda i: (scores[i], -i))[: n * (iterations - t) // iterations]
            if not worst:
                break
            row = [MASK if i in worst else row[i] for i in range(n)]
        found = predict(row)
        for i in [i for i in range(n) if row[i] == MASK]:
            row[i], scores[i] = found[i]
        seen.append(list(row))
    return seen


def low_confidence(n: int, budgets: Sequence[int], predict: Predictor, size: int) -> list[list[int]]:
    """Nie et al., 2025: of what is masked in a block the most probable are committed, as many as the budget says."""
    row, seen = [MASK] * n, []
    for begin in range(0, n, size):
        for budget in budgets:
            open_ = [i for i in range(begin, min(begin + size, n)) if row[i] == MASK]
            if not open_:
                break
            found = predict(row)
            for i in sorted(open_, key=lambda i: (-found[i][1], i))[:budget]:
                row[i] = found[i][0]
            seen.append(list(row))
    return seen


def by_threshold(n: int, threshold: float, predict: Predictor, size: int) -> list[list[int]]:
    """Wu et al., 2025: of what is masked in a block everything above the threshold is committed, at least the best."""
    row, seen = [MASK] * n, []
    for begin in range(0, n, size):
        while open_ := [i for i in range(begin, min(begin + size, n)) if row[i] == MASK]:
            found = predict(row)
            best = min(open_, key=lambda i: (-found[i][1], i))
            for i in open_:
                if i == best or math.exp(found[i][1]) > threshold:
                    row[i] = found[i][0]
            seen.append(list(row))
    return seen


@pytest.mark.parametrize("seed", range(40))
def test_the_default_is_mask_predict(seed: int):
    n, iterations = 1 + seed % 8, 1 + seed % 12
    predict = predictor(seed)
    [(passes, _)] = run(dataclasses.replace(MASK_PREDICT, iterations=iterations), [n], predict)
    assert [filled for filled, _ in passes] == mask_predict(n, iterations, predict)


@pytest.mark.parametrize("block", [None, 2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_llada_commits_the_most_probable_for_good(seed: int, block: int | None):
    size = block or 8
    iterations = (1, 2, 4, size)[seed % 4]
    if size % iterations:
        iterations = size
    predict = predictor(seed)
    [(passes, _)] = run(dataclasses.replace(LLADA, iterations=iterations, block=block), [8], predict)
    budgets = [size // iterations] * iterations
    assert [masked for _, masked in passes] == low_confidence(8, budgets, predict, size)


@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize("seed", range(20))
def test_fast_dllm_commits_all_above_the_threshold_and_at_least_one(seed: int, block: int | None):
    n = 1 + seed % 9
    predict = predictor(seed, [math.log(p) for p in (0.2, 0.5, 0.85, 0.95, 0.99)])
    [(passes, _)] = run(dataclasses.replace(FAST_DLLM, block=block), [n], predict)
    assert [masked for _, masked in passes] == by_threshold(n, 0.9, predict, block or n)


# Numbers of passes and masks.


def counts(spec: MaskedSpec, n: int, seed: int = 0) -> list[int]:
    [(passes, _)] = run(spec, [n], predictor(seed))
    return [row.count(MASK) for _, row in passes]


def test_the_masks_of_twelve_tokens_in_ten_passes():
    assert counts(MASK_PREDICT, 12) == [10, 9, 8, 7, 6, 4, 3, 2, 1, 0]


def test_two_tokens_in_ten_passes_are_finished_after_six():
    assert counts(MASK_PREDICT, 2) == [1, 1, 1, 1, 1, 0]


def test_what_is_kept_is_kept_one_by_one_where_passes_abound():
    assert counts(dataclasses.replace(LLADA, iterations=50), 4) == [3, 2, 1, 0]


@given(st.integers(1, 200), st.integers(1, 20))
@settings(max_examples=50)
def test_the_schedule_is_counted_in_whole_numbers(n: int, iterations: int):
    from fractions import Fraction

    for t in range(iterations + 1):
        found = still_masked(torch.tensor([n]), torch.tensor([t]), iterations)
        assert int(found) == math.floor(n * (1 - Fraction(t, iterations)))


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=30)
def test_commits_add_up_to_the_length_and_none_is_empty(n: int, iterations: int, seed: int):
    left = [n, *counts(dataclasses.replace(LLADA, iterations=iterations), n, seed)]
    commits = [before - after for before, after in itertools.pairwise(left)]
    assert sum(commits) == n
    assert min(commits) >= 1
    assert len(commits) <= min(n, iterations)


@given(st.integers(1, 9), st.integers(0, 10**6))
@settings(max_examples=30)
def test_a_threshold_of_one_commits_exactly_one_token_a_pass(n: int, seed: int):
    """Even where probabilities are exactly 1: only what is above the threshold is committed with it."""
    spec = dataclasses.replace(FAST_DLLM, threshold=1.0)
    assert counts(spec, n, seed) == list(range(n - 1, -1, -1))


def test_with_full_confidence_a_threshold_needs_one_pass_a_block():
    sure = lambda row: [(7, -0.01)] * len(row)  # noqa: E731
    assert len(run(FAST_DLLM, [7], sure)[0][0]) == 1
    assert len(run(dataclasses.replace(FAST_DLLM, block=3), [7], sure)[0][0]) == 3


@pytest.mark.parametrize("spec", [MASK_PREDICT, LLADA, FAST_DLLM], ids=["mask_predict", "llada", "fast_dllm"])
def test_a_block_of_the_whole_length_is_none(spec: MaskedSpec):
    for n in (1, 5, 8):
        [(passes, _)] = run(dataclasses.replace(spec, block=n), [n], predictor(n))
        assert passes == run(spec, [n], predictor(n))[0][0]


@pytest.mark.parametrize("spec", [MASK_PREDICT, LLADA, FAST_DLLM], ids=["mask_predict", "llada", "fast_dllm"])
def test_nothing_right_of_a_block_is_said_before_the_block_is_finished(spec: MaskedSpec):
    [(passes, _)] = run(dataclasses.replace(spec, block=3, iterations=4), [8], predictor(1))
    for filled, masked in passes:
        begun = [any(token != MASK for token in filled[i : i + 3]) for i in (0, 3, 6)]
        whole = [MASK not in masked[i : i + 3] for i in (0, 3, 6)]
        assert begun == sorted(begun, reverse=True)
        assert whole == sorted(whole, reverse=True)
        assert all(whole[: max(0, sum(begun) - 1)])


def test_scores_change_only_where_a_pass_predicts():
    sampler = MaskedSampler(MaskedSpec(iterations=2))
    canvas = sampler.start(torch.tensor([4]), 4)
    canvas = sampler.fill(canvas, torch.tensor([7, 8, 9, 10]), torch.tensor([-1.0, -4.0, -2.0, -3.0]))
    canvas = sampler.mask(canvas)
    assert canvas.tokens.tolist() == [[7, MASK, 9, MASK]]
    canvas = sampler.fill(canvas, torch.tensor([11, 12]), torch.tensor([-0.5, -9.0]))
    assert canvas.tokens.tolist() == [[7, 11, 9, 12]]
    assert canvas.scores.tolist() == [[-1.0, -0.5, -2.0, -9.0]]
    assert sampler.finished(sampler.mask(canvas)).tolist() == [True]


def test_of_equal_probabilities_the_leftmost_are_kept_whatever_the_padding():
    for width in (4, 9):
        sampler = MaskedSampler(MaskedSpec(iterations=2))
        canvas = sampler.start(torch.tensor([4, 3]), width)
        canvas = sampler.mask(sampler.fill(canvas, torch.full((7,), 7), torch.zeros(7)))
        assert canvas.tokens[:, :4].tolist() == [[7, 7, MASK, MASK], [7, 7, MASK, PAD]]
        assert (canvas.tokens[:, 4:] == PAD).all()


@pytest.mark.parametrize(
    "change", [{"iterations": 0}, {"iterations": 10**9}, {"threshold": 0.0}, {"threshold": 1.5}, {"block": 0}], ids=str
)
def test_numbers_out_of_range_are_refused_where_configurations_are_read(change):
    from pydantic import TypeAdapter, ValidationError

    with pytest.raises(ValidationError):
        TypeAdapter(MaskedSpec).validate_python(change)


def test_passes_without_number_are_for_those_that_keep_what_they_say():
    assert MaskedSpec(iterations=10**9, remask="none").iterations == 10**9
    with pytest.raises(UserError, match="with remask 'worst' a sentence takes them all, allowed are 1 to 1000"):
        MaskedSpec(iterations=1001)
