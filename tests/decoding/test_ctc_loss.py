from itertools import groupby, product
from operator import eq

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.decoding.ctc_loss import best_alignment, ctc_loss, feasible, frames_needed, minimum_frames, occupancies

SHAPES = [(1, 2), (2, 2), (3, 3), (4, 4), (5, 3), (6, 3), (6, 4)]


def read(path, blank):
    """The definition: merge adjacent equal tokens, then drop blanks."""
    return tuple(token for token, _ in groupby(path) if token != blank)


def paths_of(target, n_frames, vocabulary, blank):
    return [path for path in product(range(vocabulary), repeat=n_frames) if read(path, blank) == tuple(target)]


def by_enumeration(logits, target, blank):
    """Loss of one sentence as the plain sum over all paths; differentiable."""
    paths = paths_of(target, *logits.shape, blank)
    log_probs = logits.log_softmax(1)
    scores = [sum(log_probs[t, token] for t, token in enumerate(path)) for path in paths]
    return -torch.logsumexp(torch.stack(scores), 0) if scores else None


def random_logits(*shape, seed=0, scale=2.0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(scale).to(dtype)


def lengths(*values):
    return torch.tensor(values, dtype=torch.int64)


def single(logits, target, blank=0):
    """Arguments for one sentence."""
    return logits[None], lengths(logits.shape[0]), torch.tensor([target], dtype=torch.int64), lengths(len(target))


def targets_for(n_frames, vocabulary, blank):
    """Every target that some path of the length reads as."""
    return sorted({read(path, blank) for path in product(range(vocabulary), repeat=n_frames)})


@pytest.mark.parametrize(("n_frames", "vocabulary"), SHAPES)
def test_loss_and_gradient_equal_the_sum_over_all_paths(n_frames, vocabulary):
    blank = vocabulary - 1
    every = targets_for(n_frames, vocabulary, blank)
    for target in every[:: max(1, len(every) // 12)]:
        logits = random_logits(n_frames, vocabulary, seed=len(target)).requires_grad_()
        expected = by_enumeration(logits, target, blank)
        (expected_grad,) = torch.autograd.grad(expected, logits)
        loss = ctc_loss(*single(logits, target), blank=blank)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        torch.testing.assert_close(loss[0], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-12)


def test_the_likelihoods_of_all_targets_sum_to_one():
    logits = random_logits(4, 3)
    total = sum(ctc_loss(*single(logits, t), blank=1).neg().exp().item() for t in targets_for(4, 3, 1))
    assert total == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("n_frames", "target"), [(1, []), (4, [1]), (5, [1, 1]), (6, [2, 1, 1]), (5, [1, 2])])
def test_occupancies_equal_the_share_of_paths_in_each_state(n_frames, target):
    logits, blank = random_logits(n_frames, 3), 0
    log_probs, expected = logits.log_softmax(1), torch.zeros(n_frames, 2 * len(target) + 1, dtype=torch.float64)
    for path in paths_of(target, n_frames, 3, blank):
        weight = sum(log_probs[t, token] for t, token in enumerate(path)).exp()
        read_so_far, before = 0, blank
        for t, token in enumerate(path):
            read_so_far += token not in (blank, before)
            expected[t, 2 * read_so_far if token == blank else 2 * read_so_far - 1] += weight
            before = token
    gamma = occupancies(*single(logits, target), blank=blank)[0]
    torch.testing.assert_close(gamma, expected / expected[0].sum(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("n_frames", "vocabulary"), SHAPES)
def test_best_alignment_reads_as_the_target_and_no_path_scores_higher(n_frames, vocabulary):
    blank = 0
    every = targets_for(n_frames, vocabulary, blank)
    for target in every[:: max(1, len(every) // 12)]:
        logits = random_logits(n_frames, vocabulary, seed=7 + len(target))
        path = best_alignment(*single(logits, target), blank=blank)[0].tolist()
        scores = [
            sum(logits[t, c] for t, c in enumerate(p)).item() for p in paths_of(target, n_frames, vocabulary, blank)
        ]
        assert read(path, blank) == target
        assert sum(logits[t, c] for t, c in enumerate(path)).item() == pytest.approx(max(scores), abs=1e-12)


def test_equal_paths_are_broken_towards_early_tokens():
    logits = torch.zeros(4, 3)
    assert best_alignment(*single(logits, [1, 2]), blank=0).tolist() == [[1, 2, 0, 0]]
    logits[:3, 2] = -1  # the second token is best at the end, whatever comes before
    assert best_alignment(*single(logits, [1, 2]), blank=0).tolist() == [[1, 0, 0, 2]]


def test_a_long_sum_of_raw_logits_keeps_its_digits():
    logits = (10_000 + random_logits(400, 6)).float()
    target = torch.randint(1, 6, (90,), generator=torch.Generator().manual_seed(6)).tolist()
    exact = best_alignment(*single(logits.double(), target), blank=0)
    assert torch.equal(best_alignment(*single(logits, target), blank=0), exact)


def test_best_alignment_does_not_depend_on_the_normaliser():
    logits = random_logits(9, 5, scale=5)
    shifted = (logits + 1000 * random_logits(9, 1, seed=3)).float()
    arguments = single(logits, [1, 1, 3])
    expected = best_alignment(*arguments, blank=0)
    assert torch.equal(best_alignment(logits.log_softmax(1)[None], *arguments[1:], blank=0), expected)
    assert torch.equal(best_alignment(shifted[None], *arguments[1:], blank=0), expected)


@st.composite
def batches(draw):
    """A ragged batch of feasible pairs with garbage beyond every length: logits, lengths, targets, lengths, blank."""
    n_rows, vocabulary = draw(st.integers(1, 5)), draw(st.integers(2, 7))
    blank = draw(st.integers(0, vocabulary - 1))
    token = st.integers(0, vocabulary - 1).filter(lambda t: t != blank)
    rows = [draw(st.lists(token, max_size=6)) for _ in range(n_rows)]
    frames = [len(row) + sum(map(eq, row, row[1:])) + draw(st.integers(0, 5)) for row in rows]
    n_frames, n_targets = max(frames) + draw(st.integers(0, 2)), max(map(len, rows)) + draw(st.integers(0, 2))
    logits = random_logits(n_rows, n_frames, vocabulary, seed=draw(st.integers(0, 1000)), scale=3)
    targets = torch.full((n_rows, n_targets), draw(st.sampled_from([-100, blank, 10**6])))
    for index, row in enumerate(rows):
        targets[index, : len(row)] = torch.tensor(row)
        logits[index, frames[index] :] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf, 0.0]))
    return logits, lengths(*frames), targets, lengths(*map(len, rows)), blank


def cut(batch, index):
    """One row of a batch without any padding."""
    logits, frame_lengths, targets, target_lengths, _ = batch
    n_frames, n_targets = frame_lengths[index], target_lengths[index]
    return (
        logits[index : index + 1, :n_frames],
        frame_lengths[index : index + 1],
        targets[index : index + 1, :n_targets],
        target_lengths[index : index + 1],
    )


@settings(max_examples=60, deadline=None)
@given(batches())
def test_a_row_is_the_same_alone_and_in_a_batch_with_garbage_padding(batch):
    *arguments, blank = batch
    logits = arguments[0].clone().requires_grad_()
    loss = ctc_loss(logits, *arguments[1:], blank=blank)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    paths, gamma = best_alignment(*arguments, blank=blank), occupancies(*arguments, blank=blank)
    for index, n_frames in enumerate(arguments[1].tolist()):
        row = cut(batch, index)
        leaf = row[0].clone().requires_grad_()
        alone = ctc_loss(leaf, *row[1:], blank=blank)
        torch.testing.assert_close(loss[index], alone[0], rtol=1e-13, atol=1e-13)
        alone_grad = torch.autograd.grad(alone.sum(), leaf)[0][0]
        torch.testing.assert_close(grad[index, :n_frames], alone_grad, rtol=1e-11, atol=1e-13)
        assert torch.equal(grad[index, n_frames:], torch.zeros_like(grad[index, n_frames:]))
        assert torch.equal(paths[index, :n_frames], best_alignment(*row, blank=blank)[0])
        assert bool((paths[index, n_frames:] == blank).all())
        n_states = 2 * int(arguments[3][index]) + 1
        torch.testing.assert_close(gamma[index, :n_frames, :n_states], occupancies(*row, blank=blank)[0])
        torch.testing.assert_close(gamma[index, :n_frames].sum(1), torch.ones(n_frames, dtype=torch.float64))
        assert gamma[index, n_frames:].count_nonzero() == gamma[index, :, n_states:].count_nonzero() == 0


@settings(max_examples=60, deadline=None)
@given(batches())
def test_values_and_gradients_agree_with_torch(batch):
    logits, frame_lengths, targets, target_lengths, blank = batch
    logits = logits.nan_to_num(0, 0, 0)
    weights = random_logits(len(logits), seed=5)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = ctc_loss(a, frame_lengths, targets, target_lengths, blank=blank)
    clean = targets.where(torch.arange(targets.shape[1]) < target_lengths[:, None], (blank + 1) % logits.shape[2])
    log_probs = b.log_softmax(2).transpose(0, 1)
    if not log_probs.shape[0] or not clean.shape[1]:
        return  # torch refuses these; the other tests have them
    expected = F.ctc_loss(log_probs, clean, frame_lengths, target_lengths, blank=blank, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)


def test_gradcheck_passes_in_float64():
    logits = random_logits(3, 5, 4).requires_grad_()
    rest = lengths(5, 3, 4), torch.tensor([[1, 1], [2, -1], [3, 1]]), lengths(2, 1, 2)
    assert torch.autograd.gradcheck(lambda x: ctc_loss(x, *rest, blank=0), logits)


def test_float32_is_as_close_to_float64_as_torch_is_at_a_real_size():
    logits = random_logits(2, 90, 300, scale=4)
    targets = torch.randint(6, 300, (2, 35), generator=torch.Generator().manual_seed(1))
    rest = lengths(90, 80), targets, lengths(35, 30)
    exact, ours = logits.clone().requires_grad_(), logits.float().requires_grad_()
    reference, loss = ctc_loss(exact, *rest, blank=5), ctc_loss(ours, *rest, blank=5)
    reference.sum().backward()
    loss.sum().backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=0, atol=2e-3)
    assert ours.grad.sum(2).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_extreme_logits_stay_finite_and_half_precision_equals_float32(dtype):
    signs = random_logits(3, 40, 50).sign()
    rest = lengths(40, 25, 31), torch.randint(1, 50, (3, 12), generator=torch.Generator().manual_seed(2))
    logits = (60 * signs).to(dtype).requires_grad_()
    wide = logits.detach().float().requires_grad_()
    loss, expected = (ctc_loss(x, *rest, lengths(12, 9, 12), blank=0) for x in (logits, wide))
    loss.sum().backward()
    expected.sum().backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite().all()
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.float(), wide.grad, rtol=1e-2, atol=1e-6)
    assert best_alignment(logits, *rest, lengths(12, 9, 12), blank=0).shape == (3, 40)


def test_autocast_changes_nothing():
    arguments = single(random_logits(8, 20, dtype=torch.float32), [3, 3, 1])
    expected = ctc_loss(*arguments, blank=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ctc_loss(*arguments, blank=0), expected)


def test_a_repeated_token_needs_a_blank_between():
    very, blank = 7, 5
    assert frames_needed([very, very]) == 3
    targets, sizes = torch.tensor([[very, very]] * 2), lengths(2, 2)
    assert feasible(lengths(2, 3), targets, sizes).tolist() == [False, True]
    loss = ctc_loss(torch.zeros(2, 3, 9), lengths(2, 3), targets, sizes, blank=blank)
    assert loss[0] == torch.inf
    assert loss[1].item() == pytest.approx(3 * torch.log(torch.tensor(9.0)).item())
    path = best_alignment(torch.zeros(2, 3, 9), lengths(2, 3), targets, sizes, blank=blank)
    assert path.tolist() == [[blank] * 3, [very, blank, very]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 2), max_size=5), min_size=1, max_size=4))
def test_feasibility_is_exactly_a_finite_loss(rows):
    width = max(map(len, rows))
    targets = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int64).reshape(
        len(rows), width
    )
    sizes = lengths(*map(len, rows))
    needed = minimum_frames(targets, sizes)
    assert needed.tolist() == [frames_needed(row) for row in rows]
    for n_frames in range(max(needed.tolist()) + 1):
        frames = torch.full_like(sizes, n_frames)
        loss = ctc_loss(torch.zeros(len(rows), n_frames, 3), frames, targets, sizes, blank=0)
        assert torch.equal(loss.isfinite(), feasible(frames, targets, sizes))
        assert not loss.isnan().any()


@pytest.mark.parametrize("upstream", [1.0, 0.0, torch.inf, torch.nan])
def test_an_infeasible_row_costs_inf_and_leaves_an_exactly_zero_gradient(upstream):
    logits = random_logits(2, 3, 4).requires_grad_()
    loss = ctc_loss(logits, lengths(3, 3), torch.tensor([[1, 1, 1], [1, 2, 3]]), lengths(3, 3), blank=0)
    assert loss.isinf().tolist() == [True, False]
    loss.backward(torch.tensor([upstream, 1.0], dtype=torch.float64))
    assert torch.equal(logits.grad[0], torch.zeros(3, 4, dtype=torch.float64))
    assert logits.grad[1].isfinite().all()
    assert logits.grad[1].abs().sum() > 0
    gamma = occupancies(logits, lengths(3, 3), torch.tensor([[1, 1, 1], [1, 2, 3]]), lengths(3, 3), blank=0)
    assert gamma[0].count_nonzero() == 0


def test_a_token_of_probability_zero_makes_the_row_infeasible_not_nan():
    logits = random_logits(1, 3, 4)
    logits[..., 2] = -torch.inf
    logits.requires_grad_()
    loss = ctc_loss(logits.expand(2, -1, -1), lengths(3, 3), torch.tensor([[2], [1]]), lengths(1, 1), blank=0)
    loss[1].backward()
    assert loss.isinf().tolist() == [True, False]
    assert logits.grad.isfinite().all()
    assert logits.grad[..., 2].count_nonzero() == 0


def test_an_empty_target_costs_the_blanks():
    logits = random_logits(2, 4, 3).requires_grad_()
    loss = ctc_loss(logits, lengths(4, 2), torch.zeros(2, 0, dtype=torch.int64), lengths(0, 0), blank=1)
    blanks = logits.detach().log_softmax(2)[..., 1]
    torch.testing.assert_close(loss.detach(), torch.stack([-blanks[0].sum(), -blanks[1, :2].sum()]))
    loss.sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0].abs().sum() > 0


@pytest.mark.parametrize("n_frames", [0, 3])
def test_no_frames_cost_nothing_for_an_empty_target_and_inf_for_any_other(n_frames):
    logits = torch.full((2, n_frames, 3), torch.nan, requires_grad=True)
    arguments = lengths(0, 0), torch.tensor([[1], [1]]), lengths(0, 1)
    loss = ctc_loss(logits, *arguments, blank=0)
    assert loss.tolist() == [0, torch.inf]
    loss.sum().backward()
    assert torch.equal(logits.grad, torch.zeros(2, n_frames, 3))
    assert best_alignment(logits, *arguments, blank=0).tolist() == [[0] * n_frames] * 2
    assert occupancies(logits, *arguments, blank=0).shape == (2, n_frames, 3)


def test_an_empty_batch_gives_no_losses():
    empty = torch.zeros(0, dtype=torch.int64)
    assert ctc_loss(torch.zeros(0, 4, 3), empty, torch.zeros(0, 2, dtype=torch.int64), empty, blank=0).shape == (0,)


def test_not_a_number_in_a_real_frame_is_not_hidden():
    logits = torch.zeros(1, 3, 3)
    logits[0, 1, 2] = torch.nan
    assert ctc_loss(*single(logits[0], [1]), blank=0).isnan().all()


def test_strides_and_integer_widths_of_the_arguments_do_not_matter():
    logits = random_logits(6, 2, 4)
    rest = lengths(6, 5), torch.tensor([[1, 2], [3, 3]]), lengths(2, 2)
    view, packed = logits.transpose(0, 1).requires_grad_(), logits.transpose(0, 1).contiguous().requires_grad_()
    narrow = [tensor.to(torch.int32) for tensor in rest]
    loss, expected = ctc_loss(view, *narrow, blank=0), ctc_loss(packed, *rest, blank=0)
    assert torch.equal(loss, expected)
    left, right = torch.autograd.grad(loss.sum(), view)[0], torch.autograd.grad(expected.sum(), packed)[0]
    assert torch.equal(left, right)


def test_large_inputs_are_read_in_pieces_without_a_change():
    logits = random_logits(3, 50, 3000, dtype=torch.float32)  # several chunks, the last one ragged
    rest = lengths(50, 41, 50), torch.randint(6, 3000, (3, 20), generator=torch.Generator().manual_seed(3))
    a, b = logits.clone().requires_grad_(), logits.double().requires_grad_()
    ctc_loss(a, *rest, lengths(20, 20, 17), blank=5).sum().backward()
    ctc_loss(b, *rest, lengths(20, 20, 17), blank=5).sum().backward()
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=0, atol=2e-3)


def test_the_gradient_is_the_same_twice_and_a_second_derivative_is_refused():
    logits = random_logits(4, 3).requires_grad_()
    loss = ctc_loss(*single(logits, [1]), blank=0).sum()
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blank": 4}, "blank is 4, allowed 0 to 3"),
        ({"frame_lengths": lengths(6)}, "frame_lengths span 6 to 6, allowed 0 to 5"),
        ({"target_lengths": lengths(3)}, "target_lengths span 3 to 3, allowed 0 to 2"),
        ({"targets": torch.tensor([[1, 9]])}, "targets span 1 to 9"),
        ({"targets": torch.tensor([[1, 0]])}, "without the blank 0"),
    ],
)
def test_arguments_out_of_range_are_named(changes, message):
    arguments = {
        "frame_lengths": lengths(5),
        "targets": torch.tensor([[1, 2]]),
        "target_lengths": lengths(2),
        "blank": 0,
    }
    with pytest.raises(ValueError, match=message):
        ctc_loss(torch.zeros(1, 5, 4), **{**arguments, **changes})


def test_a_row_too_many_is_refused():
    with pytest.raises((ValueError, TypeError)):  # TypeError where array shapes are checked at run time
        ctc_loss(torch.zeros(1, 5, 4), lengths(5), torch.tensor([[1, 2]] * 2), lengths(2), blank=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_values_of_the_cpu():
    logits = random_logits(3, 30, 40)
    rest = (
        lengths(30, 12, 25),
        torch.randint(1, 40, (3, 9), generator=torch.Generator().manual_seed(4)),
        lengths(9, 4, 0),
    )
    here, there = logits.clone().requires_grad_(), logits.cuda().requires_grad_()
    moved = [tensor.cuda() for tensor in rest]
    loss, expected = ctc_loss(there, *moved, blank=0), ctc_loss(here, *rest, blank=0)
    torch.testing.assert_close(loss.cpu(), expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss.sum(), there)[0].cpu(), torch.autograd.grad(expected.sum(), here)[0]
    )
    assert torch.equal(best_alignment(there, *moved, blank=0).cpu(), best_alignment(here, *rest, blank=0))
