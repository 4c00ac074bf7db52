"""Similarities of layers as heat maps, side by side."""

from pathlib import Path
from typing import TYPE_CHECKING

from hasten.errors import UserError
from hasten.sharing.divergence import Similarity
from hasten.sharing.record import TITLES, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

_COLOURS = ("#f4f8fa", "#b9d6e2", "#5fa3bd", "#0b6e99", "#063a52")
_MOST_VALUES = 24  # layers up to which cells have room for their value
_CELL = 0.52  # inches


def picture(record: Record, path: Path) -> None:
    """One panel for each kind of attention, darker where layers attend more alike, on one scale up to 1.

    The scale begins at the tenth below the smallest similarity. Errors: `UserError` where the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = list(record.kinds.items())
    lowest = min(value for _, own in kinds for row in own.mu for value in row)
    low = min(0.9, int(lowest * 10) / 10)
    sides = [max(3.0, _CELL * min(_MOST_VALUES, len(own.mu))) for _, own in kinds]
    figure = Figure(figsize=(sum(sides) + 0.6 * len(kinds) + 0.9, max(sides) + 1.35), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(kinds), squeeze=False, width_ratios=sides)[0]
    drawn = zip(panels, kinds, strict=True)
    images = [_panel(axes, own, TITLES.get(name, name), low) for axes, (name, own) in drawn]
    bar = figure.colorbar(images[-1], ax=list(panels), shrink=0.75, pad=0.02, aspect=28)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(length=0, labelsize=8)
    figure.suptitle("How alike layers attend", x=0.01, ha="left", fontsize=13)
    caption = (
        f"1 - Jensen-Shannon divergence in bits, head by head · {Path(record.model).name} · {record.split} split of "
        f"{Path(record.data).name} · {record.sentences:,} sentence{'s' * (record.sentences != 1)}"
    )
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, color="#666666")
    try:
        figure.savefig(path, bbox_inches="tight", pad_inches=0.12)  # a long caption may reach over the edge
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def _panel(axes: "Axes", own: Similarity, title: str, low: float) -> "AxesImage":
    """One heat map, layers numbered from 1."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import FixedLocator, MultipleLocator

    n_layers = len(own.mu)
    shades = LinearSegmentedColormap.from_list("similarity", _COLOURS)
    edges = (0.5, n_layers + 0.5, n_layers + 0.5, 0.5)
    image = axes.imshow(own.mu, cmap=shades, vmin=low, vmax=1, extent=edges, interpolation="nearest")
    if n_layers <= _MOST_VALUES:
        for i, row in enumerate(own.mu):
            for j, value in enumerate(row):
                colour = "white" if value - low > 0.66 * (1 - low) else "#222222"
                text = "1" if i == j else f"{value:.2f}".removeprefix("0") if value < 0.995 else "1.0"
                size = 8.5 if n_layers <= 12 else 6.5
                axes.text(j + 1, i + 1, text, ha="center", va="center", color=colour, fontsize=size)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator(range(1, n_layers + 1)))
    else:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MultipleLocator(8))
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axes.set_xlabel("layer", fontsize=9)
    axes.set_ylabel("layer", fontsize=9)
    axes.tick_params(length=0, labelsize=8.5)
    axes.spines[:].set_visible(False)
    return image
