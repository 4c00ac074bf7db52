"""Rows of results as tables and pictures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from rich.table import Table

Row = dict[str, Any]
Point = tuple[float, float, str, str]
Box = tuple[float, float, float, float]
COLUMNS = (
    "model",
    "threads",
    "ms median",
    "ms p95",
    "sentences/s",
    "tokens/s",
    "passes",
    "BLEU",
    "chrF",
    "MiB",
    "parameters",
)
_FAMILIES = {
    "hasten": "PyTorch",
    "one pass": "PyTorch, one pass",
    "onnx": "ONNX Runtime",
    "ctranslate2": "CTranslate2",
}
_COLOURS = {"hasten": "#0b6e99", "one pass": "#c8442d", "ctranslate2": "#8a8a8a", "onnx": "#5b8c3e"}


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not a results file: {error}") from error


def cells(row: Row) -> list[str]:
    """What the table shows of a row, in the order of `COLUMNS`."""
    quality, parameters, passes = row["quality"], row["parameters"], row["passes"]
    return [
        row["label"],
        str(row["threads"]),
        f"{row['latency_ms']['median']:.1f}",
        f"{row['latency_ms']['p95']:.1f}",
        f"{row['sentences_per_second']:.1f}",
        f"{row['tokens_per_second']:.0f}",
        "–" if passes is None else f"{passes:.1f}",
        f"{quality['bleu']:.1f}",
        f"{quality['chrf']:.1f}",
        f"{row['peak_mib']:.0f}",
        "–" if parameters is None else f"{parameters / 1e6:.1f} M",
    ]


def conditions(rows: Sequence[Row]) -> str:
    """What the numbers were measured on and how, in one paragraph."""
    row = rows[0]
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    batch = row["batch"]
    return (
        f"{row['sentences']} sentences of {row['data']}, {row['repeats']} rounds; {row['cpu']}, {row['cores']} cores, "
        f"load {row['load_before']} before; {versions}; {row['date'][:10]}. Milliseconds are those of one sentence "
        f"alone, from text to text, tokenisation included; sentences/s and tokens/s in batches of {batch}, sorted "
        "by length; passes are runs of the decoder; MiB is the most memory the process held."
    )


def markdown(rows: Sequence[Row]) -> str:
    """A table and its conditions for a README."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * (len(COLUMNS) - 1)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n\n" + conditions(rows) + "\n"


def table(rows: Sequence[Row]) -> "Table":
    """A table for the terminal."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(COLUMNS):
        shown.add_column(name, justify="right" if number else "left", no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before["threads"] != row["threads"]:
            shown.add_section()
        shown.add_row(*cells(row))
    return shown


def plain(rows: Sequence[Row]) -> str:
    """The same table as tab-separated lines, for pipes."""
    return "\n".join("\t".join(line) for line in [list(COLUMNS), *map(cells, rows)])


def picture(rows: Sequence[Row], path: Path) -> None:
    """Quality against latency, a panel for each number of threads; a thin line reaches to the 95th percentile."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    threads = sorted({row["threads"] for row in rows})
    figure = Figure(figsize=(6.2 * len(threads), 4.6), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(threads), sharex=True, sharey=True, squeeze=False)[0]
    points: dict[int, list[Point]] = {}
    for axes, n in zip(panels, threads, strict=True):
        points[n] = _panel(axes, [row for row in rows if row["threads"] == n])
        axes.set_title(f"{n} thread{'s' * (n > 1)}", loc="left", fontsize=11, fontweight="bold")
    panels[0].set_ylabel("chrF (higher is better)")
    first = rows[0]
    caption = f"{first['sentences']} sentences of {first['data']} · {first['cpu']}, {first['cores']} cores"
    figure.suptitle("Quality against the time of one sentence", x=0.01, ha="left", fontsize=13)
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, color="#666666")
    panels[-1].legend(handles=legend(rows), loc="lower right", fontsize=8, frameon=False)  # slow and poor: seldom
    figure.canvas.draw()  # settles limits and layout, which the places of labels depend on
    for axes, n in zip(panels, threads, strict=True):
        _label(axes, points[n])
    figure.savefig(path)


def legend(rows: Sequence[Row]) -> "list[Line2D]":
    """What the colours and marks that are used stand for."""
    from matplotlib.lines import Line2D

    dot = {"color": "none", "markersize": 7, "markeredgecolor": "none"}
    used = {_family(row) for row in rows}
    entries = [
        Line2D([], [], marker="o", markerfacecolor=_COLOURS[family], label=name, **dot)
        for family, name in _FAMILIES.items()
        if family in used
    ]
    if any(row["beam"] != 1 for row in rows):
        entries.append(Line2D([], [], marker="D", markerfacecolor="#444444", label="beam search", **dot))
    return entries


def _panel(axes: "Axes", rows: Sequence[Row]) -> list[Point]:
    """Draw the points; returns them with their labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    points = []
    for row in sorted(rows, key=lambda row: row["latency_ms"]["median"]):
        x, y, far = row["latency_ms"]["median"], row["quality"]["chrf"], row["latency_ms"]["p95"]
        colour = _COLOURS[_family(row)]
        axes.plot([x, far], [y, y], color=colour, linewidth=1, alpha=0.5, solid_capstyle="butt")
        axes.scatter([x], [y], s=60, color=colour, zorder=3, marker="o" if row["beam"] == 1 else "D")
        points.append((x, y, f"{_wrapped(row['label'])}\n{_milliseconds(x)}", colour))
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds a sentence, median (line: to the 95th percentile)")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.22, y=0.3)
    axes.grid(color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return points


def _label(axes: "Axes", points: Sequence[Point]) -> None:
    """Write each label beside its point, where it covers neither a point nor a label; leaders join distant ones."""
    figure = axes.get_figure()
    assert figure is not None
    scale = figure.dpi / 72
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in (axes.transData.transform(point[:2]) for point in points)]
    if (shown := axes.get_legend()) is not None:
        taken.append(shown.get_window_extent().extents)
    for x, y, text, colour in points:
        lines = text.split("\n")
        size = (max(map(len, lines)) * 4.6 * scale, 10.5 * len(lines) * scale)
        dx, dy, box = _place(axes.transData.transform((x, y)).tolist(), size, scale, figure.bbox.width, taken)
        taken.append(box)
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "shrinkB": 4}
        axes.annotate(
            text,
            (x, y),
            (dx, dy),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=8,
            color=colour,
            linespacing=1.15,
            arrowprops=leader if abs(dy) > 30 else None,
        )


def _place(
    at: Sequence[float], size: tuple[float, float], scale: float, width: float, taken: Sequence[Box]
) -> tuple[float, float, Box]:
    """The first of the usual offsets (in points) whose box is free and within the width; the last one where none is."""
    dx, dy, box = 0.0, 0.0, (0.0, 0.0, 0.0, 0.0)
    for dx, near in _PLACES:
        dy = near + (1 if near > 0 else -1) * (size[1] / scale - 21) / 2  # offsets are for labels of two lines
        left, bottom = at[0] + dx * scale - size[0] / 2, at[1] + dy * scale - size[1] / 2
        box = (left, bottom, left + size[0], bottom + size[1])
        if left >= 0 and box[2] <= width and not any(_overlap(box, other) for other in taken):
            break
    return dx, dy, box


def _wrapped(label: str, longest: int = 24) -> str:
    """The label, broken at colons into lines of up to `longest` characters where that can be."""
    lines = [""]
    for part in label.split(":"):
        joined = f"{lines[-1]}:{part}" if lines[-1] else part
        lines[-1:] = [joined] if len(joined) <= longest or not lines[-1] else [lines[-1], part]
    return "\n".join(lines)


def _milliseconds(x: float) -> str:
    return f"{x:.0f} ms" if x >= 10 else f"{x:.1f} ms"


_PLACES = [(dx, sign * dy) for dy in (19, 42, 65, 88, 111) for sign in (1, -1) for dx in (0, 38, -38, 70, -70)]


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _family(row: Row) -> str:
    if row["engine"] in ("ctranslate2", "onnx"):
        return row["engine"]
    return "one pass" if row["passes"] is not None and row["passes"] <= 1 else "hasten"
