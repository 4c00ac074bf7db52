"""Decoding with ONNX Runtime: ids in, ids and log probabilities out, equal to hasten's own loop."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from hasten.data.shortlist import Shortlist
from hasten.data.tokenizer import BLANK, BOS, EOS, PAD, SPECIAL_IDS
from hasten.errors import MissingExtra, UserError
from hasten.runtime import words
from hasten.runtime.settings import Settings


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


class Session:
    """A graph that computes; what it refuses at run time is a file that does not belong here."""

    def __init__(self, path: Path, session: Any):
        self._path, self.graph = path, session

    def run(self, outputs: Sequence[str], inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Arrays from arrays."""
        return self._called(self.graph.run, outputs, inputs)

    def run_values(self, outputs: Sequence[str], inputs: dict[str, Any], options: Any = None) -> list[Any]:
        """Values of ONNX Runtime from such."""
        return self._called(self.graph.run_with_ort_values, outputs, inputs, options)

    def _called(self, function: Any, outputs: Sequence[str], inputs: dict[str, Any], *options: Any) -> list[Any]:
        try:
            return function(outputs, inputs, *options)
        except Exception as error:  # of many kinds, too
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"{self._path} cannot be computed ({reason}): export the model again") from error


class Engine(ABC):
    """An exported directory, ready to decode. `threads` 0 leaves the number to ONNX Runtime. With a `shortlist` each
    source is said in the pieces that it lists, and log probabilities are over these."""

    def __init__(self, directory: Path, settings: Settings, threads: int, shortlist: Shortlist | None):
        self.directory, self.settings, self._threads = directory, settings, threads

    @abstractmethod
    def decode(self, sources: Sequence[Sequence[int]]) -> list[Decoded]:
        """The greedy output of each source (ids without the end symbol), all in one batch."""

    def _session(self, name: str, inputs: set[str], outputs: set[str]) -> "Session":
        """The graph of a file, which must take and give these; what the past adds to them is not named."""
        package, path = onnxruntime(), self.directory / name
        if name in LISTED and not path.exists():
            raise UserError(f"{self.directory} was exported without {name}, which a shortlist needs; export it again")
        options = package.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self._threads, 1
        options.log_severity_level = 4  # what goes wrong is told by the error
        try:
            session = package.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # of many kinds, and every one means the same to the user
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"{path} cannot be loaded: {reason}; export the model again") from error
        given = [{entry.name for entry in entries} for entries in (session.get_inputs(), session.get_outputs())]
        if not inputs <= given[0] or not outputs <= given[1]:
            raise UserError(f"{path} is the graph of something else; export the model again")
        return Session(path, session)


def load(directory: Path, settings: Settings, threads: int = 0, shortlist: Shortlist | None = None) -> Engine:
    """The engine for a directory."""
    if settings.kind not in _ENGINES:
        raise UserError(f"{directory} holds a model of kind {settings.kind!r}; allowed {', '.join(_ENGINES)}")
    return _ENGINES[settings.kind](directory, settings, threads, shortlist)


@final
class OnePass(Engine):
    """CTC: the states of all frames, the output layer over real frames, then collapse."""

    def __init__(self, directory: Path, settings: Settings, threads: int, shortlist: Shortlist | None = None):
        super().__init__(directory, settings, threads, shortlist)
        self._encoder = self._session("encoder.onnx", {"source", "masked", "frames_masked"}, {"states"})
        banned = [i for i in SPECIAL_IDS if i != BLANK]
        if shortlist is None:
            self._words: words.Frames = words.EveryFrame(self._session, banned)
        else:
            self._words = words.ListedFrames(self._session, banned, shortlist)

    def decode(self, sources: Sequence[Sequence[int]]) -> list[Decoded]:
        """One pass, and the most probable token of every frame."""
        return [Decoded(*collapse(*row), 1) for row in self.frames(sources)]

    def frames(self, sources: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each source the token of every frame and its log probability."""
        source, real = source_batch(sources)
        frames = real.repeat(self.settings.upsample, 1)
        inputs = {"source": source, "masked": masked(real), "frames_masked": masked(frames)}
        [states] = self._encoder.run(["states"], inputs)
        tokens, scores = self._words.best(states[frames.ravel()], frames.sum(1), sources)
        ends = np.cumsum(frames.sum(1))[:-1]
        return list(zip(np.split(tokens, ends), np.split(scores, ends), strict=True))


@final
class StepByStep(Engine):
    """An autoregressive model: the source once, then a token a step; rows that are finished leave the batch."""

    def __init__(self, directory: Path, settings: Settings, threads: int, shortlist: Shortlist | None = None):
        super().__init__(directory, settings, threads, shortlist)
        self._encoder = self._session("encoder.onnx", {"source", "masked"}, set())
        self._memory = [output.name for output in self._encoder.graph.get_outputs()]
        self._step = self._session("step.onnx", {"last", "position", "masked", *self._memory}, {"logits", "states"})
        past = [entry for entry in self._step.graph.get_inputs() if entry.name.startswith("past_")]
        self._past: dict[str, list[int]] = {
            entry.name: [_AT_FIRST.get(n, n) for n in entry.shape[1:]] for entry in past
        }
        self._after = [name.replace("past_", "next_") for name in self._past]
        banned = [i for i in SPECIAL_IDS if i != EOS]
        if shortlist is None:
            self._words: words.Begin = words.BeginEvery(banned)
        else:
            self._words = words.BeginListed(self._session, banned, shortlist)
        self._tensor = onnxruntime().OrtValue.ortvalue_from_numpy
        self._options = onnxruntime().RunOptions()
        self._options.only_execute_path_to_fetches = True  # with a shortlist not the whole output layer

    def decode(self, sources: Sequence[Sequence[int]]) -> list[Decoded]:
        """The most probable token, step by step, until the end symbol or the limit of the row."""
        source, real = source_batch(sources)
        limits = 2 * real.sum(1) + 20
        state, said = self._begin(source, real), self._words.of(sources)
        rows, last = np.arange(len(source)), np.full(len(source), BOS, dtype=np.int64)
        tokens: list[list[int]] = [[] for _ in sources]
        scores: list[list[float]] = [[] for _ in sources]
        step = 0
        while len(rows):
            values, state = self._advance(last, step, state, said.fetched)
            last, score = said.best(values, rows)
            step += 1
            for row, token, value in zip(rows.tolist(), last.tolist(), score.tolist(), strict=True):
                tokens[row].append(token)
                scores[row].append(value)
            going = (last != EOS) & (step < limits[rows])
            if not going.all():
                rows, last = rows[going], last[going]
                state = {name: self._tensor(value.numpy()[going]) for name, value in state.items()} if len(rows) else {}
        return [
            Decoded(ids[:-1] if ids[-1] == EOS else ids, own, len(ids)) for ids, own in zip(tokens, scores, strict=True)
        ]

    def _begin(self, source: np.ndarray, real: np.ndarray) -> dict[str, Any]:
        """All that a step reads besides the last token: of the source, and nothing of tokens."""
        inputs = {"source": self._tensor(source), "masked": self._tensor(masked(real))}
        memory = zip(self._memory, self._encoder.run_values(self._memory, inputs), strict=True)
        empty = {
            name: self._tensor(np.zeros((len(source), *shape), dtype=np.float32)) for name, shape in self._past.items()
        }
        return {"masked": inputs["masked"], **dict(memory), **empty}

    def _advance(
        self, last: np.ndarray, position: int, state: dict[str, Any], fetched: str
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """An output of the step ("logits" or "states") for every row, and the state after `last`."""
        place = np.array([position], dtype=np.int64)
        inputs = {"last": self._tensor(last), "position": self._tensor(place), **state}
        values, *past = self._step.run_values([fetched, *self._after], inputs, self._options)
        return values.numpy(), {**state, **dict(zip(self._past, past, strict=True))}


LISTED = ("rows.onnx", "listed.onnx")
"""What a shortlist needs: rows of the output layer, and the products with them."""
_AT_FIRST = {"said": 0}
"""Sizes that grow with the tokens said, before there are any."""
_ENGINES: dict[str, type[OnePass] | type[StepByStep]] = {"ctc": OnePass, "autoregressive": StepByStep}


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


def collapse(tokens: np.ndarray, scores: np.ndarray) -> tuple[list[int], list[float]]:
    """Equal neighbours merged, then blanks dropped; a token has the highest score of its frames."""
    starts = np.flatnonzero(np.concatenate(([True], tokens[1:] != tokens[:-1])))
    ids, highest = tokens[starts], np.maximum.reduceat(scores, starts)
    return ids[ids != BLANK].tolist(), highest[ids != BLANK].tolist()
