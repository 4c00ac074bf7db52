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
    calibrate: Annotated[
        Path | None,
        typer.Option(help="onnx int8: lines that show what activations reach; else validation.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an exported model in --out.")] = False,
) -> None:
    """Export a model and prove that it says the same: equal greedy outputs, equal log probabilities.

    ctranslate2 takes autoregressive models whose layers share nothing; onnx takes those that share attention, and ctc
    and dag models, too, for `hasten translate --runtime onnx` and `python -m hasten.runtime`.

    Without --certify the sentences are the test set of the model's data where that is at hand, else 200 sentences that
    come with hasten. What differs makes exit status 1; the export is left for inspection. Quantised weights are meant
    to differ. For ctranslate2 their float32 twin is certified, and how many sentences stay the same is told; for onnx
    their outputs must stay close to those of float32: how close is in certificate.json.

    int8 in onnx rounds activations, too: what they reach is seen on 200 lines of --calibrate, else of the validation
    set, else on the sentences that come with hasten.

    Example: hasten export --to ctranslate2 --model en-de-teacher --out en-de-ct2 --quantization int8
    """
    import hasten
    from hasten.export.engine import engine
    from hasten.export.onnx_graph import onnx_package
    from hasten.runtime.engine import onnxruntime

    if calibrate is not None and (to != Target.onnx or not (int8 or quantization == "int8")):
        raise UserError("--calibrate is for --to onnx --int8 only; leave it out")
    if int8 and quantization not in ("float32", "int8"):
        raise UserError(f"--int8 and --quantization {quantization} say two things; leave one out")
    numbers = "int8" if int8 else quantization
    for package in [engine] if to == Target.ctranslate2 else [onnx_package, onnxruntime]:
        package()
    translator = hasten.load(model)
    if to == Target.ctranslate2:
        _to_ctranslate2(translator, out, numbers, certify, sentences, force)
    else:
        _to_onnx(translator, out, numbers, certify, calibrate, sentences, force)


def _to_ctranslate2(
    translator: "Translator", out: Path, quantization: str, certify: Path | None, sentences: int, force: bool
) -> None:
    import tempfile

    from hasten.export import certificate
    from hasten.export import ctranslate2 as target

    exportable = target.check_exportable(translator.model)
    lines = _lines(translator, certify, "test")[0][:sentences]
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
    translator: "Translator",
    out: Path,
    compute: str,
    certify: Path | None,
    calibrate: Path | None,
    sentences: int,
    force: bool,
) -> None:
    from hasten.export import onnx as target
    from hasten.export import onnx_certificate as certificate

    holdable = target.check_holdable(translator.model)
    lines, references = _lines(translator, certify, "test")
    directory = target.export(
        holdable,
        translator.tokenizer,
        out,
        max_source_tokens=translator.max_source_tokens,
        compute=compute,
        calibration=_lines(translator, calibrate, "valid")[0] if compute == "int8" else None,
        force=force,
    )
    lines = lines[:sentences]
    typer.echo(f"wrote {directory} ({compute}); comparing {len(lines)} sentences", err=True)
    found = certificate.certify(holdable, translator.tokenizer, directory, lines, references)
    found.write(directory)
    typer.echo(str(found))
    if not found.valid:
        raise typer.Exit(1)


def _lines(translator: "Translator", file: Path | None, split: str) -> tuple[list[str], list[str] | None]:
    """Lines of a file, of a split of the model's data, or those that ship, and references where there are any."""
    from hasten.data.corpus import Corpus
    from hasten.data.text import read_lines
    from hasten.export.certificate import sentences

    if file is not None:
        lines = [line for line in read_lines(file) if line.strip()]
        if not lines:
            raise UserError(f"{file} has no line with text; give sentences")
        return lines, None
    try:
        path = translator.spec.data.path if translator.spec else ""
        return Corpus.open(path).pairs(split)
    except UserError:
        return sentences(), None
