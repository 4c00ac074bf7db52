"""`hasten bench attention`: what attention costs as sequences grow."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hasten.cli.files import write_text
from hasten.cli.limits import MOST_THREADS
from hasten.directories import made
from hasten.errors import UserError

if TYPE_CHECKING:
    from hasten.bench.attention import Plan

_LONGEST = 2**24


def attention(
    mechanisms: Annotated[
        str,
        typer.Option(help='Comma-separated: full, "linformer(k=64)", "Local(256) | Global(first=2)", peer:NAME, ...'),
    ],
    lengths: Annotated[str, typer.Option(help="Comma-separated.")] = "256,512,1024,2048,4096,8192,16384",
    heads: Annotated[int, typer.Option(min=1, max=1024, help="How many heads.")] = 8,
    width: Annotated[int, typer.Option(min=1, max=4096, help="The width of a head.")] = 64,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="How many sequences at once.")] = 1,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="No position reads later ones.")] = False,
    level: Annotated[
        Literal["module", "core"],
        typer.Option(help="With projections, or only the operator on given queries, keys and values."),
    ] = "module",
    threads: Annotated[int, typer.Option(min=1, max=MOST_THREADS, help="CPU threads.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians are kept.")] = 5,
    gib: Annotated[float, typer.Option(min=0.01, help="No call that needs more memory, in GiB.")] = 8.0,
    seconds: Annotated[float, typer.Option(min=0.01, help="No call that takes longer.")] = 60.0,
    peers: Annotated[
        Path | None,
        typer.Option(help="Directory or interpreter of the peers, benchmarks/peers.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for attention.jsonl, .md and .png.", show_default=False)
    ] = None,
) -> None:
    """Measure attention against length: forward, forward and backward, peak memory; beside full attention.

    Each mechanism runs in a process of its own, and they take turns. Before anything is timed, each must agree with
    its dense reference on short sequences; one that does not is left out, and the exit status is 1.

    Example: hasten bench attention --mechanisms full,"Local(256)" --lengths 256,1024,4096 --out bench
    """
    from hasten.attention.mechanism import Place
    from hasten.bench.attention import Plan
    from hasten.bench.attention_contestant import contestants
    from hasten.cli.bench import warn_if_busy

    plan = Plan(
        contestants=contestants(mechanisms, peers, Place(n_heads=heads, d_head=width)),
        lengths=_lengths(lengths),
        heads=heads,
        width=width,
        batch=batch,
        causal=causal,
        level=level,
        threads=threads,
        repeats=repeats,
        memory_mib=1024 * gib,
        seconds=seconds,
    )
    warn_if_busy()
    with nullcontext() if out is None else made(out):
        rows = _measured(plan, out)
        _show(rows)
        if out is not None:
            _write(rows, out)
    _fail_if_red(rows)


def _lengths(text: str) -> tuple[int, ...]:
    """Lengths in ascending order, each once."""
    found = set()
    for part in text.split(","):
        number = part.strip()
        # isdecimal alone would let digits of other scripts through
        if not (number.isascii() and number.isdecimal() and len(number) < 10 and 1 <= int(number) <= _LONGEST):
            raise UserError(f"--lengths: {number[:20]!r} is not in 1 to {_LONGEST}; write for example 256,1024,4096")
        found.add(int(number))
    return tuple(sorted(found))


def _measured(plan: "Plan", out: Path | None) -> list[dict[str, Any]]:
    """The rows; those of a length are in the file as soon as it is done, so that an interrupted run is not lost."""
    from hasten.bench.attention import run
    from hasten.bench.decode import write_rows

    rows: list[dict[str, Any]] = []
    for more in run(plan, lambda text: typer.echo(text, err=True)):
        rows += more
        if out is not None:
            write_rows(rows, out / "attention.jsonl")
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    import sys

    from hasten.bench import attention_report as report

    if not sys.stdout.isatty():
        typer.echo(report.plain(rows))
        return
    from rich.console import Console

    console = Console(width=max(140, Console().width), height=25)
    for table in report.tables(rows):
        console.print(table)
    typer.echo("\n".join(report.notes(rows)))


def _write(rows: list[dict[str, Any]], out: Path) -> None:
    from hasten.bench.attention_picture import picture
    from hasten.bench.attention_report import markdown

    write_text(out / "attention.md", markdown(rows))
    picture(rows, out / "attention.png")
    typer.echo(f"wrote {out / 'attention.jsonl'}, attention.md and attention.png", err=True)


def _fail_if_red(rows: list[dict[str, Any]]) -> None:
    from hasten.bench.attention import RED

    reasons = [reason for row in rows for reason in (row["skipped"] or {}).values()]
    if any(reason.startswith(RED) for reason in reasons):
        raise typer.Exit(1)
