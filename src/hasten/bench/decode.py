"""Decoders against each other on real sentences: latency, throughput, passes, memory, quality.

Every contestant runs in a process of its own; the processes take turns, sentence by sentence, so that whatever else the
machine does hits all of them alike.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.bench.contestant import Contestant
from hasten.bench.machine import machine
from hasten.errors import UserError

BATCH = 32
_WARM_UP = 3
_PARITY_SENTENCES = 8
Row = dict[str, Any]


class ParityError(UserError):
    """A contestant says something else in a batch than alone: its timings would mean nothing."""


@dataclass(frozen=True)
class Plan:
    """What to measure. sources[i] is translated by references[i]; `name` says where they are from."""

    contestants: list[Contestant]
    sources: list[str]
    references: list[str]
    name: str
    threads: tuple[int, ...]
    repeats: int = 3


@dataclass
class _Record:
    """Everything measured about one contestant with one number of threads."""

    facts: Row
    latencies: list[list[float]] = field(default_factory=list)
    batch_seconds: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    passes: list[int | None] = field(default_factory=list)


class _Worker:
    """A contestant's process."""

    def __init__(self, contestant: Contestant, threads: int):
        self.contestant, self.threads, self.facts = contestant, threads, {}
        settings = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hasten.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **settings},
            text=True,
            encoding="utf-8",
        )

    def load(self) -> None:
        """Build the model; `UserError` where that fails."""
        self.facts = self._ask({"contestant": dataclasses.asdict(self.contestant), "threads": self.threads})

    def ask(self, what: str, lines: Sequence[str] = ()) -> Row:
        """A request by name."""
        return self._ask({"do": what, "lines": list(lines)})

    def _ask(self, request: Row) -> Row:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise UserError(f"{self.contestant.label} ended early (status {self._process.wait()}); see above")
        reply = json.loads(line)
        if "error" in reply:
            raise UserError(f"{self.contestant.label}: {reply['error']}")
        return reply

    def close(self) -> None:
        """Let the process end."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()


def run(plan: Plan, note: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Measure every contestant with every number of threads; a row each. `note` hears of the progress.

    Latency: seconds from text to text of one sentence alone, tokenisation included; of each sentence the median over
    the repeats, of those the median and the 95th percentile. Throughput: the same sentences sorted by length in batches
    of 32, the median over the repeats. Raises `ParityError` before anything is timed.
    """
    rows = []
    for threads in plan.threads:
        conditions = machine()
        with _workers(plan.contestants, threads) as workers:
            for worker in workers:
                check_parity(worker, plan.sources[:_PARITY_SENTENCES])
            note(f"{threads} thread{'s' * (threads > 1)}: a sentence decodes alone as in a batch, for all")
            records = _measure(workers, plan, note)
            memory = [worker.ask("memory")["peak_mib"] for worker in workers]
        for worker, record, peak in zip(workers, records, memory, strict=True):
            rows.append(_row(worker.contestant, record, plan, threads) | {"peak_mib": peak} | conditions)
    return rows


@contextmanager
def _workers(contestants: Sequence[Contestant], threads: int) -> Iterator[list[_Worker]]:
    with ExitStack() as stack:
        workers = []
        for contestant in contestants:
            worker = _Worker(contestant, threads)
            stack.callback(worker.close)
            worker.load()
            workers.append(worker)
        yield workers


def check_parity(worker: _Worker, lines: Sequence[str]) -> None:
    """`ParityError` unless the ids of every line are the same alone and in one batch with the others."""
    together = worker.ask("ids", lines)["ids"]
    for line, ids in zip(lines, together, strict=True):
        alone = worker.ask("ids", [line])["ids"][0]
        if alone != ids:
            raise ParityError(
                f"{worker.contestant.label} says {alone} for {line!r} alone and {ids} in a batch; nothing is timed"
            )


def _measure(workers: Sequence[_Worker], plan: Plan, note: Callable[[str], None]) -> list[_Record]:
    records = [_Record(worker.facts) for worker in workers]
    by_length = sorted(plan.sources, key=len)
    batches = [by_length[i : i + BATCH] for i in range(0, len(by_length), BATCH)]
    for worker, record in zip(workers, records, strict=True):
        for line in plan.sources[:_WARM_UP]:
            worker.ask("translate", [line])
        for batch in batches:
            found = worker.ask("ids", batch)
            record.lengths += map(len, found["ids"])
            record.passes += found["passes"]
    for repeat in range(plan.repeats):
        note(f"round {repeat + 1} of {plan.repeats}")
        seconds: list[list[float]] = [[] for _ in workers]
        texts: list[list[str]] = [[] for _ in workers]
        for number, line in enumerate(plan.sources):
            for i in _turn(len(workers), number + repeat):
                reply = workers[i].ask("translate", [line])
                seconds[i].append(reply["seconds"])
                texts[i] += reply["texts"]
        totals = [0.0] * len(workers)
        for number, batch in enumerate(batches):
            for i in _turn(len(workers), number + repeat):
                totals[i] += workers[i].ask("translate", batch)["seconds"]
        for i, record in enumerate(records):
            record.latencies.append(seconds[i])
            record.batch_seconds.append(totals[i])
            record.texts = texts[i]
    return records


def _turn(n: int, start: int) -> list[int]:
    """0 .. n - 1, beginning elsewhere each time, so that nobody always follows the same neighbour."""
    return [(start + i) % n for i in range(n)]


def _row(contestant: Contestant, record: _Record, plan: Plan, threads: int) -> Row:
    from hasten.training.metrics import quality

    each = [1e3 * statistics.median(times) for times in zip(*record.latencies, strict=True)]
    seconds, n = statistics.median(record.batch_seconds), len(plan.sources)
    counted = [p for p in record.passes if p is not None]
    return {
        "benchmark": "decode",
        "label": contestant.label,
        "model": contestant.model,
        "engine": contestant.engine,
        "compute": contestant.compute,
        "beam": contestant.beam,
        "decoding": list(contestant.decoding),
        "rescorer": contestant.rescorer,
        "draft": contestant.draft,
        "shortlist": contestant.shortlist,
        **record.facts,
        "threads": threads,
        "data": plan.name,
        "sentences": n,
        "repeats": plan.repeats,
        "tokenisation": "included",
        "latency_ms": {
            "median": round(statistics.median(each), 3),
            "p95": round(percentile(each, 0.95), 3),
            "mean": round(statistics.fmean(each), 3),
        },
        "batch": BATCH,
        "sentences_per_second": round(n / seconds, 2),
        "tokens_per_second": round(sum(record.lengths) / seconds, 1),
        "passes": round(statistics.fmean(counted), 2) if counted else None,
        "quality": quality(record.texts, plan.references).as_dict(),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """One JSON object a line."""
    try:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
