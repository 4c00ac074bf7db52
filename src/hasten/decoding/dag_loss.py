"""Loss and best path of directed acyclic graphs of words.

A graph has L vertices in a row. A path begins at the first vertex, only ever moves to a later one, and ends at the
last. Both ends are silent; every vertex between them that a path visits says one word. The probability of a target is
the sum over all paths with as many words:

    p(y | x) = sum over 0 < a_1 < ... < a_U < L - 1 of E(0, a_1) ... E(a_U, L - 1) P(y_1 | a_1) ... P(y_U | a_U)

computed word by word: f_i(u) = log P(y_i | u) + logsumexp over v < u of (f_(i-1)(v) + log E(v, u)). So a target has a
path if and only if U <= L - 2; one of a single word and an empty one have theirs in every graph of three or two.

Shapes: B batch, U target tokens, L vertices. emissions (B, U, L) are log P(y_i | u), links (B, L, L) log E(v, u).
Whatever stands at silent vertices, at edges that do not lead on, and beyond `vertices` and `target_lengths`, is not
read. Every step of the recursion reads all edges, U L^2 in all, and keeps nothing of that size: `dag_sweeps`.

Source: Huang, Zhou, Liu, Li, Huang, 2022, section 3 ("Directed Acyclic Transformer for Non-Autoregressive Machine
Translation"). There the first vertex says a begin symbol and the last an end symbol.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.decoding.dag_sweeps import begun, leaving, swept

_ENDS = 2


def words_carried(n_vertices: int) -> int:
    """The most words of a path; -1 where there is none, since a graph has two ends."""
    return max(-1, n_vertices - _ENDS)


def feasible(vertices: Int[Tensor, "B"], target_lengths: Int[Tensor, "B"]) -> Bool[Tensor, "B"]:
    """Whether any path has as many words as each target: U + 2 <= L."""
    return target_lengths + _ENDS <= vertices


def inner(vertices: Int[Tensor, "B"], width: int) -> Bool[Tensor, "B L"]:
    """True on the vertices between a graph's ends, which are those that say words."""
    u = torch.arange(width, device=vertices.device)
    return (u > 0) & (u < vertices[:, None] - 1)


def dag_loss(
    emissions: Float[Tensor, "B U L"],
    links: Float[Tensor, "B L L"],
    vertices: Int[Tensor, "B"],
    target_lengths: Int[Tensor, "B"],
) -> Float[Tensor, "B"]:
    """Negative log likelihood of each target, summed over all paths.

    d loss / d emissions[i, u] = -P(word i is said at u | y);  d loss / d links[v, u] = -P(the path has the edge | y)

    Told in float32 (float64 for float64 links) whatever the dtypes given, which are those of the gradients. An
    infeasible target has loss inf and gradients of exactly zero, never NaN: see `feasible`. Differentiable once:
    create_graph=True raises RuntimeError. Raises ValueError for a graph without vertices and, on the CPU, for lengths
    out of range.
    """
    _check(emissions, links, vertices, target_lengths)
    return _NegativeLogLikelihood.apply(emissions, links, vertices, target_lengths)


def best_path(
    emissions: Float[Tensor, "B U L"],
    links: Float[Tensor, "B L L"],
    vertices: Int[Tensor, "B"],
    target_lengths: Int[Tensor, "B"],
) -> Int[Tensor, "B U"]:
    """The vertex that says each word on the most probable path (Viterbi).

    argmax over paths a of log E(0, a_1) + log P(y_1 | a_1) + ... + log E(a_U, L - 1)

    0 at padding and in all of an infeasible row. Not differentiable. Errors as in `dag_loss`.
    """
    _check(emissions, links, vertices, target_lengths)
    emissions, links = _prepared(emissions.detach(), links.detach(), vertices, target_lengths)
    best, origins = best_arrivals(emissions, links)
    return traced(best, origins, leaving(links, vertices), target_lengths)


class _NegativeLogLikelihood(torch.autograd.Function):
    """The loss, and the posteriors that are its gradients; no step of either sweep is kept."""

    @staticmethod
    def forward(ctx, emissions, links, vertices, target_lengths):
        dtypes = emissions.dtype, links.dtype
        emissions, links = _prepared(emissions, links, vertices, target_lengths)
        sums = swept(emissions, links, vertices, target_lengths)
        if any(ctx.needs_input_grad[:2]):
            end = (vertices - 1).clamp(min=0)[:, None, None].expand(-1, links.shape[1], 1)
            edges = sums.edges.scatter_add_(2, end, sums.last[..., None])
            possible = (sums.log_likelihood != -torch.inf)[:, None, None]
            ctx.dtypes = dtypes
            ctx.save_for_backward(sums.words.mul_(possible), edges.mul_(possible))
        return -sums.log_likelihood

    @staticmethod
    def backward(ctx, *grad_outputs):
        if torch.is_grad_enabled():  # once_differentiable would lose the second derivative without a word
            raise RuntimeError("dag_loss has no second derivative: take its gradient without create_graph=True")
        scale = -grad_outputs[0][:, None, None]
        found = (scale * posterior for posterior in ctx.saved_tensors)
        return *(x.to(dtype) for x, dtype in zip(found, ctx.dtypes, strict=True)), None, None


def _check(emissions: Tensor, links: Tensor, vertices: Tensor, target_lengths: Tensor) -> None:
    """Raise ValueError for a graph of nothing and, on the CPU, where lengths are out of range."""
    n_targets, n_vertices = emissions.shape[1:]
    if n_vertices == 0:
        raise ValueError("dag: the graph has no vertices; need 1 or more")
    if links.device.type != "cpu" or len(links) == 0:
        return
    for name, sizes, most in [("vertices", vertices, n_vertices), ("target_lengths", target_lengths, n_targets)]:
        low, high = int(sizes.min()), int(sizes.max())
        if low < 0 or high > most:
            raise ValueError(f"dag: {name} span {low} to {high}, allowed 0 to {most}")


def _prepared(emissions: Tensor, links: Tensor, vertices: Tensor, target_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the working type, with -inf wherever no path goes."""
    dtype = torch.float64 if links.dtype == torch.float64 else torch.float32
    u = torch.arange(links.shape[1], device=links.device)
    real = torch.arange(emissions.shape[1], device=links.device) < target_lengths[:, None]
    edges = (u[:, None] < u) & (u < vertices[:, None])[:, None]
    said = torch.where(real[..., None] & inner(vertices, len(u))[:, None], emissions.to(dtype), -torch.inf)
    return said, torch.where(edges, links.to(dtype), -torch.inf)


def best_arrivals(
    emissions: Float[Tensor, "B U L"], links: Float[Tensor, "B L L"]
) -> tuple[Float[Tensor, "B n L"], Int[Tensor, "B U L"]]:
    """As f_i(u), of the best beginning alone, and the vertex before u on it. -inf stands wherever no path goes."""
    best, into = begun(emissions), links.transpose(1, 2).contiguous()
    origins = torch.empty(emissions.shape, dtype=torch.int64, device=emissions.device)
    for i in range(emissions.shape[1]):
        reached, origins[:, i] = (into + best[:, i, None]).max(2)
        torch.add(reached, emissions[:, i], out=best[:, i + 1])
    return best, origins


def traced(
    best: Float[Tensor, "B n L"], origins: Int[Tensor, "B U L"], out: Float[Tensor, "B L"], lengths: Int[Tensor, "B"]
) -> Int[Tensor, "B U"]:
    """The vertices of the best path with so many words; 0 beyond them, and in rows that have no path."""
    final = best[torch.arange(len(best), device=best.device), lengths] + out
    total, vertex = final.max(1)
    path = torch.zeros(origins.shape[:2], dtype=torch.int64, device=origins.device)
    for i in range(origins.shape[1], 0, -1):
        inside = lengths >= i
        path[:, i - 1] = torch.where(inside, vertex, 0)
        vertex = torch.where(inside, origins[:, i - 1].gather(1, vertex[:, None])[:, 0], vertex)
    return path.masked_fill((total == -torch.inf)[:, None], 0)
