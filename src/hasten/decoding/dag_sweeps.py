"""All paths through a graph, summed forwards and backwards: in logarithms, and faster by products of probabilities.

Both give the same. In logarithms, every word of a target costs an exponential for every edge, in either direction. As
probabilities it costs a product of a vector with the matrix of edges, and all the edges' posteriors together one
product of matrices; but sums of what float64 cannot hold would be lost. So the products tell which rows they are exact
for, and the others are computed in logarithms. Terms: see `dag_loss`, which prepares what is given here.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_LEAST = 1e-280  # float64 goes on to 1e-308: what is lost in a sum that is larger than this is less than its rounding


class Sums(NamedTuple):
    """What both sweeps find; without a path log_likelihood is -inf and the rest means nothing."""

    log_likelihood: Float[Tensor, "B"]
    words: Float[Tensor, "B U L"]
    """P(word i is said at u | y)."""
    edges: Float[Tensor, "B L L"]
    """How often a path has each edge that leads to a word."""
    last: Float[Tensor, "B L"]
    """P(the path goes from v to the end | y)."""

    def replaced(self, rows: Int[Tensor, "R"], others: "Sums") -> "Sums":
        """The sums of some rows by those of `others`."""
        pairs = zip(self, others, strict=True)
        return Sums(*(mine.index_copy(0, rows, theirs.to(mine.dtype)) for mine, theirs in pairs))


def swept(
    emissions: Float[Tensor, "B U L"],
    links: Float[Tensor, "B L L"],
    vertices: Int[Tensor, "B"],
    target_lengths: Int[Tensor, "B"],
) -> Sums:
    """Scaled where that is exact, which it nearly always is; in logarithms elsewhere.

    -inf stands wherever no path goes.
    """
    given = emissions, links, vertices, target_lengths
    if links.device.type == "mps":  # it has no float64
        return by_logarithms(*given)
    sums, exact = scaled(*given)
    if exact.all():
        return sums
    rows = (~exact).nonzero()[:, 0]
    return sums.replaced(rows, by_logarithms(*(x[rows] for x in given)))


def leaving(links: Float[Tensor, "B L L"], vertices: Int[Tensor, "B"]) -> Float[Tensor, "B L"]:
    """log E(v, end) of every vertex."""
    end = (vertices - 1).clamp(min=0)
    return links.gather(2, end[:, None, None].expand(-1, links.shape[1], 1))[..., 0]


def begun(emissions: Float[Tensor, "B U L"]) -> Float[Tensor, "B n L"]:
    """f_0 .. f_U: nothing is reached yet, but the first vertex before the first word."""
    batch, n_targets, n_vertices = emissions.shape
    arrive = emissions.new_full((batch, n_targets + 1, n_vertices), -torch.inf)
    arrive[:, 0, 0] = 0
    return arrive


def by_logarithms(
    emissions: Float[Tensor, "B U L"],
    links: Float[Tensor, "B L L"],
    vertices: Int[Tensor, "B"],
    target_lengths: Int[Tensor, "B"],
) -> Sums:
    """Exact whatever the numbers.

    Going back over the words, r_i(v) = logsumexp over u of (log E(v, u) + log P(y_(i+1) | u) + r_(i+1)(u)): the
    summands of that are, times f_i(v), the edges' posteriors. Each step is normalised by itself, which keeps float32
    exact enough.
    """
    arrive, into = begun(emissions), links.transpose(1, 2).contiguous()  # sums run over the contiguous dimension
    for i in range(emissions.shape[1]):
        torch.add((into + arrive[:, i, None]).logsumexp(2), emissions[:, i], out=arrive[:, i + 1])
    out = leaving(links, vertices)
    final = arrive[torch.arange(len(arrive), device=arrive.device), target_lengths] + out
    words, edges = torch.empty_like(emissions), torch.zeros_like(links)
    rest, lowest = torch.full_like(out, -torch.inf), torch.finfo(links.dtype).min
    for i in range(emissions.shape[1], 0, -1):
        rest = torch.where((target_lengths == i)[:, None], out, rest)
        words[:, i - 1] = _share(arrive[:, i] + rest)
        summands = links + (emissions[:, i - 1] + rest)[:, None]
        most = summands.amax(2, keepdim=True).clamp(min=lowest)  # -inf - -inf would be NaN
        summands.sub_(most).exp_()
        rest = summands.sum(2).log().add_(most[..., 0])
        before = arrive[:, i - 1]
        total = (before + rest).logsumexp(1, keepdim=True).clamp(min=lowest)
        edges.addcmul_(summands, (before + most[..., 0] - total).exp_()[..., None])
    return Sums(final.logsumexp(1), words, edges, _share(final))


def _share(log_weights: Tensor) -> Tensor:
    """Softmax over the last dimension; 0 where there is no weight at all."""
    return log_weights.softmax(-1).nan_to_num_(0.0)


def scaled(
    emissions: Float[Tensor, "B U L"],
    links: Float[Tensor, "B L L"],
    vertices: Int[Tensor, "B"],
    target_lengths: Int[Tensor, "B"],
) -> tuple[Sums, Bool[Tensor, "B"]]:
    """The same in float64 by products, the highest probability of every step scaled to 1, and for which rows it holds.

    It holds where no vertex that a path can visit at a step is left with less than `_LEAST`.
    """
    batch, n_targets = emissions.shape[:2]
    tried = _tried(emissions, vertices, target_lengths)
    said = emissions.double().masked_fill(~tried[:, 1:], -torch.inf)
    tops = said.amax(2).clamp(min=torch.finfo(said.dtype).min)
    said, edges, ends = (said - tops[..., None]).exp(), links.double().exp(), leaving(links, vertices).double().exp()
    arrive, logs = begun(said).exp(), tops.new_zeros(batch, n_targets + 1)
    exact = torch.ones(batch, dtype=torch.bool, device=links.device)
    for i in range(n_targets):
        reached = (arrive[:, i, None] @ edges)[:, 0] * said[:, i]
        exact &= _holds(reached, tried[:, i + 1])
        arrive[:, i + 1], scale = _scaled(reached)
        logs[:, i + 1] = logs[:, i] + scale + tops[:, i]
    rows = torch.arange(batch, device=links.device)
    final = arrive[rows, target_lengths] * ends
    exact &= _holds(final.sum(1, keepdim=True), tried[:, 0, :1])
    words, onward = torch.empty_like(said), torch.empty_like(said)
    rest = torch.zeros_like(ends)
    for i in range(n_targets, 0, -1):
        rest, _ = _scaled(torch.where((target_lengths == i)[:, None], ends, rest) * tried[:, i])
        words[:, i - 1] = _normalised(arrive[:, i] * rest)
        onward[:, i - 1] = said[:, i - 1] * rest
        rest = (edges @ onward[:, i - 1, :, None])[..., 0]
        going = (target_lengths >= i)[:, None]
        total = (arrive[:, i - 1] * rest).sum(1, keepdim=True)
        exact &= _holds(rest, tried[:, i - 1] & going) & _holds(total, tried[:, 0, :1] & going)
        arrive[:, i - 1] /= total.masked_fill(total < _LEAST, 1.0)
    edges *= arrive[:, :-1].transpose(1, 2) @ onward
    log_likelihood = final.sum(1).log() + logs[rows, target_lengths]
    found = (log_likelihood, words, edges, _normalised(final))
    return Sums(*(x.to(links.dtype) for x in found)), exact


def _tried(emissions: Tensor, vertices: Tensor, target_lengths: Tensor) -> Tensor:
    """(B, U + 1, L): the vertices at which a path can be after each word and still come to the end in time."""
    i = torch.arange(emissions.shape[1] + 1, device=emissions.device)[:, None]
    u = torch.arange(emissions.shape[2], device=emissions.device)
    left, end = target_lengths[:, None, None] - i, vertices[:, None, None] - 1
    return (u >= i) & (u + left < end) & (left >= 0) & ((i > 0) | (u == 0))


def _holds(values: Tensor, tried: Tensor) -> Tensor:
    return (values.masked_fill(~tried, 1.0) >= _LEAST).all(1)


def _scaled(values: Tensor) -> tuple[Tensor, Tensor]:
    most = values.amax(1, keepdim=True).clamp(min=_LEAST)
    return values / most, most[:, 0].log()


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(1, keepdim=True).clamp(min=_LEAST)
