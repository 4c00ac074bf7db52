"""Decoding with ONNX Runtime: ids in, ids and log probabilities out, equal to hasten's own loop."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

import numpy as np

from hasten.data.shortlist import Shortlist
from hasten.data.tokenizer import BLANK, BOS, EOS, PAD, SPECIAL_IDS
from hasten.errors import NOT_FINITE, MissingExtra, UserError
from hasten.runtime import words
from hasten.runtime.settings import SETTINGS, Settings


class Decoded(NamedTuple):
    """An output: ids without the end symbol, a log probability for each decision, the passes of the decoder."""

    ids: list[int]
    scores: list[float]
    passes: int


def onnxruntime() -> Any:
    """The onnxruntime package; `MissingExtra` where it is not installed."""
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise MissingExtra("onnxruntime", "onnx") from error


STAMP = "hasten"
"""The key of what all graphs of one export have in common."""


class Session:
    """A graph that computes; what it refuses at run time is a file that does not belong here."""

    def __init__(self, path: Path, session: Any):
        self._path, self.graph = path, session

    def run(self, outputs: Sequence[str], inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Arrays from arrays."""
        return self._called(self.graph.run, outputs, inputs)

    def run_values(self, outputs: Sequence[str], inputs: dict[str, Any]) -> list[Any]:
        """Values of ONNX Runtime from such."""
        return self._called(self.graph.run_with_ort_values, outputs, inputs)

    def _called(self, function: Any, outputs: Sequence[str], inputs: dict[str, Any]) -> list[Any]:
        try:
            return function(outputs, inputs)
        except Exception as error:  # of many kinds, too
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"{self._path} cannot be computed ({reason}): export the model again") from error


class Engine(ABC):
    """An exported directory, ready to decode. `threads` 0 leaves the number to ONNX Runtime. With a `shortlist` each
    source is said in the pieces that it lists, and log probabilities are over these."""

    def __init__(self, directory: Path, settings: Settings, threads: int, shortlist: Shortlist | None):
        self.directory, self.settings, self._threads, self._lists = directory, settings, threads, shortlist is not None

    @abstractmethod
    def decode(self, sources: Sequence[Sequence[int]]) -> list[Decoded]:
        """The greedy output of each source (ids without the end symbol), all in one batch."""

    def _session(self, name: str, inputs: set[str], outputs: set[str]) -> "Session":
        """The graph of a file, which must take and give these; what the past adds to them is not named."""
        package, path = onnxruntime(), self.directory / name
        if self._lists and name in LISTED and not path.exists():
            raise UserError(f"{self.directory} was exported without {name}, which a shortlist needs; export it again")
        options = package.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self._threads, 1
        options.log_severity_level = 4  # what goes wrong is told by the error
        try:
            # The fallback is the same provider again, and words on stdout, where translations go.
            session = package.InferenceSession(
                _given(path), options, providers=["CPUExecutionProvider"], enable_fallback=0
            )
        except Exception as error:  # of many kinds, and every one means the same to the user
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"{path} cannot be loaded: {reason}; export the model again") from error
        given = [{entry.name for entry in entries} for entries in (session.get_inputs(), session.get_outputs())]
        if not inputs <= given[0] or not outputs <= given[1]:
            raise UserError(f"{path} is the graph of something else; export the model again")
        if session.get_modelmeta().custom_metadata_map.get(STAMP) != self.settings.graphs:
            raise UserError(f"{path} is of another export than {SETTINGS} beside it; export the model again")
        return Session(path, session)


def load(directory: Path, settings: Settings, threads: int = 0, shortlist: Shortlist | None = None) -> Engine:
    """The engine for a directory."""
    if settings.kind not in _ENGINES:
        raise UserError(f"{directory} holds a model of kind {settings.kind!r}; allowed {', '.join(_ENGINES)}")
    return _ENGINES[settings.kind](directory, settings, threads, shortlist)


class AtOnce(Engine):
    """All states at once, and the output layer over real ones."""

    gives: ClassVar[tuple[str, ...]] = ("states",)
    """What its encoder leaves, the states first."""
    says: ClassVar[tuple[int, ...]] = ()
    """The special ids that it may say."""

    def __init__(self, directory: Path, settings: Settings, threads: int, shortlist: Shortlist | None = None):
        super().__init__(directory, settings, threads, shortlist)
        self._encoder = self._session("encoder.onnx", {"source", "masked", "frames_masked"}, set(self.gives))
        banned = [i for i in SPECIAL_IDS if i not in self.says]
        if shortlist is None:
            self._words: words.Frames = words.EveryFrame(self._session, banned)
        else:
            self._words = words.ListedFrames(self._session, banned, shortlist)

    def frames(self, sources: Sequence[Sequence[int]]) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[np.ndarray]]:
        """Of each source the token of every frame and its log probability; and what the encoder left besides."""
        source, real = source_batch(sources)
        frames = real.repeat(self.settings.upsample, 1)
        inputs = {"source": source, "masked": masked(real), "frames_masked": masked(frames)}
        states, *others = self._encoder.run(self.gives, inputs)
        tokens, scores = self._words.best(states[frames.ravel()], frames.sum(1), sources)
        ends = np.cumsum(frames.sum(1))[:-1]
        return list(zip(np.split(tokens, ends), np.split(scores, ends), strict=True)), others


@final
class OnePass(AtOnce):
    """CTC: the most probable token of every frame, then collapse."""

    says = (BLANK,)

    def decode(self, sources: Sequence[Sequence[int]]) -> list[Decoded]:
        """One pass."""
        return [Decoded(*collapse(*row), 1) for row in self.frames(sources)[0]] if sources else []


@final
class OneWay(AtOnce):
    """A graph of words: from vertex to vertex by the best edge, with its word as far as `beta` says."""

    gives = ("states", "links")

    def decode(self, sources: Sequence[Sequence[int]]) -> list[Decoded]:
        """One pass."""
        found = []
        for (tokens, log_probs), visited, edges in self.ways(sources) if sources else ():
            scores = log_probs[visited] + edges
            if np.isnan(scores).any():
                raise UserError(NOT_FINITE)
            found.append(Decoded(tokens[visited].tolist(), scores.tolist(), 1))
        return found

    def ways(
        self, sources: Sequence[Sequence[int]]
    ) -> list[tuple[tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]]:
        """Of each source the tokens of its vertices and their log probabilities, the vertices that are visited, and log
        probabilities of the edges to these, that of the edge to the end in the last."""
        found, [links] = self.frames(sources)
        return [
            (row, *follow(own[: len(row[0]), : len(row[0])], row[1], self.settings.beta))
            for row, own in zip(found, links, strict=True)
        ]


@final
class StepByStep(Engine):
    """An autoregressive model: the source once, then token by token; rows that are finished leave the batch."""

    def __init__(self, directory: Path, settings: Settings, threads: int, shortlist: Shortlist | None = None):
        super().__init__(directory, settings, threads, shortlist)
        self._encoder = self._session("encoder.onnx", {"source", "masked"}, set())
        self._memory = [output.name for output in self._encoder.graph.get_outputs()]
        read, name = {"last", "position", "most", "masked", "banned", *self._memory}, "steps.onnx"
        if shortlist is not None:
            read, name = {*read, "outside"}, "listed_steps.onnx"
        self._steps = self._session(name, read, {"tokens", "scores"})
        past = [entry for entry in self._steps.graph.get_inputs() if entry.name.startswith("past_")]
        self._past = {entry.name: [_AT_FIRST.get(str(size), size) for size in entry.shape[1:]] for entry in past}
        self._after = [name.replace("past_", "next_") for name in self._past]
        self._tensor = onnxruntime().OrtValue.ortvalue_from_numpy
        banned = [i for i in SPECIAL_IDS if i != EOS]
        if shortlist is None:
            self._words: words.Vocabulary = words.Everything(banned, settings.vocabulary, self._tensor)
        else:
            self._words = words.Listed(self._session, banned, shortlist, self._tensor)

    def decode(self, sources: Sequence[Sequence[int]]) -> list[Decoded]:
        """The most probable token, step by step, until the end symbol or the limit of the row."""
        if not sources:
            return []
        source, real = source_batch(sources)
        limits = 2 * real.sum(1) + 20
        state, sayable = self._begin(source, real), self._words.of(sources)
        rows, last = np.arange(len(source)), np.full(len(source), BOS, dtype=np.int64)
        said: list[list[np.ndarray]] = [[] for _ in sources]
        scores: list[list[np.ndarray]] = [[] for _ in sources]
        step = 0
        while len(rows):
            places, log_probs, state = self._advance(last, step, limits[rows].min() - step, state, sayable)
            if np.isnan(log_probs).any():
                raise UserError(NOT_FINITE)
            step += len(places)
            for row, own, values in zip(rows.tolist(), sayable.pieces(places).T, log_probs.T, strict=True):
                said[row].append(own)
                scores[row].append(values)
            last = places[-1]
            going = (last != EOS) & (step < limits[rows])
            rows, last, sayable = rows[going], last[going], sayable.select(going)
            if len(rows):
                state = {name: self._tensor(value.numpy()[going]) for name, value in state.items()}
        return [_decoded(np.concatenate(ids), np.concatenate(own)) for ids, own in zip(said, scores, strict=True)]

    def _begin(self, source: np.ndarray, real: np.ndarray) -> dict[str, Any]:
        """All that a step reads of the source, and nothing of tokens."""
        inputs = {"source": self._tensor(source), "masked": self._tensor(masked(real))}
        memory = zip(self._memory, self._encoder.run_values(self._memory, inputs), strict=True)
        empty = {
            name: self._tensor(np.zeros((len(source), *sizes), dtype=np.float32)) for name, sizes in self._past.items()
        }
        return {"masked": inputs["masked"], **dict(memory), **empty}

    def _advance(
        self, last: np.ndarray, position: int, most: int, state: dict[str, Any], sayable: words.Sayable
    ) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """Places and log probabilities (t, B) of what is said after `last` until a row ends, at most `most` steps, and
        the state then."""
        given = {
            "last": self._tensor(last),
            "position": self._tensor(np.array([position], dtype=np.int64)),
            "most": self._tensor(np.array(most, dtype=np.int64)),
        }
        if sayable.outside is not None:
            given["outside"] = self._tensor(sayable.outside)
        inputs = {**given, **sayable.given, **state}
        places, log_probs, *past = self._steps.run_values(["tokens", "scores", *self._after], inputs)
        return places.numpy(), log_probs.numpy(), {**state, **dict(zip(self._past, past, strict=True))}


def _decoded(ids: np.ndarray, scores: np.ndarray) -> Decoded:
    """An output from all that was said, its end symbol among it or cut off."""
    return Decoded(ids[: len(ids) - (ids[-1] == EOS)].tolist(), scores.tolist(), len(ids))


def _given(path: Path) -> Path | bytes:
    """A file as ONNX Runtime takes it: by its path or, where that is no text in UTF-8, by its content."""
    try:
        str(path).encode("utf-8")
        return path
    except UnicodeEncodeError:
        return path.read_bytes()


LISTED = ("rows.onnx", "listed.onnx", "listed_steps.onnx")
"""What a shortlist needs: rows of the output layer, and the products with them."""
_AT_FIRST: dict[str, Any] = {"said": 0}
"""Sizes that grow with the tokens said, before there are any."""
_ENGINES: dict[str, type[OnePass] | type[OneWay] | type[StepByStep]] = {
    "ctc": OnePass,
    "dag": OneWay,
    "autoregressive": StepByStep,
}


def source_batch(sources: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids (B, S), the end symbol appended and padded on the right, and True on real tokens."""
    lengths = np.array([len(source) + 1 for source in sources])
    ids = np.full((len(sources), lengths.max(initial=0)), PAD, dtype=np.int64)
    for row, source in zip(ids, sources, strict=True):
        row[: len(source) + 1] = [*source, EOS]
    return ids, np.arange(ids.shape[1]) < lengths[:, None]


def masked(real: np.ndarray) -> np.ndarray:
    """What is added to scores, (B, 1, 1, S): 0 where `real` (B, S), else -inf."""
    return np.where(real, np.float32(0), np.float32(-np.inf))[:, None, None, :]


def follow(links: np.ndarray, scores: np.ndarray, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """From the first of L vertices to the last, always on to the one with the highest of links[v, u] + beta scores[u]:
    the vertices between, and their links, the last with that to the end. See `hasten.decoding.dag_paths`."""
    end, ahead = len(links) - 1, float(beta) * scores
    ahead[-1] = 0.0
    following = np.maximum((links + ahead).argmax(1), np.arange(len(links)) + 1).tolist()
    visited, here = [0], following[0]
    while here < end:
        visited.append(here)
        here = following[here]
    edges = links[visited, [*visited[1:], end]]
    if len(edges) > 1:
        edges[-2] += edges[-1]
    return np.array(visited[1:], dtype=np.int64), edges[:-1]


def collapse(tokens: np.ndarray, scores: np.ndarray) -> tuple[list[int], list[float]]:
    """Equal neighbours merged, then blanks dropped; a token has the highest score of its frames."""
    starts = np.flatnonzero(np.concatenate(([True], tokens[1:] != tokens[:-1])))
    ids, highest = tokens[starts], np.maximum.reduceat(scores, starts)
    return ids[ids != BLANK].tolist(), highest[ids != BLANK].tolist()
