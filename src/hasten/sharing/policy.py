"""Which layers use the attention of which, chosen by how alike they attend. Layers count from 0, as in `SourceMap`."""

import math
from collections.abc import Sequence

from hasten.errors import UserError
from hasten.nn.sharing import SourceMap

Matrix = Sequence[Sequence[float]]
_ROUNDING = 1e-6


def group_similarity(mu: Matrix, layers: Sequence[int]) -> float:
    """The mean of mu(i, j) over the pairs of different layers; 1 for a single layer.

    For a block m .. n it is sim(m, n) = sum_i sum_j (1 - delta(i, j)) mu(i, j) / ((n - m + 1)(n - m)).
    Source: Xiao et al., 2019.
    """
    if len(layers) < 2:
        return 1.0
    pairs = [mu[i][j] for i in layers for j in layers if i != j]
    return math.fsum(pairs) / len(pairs)


def blocks(mu: Matrix, theta: float, largest: int | None = None) -> SourceMap:
    """Adjacent layers in blocks, each using the attention of its first, greedily from the first layer on.

    A block m .. n ends at the largest n with sim(m, n) > theta, be it that smaller ones do not pass, and has at most
    `largest` layers. theta >= 1 leaves all layers alone, theta < 0 puts them in one block. A `largest` serves where
    policies are searched for again and again: layers of a block attend alike from then on. The first block never
    shrinks; a later one may lose its first layers to the block before it.
    Errors: `UserError` for what is no matrix of similarities, for a theta that is no number, for largest < 1.
    Source: Xiao et al., 2019.
    """
    n_layers = _check(mu, theta, largest)
    sources: list[int] = []
    while len(sources) < n_layers:
        first = len(sources)
        longest = min(n_layers - first, largest or n_layers)
        fitting = (n for n in range(longest, 1, -1) if group_similarity(mu, range(first, first + n)) > theta)
        sources += [first] * next(fitting, 1)
    return SourceMap(tuple(sources))


def source_map(mu: Matrix, theta: float, largest: int | None = None) -> SourceMap:
    """Each layer uses the attention of the most similar earlier layer that computes its own, if mu > theta.

    Else it computes its own. Layers may point over others: [1, 2, 1, 1, 1, 1]. Of equals the earliest is taken. At
    most `largest` layers, the source included, have one source. Errors: those of `blocks`.
    """
    n_layers = _check(mu, theta, largest)
    sources: list[int] = []
    for layer in range(n_layers):
        free = [s for s in range(layer) if sources[s] == s and sources.count(s) < (largest or n_layers)]
        best = max(free, key=lambda source: mu[layer][source], default=layer)
        sources.append(best if best != layer and mu[layer][best] > theta else layer)
    return SourceMap(tuple(sources))


def groups(plan: SourceMap) -> list[tuple[int, ...]]:
    """The layers that have one source, for each source."""
    return [
        tuple(layer for layer, own in enumerate(plan.sources) if own == source) for source in sorted(set(plan.sources))
    ]


def sizes(plan: SourceMap) -> tuple[int, ...]:
    """The sizes of its blocks, {2, 4} for [1, 1, 3, 3, 3, 3]; `UserError` where layers do not stand in blocks."""
    if not is_blocks(plan):
        raise UserError(f"{list(plan.numbers)} is no sequence of blocks: sources are not those of adjacent layers")
    return tuple(len(group) for group in groups(plan))


def is_blocks(plan: SourceMap) -> bool:
    """Whether every layer uses its own attention or the same as the layer before it."""
    pairs = zip(plan.sources, plan.sources[1:], strict=False)
    return all(own in (layer, before) for layer, (before, own) in enumerate(pairs, 1))


def of_sizes(numbers: Sequence[int]) -> SourceMap:
    """Blocks of these sizes, from the first layer on: [1, 1, 3, 3, 3, 3] for {2, 4}; `UserError` for sizes below 1."""
    if any(size < 1 for size in numbers) or not numbers:
        raise UserError(f"block sizes are {list(numbers)}; give one or more, each 1 or more")
    sources: list[int] = []
    for size in numbers:
        sources += [len(sources)] * size
    return SourceMap(tuple(sources))


def _check(mu: Matrix, theta: float, largest: int | None) -> int:
    """The number of layers; `UserError` where arguments mean nothing."""
    n_layers = len(mu)
    if not n_layers or any(len(row) != n_layers for row in mu):
        raise UserError(f"similarities: got rows of {[len(row) for row in mu]} numbers; give a square matrix")
    for i, row in enumerate(mu):
        for j, value in enumerate(row):
            if not -_ROUNDING <= value <= 1 + _ROUNDING:
                raise UserError(f"similarities: layers {i + 1} and {j + 1} have {value}; allowed 0 to 1")
            if abs(value - mu[j][i]) > _ROUNDING:
                raise UserError(
                    f"similarities: {value} for layers {i + 1} and {j + 1}, {mu[j][i]} for the same two the other "
                    "way round; give a symmetric matrix"
                )
    if math.isnan(theta):
        raise UserError("theta is nan; give a number, for example 0.8")
    if largest is not None and largest < 1:
        raise UserError(f"the largest block has {largest} layers; give 1 or more")
    return n_layers
