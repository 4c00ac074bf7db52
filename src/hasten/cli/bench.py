"""`hasten bench`: what each way buys on this machine."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from hasten.cli.bench_attention import attention
from hasten.cli.files import write_text
from hasten.cli.limits import MOST_THREADS
from hasten.directories import made
from hasten.errors import UserError

app = typer.Typer(help="Measure speed and quality on this machine.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Measure speed and quality on this machine."""


app.command("attention", short_help="Time and memory of attention mechanisms against length.")(attention)


@app.command(short_help="Latency, throughput and quality of decoders, side by side.")
def decode(
    models: Annotated[
        str,
        typer.Option(help="Comma-separated: NAME, NAME:beam=4, NAME:iterations=4, ctranslate2:NAME:int8, onnx:NAME"),
    ],
    data: Annotated[Path, typer.Option(help="A data directory by `hasten data`.", show_default=False)],
    split: Annotated[str, typer.Option(help="Which part of it.")] = "test",
    sentences: Annotated[int, typer.Option(min=1, help="How many sentences, spread evenly over the split.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians are kept.")] = 3,
    threads: Annotated[str, typer.Option(help="CPU threads to measure with, comma-separated.")] = "1,all",
    peers: Annotated[
        bool,
        typer.Option("--peers/--no-peers", help="Also run them in CTranslate2 and ONNX Runtime, where these can."),
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="Directory for decode.jsonl, .md and .png.", show_default=False)
    ] = None,
) -> None:
    """Compare decoders on real sentences: latency, throughput, passes, memory, BLEU and chrF.

    Each model runs in a process of its own, for one thread and for all, and the models take turns sentence by sentence.
    Before anything is timed, each must say the same for a sentence alone and in a batch. Latency is from text to text,
    tokenisation included; throughput is in batches of 32.

    After a colon stand settings: beam=N, rescorer=MODEL (chooses among a beam), draft=MODEL (whose outputs are
    checked), shortlist=FILE (what each sentence may be said in), and those of the model's decoding.

    Example: hasten bench decode --models en-de-ctc,en-de-teacher,en-de-teacher:beam=4 --data data/en-de --out bench
    """
    import tempfile

    from hasten.bench import decode as bench
    from hasten.bench import report
    from hasten.bench.contestant import parse_all
    from hasten.bench.peers import export_peers

    contestants, counts = parse_all(models), _threads(threads)
    name, sources, references = _sentences(data, split, sentences)
    warn_if_busy()
    with nullcontext() if out is None else made(out), tempfile.TemporaryDirectory() as exports:
        ready = export_peers(contestants, peers, Path(exports), lambda text: typer.echo(text, err=True))
        plan = bench.Plan(ready, sources, references, name, counts, repeats)
        rows = bench.run(plan, lambda text: typer.echo(text, err=True))
        _show(rows)
        if out is not None:
            bench.write_rows(rows, out / "decode.jsonl")
            write_text(out / "decode.md", report.markdown(rows))
            report.picture(rows, out / "decode.png")
            typer.echo(f"wrote {out / 'decode.jsonl'}, decode.md and decode.png", err=True)


def _show(rows: list[dict[str, Any]]) -> None:
    import sys

    from hasten.bench import report

    if not sys.stdout.isatty():
        typer.echo(report.plain(rows))
        return
    from rich.console import Console

    Console(width=max(120, Console().width), height=25).print(report.table(rows))
    typer.echo(report.conditions(rows))


def _threads(text: str) -> tuple[int, ...]:
    """Numbers of threads in ascending order, each once; `all` is what this process may use."""
    from hasten.bench.machine import cores

    found = set()
    for part in text.split(","):
        number = part.strip().isdecimal() and len(part) < 10
        if part.strip() != "all" and not (number and 1 <= int(part) <= MOST_THREADS):
            raise UserError(f"--threads: {part.strip()!r} is not in 1 to {MOST_THREADS}; write for example 1,all")
        found.add(cores() if part.strip() == "all" else int(part))
    return tuple(sorted(found))


def _sentences(data: Path, split: str, wanted: int) -> tuple[str, list[str], list[str]]:
    """Name, sources and references: evenly spread over the split, so that every document has its share."""
    from hasten.data.corpus import Corpus

    corpus = Corpus.open(data)
    pairs = [pair for pair in zip(*corpus.pairs(split), strict=True) if pair[0].strip()]
    if not pairs:
        raise UserError(f"{data} {split} has no sentences")
    count = min(wanted, len(pairs))
    chosen = [pairs[i * len(pairs) // count] for i in range(count)]
    name = f"{corpus.source_language}-{corpus.target_language} {split}"
    return name, [source for source, _ in chosen], [target for _, target in chosen]


def warn_if_busy() -> None:
    """Say on stderr that others use this machine."""
    from hasten.bench.machine import machine

    state: dict[str, Any] = machine()
    load, cores = state["load_before"], state["cores"]
    if load is not None and load > 0.3 * cores:
        typer.echo(f"warning: this machine is busy (load {load}, {cores} cores): trust ratios, not times", err=True)
