"""Pictures of patterns: who may read whom, as a figure or as characters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hasten.attention.patterns.algebra import Pattern
from hasten.attention.patterns.survey import Survey, survey

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#7f7f7f")
_ACROSS = 4
POINTS = 320
"""Cells of a figure along one side, at most."""
_FAINTEST = 0.3
SHADES = " ░▒▓█"
"""Characters for cells of which no pair is allowed, up to a third, up to two thirds, more, and all."""


@dataclass(frozen=True, eq=False)
class Panel:
    """One head of a survey, with what is written above it; empty where it stands for all heads."""

    title: str
    survey: Survey
    head: int

    @property
    def statistics(self) -> str:
        """Share of allowed pairs, and keys per query."""
        least, median, most = self.survey.keys_per_query(self.head)
        share = "about " * self.survey.sampled + f"{100 * self.survey.share(self.head):.3g} % of pairs allowed"
        return f"{share}\nkeys per query: {least:,} to {most:,}, median {median:,}"


def panels(counted: Survey, *, name: str = "", first: int = 0, n_heads: int = 0) -> list[Panel]:
    """One panel, or where heads differ one for each; heads are counted from `first`, n_heads 0: any number."""
    differing = counted.shares.shape[1]
    if differing > 1:
        titles = [f"head {first + head}" for head in range(differing)]
    elif n_heads > 1:
        titles = [f"heads {first} to {first + n_heads - 1}"]
    else:
        titles = [f"head {first}"] if name else [""]
    full = [f"{title}: {name}" if name else title for title in titles]
    return [Panel(title, counted, head) for head, title in enumerate(full)]


def picture(
    pattern: Pattern,
    n_keys: int,
    *,
    n_queries: int | None = None,
    n_heads: int = 1,
    seed: int = 0,
    causal: bool = False,
    marked: Sequence[int] = (),
) -> "Figure":
    """A figure of the pattern among n_keys tokens, of which the last n_queries (None: all) ask.

    Each part of a union has its colour; a pair that several allow has the first one's. Long sequences are drawn in
    cells, the darker the more of their pairs are allowed. n_heads: heads beside each other, where heads differ.
    `figure.savefig(path)` writes it. Raises `UserError` as `survey` does.
    """
    n_queries = n_keys if n_queries is None else n_queries
    counted = survey(
        pattern, n_queries, n_keys, n_heads=n_heads, seed=seed, causal=causal, marked=marked, points=POINTS
    )
    return figure(str(pattern), panels(counted), causal=causal)


def figure(title: str, shown: Sequence[Panel], *, causal: bool = False) -> "Figure":
    """Panels side by side under a title, with a legend and what they show."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    across = min(len(shown), _ACROSS)
    down = (len(shown) + across - 1) // across
    wide = 4.6 if across == 1 else 3.1
    high = wide * min(1.5, max(_ratio(panel.survey) for panel in shown))
    made = Figure(figsize=(0.5 + wide * across, 1.1 + (high + 0.7) * down), layout="constrained", dpi=120)
    FigureCanvasAgg(made)
    grid = made.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    colours: dict[str, str] = {}
    for axes, panel in zip(grid.flat, shown, strict=False):
        for label in panel.survey.labels:
            colours.setdefault(label, _COLOURS[len(colours) % len(_COLOURS)])
        _draw(axes, panel, [colours[label] for label in panel.survey.labels])
    made.suptitle(_wrapped(title, int(9 * made.get_figwidth())), x=0.01, ha="left", fontsize=12, fontweight="bold")
    legend = made.legend(
        # A single shape is what the title says.
        handles=[Patch(facecolor=colour, label=label) for label, colour in colours.items() if len(colours) > 1],
        title=_wrapped(caption(shown[0].survey, causal), int(14.5 * made.get_figwidth())),
        loc="outside lower left",
        ncols=max(1, min(len(colours), int(13 * made.get_figwidth()) // (7 + max(map(len, colours))))),
        fontsize=8,
        title_fontsize=8,
        alignment="left",
        frameon=False,
    )
    legend.get_title().set_color("#555555")
    return made


def caption(counted: Survey, causal: bool) -> str:
    """What is drawn, in words."""
    parts = [f"{counted.n_keys:,} tokens" + ", causal" * causal]
    if counted.n_queries != counted.n_keys:
        parts = [
            f"{counted.n_keys:,} keys, {counted.n_queries:,} queries, the last at the last key" + ", causal" * causal
        ]
    if counted.cell > 1:
        parts.append(f"a point is {counted.cell:,} x {counted.cell:,} pairs, the darker the more of them are allowed")
    if counted.sampled:
        parts.append(f"counted for {counted.counts.shape[1]:,} of {counted.n_queries:,} queries")
    return "; ".join(parts)


def _draw(axes: "Axes", panel: Panel, colours: Sequence[str]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    counted = panel.survey
    offset = counted.n_keys - counted.n_queries
    rows, columns = counted.shares.shape[2:]
    extent = (-0.5, columns * counted.cell - 0.5, offset + rows * counted.cell - 0.5, offset - 0.5)
    aspect = "equal" if _ratio(counted) == counted.n_queries / counted.n_keys else "auto"
    axes.imshow(_image(counted, panel.head, colours).numpy(), extent=extent, aspect=aspect)
    # A margin, so that the frame does not hide the first tokens.
    x, y = 0.5 + 0.006 * counted.n_keys, 0.5 + 0.006 * counted.n_queries
    axes.set_xlim(-x, counted.n_keys - 1 + x)
    axes.set_ylim(counted.n_keys - 1 + y, offset - y)
    if max(counted.n_queries, counted.n_keys) <= 48:
        axes.set_xticks([x - 0.5 for x in range(counted.n_keys + 1)], minor=True)
        axes.set_yticks([offset + y - 0.5 for y in range(counted.n_queries + 1)], minor=True)
        axes.grid(which="minor", color="#d9d9d9", linewidth=0.4)
    axes.tick_params(which="both", length=0, labelsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 4, 5, 8, 10], integer=True))
        axis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.0f}"))
    axes.set_xlabel("key", fontsize=9)
    axes.set_ylabel("query", fontsize=9)
    axes.spines[:].set_color("#bbbbbb")
    axes.spines[:].set_linewidth(0.6)
    above = [_wrapped(panel.title, 46)] if panel.title else []
    axes.set_title("\n".join([*above, panel.statistics]), loc="left", fontsize=8)


def _ratio(counted: Survey) -> float:
    """Height of a panel by its width: pairs are squares unless that makes a strip."""
    return min(4.0, max(0.25, counted.n_queries / counted.n_keys))


def _image(counted: Survey, head: int, colours: Sequence[str]) -> Tensor:
    """(R, C, 3): the mixture of the parts' colours, on white as far as pairs are not allowed."""
    from matplotlib.colors import to_rgb

    shares = counted.shares[:, head]
    total = shares.sum(0)
    palette = torch.tensor([to_rgb(colour) for colour in colours])
    mixed = torch.einsum("prc,pk->rck", shares, palette) / total.clamp(min=1e-12)[..., None]
    # The eye must also find the column of one global token among many: nothing that is allowed fades away.
    opacity = torch.where(total > 0, _FAINTEST + (1 - _FAINTEST) * total.clamp(max=1).sqrt(), 0.0)[..., None]
    return 1 - opacity * (1 - mixed)


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width, break_long_words=False))


def drawing(panel: Panel, shades: str = SHADES) -> str:
    """The pattern in characters, which are half as wide as they are high; of a survey of at most 64 points."""
    total = panel.survey.shares[:, panel.head].sum(0)
    keys, queries = _character(panel.survey)
    if queries > panel.survey.cell:
        even = torch.cat((total, total[-1:])) if len(total) % 2 else total
        total = even.unflatten(0, (-1, 2)).mean(1)
    wide = 2 if keys == queries else 1
    lines = ["".join(_shade(share, shades) * wide for share in row) for row in total.tolist()]
    width, last = wide * total.shape[1], f"{panel.survey.n_keys - 1:,}"
    ends = "0" + last.rjust(width - 1) if width > len(last) else "0"
    frame = "+" + "-" * width + "+"
    return "\n".join([frame, *(f"|{line}|" for line in lines), frame, f" {ends}"])


def legend(counted: Survey, shades: str = SHADES) -> str:
    """What the characters of a drawing mean."""
    keys, queries = _character(counted)
    if keys == queries == 1:
        return f"rows: queries, columns: keys; {shades[4]} allowed"
    cell = f"{queries:,} queries x {keys:,} keys"
    return f"rows: queries, columns: keys; a character: {cell}; {shades[1]} some to {shades[3]} most, {shades[4]} all"


def _character(counted: Survey) -> tuple[int, int]:
    """Keys and queries of a character (of two beside each other, where there is room)."""
    small = max(counted.shares.shape[2:]) <= 32
    return counted.cell, counted.cell if small else 2 * counted.cell


def _shade(share: float, shades: str) -> str:
    return shades[4 if share > 1 - 1e-6 else min(3, math.ceil(3 * share))]
