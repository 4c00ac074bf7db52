"""Ways through a graph of words: the best edge, the best edge with its word, the best path of any length.

A graph has L vertices in a row (see `dag_loss`): the first and the last real one are silent. Here every vertex between
them would say its own most probable word, and the question is which of them are visited: True in (B, L). Ties go to the
earlier vertex.

Sources: Huang et al., 2022, section 3 (greedy, lookahead); Shao, Ma, Feng, 2022 ("Viterbi decoding of directed acyclic
Transformer for non-autoregressive machine translation").
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.decoding.dag_loss import best_arrivals, inner, traced
from hasten.decoding.dag_sweeps import leaving


def follow(scores: Float[Tensor, "B L L"], vertices: Int[Tensor, "B"]) -> Bool[Tensor, "B L"]:
    """From the first vertex always on to the one with the highest of `scores` [v, u] until the last is reached.

    Scores of what is no edge are -inf.
    """
    following, end = scores.argmax(2), (vertices - 1)[:, None]
    visited, here = torch.zeros(scores.shape[:2], dtype=torch.bool, device=scores.device), torch.zeros_like(end)
    while True:
        # Scores of NaN, which are refused later, must not lead in a circle.
        here = torch.where(here < end, following.gather(1, here).maximum(here + 1), end)
        if (here >= end).all():
            return visited & inner(vertices, scores.shape[1])
        visited = visited.scatter(1, here, value=True)


def greedy(
    links: Float[Tensor, "B L L"], words: Float[Tensor, "B L"], vertices: Int[Tensor, "B"]
) -> Bool[Tensor, "B L"]:
    """Always along the most probable edge; the words are not asked."""
    return follow(links, vertices)


def lookahead(
    links: Float[Tensor, "B L L"], words: Float[Tensor, "B L"], vertices: Int[Tensor, "B"], beta: float = 1.0
) -> Bool[Tensor, "B L"]:
    """Always on to argmax over u of log E(v, u) + beta words[u], words[u] = max over y of log P(y | u).

    The last vertex, which says nothing, has words 0.
    """
    return follow(ahead(links, words, vertices, beta), vertices)


def ahead(
    links: Float[Tensor, "B L L"], words: Float[Tensor, "B L"], vertices: Int[Tensor, "B"], beta: float
) -> Float[Tensor, "B L L"]:
    """What `lookahead` compares, [v, u]."""
    return links + beta * words.masked_fill(~inner(vertices, words.shape[1]), 0.0)[:, None]


def viterbi(
    links: Float[Tensor, "B L L"],
    words: Float[Tensor, "B L"],
    vertices: Int[Tensor, "B"],
    limits: Int[Tensor, "B"],
    length_power: float = 1.0,
) -> Bool[Tensor, "B L"]:
    """The path of the highest log probability, edges and words, divided by max(1, number of words) ** length_power.

    Of 0 to `limits` words; neither end counts as a word. All lengths are compared, each by its own best path.
    """
    limits = limits.minimum(vertices - 2).clamp(min=0)
    steps = int(limits.max())
    said = words.masked_fill(~inner(vertices, words.shape[1]), -torch.inf)[:, None].expand(-1, steps, -1)
    best, origins = best_arrivals(said, links)
    out = leaving(links, vertices)
    totals = (best + out[:, None]).amax(2)
    n = torch.arange(steps + 1, device=links.device)
    scores = (totals / n.clamp(min=1) ** length_power).masked_fill(n > limits[:, None], -torch.inf)
    lengths = scores.argmax(1)
    path = traced(best, origins, out, lengths)
    visited = torch.zeros(words.shape, dtype=torch.bool, device=words.device).scatter(1, path, value=True)
    return visited & inner(vertices, words.shape[1])
