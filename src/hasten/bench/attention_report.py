"""Rows of `hasten bench attention` as tables: multiples of full attention, growth with length, who is faster."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hasten.bench.attention import BASELINE, PASSES

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]
MEASURES = {
    "forward": "forward, milliseconds",
    "training": "forward and backward, milliseconds",
    "memory": "peak memory of forward and backward, MiB",
}
_FITTED = 4  # the longest lengths, where what does not depend on the length weighs least


def value(row: Row, measure: str) -> float | None:
    """What a row says of a measure: a median of milliseconds, or MiB; None where it was not measured."""
    if measure == "memory":
        return row["peak_mib"]["training"]
    times = row[f"{measure}_ms"]
    return None if times is None else times["median"]


def points(rows: Iterable[Row], label: str, measure: str) -> list[tuple[int, float]]:
    """(length, value) of a contestant, ascending, without what was not measured."""
    found = [(row["length"], value(row, measure)) for row in rows if row["label"] == label]
    return sorted((length, cost) for length, cost in found if cost)


def labels(rows: Iterable[Row]) -> list[str]:
    """The contestants in the order of the rows; the baseline first."""
    found = list(dict.fromkeys(row["label"] for row in rows))
    return sorted(found, key=lambda label: label != BASELINE)


def lengths(rows: Iterable[Row]) -> list[int]:
    """All lengths, ascending."""
    return sorted({row["length"] for row in rows})


def exponent(costs: Sequence[tuple[int, float]]) -> float | None:
    """The power p of cost = c N^p that fits the longest four lengths best (least squares of logarithms).

    None for a single length.
    """
    logs = [(math.log(n), math.log(cost)) for n, cost in costs[-_FITTED:]]
    if len(logs) < 2:
        return None
    centre = sum(x for x, _ in logs) / len(logs)
    return sum((x - centre) * y for x, y in logs) / sum((x - centre) ** 2 for x, _ in logs)


def crossover(mine: Sequence[tuple[int, float]], baseline: Sequence[tuple[int, float]]) -> int | None:
    """The smallest measured length from which on `mine` costs less at all lengths that both were measured at."""
    theirs, found = dict(baseline), None
    for n, cost in reversed(mine):
        if n in theirs:
            if cost >= theirs[n]:
                break
            found = n
    return found


def header(rows: Sequence[Row], measure: str) -> list[str]:
    """The columns of `lines`."""
    less = "less from N" if measure == "memory" else "faster from N"
    return [MEASURES[measure], *(f"N={n}" for n in lengths(rows)), "grows as", less]


def lines(rows: Sequence[Row], measure: str) -> list[list[str]]:
    """A line a contestant that was measured: cost at each length, its power of N, the crossover.

    Where full attention was measured too, the others' costs are multiples of its cost ("0.25x"); else plain numbers.
    """
    baseline = points(rows, BASELINE, measure)
    found = []
    for label in labels(rows):
        mine = points(rows, label, measure)
        if not mine:
            continue
        theirs = {} if label == BASELINE else dict(baseline)
        known, power = dict(mine), exponent(mine)
        cells = [_cell(known.get(n), theirs.get(n)) for n in lengths(rows)]
        start = crossover(mine, baseline)
        shared = theirs.keys() & known.keys()
        last = "–" if not shared else str(start) if start is not None else "not yet"
        found.append([label, *cells, "–" if power is None else f"N^{power:.2f}", last])
    return found


def _cell(cost: float | None, baseline: float | None) -> str:
    if cost is None:
        return "–"
    if baseline is None:
        return f"{cost:.0f}" if cost >= 100 else f"{cost:.1f}"
    return f"{cost / baseline:.2f}x"


def left_out(rows: Sequence[Row]) -> list[str]:
    """Who was not measured at what lengths, and why; a sentence each."""
    reasons: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        skipped: dict[str, str] = row["skipped"] or {}
        for reason in dict.fromkeys(skipped.values()):
            passes = [what for what in PASSES if skipped.get(what) == reason]
            what = "" if len(passes) == len(PASSES) else f", {passes[0]}"
            reasons.setdefault((row["label"], what, reason), []).append(row["length"])
    found = []
    for (label, what, reason), where in reasons.items():
        at = "at no length" if where == lengths(rows) else f"not at N={', '.join(map(str, where))}"
        found.append(f"{label}{what}, {at}: {reason}")
    return found


def conditions(rows: Sequence[Row]) -> str:
    """What the numbers were measured on and how, in one paragraph."""
    row = next((row for row in rows if row["engine"] == "hasten"), rows[0])
    what = (
        f"modules with projections, d_model {row['heads'] * row['width']}"
        if row["level"] == "module"
        else "the operator on given q, k, v, without projections"
    )
    versions = ", ".join(f"{name} {row['versions'][name]}" for name in ("python", "hasten", "torch"))
    return (
        f"Self-attention, {'causal' if row['causal'] else 'not causal'}: {what}; batch {row['batch']}, "
        f"{row['heads']} heads of width {row['width']}, float32, {row['threads']} thread"
        f"{'s' * (row['threads'] > 1)}. Medians of {row['repeats']} round{'s' * (row['repeats'] > 1)}, in which the "
        "contestants' processes take turns; backward reaches input and parameters. Peak memory: the most that torch's "
        "tensors held at once beyond "
        f"module and input. Powers of N are fitted to the longest {_FITTED} lengths. {row['cpu']}, {row['cores']} "
        f"cores, load {row['load_before']} before; {versions}; {row['date'][:10]}."
    )


def notes(rows: Sequence[Row]) -> list[str]:
    """What the tables need explained, a paragraph each."""
    explained = [conditions(rows)]
    if any(row["ratio_to_full"] for row in rows):
        explained.append("x: multiples of full attention at the same length, in the same run.")
    missing = [f"- {sentence}" for sentence in left_out(rows)]
    return [*explained, "\n".join(["Not measured:", *missing])] if missing else explained


def markdown(rows: Sequence[Row]) -> str:
    """The three tables with their conditions."""
    parts = []
    for measure in MEASURES:
        head = header(rows, measure)
        table = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
        # A pattern's union is a bar, which would end the cell.
        table += ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines(rows, measure)]
        parts.append("\n".join(table))
    return "\n\n".join([*parts, *notes(rows)]) + "\n"


def tables(rows: Sequence[Row]) -> "list[Table]":
    """The same for the terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    found = []
    for measure in MEASURES:
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for number, name in enumerate(header(rows, measure)):
            shown.add_column(name, justify="right" if number else "left", no_wrap=True)
        for line in lines(rows, measure):
            # As text: brackets in a mechanism's settings are no markup.
            shown.add_row(*(Text(cell, style="bold" if line[0] == BASELINE else "") for cell in line))
        found.append(shown)
    return found


def plain(rows: Sequence[Row]) -> str:
    """A tab-separated line a row, for pipes: absolute figures and multiples of full attention."""
    head = ["mechanism", "N"]
    for measure, unit in (("forward", "ms"), ("training", "ms"), ("memory", "MiB")):
        head += [f"{measure} {unit}", f"{measure} / full"]
    found = ["\t".join(head)]
    for row in rows:
        cells = [row["label"], str(row["length"])]
        for measure in MEASURES:
            ratio = (row["ratio_to_full"] or {}).get(measure)
            cost = value(row, measure)
            cells += ["–" if number is None else f"{number:.3f}" for number in (cost, ratio)]
        found.append("\t".join(cells))
    return "\n".join(found)
