"""Rows of `hasten bench attention` as a picture: time and memory against length, both axes logarithmic."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.bench.attention import BASELINE
from hasten.bench.attention_report import MEASURES, exponent, labels, lengths, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
# Distinct in hue or in lightness; the peers begin them again, dashed.
_COLOURS = (
    "#0b6e99",
    "#c8442d",
    "#2e8b57",
    "#8e44ad",
    "#d68910",
    "#16a0a0",
    "#b03a7a",
    "#6b8e23",
    "#4a5fc1",
    "#8b5a2b",
)
_SIZE = 7.5  # of the lines' labels, in points
_LONGEST = 36
_PITCH = 1.45 * _SIZE  # from one label to the next


def picture(rows: Sequence[Row], path: Path) -> None:
    """Three panels: forward, forward and backward, peak memory. Each line bears its name and its power of N."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = max(5.2, 1.7 + len(labels(rows)) * _PITCH / 72)
    figure = Figure(figsize=(16.5, height), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(MEASURES))
    ends = [_panel(axes, rows, measure) for axes, measure in zip(panels, MEASURES, strict=True)]
    first = rows[0]
    figure.suptitle("What attention costs as sequences grow", x=0.01, ha="left", fontsize=13)
    caption = (
        f"{'causal' if first['causal'] else 'not causal'} · {first['level']} · batch {first['batch']} · "
        f"{first['heads']} heads of {first['width']} · {first['threads']} thread{'s' * (first['threads'] > 1)} · "
        f"{first['cpu']}, {first['cores']} cores{' · dashed: peers' * any(row['engine'] == 'peer' for row in rows)}"
    )
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, color="#666666")
    figure.canvas.draw()  # settles limits and layout, which the places of labels depend on
    for axes, marks in zip(panels, ends, strict=True):
        _label(axes, marks)
    figure.savefig(path, bbox_inches="tight", pad_inches=0.12)  # long names may reach over the edge


def _styles(rows: Sequence[Row]) -> dict[str, tuple[str, str, float]]:
    """Colour, dashes and width of each contestant's line."""
    engines = {row["label"]: row["engine"] for row in rows}
    counts, found = {"hasten": 0, "peer": 0}, {}
    for label in labels(rows):
        if label == BASELINE:
            found[label] = ("#111111", "-", 2.4)
            continue
        engine = engines[label]
        dashes = "-" if engine == "hasten" else "--"
        found[label] = (_COLOURS[counts[engine] % len(_COLOURS)], dashes, 1.6 if engine == "hasten" else 1.1)
        counts[engine] += 1
    return found


def _panel(axes: "Axes", rows: Sequence[Row], measure: str) -> list[tuple[float, float, str, str]]:
    """Draw the lines; returns the end of each with its label and colour."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    ends = []
    for label, (colour, dashes, width) in _styles(rows).items():
        costs = points(rows, label, measure)
        if not costs:
            continue
        x, y = zip(*costs, strict=True)
        axes.plot(x, y, color=colour, linestyle=dashes, linewidth=width, marker="o", markersize=2.5 + width / 2)
        power = exponent(costs)
        ends.append((x[-1], y[-1], shortened(label) + ("" if power is None else f"  $N^{{{power:.1f}}}$"), colour))
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = lengths(rows)
    first, last = ticks[0] / 1.15, ticks[-1] * 1.1
    axes.set_xlim(first, first * (last / first) ** (1 / (1 - _share(rows))))
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}" if tick < 1024 else f"{tick / 1024:g}k"))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("length N", x=(1 - _share(rows)) / 2)
    axes.set_title(MEASURES[measure], loc="left", fontsize=10.5, fontweight="bold")
    axes.grid(color="#e8e8e8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return ends


def _share(rows: Sequence[Row]) -> float:
    """How much of a panel's width the names take."""
    return min(0.6, 0.07 + 0.0115 * max(len(shortened(label)) for label in labels(rows)))


def shortened(label: str) -> str:
    """A label that leaves room for the lines: long settings are cut, those at the front stay."""
    return label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "…"


def _label(axes: "Axes", ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names in a column at the right, in the order of the lines' ends and joined with them, none over another."""
    if not ends:
        return
    figure = axes.get_figure()
    assert figure is not None
    ends = sorted(ends, key=lambda end: end[1])
    places = [float(axes.transData.transform(end[:2])[1]) for end in ends]
    box = axes.get_window_extent()
    column = max(end[0] for end in ends) * (axes.get_xlim()[1] / axes.get_xlim()[0]) ** 0.04
    pitch = _PITCH * figure.dpi / 72
    leader = {"arrowstyle": "-", "relpos": (0, 0.5), "linewidth": 0.5, "alpha": 0.5, "shrinkA": 1, "shrinkB": 3}
    for (x, y, text, colour), place in zip(ends, spread(places, pitch, box.y0, box.y1), strict=True):
        level = axes.transData.inverted().transform((0, place))[1]
        axes.annotate(
            text,
            (x, y),
            (column, level),
            ha="left",
            va="center",
            fontsize=_SIZE,
            color=colour,
            annotation_clip=False,
            arrowprops=leader | {"color": colour},
        )


def spread(places: Sequence[float], pitch: float, low: float, high: float) -> list[float]:
    """Ascending places moved as little as it takes to be `pitch` apart, between low and high if they fit there."""
    groups: list[list[float]] = []  # (how many, middle) of runs that stand pitch by pitch
    for place in places:
        groups.append([1, place])
        while len(groups) > 1 and groups[-1][1] - groups[-2][1] < pitch * (groups[-1][0] + groups[-2][0]) / 2:
            (n, at), (m, before) = groups.pop(), groups.pop()
            groups.append([n + m, (n * at + m * before) / (n + m)])
    found = [middle + (i - (n - 1) / 2) * pitch for n, middle in groups for i in range(int(n))]
    for i in range(len(found)):  # push up from the bottom, then down from the top
        found[i] = max(found[i], low + (i + 0.5) * pitch)
    for i in range(len(found)):
        found[-1 - i] = min(found[-1 - i], high - (i + 0.5) * pitch)
    return found
