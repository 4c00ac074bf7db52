"""What an exported model may say: every piece, or for each source a list of its own. See `hasten.nn.words`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from hasten.data.shortlist import Shortlist
from hasten.errors import NOT_FINITE, UserError

_FRAMES_AT_ONCE = 256

Sources = Sequence[Sequence[int]]
Open = Callable[[str, set[str], set[str]], Any]
"""The session of a graph, by its file's name, its inputs and its outputs."""
Tensor = Callable[[np.ndarray], Any]
"""An array as a value of ONNX Runtime."""


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
        self._rows, self._banned, self._shortlist = _Rows(open_graph), banned, shortlist
        self._product = open_graph("listed.onnx", {"states", *self._rows.names}, {"logits"})

    def best(self, states: np.ndarray, counts: np.ndarray, sources: Sources) -> tuple[np.ndarray, np.ndarray]:
        """Source by source."""
        found = []
        for own, source in zip(np.split(states, np.cumsum(counts)[:-1]), sources, strict=True):
            ids = self._shortlist.ids(source)
            [logits] = self._product.run(["logits"], {"states": own, **self._rows(ids)})
            places, scores = best(logits, self._banned)
            found.append((ids[places], scores))
        tokens, scores = (np.concatenate(part) for part in zip(*found, strict=True))
        return tokens, scores


@dataclass(frozen=True)
class Sayable:
    """What a batch may say, token by token: n pieces, called by their places, those of all special ids first.

    ids (n): which pieces they are, ascending; None: all, so that places are ids. given: what the steps read of them.
    outside (B or 1, n): -inf where a row does not list a piece itself; None where there are no lists.
    """

    ids: np.ndarray | None
    given: dict[str, Any]
    outside: np.ndarray | None

    def select(self, rows: np.ndarray) -> "Sayable":
        """Of rows of the batch, by truth values."""
        return self if self.outside is None or len(self.outside) == 1 else replace(self, outside=self.outside[rows])

    def pieces(self, places: np.ndarray) -> np.ndarray:
        """Ids from places."""
        return places if self.ids is None else self.ids[places]


class Vocabulary(ABC):
    """What an autoregressive model may say, for any batch."""

    @abstractmethod
    def of(self, sources: Sources) -> Sayable:
        """What these may say."""


@final
class Everything(Vocabulary):
    """Every piece."""

    def __init__(self, banned: Sequence[int], size: int, tensor: Tensor):
        self._all = Sayable(None, {"banned": tensor(_never(size, banned))}, None)

    def of(self, sources: Sources) -> Sayable:
        """The same for all."""
        return self._all


@final
class Listed(Vocabulary):
    """What any source lists, in one small matrix for all steps; a row sees -inf at what it does not list itself."""

    def __init__(self, open_graph: Open, banned: Sequence[int], shortlist: Shortlist, tensor: Tensor):
        self._rows, self._banned, self._shortlist, self._tensor = _Rows(open_graph), banned, shortlist, tensor

    def of(self, sources: Sources) -> Sayable:
        """Rows of the output layer are gathered here, once."""
        lists = [self._shortlist.ids(source) for source in sources]
        ids = np.unique(np.concatenate(lists)) if len(lists) > 1 else lists[0]
        outside = np.full((len(lists), len(ids)), -np.inf, dtype=np.float32)
        for row, own in zip(outside, lists, strict=True):
            row[np.searchsorted(ids, own)] = 0
        given = {**self._rows(ids), "banned": _never(len(ids), self._banned)}
        return Sayable(ids, {name: self._tensor(value) for name, value in given.items()}, outside)


class _Rows:
    """The output layer by rows. All special ids are in every list and come first: their places are their ids."""

    def __init__(self, open_graph: Open):
        self._gather = open_graph("rows.onnx", {"ids"}, set())
        self.names = [output.name for output in self._gather.graph.get_outputs()]

    def __call__(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The rows of these ids, as the weights are held."""
        return dict(zip(self.names, self._gather.run(self.names, {"ids": ids}), strict=True))


def _never(size: int, banned: Sequence[int]) -> np.ndarray:
    """-inf at what none may say."""
    never = np.zeros(size, dtype=np.float32)
    never[banned] = -np.inf
    return never


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
