"""Directed acyclic graphs of words by enumeration: every path, every output."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor


def paths(n_vertices: int, n_words: int) -> Iterator[tuple[int, ...]]:
    """Every way from the first vertex to the last over so many others, in ascending order."""
    if n_vertices >= 2:
        yield from itertools.combinations(range(1, n_vertices - 1), n_words)


def path_log_prob(log_words: Tensor, links: Tensor, path: tuple[int, ...], words: tuple[int, ...]) -> Tensor:
    """Of the edges and of the words; log_words (L, V), links (L, L); both ends are silent."""
    stops = (0, *path, len(links) - 1)
    edges = [links[v, u] for v, u in itertools.pairwise(stops)]
    return torch.stack([*edges, *(log_words[u, word] for u, word in zip(path, words, strict=True))]).sum()


def log_likelihood(log_words: Tensor, links: Tensor, words: tuple[int, ...]) -> Tensor | None:
    """log p(words), the sum over all paths; None where there is no path."""
    every = [path_log_prob(log_words, links, path, words) for path in paths(len(links), len(words))]
    return torch.stack(every).logsumexp(0) if every else None


def random_graph(n_vertices: int, n_words: int, seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Log probabilities (L, V) of words and (L, L) of edges to later vertices, in float64."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randn(n_vertices, n_words, generator=draw, dtype=torch.float64).mul(scale).log_softmax(1)
    scores = torch.randn(n_vertices, n_vertices, generator=draw, dtype=torch.float64) * scale
    later = torch.ones(n_vertices, n_vertices).triu(1).bool()
    links = scores.masked_fill(~later, -torch.inf)
    links[:-1] = links[:-1].log_softmax(1)
    return words, links
