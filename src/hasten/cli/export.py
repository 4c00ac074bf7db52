"""`hasten export`: a model in the format of another engine, certified to say the same there."""

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hasten.errors import UserError

if TYPE_CHECKING:
    from hasten.translator import Translator


class Target(str, Enum):
    """Formats that models are exported to."""

    ctranslate2 = "ctranslate2"


def export(
    model: Annotated[str, typer.Option(help="A bundled model, a run directory or a hub id.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The directory to write.", show_default=False)],
    to: Annotated[Target, typer.Option(help="The engine that is to run it.")] = Target.ctranslate2,
    quantization: Annotated[str, typer.Option(help="Numbers of the weights: float32, int8, ...")] = "float32",
    certify: Annotated[
        Path | None, typer.Option(help="Lines to compare the engines on; else test sentences.", show_default=False)
    ] = None,
    sentences: Annotated[int, typer.Option(min=1, help="How many lines to compare.")] = 200,
    force: Annotated[bool, typer.Option("--force", help="Replace an exported model in --out.")] = False,
) -> None:
    """Export an autoregressive model and prove that it says the same: equal greedy outputs, equal log probabilities.

    Without --certify the sentences are the test set of the model's data where that is at hand, else 200 sentences that
    come with hasten. What differs makes exit status 1; the export is left for inspection. Quantised weights are meant
    to differ: their float32 twin is certified, and how many sentences stay the same is told.

    Example: hasten export --to ctranslate2 --model en-de-teacher --out en-de-ct2 --quantization int8
    """
    import tempfile

    import hasten
    from hasten.export import certificate
    from hasten.export import ctranslate2 as target
    from hasten.export.engine import engine

    engine()
    translator = hasten.load(model)
    exportable = target.check_exportable(translator.model)
    lines = _lines(translator, certify)[:sentences]
    directory = target.export(exportable, translator.tokenizer, out, quantization=quantization, force=force)
    typer.echo(f"wrote {directory} ({quantization}); comparing {len(lines)} sentences", err=True)
    with tempfile.TemporaryDirectory() as twin:
        exact = directory if quantization == "float32" else target.export(exportable, translator.tokenizer, twin)
        found = certificate.certify(exportable, translator.tokenizer, exact, lines)
    typer.echo(str(found))
    if not found.valid:
        raise typer.Exit(1)
    if quantization != "float32":
        same, total = certificate.agreement(exportable, translator.tokenizer, directory, lines)
        typer.echo(f"{quantization}: {same} of {total} outputs are those of float32")


def _lines(translator: "Translator", certify: Path | None) -> list[str]:
    """The sentences to compare on."""
    from hasten.data.corpus import Corpus
    from hasten.data.text import read_lines
    from hasten.export.certificate import sentences

    if certify is not None:
        lines = [line for line in read_lines(certify) if line.strip()]
        if not lines:
            raise UserError(f"{certify} has no line with text; give sentences to compare the engines on")
        return lines
    try:
        path = translator.spec.data.path if translator.spec else ""
        return Corpus.open(path).pairs("test")[0]
    except UserError:
        return sentences()
