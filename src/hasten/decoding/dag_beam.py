"""The most probable outputs of a graph of words, all their paths together, by beam search.

The probability of a beginning y_1 .. y_m is that of all paths that visit m vertices and say so there; what a beam keeps
of it is where these paths stand: one number a vertex. From there every vertex is reached by one product with the edges,
and every next word weighed by one with the words' probabilities, so no path and no word is left out. See `dag_loss`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from hasten.decoding.beam import length_normalised


def prefix_beam_search(
    words: Float[Tensor, "L V"],
    links: Float[Tensor, "L L"],
    *,
    beam: int,
    limit: int,
    n_best: int = 1,
    length_power: float = 1.0,
) -> list[tuple[tuple[int, ...], float]]:
    """Outputs of one graph and their log p(y | x), best first by log p(y | x) / max(1, words) ** length_power.

    words: log P(y | u), -inf for what must not be said; links: log E(v, u), -inf where there is no edge. Both ends are
    silent and count as no word. Outputs have up to `limit` words; fewer than `n_best` come back where fewer are found.

    Beginnings of equal length compete for the `beam` places, by the probability of everything they begin. With as many
    places as there are beginnings the result is exact. Computed in float64 on the CPU. Raises ValueError for n_best >
    beam, sizes below 1, and scores of NaN.
    """
    if not 1 <= n_best <= beam:
        raise ValueError(f"graph beam search: n_best is {n_best} and beam {beam}; need 1 <= n_best <= beam")
    if words.isnan().any() or links.isnan().any():
        raise ValueError("graph beam search: words or links hold NaN; pass the scores of a finite model")
    edges = links.detach().cpu().double().exp()
    if len(edges) < 2:
        return []
    search = _Search(words.detach().cpu().double()[1:-1].exp(), edges, n_best, limit, length_power)
    for length in range(min(limit, len(edges) - 2)):
        search.extend(beam)
        if not search.live or search.settled(length + 1):
            break
    return search.results()


class _Search:
    """Beginnings of one length, best first, and the outputs found so far.

    Of each beginning: its words, its log probability, and (K, inner vertices) the share of it that comes next to each
    vertex.
    """

    def __init__(self, said: Tensor, edges: Tensor, n_best: int, limit: int, length_power: float):
        self.said, self.onward, self.out = said, edges[1:-1, 1:-1], edges[1:-1, -1]
        self.n_best, self.limit, self.length_power = n_best, limit, length_power
        self.live: list[tuple[int, ...]] = [()]
        self.log_probs, self.arriving = torch.zeros(1, dtype=torch.float64), edges[:1, 1:-1]
        self.found: list[tuple[tuple[int, ...], float]] = []
        self._finish(edges[:1, -1].log())

    def extend(self, beam: int) -> None:
        """Every beginning by every word; the most probable `beam` stay, and what they are as they stand is found."""
        masses = self.log_probs[:, None] + (self.arriving @ self.said).log()
        best, index = masses.flatten().topk(min(beam, masses.numel()))
        index = index[best > -torch.inf]
        parents, words = index // masses.shape[1], index % masses.shape[1]
        self.live = [(*self.live[i], word) for i, word in zip(parents.tolist(), words.tolist(), strict=True)]
        self.log_probs = best[: len(index)]
        standing = self.arriving[parents] * self.said[:, words].T
        standing = standing / standing.sum(1, keepdim=True)
        self.arriving = standing @ self.onward
        self._finish(self.log_probs + (standing @ self.out).log())

    def _finish(self, totals: Tensor) -> None:
        ended = zip(self.live, totals.tolist(), strict=True)
        self.found = self._ranked([*self.found, *((words, total) for words, total in ended if total > -torch.inf)])

    def _ranked(self, outputs: list[tuple[tuple[int, ...], float]]) -> list[tuple[tuple[int, ...], float]]:
        return sorted(outputs, key=lambda one: -self._score(one[1], len(one[0])))[: self.n_best]

    def _score(self, log_prob: float, length: int) -> float:
        return length_normalised(log_prob, length, self.length_power)

    def settled(self, length: int) -> bool:
        """Whether nothing that begins like the best beginning, of this length, would be among the results."""
        if len(self.found) < self.n_best:
            return False
        # Of what it begins nothing is more probable than all of it, nor scores higher than at the longest.
        longest = self.limit if self.length_power > 0 else length
        return self._score(float(self.log_probs[0]), longest) <= self._score(self.found[-1][1], len(self.found[-1][0]))

    def results(self) -> list[tuple[tuple[int, ...], float]]:
        """The best outputs, best first."""
        return self.found
