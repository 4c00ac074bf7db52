"""hasten show: who may read whom, as a picture."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hasten.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hasten.attention.base import Attention
    from hasten.attention.patterns.algebra import Pattern
    from hasten.attention.patterns.picture import Panel

_LONGEST = 100_000
_MOST_HEADS = 16
_FORMATS = ("png", "svg", "pdf", "jpg", "jpeg", "webp")


@dataclass(frozen=True)
class _Group:
    """Some heads and their pattern; heads 0: as many as suit a picture."""

    pattern: "Pattern"
    heads: int
    seed: int


def show(
    pattern: Annotated[
        str,
        typer.Argument(
            help="'Local(64) | Global(first=2)', or a mechanism: bigbird, 'local(left=8)', ...", show_default=False
        ),
    ],
    length: Annotated[int, typer.Option(min=1, max=_LONGEST, help="Tokens that are read.")] = 512,
    queries: Annotated[
        int | None,
        typer.Option(min=1, max=_LONGEST, help="Only the last tokens ask, this many; else all.", show_default=False),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST_HEADS, help="How many; drawn apart where they differ.", show_default=False),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="No position reads later ones.")] = False,
    marked: Annotated[
        str | None, typer.Option(help="Positions that Marked() marks, for example 0,17.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="Seed of random blocks.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help=f"A picture: .{', .'.join(_FORMATS)}; without it, characters.", show_default=False),
    ] = None,
) -> None:
    """Draw which positions a sparse pattern lets each position read, and count them.

    A pattern is an expression of shapes, united by | and restricted by &, or a mechanism that is one, with settings in
    TOML notation. Rows are queries, columns are keys. Where heads differ, each is drawn.

    Example: hasten show 'Local(64) | Global(first=2)' --length 512 --out pattern.png
    """
    from hasten.attention.patterns import picture

    suffix = None if out is None else _suffix(out)
    shown: list[Panel] = []
    groups, first = _groups(pattern, heads), 0
    _refuse_idle(pattern, groups, marked, seed)
    for group in groups:
        count = group.heads or 1
        counted = picture.survey(
            group.pattern,
            queries or length,
            length,
            n_heads=count,
            seed=group.seed if seed is None else seed,
            causal=causal,
            marked=_positions(marked),
            points=64 if out is None else picture.POINTS,
        )
        name = str(group.pattern) if len(groups) > 1 else ""
        shown += picture.panels(counted, name=name, first=first, n_heads=group.heads)
        first += count
    if out is not None and suffix is not None:
        _write(picture.figure(pattern.strip(), shown, causal=causal), out, suffix)
    _print(shown, picture.caption(shown[0].survey, causal), drawn=out is None)


def _groups(text: str, heads: int | None) -> list[_Group]:
    """The groups of heads that an expression or a mechanism describes."""
    from hasten.attention.heads import HeadsAttention
    from hasten.attention.mechanism import Place
    from hasten.attention.patterns import parse
    from hasten.bench.mechanism import mechanism

    if text.strip()[:1].isupper() or text.strip()[:1] == "(":
        found = parse(text.strip())
        return [_Group(found, heads or 2 * _is_random(found), 0)]
    attention = mechanism(text.strip()).at(Place(n_heads=heads or 2, d_head=64)).build()
    if not isinstance(attention, HeadsAttention):
        found, seed = _pattern(text, attention)
        return [_Group(found, heads or 2 * _is_random(found), seed)]
    total = sum(attention.sizes)
    if heads not in (None, total):
        raise UserError(f"--heads {heads}: {text} has {total} heads; leave the option out")
    if total > _MOST_HEADS:
        raise UserError(f"{text} has {total} heads; at most {_MOST_HEADS} are drawn")
    parts = [_pattern(text, part) for part in attention.groups]  # type: ignore[arg-type]
    return [_Group(found, size, seed) for size, (found, seed) in zip(attention.sizes, parts, strict=True)]


def _pattern(text: str, attention: "Attention") -> "tuple[Pattern, int]":
    """Pattern and seed of a mechanism."""
    from dataclasses import replace
    from functools import reduce

    from hasten.attention.full import FullAttention
    from hasten.attention.patterns import Everything, Global, Marked, Pattern, PatternAttention
    from hasten.attention.patterns.algebra import Union, members

    if isinstance(attention, FullAttention):
        return Everything(), 0
    if not isinstance(attention, PatternAttention):
        raise UserError(f"{text!r} is no pattern: what a position reads depends on more than positions")
    found = attention.pattern
    if attention.traits.second_projections:  # what global tokens read is computed apart, and they read everything
        parts = [replace(one, rows=True) if isinstance(one, Global | Marked) else one for one in members(found, Union)]
        found = reduce(Pattern.__or__, parts)
    return found, int(attention.seed)


def _is_random(pattern: "Pattern") -> bool:
    from hasten.attention.patterns import RandomBlocks
    from hasten.attention.patterns.algebra import walk

    return any(isinstance(shape, RandomBlocks) for shape in walk(pattern))


def _refuse_idle(text: str, groups: list[_Group], marked: str | None, seed: int | None) -> None:
    """No option is ignored."""
    from hasten.attention.patterns import Marked
    from hasten.attention.patterns.algebra import walk

    shapes = [shape for group in groups for shape in walk(group.pattern)]
    has_marked = any(isinstance(shape, Marked) for shape in shapes)
    if marked is not None and not has_marked:
        raise UserError(f"--marked: {text} has no marked tokens; unite it with Marked()")
    if marked is None and has_marked:
        raise UserError(f"{text}: which tokens are marked? give their positions, for example --marked 0,17")
    if seed is not None and not any(_is_random(group.pattern) for group in groups):
        raise UserError(f"--seed: nothing in {text} is drawn at random; leave the option out")


def _positions(text: str | None) -> tuple[int, ...]:
    found = []
    for part in (text or "").split(",") if text is not None else ():
        number = part.strip()
        if not (number.isascii() and number.isdecimal() and len(number) < 10):
            raise UserError(f"--marked: {number!r} is no position; write for example 0,17")
        found.append(int(number))
    return tuple(found)


def _suffix(out: Path) -> str:
    suffix = out.suffix[1:].lower()
    if suffix not in _FORMATS:
        raise UserError(f"--out: {out} ends in no format of a picture; choose .{', .'.join(_FORMATS)}")
    return suffix


def _write(figure: "Figure", out: Path, suffix: str) -> None:
    try:
        figure.savefig(out, format=suffix)
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {error.strerror or error}") from error
    typer.echo(f"wrote {out}", err=True)


def _print(shown: "list[Panel]", caption: str, *, drawn: bool) -> None:
    from hasten.attention.patterns.picture import drawing, legend

    shades = _shades()
    for panel in shown:
        if panel.title:
            typer.echo(panel.title)
        if drawn:
            typer.echo(drawing(panel, shades))
        typer.echo(panel.statistics)
    typer.echo(legend(shown[0].survey, shades) if drawn else caption)


def _shades() -> str:
    """Characters that this terminal can show."""
    from hasten.attention.patterns.picture import SHADES

    try:
        SHADES.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return " .:+#"
    return SHADES
