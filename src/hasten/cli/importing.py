"""`hasten import`: models that were made elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Bring in models that were made elsewhere.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Bring in models that were made elsewhere."""


@app.command(short_help="A Hugging Face directory of a Marian model (OPUS-MT).")
def marian(
    directory: Annotated[
        Path, typer.Argument(help="config.json, model.safetensors, vocab.json, source.spm, target.spm.")
    ],
    out: Annotated[Path, typer.Option(help="The run directory to write.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Replace a run in --out.")] = False,
) -> None:
    """Make a run of a Marian model, for example one of OPUS-MT: `translate`, `distill` and `evaluate` take it.

    Nothing in the directory is executed; a pytorch_model.bin, which would be, is refused. Post-norm models with one
    vocabulary for both sides can be imported; what cannot is said in one line.

    Example: hasten import marian opus-mt-en-de --out runs/opus-en-de
    """
    from hasten.importing.marian import import_marian

    written = import_marian(directory, out, force=force)
    typer.echo(f"wrote {written}")
