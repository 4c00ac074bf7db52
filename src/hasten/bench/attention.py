"""Attention mechanisms against each other and against the length of the sequence: time and memory.

Every contestant runs in a process of its own; the processes take turns, so that whatever else the machine does hits all
of them alike.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from hasten.bench.attention_contestant import Contestant
from hasten.bench.machine import machine
from hasten.bench.process import EndedEarly, Process

PASSES = ("forward", "training")
BASELINE = "full"
RED = "the check failed: "
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    level: "module" (with projections) or "core" (the operator on given q, k, v). memory_mib, seconds: what one call may
    need; a longer sequence that would need more is left out.
    """

    contestants: list[Contestant]
    lengths: tuple[int, ...]
    heads: int = 8
    width: int = 64
    batch: int = 1
    causal: bool = False
    level: str = "module"
    threads: int = 1
    repeats: int = 5
    memory_mib: float = 8192
    seconds: float = 60

    def sizes(self, length: int) -> Row:
        """What a worker is told of one length."""
        names = ("level", "causal", "batch", "heads", "width")
        return {"length": length, **{name: getattr(self, name) for name in names}}


@dataclass
class Entry:
    """A contestant's process and what is known of it so far.

    out: why nothing more is measured, by pass. skipped: the same for the present length. costs: (length, seconds, MiB)
    of one call, by pass. turns: seconds of the calls of every turn at the present length, by pass.
    """

    contestant: Contestant
    process: Process
    facts: Row = field(default_factory=dict)
    parameters: int | None = None
    out: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    costs: dict[str, list[tuple[int, float, float]]] = field(default_factory=lambda: {what: [] for what in PASSES})
    turns: dict[str, list[list[float]]] = field(default_factory=dict)

    def ask(self, request: Row, passes: Sequence[str] = PASSES) -> Row | None:
        """An answer, or None where there is none; then `skipped` says why, for the passes that the request is about."""
        try:
            answer = self.process.ask(request)
        except EndedEarly as error:
            answer, passes = {"failed": str(error)}, PASSES
        if "refused" not in answer and "failed" not in answer:
            return answer
        for what in passes:
            if "refused" in answer:  # which another length may not be
                self.skipped.setdefault(what, answer["refused"])
            else:
                self.stop(what, answer["failed"])
        return None

    def stop(self, what: str, reason: str) -> None:
        """Measure no more of a pass, at this length and all longer ones."""
        self.out.setdefault(what, reason)
        self.skipped.setdefault(what, reason)

    def open(self) -> list[str]:
        """The passes that are still to be measured at the present length."""
        return [what for what in PASSES if what not in self.skipped]


def run(plan: Plan, note: Callable[[str], None] = lambda _: None) -> Iterator[list[Row]]:
    """Measure, length after length; the rows of a length, one a contestant, as soon as it is done.

    First the parity check of each mechanism against its dense reference: what fails it is not timed. Then, at each
    length, peak memory, and rounds of turns. The rows of what was not measured say why under `skipped`.
    """
    conditions = machine()
    with ExitStack() as stack:
        entries = []
        for contestant in plan.contestants:
            process = Process(contestant.label, contestant.command, plan.threads)
            stack.callback(process.close)
            entries.append(Entry(contestant, process))
        for entry in entries:
            _admit(entry, plan)
            reason = next(iter(entry.out.values()), None)
            note(f"{entry.contestant.label}: {f'not timed: {reason}' if reason else 'checked'}")
        for length in plan.lengths:
            _measure(entries, length, plan, note)
            yield _rows(entries, length, plan, conditions)


def _admit(entry: Entry, plan: Plan) -> None:
    """Start and check one contestant."""
    start = {"do": "start", "name": entry.contestant.name, "threads": plan.threads, "memory_mib": plan.memory_mib}
    check = {"do": "check", "name": entry.contestant.name, "sizes": plan.sizes(plan.lengths[0])}
    facts = entry.ask(start)
    if facts is not None:
        entry.facts = facts
        checked = entry.ask(check)
        if checked is not None and checked["wrong"]:
            entry.skipped = dict.fromkeys(PASSES, RED + checked["wrong"])
    for what, reason in entry.skipped.items():  # what is refused here is refused at every length
        entry.stop(what, reason)


def _measure(entries: Sequence[Entry], length: int, plan: Plan, note: Callable[[str], None]) -> None:
    for entry in entries:
        _prepare(entry, length, plan)
    ready = [entry for entry in entries if entry.turns]
    note(f"N = {length}: {', '.join(entry.contestant.label for entry in ready) or 'nothing is left to be measured'}")
    for repeat in range(plan.repeats):
        for i in range(len(ready)):
            # Beginning elsewhere each time, so that nobody always follows the same neighbour.
            entry = ready[(i + repeat) % len(ready)]
            for what in entry.open():
                answer = entry.ask({"do": "time", "what": what}, (what,))
                if answer is not None:
                    entry.turns[what].append(answer["seconds"])
    for entry in ready:
        entry.ask({"do": "leave"}, ())
        for what, turns in entry.turns.items():
            if turns:  # a call that is not watched costs less
                n, _, mib = entry.costs[what][-1]
                entry.costs[what][-1] = (n, statistics.median(map(statistics.median, turns)), mib)


def _prepare(entry: Entry, length: int, plan: Plan) -> None:
    """Build a contestant at a length and take its memory. What is to be timed gets a place in its `turns`."""
    entry.turns, entry.skipped = {}, dict(entry.out)
    for what in entry.open():
        if too_much := over(entry.costs[what], length, plan):
            entry.stop(what, too_much)
    if not entry.open():
        return
    built = entry.ask({"do": "build", "name": entry.contestant.name, "sizes": plan.sizes(length)})
    entry.parameters = built["parameters"] if built is not None else None
    for what in entry.open():
        answer = entry.ask({"do": "memory", "what": what}, (what,))
        if answer is None:
            continue
        entry.costs[what].append((length, answer["seconds"], answer["peak_mib"]))
        if answer["seconds"] > plan.seconds:
            entry.stop(what, f"a call at N={length} takes {answer['seconds']:.0f} s (limit {plan.seconds:g})")
        else:
            entry.turns[what] = []


def over(costs: Sequence[tuple[int, float, float]], length: int, plan: Plan) -> str:
    """Why a call at this length is not made, or "": what it would need, as shorter ones tell, is over the limit."""
    seconds = predicted([(n, cost) for n, cost, _ in costs], length)
    mib = predicted([(n, cost) for n, _, cost in costs], length)
    if mib > plan.memory_mib:
        return f"a call at N={length} would need about {mib / 1024:.1f} GiB (limit {plan.memory_mib / 1024:g})"
    if seconds > plan.seconds:
        return f"a call at N={length} would take about {seconds:.0f} s (limit {plan.seconds:g})"
    return ""


def predicted(costs: Sequence[tuple[int, float]], length: int) -> float:
    """The cost at a length by the power law through the last two; by the second power from one; 0 where none is known.

    The power is kept between 1 and 3, so that noise at short lengths does not stop anybody.
    """
    costs = [(n, cost) for n, cost in costs if cost > 0]
    if not costs:
        return 0.0
    power = 2.0
    if len(costs) > 1:
        (n0, cost0), (n1, cost1) = costs[-2:]
        power = min(3.0, max(1.0, math.log(cost1 / cost0) / math.log(n1 / n0)))
    n, cost = costs[-1]
    return cost * (length / n) ** power


def _rows(entries: Sequence[Entry], length: int, plan: Plan, conditions: Row) -> list[Row]:
    rows = [_row(entry, length, plan) for entry in entries]
    baseline = next((row for row in rows if row["label"] == BASELINE), None)
    for row in rows:
        row["ratio_to_full"] = ratios(row, baseline) if baseline is not None else None
    return [row | conditions | {"versions": {**conditions["versions"], **row["versions"]}} for row in rows]


def _row(entry: Entry, length: int, plan: Plan) -> Row:
    times, peaks = {}, {}
    for what in PASSES:
        turns = entry.turns.get(what) or []
        known = [mib for n, _, mib in entry.costs[what] if n == length]
        peaks[what] = round(known[0], 6) if known else None
        calls = [1e3 * seconds for turn in turns for seconds in turn]
        medians = [1e3 * statistics.median(turn) for turn in turns]
        times[what] = None
        if calls and what not in entry.skipped:
            times[what] = {"median": round(statistics.median(medians), 4), "min": round(min(calls), 4)}
    return {
        "benchmark": "attention",
        "label": entry.contestant.label,
        "engine": entry.contestant.engine,
        "mechanism": entry.facts.get("kind"),
        "setting": entry.facts.get("setting"),
        "length": length,
        **{name: getattr(plan, name) for name in ("level", "causal", "batch", "heads", "width", "threads", "repeats")},
        "parameters": entry.parameters,
        "forward_ms": times["forward"],
        "training_ms": times["training"],
        "peak_mib": peaks,
        "skipped": entry.skipped or None,
        "versions": entry.facts.get("versions", {}),
    }


def ratios(row: Row, baseline: Row) -> Row:
    """Median times and peak memory of training, as multiples of those of full attention; None where one is unknown."""

    def ratio(mine: float | None, others: float | None) -> float | None:
        return round(mine / others, 4) if mine is not None and others else None

    found = {}
    for what in PASSES:
        mine, others = row[f"{what}_ms"], baseline[f"{what}_ms"]
        found[what] = ratio(mine and mine["median"], others and others["median"])
    return {**found, "memory": ratio(row["peak_mib"]["training"], baseline["peak_mib"]["training"])}
