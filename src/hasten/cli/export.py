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
    onnx = "onnx"


def export(
    model: Annotated[str, typer.Option(help="A bundled model, a run directory or a hub id.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The directory to write.", show_default=False)],
    to: Annotated[Target, typer.Option(help="The engine that is to run it.")] = Target.ctranslate2,
    quantization: Annotated[str, typer.Option(help="Numbers of the weights: float32, int8, ...")] = "float32",
    int8: Annotated[bool, typer.Option("--int8", help="The same as --quantization int8.")] = False,
    certify: Annotated[
        Path | None, typer.Option(help="Lines to compare the engines on; else test sentences.", show_default=False)
    ] = None,
    sentences: Annotated[int, typer.Option(min=1, help="How many lines to compare.")] = 200,
    force: Annotated[bool, typer.Option("--force", help="Replace an exported model in --out.")] = False,
) -> None:
    """Export a model and prove that it says the same: equal greedy outputs, equal log probabilities.

    ctranslate2 takes autoregressive models whose layers share nothing; onnx takes those that share attention, and ctc
    models, too, for `hasten translate --runtime onnx` and `python -m hasten.runtime`.

    Without --certify the sentences are the test set of the model's data where that is at hand, else 200 sentences that
    come with hasten. What differs makes exit status 1; the export is left for inspection. Quantised weights are meant
    to differ. For ctranslate2 their float32 twin is certified, and how many sentences stay the same is told; for onnx
    their outputs must stay close to those of float32: how close is in certificate.json.

    Example: hasten export --to ctranslate2 --model en-de-teacher --out en-de-ct2 --quantization int8
    """
    import hasten
    from hasten.export.engine import engine
    from hasten.export.onnx_graph import onnx_package
    from hasten.runtime.engine import onnxruntime

    if int8 and quantization not in ("float32", "int8"):
        raise UserError(f"--int8 and --quantization {quantization} say two things; leave one out")
    numbers = "int8" if int8 else quantization
    for package in [engine] if to == Target.ctranslate2 else [onnx_package, onnxruntime]:
        package()
    write = _to_ctranslate2 if to == Target.ctranslate2 else _to_onnx
    write(hasten.load(model), out, numbers, certify, sentences, force)


def _to_ctranslate2(
    translator: "Translator", out: Path, quantization: str, certify: Path | None, sentences: int, force: bool
) -> None:
    import tempfile

    from hasten.export import certificate
    from hasten.export import ctranslate2 as target

    exportable = target.check_exportable(translator.model)
    lines = _lines(translator, certify)[0][:sentences]
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


def _to_onnx(
    translator: "Translator", out: Path, compute: str, certify: Path | None, sentences: int, force: bool
) -> None:
    from hasten.export import onnx as target
    from hasten.export import onnx_certificate as certificate

    holdable = target.check_holdable(translator.model)
    lines, references = _lines(translator, certify)
    directory = target.export(
        holdable,
        translator.tokenizer,
        out,
        max_source_tokens=translator.max_source_tokens,
        compute=compute,
        force=force,
    )
    lines = lines[:sentences]
    typer.echo(f"wrote {directory} ({compute}); comparing {len(lines)} sentences", err=True)
    found = certificate.certify(holdable, translator.tokenizer, directory, lines, references)
    found.write(directory)
    typer.echo(str(found))
    if not found.valid:
        raise typer.Exit(1)


def _lines(translator: "Translator", certify: Path | None) -> tuple[list[str], list[str] | None]:
    """The sentences to compare on, and their references where there are any."""
    from hasten.data.corpus import Corpus
    from hasten.data.text import read_lines
    from hasten.export.certificate import sentences

    if certify is not None:
        lines = [line for line in read_lines(certify) if line.strip()]
        if not lines:
            raise UserError(f"{certify} has no line with text; give sentences to compare the engines on")
        return lines, None
    try:
        path = translator.spec.data.path if translator.spec else ""
        return Corpus.open(path).pairs("test")
    except UserError:
        return sentences(), None
