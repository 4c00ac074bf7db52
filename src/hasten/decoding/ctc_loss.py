"""Connectionist temporal classification (CTC): loss, occupancies, best alignment and feasibility.

A path is one token a frame; merging adjacent equal tokens and then dropping blanks turns it into a token sequence.
The probability of a target is the sum over all paths that turn into it:

    p(y | x) = sum over paths a with collapse(a) = y of prod_t softmax(logits_t)[a_t]

computed by dynamic programming over the 2U + 1 states `blank y_1 blank y_2 ... y_U blank`: from one frame to the next
a path stays, moves one state, or skips a blank between two *different* tokens.

Shapes: B batch, T frames, V vocabulary (blank included), U target tokens, S = 2U + 1 states.
Frames at and beyond `frame_lengths` and targets at and beyond `target_lengths` may hold anything: NaN, any id.

Source: Graves, Fernandez, Gomez, Schmidhuber 2006, sections 3 and 4.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_CHUNK_ELEMENTS = {"cpu": 1 << 17}  # a chunk of float32 logits stays in a core's cache; elsewhere few, large kernels
_CHUNK_ELSEWHERE = 1 << 26


def minimum_frames(targets: Int[Tensor, "B U"], target_lengths: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
    """Fewest frames that can carry each target.

    U + number of adjacent equal tokens: "very very" needs a blank between, so three frames.
    """
    valid = _positions(targets.shape[1], target_lengths)
    repeats = (targets[:, 1:] == targets[:, :-1]) & valid[:, 1:]
    return target_lengths.long() + repeats.sum(1)


def frames_needed(tokens: Sequence[int]) -> int:
    """Fewest frames that can carry a token list: `minimum_frames` for one plain list."""
    return len(tokens) + sum(a == b for a, b in pairwise(tokens))


def feasible(
    frame_lengths: Int[Tensor, "B"], targets: Int[Tensor, "B U"], target_lengths: Int[Tensor, "B"]
) -> Bool[Tensor, "B"]:
    """Whether any path of the given length turns into each target: T >= U + adjacent equal tokens."""
    return frame_lengths >= minimum_frames(targets, target_lengths)


def ctc_loss(
    logits: Float[Tensor, "B T V"],
    frame_lengths: Int[Tensor, "B"],
    targets: Int[Tensor, "B U"],
    target_lengths: Int[Tensor, "B"],
    *,
    blank: int,
) -> Float[Tensor, "B"]:
    """Negative log likelihood of each target under unnormalised frame scores.

    loss_b = -log p(y_b | x_b);  d loss / d logits[t, v] = softmax(logits_t)[v] - P(path emits v at t | y)

    Computed in float32 (float64 for float64 logits) whatever the dtype of the logits; the gradient has their dtype.
    No (B, T, V) tensor is made but the gradient. Targets hold no blank within their length.
    An infeasible target has loss inf and a gradient of exactly zero, never NaN: see `feasible`.
    An empty target costs -sum_t log p(blank); no frames and no target cost 0.
    Differentiable once: create_graph=True raises RuntimeError. Raises ValueError for shapes that disagree, and on the
    CPU for lengths or ids out of range (elsewhere the check would have to wait for the device).
    Logits that are not contiguous are copied.
    Source: Graves et al. 2006, section 4.
    """
    _check(logits, frame_lengths, targets, target_lengths, blank)
    return _NegativeLogLikelihood.apply(*_prepare(logits, frame_lengths, targets, target_lengths, blank))


def occupancies(
    logits: Float[Tensor, "B T V"],
    frame_lengths: Int[Tensor, "B"],
    targets: Int[Tensor, "B U"],
    target_lengths: Int[Tensor, "B"],
    *,
    blank: int,
) -> Float[Tensor, "B T S"]:
    """Posterior over the S = 2U + 1 states at each frame, given the target.

    gamma[t, s] = P(path is in state s at frame t | y, x): even states are blanks, state 2u + 1 is target u.

    Each real frame of a feasible row sums to 1; padding frames, padding states and infeasible rows are 0.
    Not differentiable. Errors as in `ctc_loss`.
    """
    _check(logits, frame_lengths, targets, target_lengths, blank)
    n_frames = logits.shape[1]
    logits, frame_lengths, targets, target_lengths, columns = _prepare(
        logits.detach(), frame_lengths, targets, target_lengths, blank
    )
    scores = _state_scores(logits, columns) - _log_normaliser(logits).transpose(0, 1)
    before, after, log_likelihood = _both_sweeps(scores, frame_lengths, targets, target_lengths)
    return _posterior(scores, before, after, frame_lengths, log_likelihood)[:, :n_frames]


def best_alignment(
    scores: Float[Tensor, "B T V"],
    frame_lengths: Int[Tensor, "B"],
    targets: Int[Tensor, "B U"],
    target_lengths: Int[Tensor, "B"],
    *,
    blank: int,
) -> Int[Tensor, "B T"]:
    """Token of each frame on the most probable path that turns into the target (Viterbi).

    argmax over paths a with collapse(a) = y of sum_t scores[t, a_t]

    `scores` are logits or log probabilities: a constant added to a frame does not change the path.
    Among equal paths the one that enters its states first wins. Frames beyond the length are blank, and so is every
    frame of an infeasible row: see `feasible`. Errors as in `ctc_loss`.
    """
    _check(scores, frame_lengths, targets, target_lengths, blank)
    n_frames = scores.shape[1]
    scores, frame_lengths, targets, target_lengths, columns = _prepare(
        scores.detach(), frame_lengths, targets, target_lengths, blank
    )
    picked = _state_scores(scores, columns)
    picked -= picked.amax(2, keepdim=True)  # sums of raw logits would cost float32 digits
    states = _best_states(picked, frame_lengths, targets, target_lengths)
    real = _positions(picked.shape[0], frame_lengths)
    labels = columns.gather(1, torch.where(states % 2 == 1, states // 2 + 1, 0))
    return torch.where(real, labels, blank)[:, :n_frames]


class _NegativeLogLikelihood(torch.autograd.Function):
    """The loss with its analytic gradient: softmax minus occupancy."""

    @staticmethod
    def forward(ctx, logits, frame_lengths, targets, target_lengths, columns):
        log_normaliser = _log_normaliser(logits)
        scores = _state_scores(logits, columns) - log_normaliser.transpose(0, 1)
        if not ctx.needs_input_grad[0]:
            return -_log_likelihood(_sweep(scores, targets), scores, frame_lengths, target_lengths)
        before, after, log_likelihood = _both_sweeps(scores, frame_lengths, targets, target_lengths)
        posterior = _posterior(scores, before, after, frame_lengths, log_likelihood)
        occupancy = torch.cat([posterior[..., 0::2].sum(-1, keepdim=True), posterior[..., 1::2]], -1)
        keep = _positions(logits.shape[1], frame_lengths) & (log_likelihood != -torch.inf)[:, None]
        ctx.save_for_backward(logits, log_normaliser, columns, occupancy, keep)
        return -log_likelihood

    @staticmethod
    def backward(ctx, *grad_outputs):
        if torch.is_grad_enabled():  # once_differentiable would lose the second derivative without a word
            raise RuntimeError("ctc_loss has no second derivative: take its gradient without create_graph=True")
        logits, log_normaliser, columns, occupancy, keep = ctx.saved_tensors
        n_frames, vocabulary = logits.shape[1:]
        scale = grad_outputs[0].to(occupancy.dtype).repeat_interleave(n_frames)[:, None]
        columns = columns[:, None].expand(-1, n_frames, -1).reshape(-1, columns.shape[1])
        occupancy, normaliser = occupancy.flatten(0, 1), log_normaliser.reshape(-1, 1)
        flat, drop = logits.reshape(-1, vocabulary), ~keep.reshape(-1, 1)
        grad = torch.empty_like(flat)
        for rows in _chunks(flat):
            piece = torch.sub(flat[rows], normaliser[rows]).exp_()  # float32 by promotion
            piece.scatter_add_(1, columns[rows], -occupancy[rows])
            grad[rows] = piece.mul_(scale[rows]).masked_fill_(drop[rows], 0)
        return grad.view(logits.shape), None, None, None, None


def _check(scores: Tensor, frame_lengths: Tensor, targets: Tensor, target_lengths: Tensor, blank: int) -> None:
    """Raise ValueError where shapes disagree and, on the CPU, where lengths or ids are out of range."""
    batch, n_frames, vocabulary = scores.shape
    for name, tensor in [("frame_lengths", frame_lengths), ("targets", targets), ("target_lengths", target_lengths)]:
        if tensor.shape[0] != batch:
            raise ValueError(f"ctc: {name} has {tensor.shape[0]} rows, the scores have {batch}; they must be equal")
    if not 0 <= blank < vocabulary:
        raise ValueError(f"ctc: blank is {blank}, allowed 0 to {vocabulary - 1}: the vocabulary includes the blank")
    if scores.device.type != "cpu" or batch == 0:
        return
    for name, lengths, most in [("frame", frame_lengths, n_frames), ("target", target_lengths, targets.shape[1])]:
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > most:
            raise ValueError(f"ctc: {name}_lengths span {low} to {high}, allowed 0 to {most}")
    real = targets[_positions(targets.shape[1], target_lengths)]
    if real.numel() and (int(real.min()) < 0 or int(real.max()) >= vocabulary or bool((real == blank).any())):
        raise ValueError(
            f"ctc: targets span {int(real.min())} to {int(real.max())}, "
            f"allowed 0 to {vocabulary - 1} without the blank {blank}"
        )


def _prepare(
    logits: Tensor, frame_lengths: Tensor, targets: Tensor, target_lengths: Tensor, blank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """At least one frame, int64 ids and lengths, blanks for target padding, and the columns `blank y_1 ... y_U`."""
    if logits.shape[1] == 0:
        logits = torch.nn.functional.pad(logits, (0, 0, 0, 1))
    targets = torch.where(_positions(targets.shape[1], target_lengths), targets.long(), blank)
    columns = torch.nn.functional.pad(targets, (1, 0), value=blank)
    return logits, frame_lengths.long(), targets, target_lengths.long(), columns


def _positions(size: int, lengths: Tensor) -> Tensor:
    """(B, size), True before each row's length."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def _chunks(flat: Tensor) -> Iterator[slice]:
    """Slices of rows of a (N, V) tensor, small enough to be worked on at once."""
    rows = max(1, _CHUNK_ELEMENTS.get(flat.device.type, _CHUNK_ELSEWHERE) // flat.shape[1])
    return (slice(start, start + rows) for start in range(0, flat.shape[0], rows))


def _working_dtype(scores: Tensor) -> torch.dtype:
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def _log_normaliser(logits: Tensor) -> Tensor:
    """Log of the sum of exponentials over the vocabulary: (B, T, 1)."""
    flat = logits.reshape(-1, logits.shape[2])
    out = torch.empty(flat.shape[0], dtype=_working_dtype(logits), device=logits.device)
    for rows in _chunks(flat):
        torch.logsumexp(flat[rows].to(out.dtype), 1, out=out[rows])
    return out.view(*logits.shape[:2], 1)


def _state_scores(logits: Tensor, columns: Tensor) -> Tensor:
    """Score of each state's token at each frame, states interleaved from `columns`: (T, B, S)."""
    index = columns[:, None].expand(-1, logits.shape[1], -1)
    picked = logits.gather(2, index).to(_working_dtype(logits)).transpose(0, 1)
    scores = picked.new_empty(*picked.shape[:2], 2 * columns.shape[1] - 1)
    scores[..., 0::2] = picked[..., :1]
    scores[..., 1::2] = picked[..., 1:]
    return scores


def _skips(targets: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, S): 0 where a path may arrive from two states before (a new token, other than the last), else -inf."""
    skips = torch.full((targets.shape[0], 2 * targets.shape[1] + 1), -torch.inf, dtype=dtype, device=targets.device)
    skips[:, 3::2].masked_fill_(targets[:, 1:] != targets[:, :-1], 0)
    return skips


def _sweep(scores: Tensor, targets: Tensor) -> Tensor:
    """Log probability of all path beginnings before frame t that enter state s at t, s not yet emitted: (T, B, S)."""
    n_frames, batch, n_states = scores.shape
    skips = _skips(targets, scores.dtype)
    arrive = torch.empty_like(scores)
    arrive[0] = -torch.inf
    arrive[0, :, :2] = 0
    padded = scores.new_full((batch, n_states + 2), -torch.inf)  # two unreachable states before the first
    stay, move, skip = padded[:, 2:], padded[:, 1:-1], padded[:, :-2]
    two = torch.empty_like(skips)
    for frame in range(1, n_frames):
        torch.add(arrive[frame - 1], scores[frame - 1], out=stay)
        torch.logaddexp(stay, move, out=two)
        torch.logaddexp(two, skip + skips, out=arrive[frame])
    return arrive


def _ends(target_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """(B, 1) each: the last state (a blank) and the last target's state, the same where the target is empty."""
    last = 2 * target_lengths[:, None]
    return last, (last - 1).clamp(min=0)


def _log_likelihood(arrive: Tensor, scores: Tensor, frame_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """(B,): mass of the two final states after each row's last frame."""
    rows = torch.arange(scores.shape[1], device=scores.device)
    frame = (frame_lengths - 1).clamp(min=0)
    final = arrive[frame, rows] + scores[frame, rows]
    blank, token = (final.gather(1, state)[:, 0] for state in _ends(target_lengths))
    total = torch.where(target_lengths > 0, torch.logaddexp(blank, token), blank)
    nothing = torch.where(target_lengths > 0, -torch.inf, 0.0).to(total.dtype)
    return torch.where(frame_lengths > 0, total, nothing)


def _mirror(values: Tensor, frame_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """(T, B, S) with each row's real frames and real states in reverse order; the rest is arbitrary but in range."""
    n_frames, batch, n_states = values.shape
    frames = torch.arange(n_frames, device=values.device)[:, None, None]
    states = torch.arange(n_states, device=values.device)
    frames = (frame_lengths[:, None] - 1 - frames).clamp(min=0)
    states = (2 * target_lengths[:, None] - states).clamp(min=0)
    return values[frames, torch.arange(batch, device=values.device)[:, None], states]


def _both_sweeps(
    scores: Tensor, frame_lengths: Tensor, targets: Tensor, target_lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Path beginnings, path ends (both without the frame itself) and the log likelihood; one loop runs both ways."""
    batch = scores.shape[1]
    order = (target_lengths[:, None] - 1 - torch.arange(targets.shape[1], device=targets.device)).clamp(min=0)
    both = _sweep(
        torch.cat([scores, _mirror(scores, frame_lengths, target_lengths)], 1),
        torch.cat([targets, targets.gather(1, order)], 0),
    )
    before, after = both[:, :batch], _mirror(both[:, batch:], frame_lengths, target_lengths)
    after = after.masked_fill(~_positions(scores.shape[2], 2 * target_lengths + 1), -torch.inf)
    return before, after, _log_likelihood(before, scores, frame_lengths, target_lengths)


def _posterior(scores: Tensor, before: Tensor, after: Tensor, frame_lengths: Tensor, log_likelihood: Tensor) -> Tensor:
    """(B, T, S): share of each state at each frame; normalised frame by frame, which keeps float32 exact enough."""
    posterior = (before + after).add_(scores).softmax(2).transpose(0, 1)
    keep = _positions(scores.shape[0], frame_lengths) & (log_likelihood != -torch.inf)[:, None]
    return posterior.masked_fill(~keep[..., None], 0)


def _best_states(scores: Tensor, frame_lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
    """States of the best path: (B, T). An unreachable end is never left: it is the last blank at every frame."""
    n_frames, batch, n_states = scores.shape
    skips = _skips(targets, scores.dtype)
    steps = scores.new_zeros(scores.shape, dtype=torch.int8)
    arrive = torch.full_like(scores, -torch.inf)
    arrive[0, :, :2] = 0
    padded = scores.new_full((batch, n_states + 2), -torch.inf)
    stay, move, skip = padded[:, 2:], padded[:, 1:-1], padded[:, :-2]
    for frame in range(1, n_frames):
        torch.add(arrive[frame - 1], scores[frame - 1], out=stay)
        jump = skip + skips
        one = torch.maximum(stay, move)
        torch.maximum(one, jump, out=arrive[frame])
        steps[frame] = torch.where(jump > one, 2, (move > stay).to(torch.int8))
    steps.masked_fill_(~_positions(n_frames, frame_lengths).T[..., None], 0)
    rows, frame = torch.arange(batch, device=scores.device), (frame_lengths - 1).clamp(min=0)
    final = arrive[frame, rows] + scores[frame, rows]
    blank, token = _ends(target_lengths)
    state = torch.where(final.gather(1, token) > final.gather(1, blank), token, blank)
    states = state.new_empty(batch, n_frames)
    for frame in reversed(range(n_frames)):
        states[:, frame] = state[:, 0]
        state = state - steps[frame].gather(1, state)
    return states
