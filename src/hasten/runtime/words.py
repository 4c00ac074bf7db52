"""What an exported model may say: every piece, or for each source a list of its own. See `hasten.nn.words`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hasten.data.shortlist import Shortlist
from hasten.errors import NOT_FINITE, UserError

_FRAMES_AT_ONCE = 256

Sources = Sequence[Sequence[int]]
Open = Callable[[str, set[str], set[str]], Any]
"""The session of a graph, by its file's name, its inputs and its outputs."""


class Frames(ABC):
    """For models that say all at once."""

    @abstractmethod
    def best(self, states: np.ndarray, counts: np.ndarray, sources: Sources) -> tuple[np.ndarray, np.ndarray]:
        """At each of the states (N, D), `counts` of each source, the most probable id, and its log probability."""


@final
class EveryFrame(Frames):
    """Every piece, a few frames at a time."""

    def __init__(self, open_graph: Open, banned: Sequence[int]):
        self._output, self._banned = open_graph("output.onnx", {"states"}, {"logits"}), banned

    def best(self, states: np.ndarray, counts: np.ndarray, sources: Sources) -> tuple[np.ndarray, np.ndarray]:
        """Over all pieces."""
        parts = [self._read(states[i : i + _FRAMES_AT_ONCE]) for i in range(0, len(states), _FRAMES_AT_ONCE)]
        tokens, scores = (np.concatenate(part) for part in zip(*parts, strict=True))
        return tokens, scores

    def logits(self, states: np.ndarray) -> np.ndarray:
        """Scores (N, V) of all pieces."""
        return self._output.run(["logits"], {"states": states})[0]

    def _read(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return best(self.logits(states), self._banned)


@final
class ListedFrames(Frames):
    """Each source's own list."""

    def __init__(self, open_graph: Open, banned: Sequence[int], shortlist: Shortlist):
        self._layer, self._banned, self._shortlist = _Layer(open_graph), banned, shortlist

    def best(self, states: np.ndarray, counts: np.ndarray, sources: Sources) -> tuple[np.ndarray, np.ndarray]:
        """Source by source."""
        found = []
        for own, source in zip(np.split(states, np.cumsum(counts)[:-1]), sources, strict=True):
            ids = self._shortlist.ids(source)
            places, scores = best(self._layer.logits(own, self._layer.rows(ids)), self._banned)
            found.append((ids[places], scores))
        tokens, scores = (np.concatenate(part) for part in zip(*found, strict=True))
        return tokens, scores


class Next(ABC):
    """For models that say one token after the other."""

    fetched: str
    """The output of a step that `best` reads: everything beyond it need not be computed."""

    @abstractmethod
    def best(self, values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The most probable id of each row, these rows of the batch, and its log probability."""


@final
class EveryNext(Next):
    """Every piece."""

    fetched = "logits"

    def __init__(self, banned: Sequence[int]):
        self._banned = banned

    def best(self, values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of logits (R, V)."""
        return best(values, self._banned)


@final
class ListedNext(Next):
    """What any source lists, in one small matrix for all steps; a row sees -inf at what it does not list itself."""

    fetched = "states"

    def __init__(self, layer: "_Layer", banned: Sequence[int], lists: Sequence[np.ndarray]):
        self._layer, self._banned = layer, banned
        self._ids = np.unique(np.concatenate(lists))
        self._rows = layer.rows(self._ids)
        self._outside = np.full((len(lists), len(self._ids)), -np.inf, dtype=np.float32)
        for row, own in zip(self._outside, lists, strict=True):
            row[np.searchsorted(self._ids, own)] = 0

    def best(self, values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of states (R, D)."""
        places, scores = best(self._layer.logits(values, self._rows) + self._outside[rows], self._banned)
        return self._ids[places], scores


class Begin(ABC):
    """How a batch of sources begins."""

    @abstractmethod
    def of(self, sources: Sources) -> Next:
        """What they may say."""


@final
class BeginEvery(Begin):
    """Every piece."""

    def __init__(self, banned: Sequence[int]):
        self._next = EveryNext(banned)

    def of(self, sources: Sources) -> Next:
        """The same for all."""
        return self._next


@final
class BeginListed(Begin):
    """Each source's own list."""

    def __init__(self, open_graph: Open, banned: Sequence[int], shortlist: Shortlist):
        self._layer, self._banned, self._shortlist = _Layer(open_graph), banned, shortlist

    def of(self, sources: Sources) -> Next:
        """Rows of the output layer are gathered here, once."""
        return ListedNext(self._layer, self._banned, [self._shortlist.ids(source) for source in sources])


class _Layer:
    """The output layer by rows. All special ids are in every list and come first: their places are their ids."""

    def __init__(self, open_graph: Open):
        self._gather = open_graph("rows.onnx", {"ids"}, set())
        self._names = [output.name for output in self._gather.graph.get_outputs()]
        self._product = open_graph("listed.onnx", {"states", *self._names}, {"logits"})

    def rows(self, ids: np.ndarray) -> dict[str, Any]:
        """The rows of these ids, as the weights are held."""
        return dict(zip(self._names, self._gather.run(self._names, {"ids": ids}), strict=True))

    def logits(self, states: np.ndarray, rows: dict[str, Any]) -> np.ndarray:
        """Scores (N, n) of the ids whose rows these are."""
        return self._product.run(["logits"], {"states": states, **rows})[0]


def best(logits: np.ndarray, banned: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The most probable id of each row of logits (N, V) that is not banned, and its log probability among all.

    Of equal ones the lowest id. Raises `UserError` for scores that are not numbers.
    """
    highest = logits.max(1, keepdims=True)
    normaliser = highest[:, 0] + np.log(np.exp(logits - highest).sum(1))
    allowed = logits.copy()
    allowed[:, banned] = -np.inf
    ids = allowed.argmax(1)
    scores = allowed[np.arange(len(ids)), ids] - normaliser
    if np.isnan(scores).any():
        raise UserError(NOT_FINITE)
    return ids, scores
