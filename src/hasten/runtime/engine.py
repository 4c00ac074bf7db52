"""Decoding with ONNX Runtime: ids in, ids and log probabilities out, equal to hasten's own loop."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from hasten.data.tokenizer import BLANK, BOS, EOS, PAD, SPECIAL_IDS
from hasten.errors import NOT_FINITE, MissingExtra, UserError
from hasten.runtime.settings import Settings

_FRAMES_AT_ONCE = 256


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
    """An exported directory, ready to decode. `threads` 0 leaves the number to ONNX Runtime."""

    def __init__(self, directory: Path, settings: Settings, threads: int):
        self.directory, self.settings, self._threads = directory, settings, threads

    @abstractmethod
    def decode(self, sources: Sequence[Sequence[int]]) -> list[Decoded]:
        """The greedy output of each source (ids without the end symbol), all in one batch."""

    def _session(self, name: str, inputs: set[str], outputs: set[str]) -> "Session":
        """The graph of a file, which must take and give these; what the past adds to them is not named."""
        package, path = onnxruntime(), self.directory / name
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


def load(directory: Path, settings: Settings, threads: int = 0) -> Engine:
    """The engine for a directory."""
    if settings.kind not in _ENGINES:
        raise UserError(f"{directory} holds a model of kind {settings.kind!r}; allowed {', '.join(_ENGINES)}")
    return _ENGINES[settings.kind](directory, settings, threads)


@final
class OnePass(Engine):
    """CTC: the states of all frames, the output layer over real frames, then collapse."""

    def __init__(self, directory: Path, settings: Settings, threads: int):
        super().__init__(directory, settings, threads)
        self._encoder = self._session("encoder.onnx", {"source", "masked", "frames_masked"}, {"states"})
        self._output = self._session("output.onnx", {"states"}, {"logits"})
        self._banned = [i for i in SPECIAL_IDS if i != BLANK]

    def decode(self, sources: Sequence[Sequence[int]]) -> list[Decoded]:
        """One pass, and the most probable token of every frame."""
        return [Decoded(*collapse(*row), 1) for row in self.frames(sources)]

    def frames(self, sources: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each source the token of every frame and its log probability."""
        source, real = source_batch(sources)
        frames = real.repeat(self.settings.upsample, 1)
        inputs = {"source": source, "masked": masked(real), "frames_masked": masked(frames)}
        [states] = self._encoder.run(["states"], inputs)
        states = states[frames.ravel()]
        parts = [self._read(states[i : i + _FRAMES_AT_ONCE]) for i in range(0, len(states), _FRAMES_AT_ONCE)]
        tokens, scores = (np.concatenate(part) for part in zip(*parts, strict=True))
        ends = np.cumsum(frames.sum(1))[:-1]
        return list(zip(np.split(tokens, ends), np.split(scores, ends), strict=True))

    def _read(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        [logits] = self._output.run(["logits"], {"states": states})
        return best(logits, self._banned)


@final
class StepByStep(Engine):
    """An autoregressive model: the source once, then a token a step; rows that are finished leave the batch."""

    def __init__(self, directory: Path, settings: Settings, threads: int):
        super().__init__(directory, settings, threads)
        self._encoder = self._session("encoder.onnx", {"source", "masked"}, set())
        self._memory = [output.name for output in self._encoder.graph.get_outputs()]
        self._step = self._session("step.onnx", {"last", "position", "masked", *self._memory}, {"logits"})
        past = [entry for entry in self._step.graph.get_inputs() if entry.name.startswith("past_")]
        self._past = {entry.name: (entry.shape[1], entry.shape[3]) for entry in past}
        self._outputs = ["logits", *(name.replace("past_", "next_") for name in self._past)]
        self._banned = [i for i in SPECIAL_IDS if i != EOS]
        self._tensor = onnxruntime().OrtValue.ortvalue_from_numpy

    def decode(self, sources: Sequence[Sequence[int]]) -> list[Decoded]:
        """The most probable token, step by step, until the end symbol or the limit of the row."""
        source, real = source_batch(sources)
        limits = 2 * real.sum(1) + 20
        state = self._begin(source, real)
        rows, last = np.arange(len(source)), np.full(len(source), BOS, dtype=np.int64)
        tokens: list[list[int]] = [[] for _ in sources]
        scores: list[list[float]] = [[] for _ in sources]
        step = 0
        while len(rows):
            last, score, state = self._advance(last, step, state)
            step += 1
            for row, token, value in zip(rows.tolist(), last.tolist(), score.tolist(), strict=True):
                tokens[row].append(token)
                scores[row].append(value)
            going = (last != EOS) & (step < limits[rows])
            if not going.all():
                rows, last = rows[going], last[going]
                state = {name: self._tensor(value.numpy()[going]) for name, value in state.items()} if len(rows) else {}
        return [
            Decoded(said[:-1] if said[-1] == EOS else said, own, len(said))
            for said, own in zip(tokens, scores, strict=True)
        ]

    def _begin(self, source: np.ndarray, real: np.ndarray) -> dict[str, Any]:
        """All that a step reads besides the last token: of the source, and nothing of tokens."""
        inputs = {"source": self._tensor(source), "masked": self._tensor(masked(real))}
        memory = zip(self._memory, self._encoder.run_values(self._memory, inputs), strict=True)
        empty = {
            name: self._tensor(np.zeros((len(source), heads, 0, width), dtype=np.float32))
            for name, (heads, width) in self._past.items()
        }
        return {"masked": inputs["masked"], **dict(memory), **empty}

    def _advance(
        self, last: np.ndarray, position: int, state: dict[str, Any]
    ) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """The next token of every row, its log probability, and the state after `last`."""
        place = np.array([position], dtype=np.int64)
        inputs = {"last": self._tensor(last), "position": self._tensor(place), **state}
        logits, *past = self._step.run_values(self._outputs, inputs)
        token, score = best(logits.numpy(), self._banned)
        return token, score, {**state, **dict(zip(self._past, past, strict=True))}


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


def collapse(tokens: np.ndarray, scores: np.ndarray) -> tuple[list[int], list[float]]:
    """Equal neighbours merged, then blanks dropped; a token has the highest score of its frames."""
    starts = np.flatnonzero(np.concatenate(([True], tokens[1:] != tokens[:-1])))
    ids, highest = tokens[starts], np.maximum.reduceat(scores, starts)
    return ids[ids != BLANK].tolist(), highest[ids != BLANK].tolist()
