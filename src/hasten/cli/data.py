"""`hasten data`: build a parallel corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Build a parallel corpus.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Build a parallel corpus."""


@app.command()
def debian(
    pair: Annotated[str, typer.Argument(help="Language pair: en-de, en-fr or en-es.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    work: Annotated[Path | None, typer.Option(help="Where downloads are kept [~/.cache/hasten/debian].")] = None,
    valid: Annotated[int, typer.Option(help="Pairs wanted in the validation split.")] = 2000,
    test: Annotated[int, typer.Option(help="Pairs wanted in the test split.")] = 3000,
    seed: Annotated[int, typer.Option(help="Seed of the choice of documents.")] = 1,
    refresh: Annotated[bool, typer.Option("--refresh", help="Fetch the package lists anew.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the corpus in a non-empty --out.")] = False,
) -> None:
    """Build a corpus out of the translations in Debian packages (70 MB of downloads, about two minutes).

    Example: hasten data debian en-de --out runs/data/en-de
    """
    from hasten.data.debian import DebianOptions, build_debian_corpus

    options = DebianOptions(valid=valid, test=test, seed=seed)
    build_debian_corpus(
        pair,
        out,
        work=work,
        options=options,
        refresh=refresh,
        force=force,
        progress=lambda message: typer.echo(message, err=True),
    )
