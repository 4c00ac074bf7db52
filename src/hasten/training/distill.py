"""Sequence-level distillation: a teacher translates the training text, line for line, and filters drop poor pairs."""

import fcntl
import hashlib
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from hasten.data.text import read_lines
from hasten.errors import UserError
from hasten.training.teachers import Teacher
from hasten.training.workers import Workers

# Five copies or more of the same two to forty characters: a decoder that could not stop.
_LOOP = re.compile(r"(?=\S)(.{2,40}?)\1{4}")
_GO_ON = "the same command goes on where this one stopped"
_LINE_BREAKS = re.compile(r"[\r\n]+")


@dataclass(frozen=True, kw_only=True)
class DistillSpec:
    """What is kept of a teacher's translations."""

    max_ratio: float = 3.0
    """Longest side over shortest, in the teacher's unit of length."""
    max_tokens: int = 250
    """Most units of length on either side; longer sources are not translated at all."""
    keep_copies: bool = False
    """Keep translations that equal their source."""
    limit: int | None = None
    """Only the first lines of the source."""
    shard_lines: int = 1000
    """Lines that are translated, and saved, at a time."""

    def __post_init__(self) -> None:
        for name, least in (("max_ratio", 1), ("max_tokens", 1), ("shard_lines", 1), ("limit", 1)):
            value = getattr(self, name)
            if value is not None and not value >= least:  # NaN is not either
                raise UserError(f"{name} is {value}; it must be at least {least}")


@dataclass(frozen=True)
class Shard:
    """Translations of consecutive lines, the empty text where a filter dropped one, and counts of what happened."""

    targets: list[str]
    counts: Counter[str]


@dataclass(frozen=True)
class DistillProgress:
    """Where the work stands: lines done of lines in all, lines a second of this session, estimated seconds left."""

    done: int
    lines: int
    lines_per_second: float
    seconds_left: float


def shard_maker(
    teacher: Teacher, identity: Mapping[str, str | int], spec: DistillSpec
) -> Callable[[Sequence[str]], Shard]:
    """Load the teacher and return what turns source lines into a shard; `UserError` where it is not `identity` now."""
    ready = teacher.ready()
    if teacher.identity() != identity:
        raise UserError(f"the files of {teacher.name} changed while it was loaded; distil when its training is over")

    def make(lines: Sequence[str]) -> Shard:
        sources = [line.strip() for line in lines]
        lengths = [ready.length(source) for source in sources]
        chosen = [i for i, length in enumerate(lengths) if 0 < length <= spec.max_tokens]
        translations = [""] * len(sources)
        for i, text in zip(chosen, ready.translate([sources[i] for i in chosen]), strict=True):
            translations[i] = _LINE_BREAKS.sub(" ", text).strip()
        counts: Counter[str] = Counter()
        for i, (source, target) in enumerate(zip(sources, translations, strict=True)):
            reason = drop_reason(source, target, lengths[i], ready.length(target), spec)
            if reason is not None:
                translations[i] = ""
            counts[reason or "kept"] += 1
        return Shard(translations, counts)

    return make


def drop_reason(source: str, target: str, source_length: int, target_length: int, spec: DistillSpec) -> str | None:
    """Why a stripped pair is left out; None where it is kept. The first reason counts."""
    if not source:
        return "empty source"
    if source_length > spec.max_tokens:
        return "long source"
    if not target:
        return "empty translation"
    if target_length > spec.max_tokens:
        return "long translation"
    if max(source_length, target_length) > spec.max_ratio * min(source_length, target_length):
        return "length ratio"
    if target == source and not spec.keep_copies:
        return "copy"
    if _LOOP.search(target) and not _LOOP.search(source):
        return "repetition"
    return None


def distill(
    teacher: Teacher,
    source: Path,
    out: Path,
    spec: DistillSpec | None = None,
    *,
    workers: int = 1,
    force: bool = False,
    observe: Callable[[DistillProgress], None] = lambda _: None,
) -> dict[str, Any]:
    """Write the translation of line i of `source` as line i of `out`, an empty line where the pair is left out.

    Returns the report that is also written beside `out`. Work that was interrupted, however harshly, is taken up where
    the last shard was saved, and ends in the same bytes; the number of workers does not matter for them. `force` throws
    away unfinished work, and an existing `out` when the new one is whole. Raises `UserError` where `out` exists, where
    unfinished work was begun with another source, teacher or settings, and where another process is at work on it.

    Source: Kim and Rush, 2016, "Sequence-Level Knowledge Distillation", section 3.2.
    """
    spec = spec or DistillSpec()
    lines = read_lines(source)[: spec.limit]
    if not lines:
        raise UserError(f"{source} has no lines")
    _check_out(out, source)
    task = _task(teacher, lines, spec)
    with Output.opened(out, task, force) as output:
        make = partial(shard_maker, teacher, task["teacher"], spec)
        shards = [lines[i : i + spec.shard_lines] for i in range(output.done, len(lines), spec.shard_lines)]
        _translate(output, _shards(make, shards, workers), len(lines), observe)
        report = _report(teacher, source, out, task, output)
        output.finish(report)
    return report


def _check_out(out: Path, source: Path) -> None:
    """`UserError` where the source would be written over."""
    if out.is_dir():
        raise UserError(f"{out} is a directory; name a file, for example {out / 'distilled.txt'}")
    for written in (out, *(beside(out, ending) for ending in ("partial", "progress.json", "report.json"))):
        if written.exists() and written.samefile(source):
            raise UserError(f"--out is the source itself, or would write over it ({written}); give another --out")


def _task(teacher: Teacher, lines: Sequence[str], spec: DistillSpec) -> dict[str, Any]:
    """Everything the output depends on."""
    text = "".join(line + "\n" for line in lines).encode("utf-8")
    return {
        "source": {"sha256": hashlib.sha256(text).hexdigest(), "lines": len(lines)},
        "teacher": teacher.identity(),
        "settings": {**asdict(spec), "unit": teacher.unit()},
        "version": version("hasten"),
    }


def _translate(
    output: "Output", shards: Iterator[Shard], n_lines: int, observe: Callable[[DistillProgress], None]
) -> None:
    """Append the shards that are missing."""
    first, before, began = output.done, output.seconds, time.monotonic()
    observe(DistillProgress(first, n_lines, 0.0, math.nan))
    for shard in shards:
        elapsed = time.monotonic() - began
        output.append(shard, before + elapsed)
        rate = (output.done - first) / max(elapsed, 1e-9)
        observe(DistillProgress(output.done, n_lines, rate, (n_lines - output.done) / rate))


def _shards(
    make: Callable[[], Callable[[Sequence[str]], Shard]], shards: Sequence[Sequence[str]], workers: int
) -> Iterator[Shard]:
    """The shards in order, made here by one worker and elsewhere by several."""
    workers = min(workers, len(shards))
    if workers <= 1:
        if shards:
            yield from map(make(), shards)
        return
    with Workers(make, workers) as pool:
        yield from pool.map(shards)


def _report(teacher: Teacher, source: Path, out: Path, task: dict[str, Any], output: "Output") -> dict[str, Any]:
    return {
        "out": str(out),
        "source": {"file": str(source), **task["source"]},
        "teacher": {"name": teacher.name, **task["teacher"]},
        "settings": task["settings"],
        "counts": dict(sorted(output.counts.items(), key=lambda item: (item[0] != "kept", -item[1], item[0]))),
        "seconds": round(output.seconds, 1),
        "version": task["version"],
    }


class Output:
    """The growing file `OUT.partial` and `OUT.progress.json`, which says how much of it is valid.

    A shard is appended and flushed to disk before the progress file that counts it in replaces the old one, so that
    whatever stands behind the recorded length is debris of an interruption.
    """

    def __init__(self, out: Path, task: dict[str, Any], file: BinaryIO, saved: dict[str, Any]):
        self._out, self._task, self._file = out, task, file
        self.done: int = saved.get("done", 0)
        self.seconds: float = saved.get("seconds", 0.0)
        self.counts: Counter[str] = Counter(saved.get("counts", {}))
        self._bytes: int = saved.get("bytes", 0)
        self._file.truncate(self._bytes)
        self._file.seek(self._bytes)

    @classmethod
    @contextmanager
    def opened(cls, out: Path, task: dict[str, Any], force: bool) -> Iterator["Output"]:
        """Take up unfinished work on `out` or begin; nobody else can meanwhile."""
        partial_file, progress = beside(out, "partial"), beside(out, "progress.json")
        begun = partial_file.exists() and progress.exists()  # with force: the old output stays until then
        if out.exists() and not force and not begun:
            raise UserError(f"{out} exists; give another --out, or --force to replace it")
        try:
            file = partial_file.open("ab+")
        except OSError as error:
            raise UserError(f"cannot write {partial_file}: {error.strerror}") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(f"another process is at work on {out}; wait for it or give another --out") from error
            if force:
                progress.unlink(missing_ok=True)
            yield cls(out, task, file, _saved(out, task))

    def append(self, shard: Shard, seconds: float) -> None:
        """Add a shard for good."""
        data = "".join(line + "\n" for line in shard.targets).encode("utf-8")
        try:
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {beside(self._out, 'partial')}: {error.strerror}; {_GO_ON}") from error
        self.done += len(shard.targets)
        self.counts += shard.counts
        self.seconds = seconds
        self._bytes += len(data)
        record = {"done": self.done, "bytes": self._bytes, "counts": self.counts, "seconds": seconds}
        _replace(beside(self._out, "progress.json"), {**record, "task": self._task})

    def finish(self, report: dict[str, Any]) -> None:
        """Write the report, and give the complete file its name."""
        _replace(beside(self._out, "report.json"), report)
        os.replace(beside(self._out, "partial"), self._out)
        beside(self._out, "progress.json").unlink()


def beside(out: Path, ending: str) -> Path:
    """The file of that ending that belongs to `out`."""
    return out.with_name(f"{out.name}.{ending}")


def _saved(out: Path, task: dict[str, Any]) -> dict[str, Any]:
    """The record of unfinished work; empty where there is none. Work on another task, or damaged, is a `UserError`."""
    progress = beside(out, "progress.json")
    again = "give --force to start again"
    try:
        saved = json.loads(progress.read_bytes())
        begun, size = saved["task"], saved["bytes"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{progress} is damaged ({error}); {again}") from error
    for part, value in task.items():
        if begun.get(part) != value:
            raise UserError(f"unfinished work on {out} has another {part} ({_first_difference(begun, part, value)}); "
                            f"finish it as it was begun, or {again}")  # fmt: skip
    if beside(out, "partial").stat().st_size < size:
        raise UserError(f"{beside(out, 'partial')} is shorter than {progress} says; {again}")
    return saved


def _first_difference(begun: dict[str, Any], part: str, value: Any) -> str:
    old = begun.get(part)
    if not isinstance(old, dict) or not isinstance(value, dict):
        return f"{old}, now {value}"
    key = next(key for key in [*value, *old] if old.get(key) != value.get(key))
    return f"{key} {old.get(key)}, now {value.get(key)}"


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Write JSON so that either the old or the new content is there at any moment."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; {_GO_ON}") from error
