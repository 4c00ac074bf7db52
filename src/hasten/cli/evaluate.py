"""`hasten evaluate`: the quality of a model on held-out text, and whether it differs from another's."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hasten.cli.files import check_distinct, check_writable, write_text
from hasten.cli.limits import MOST_THREADS
from hasten.errors import UserError

if TYPE_CHECKING:
    from hasten.data.corpus import Corpus
    from hasten.training.metrics import Difference, Quality
    from hasten.translator import Translator


_WIDTH_ELSEWHERE = 160  # in files and pipes, where lines may be long


@dataclass(frozen=True)
class _TestSet:
    """Sentences with references, and the languages where they are known."""

    name: str
    source: list[str]
    target: list[str]
    languages: tuple[str, str] | None = None


@dataclass(frozen=True)
class _Contestant:
    """A model with the way it is decoded."""

    model: str
    beam: int
    rescorer: str | None = None
    decoding: tuple[str, ...] = ()
    shortlist: Path | None = None

    @property
    def label(self) -> str:
        """The model with what differs from its own way."""
        chosen = [f"rescorer={self.rescorer}"] if self.rescorer else []
        chosen += [f"shortlist={self.shortlist}"] if self.shortlist else []
        return " ".join([self.model, *chosen, *self.decoding])


@dataclass(frozen=True)
class _Result:
    """What one model made of a test set."""

    by: _Contestant
    translations: list[str]
    quality: "Quality"
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {"rescorer": self.by.rescorer} if self.by.rescorer else {}
        chosen |= {"shortlist": str(self.by.shortlist)} if self.by.shortlist else {}
        chosen |= {"decoding": list(self.by.decoding)} if self.by.decoding else {}
        return {
            "model": self.by.model,
            "beam": self.by.beam,
            **chosen,
            "seconds": self.seconds,
            **self.quality.as_dict(),
        }


def evaluate(
    model: Annotated[str, typer.Option(help="A bundled model, a run directory or a hub id.", show_default=False)],
    data: Annotated[Path | None, typer.Option(help="A data directory by `hasten data`.", show_default=False)] = None,
    split: Annotated[str | None, typer.Option(help="Which part of --data; test.", show_default=False)] = None,
    src: Annotated[Path | None, typer.Option(help="Instead of --data: source lines.", show_default=False)] = None,
    ref: Annotated[Path | None, typer.Option(help="Instead of --data: their references.", show_default=False)] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Another model, to test the difference.", show_default=False)
    ] = None,
    beam: Annotated[int, typer.Option(min=1, help="Width of the search.")] = 1,
    baseline_beam: Annotated[
        int | None, typer.Option(min=1, help="Width for the baseline; that of --beam.", show_default=False)
    ] = None,
    rescorer: Annotated[
        str | None, typer.Option(help="Model that chooses among the outputs of --beam.", show_default=False)
    ] = None,
    shortlist: Annotated[
        Path | None, typer.Option(help="A table by `hasten shortlist`, for --model.", show_default=False)
    ] = None,
    decoding: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="A setting of the model's decoding; may be repeated.", show_default=False
        ),
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Padded source pieces of a batch.")] = 4096,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first sentences.", show_default=False)] = None,
    json: Annotated[Path | None, typer.Option(help="Also write all numbers here.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the translations here.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="Where the models compute.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, max=MOST_THREADS, help="CPU threads; all.", show_default=False)
    ] = None,
) -> None:
    """Score a model: BLEU and chrF of detokenised text, length, repetition, and a test against a baseline.

    Length is words said per word of the reference; repetition the share of words that equal the word before them. With
    --baseline, p is how often chance alone would show such a difference (paired bootstrap, 1000 samples), and 95% of
    the resampled test sets have a difference in the range below it.

    Example: hasten evaluate --model en-de-ctc --baseline en-de-teacher --data data/en-de
    """
    check_distinct(
        read={"--src": src, "--ref": ref, "--shortlist": shortlist}, written={"--json": json, "--output": output}
    )
    test_set = _read(data, split, src, ref, limit)
    if baseline is None and baseline_beam is not None:
        raise UserError("--baseline-beam without --baseline; name the other model")
    for file in (json, output):
        if file is not None and not file.parent.is_dir():
            raise UserError(f"{file}: no directory {file.parent}; create it first")
        if file is not None:
            check_writable(file)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if rescorer is not None and beam == 1:
        raise UserError("--rescorer has one output to choose from; widen --beam")
    own = _Contestant(model, beam, rescorer, tuple(decoding or ()), shortlist)
    others = [] if baseline is None else [_Contestant(baseline, baseline_beam or beam)]
    results = [_translate(contestant, test_set, batch_tokens, device) for contestant in (own, *others)]
    differences = _compare(results, test_set.target)
    if output is not None:
        write_text(output, "".join(line + "\n" for line in results[0].translations))
    if json is not None:
        _write_json(json, test_set, results, differences)
    _print(test_set, results, differences)


def _read(data: Path | None, split: str | None, src: Path | None, ref: Path | None, limit: int | None) -> _TestSet:
    """The sentences that the options name."""
    from hasten.data.corpus import Corpus
    from hasten.data.text import read_lines

    if data is not None and src is None and ref is None:
        corpus = Corpus.open(data)
        name = split or "test"
        source, target = corpus.pairs(name)
        test_set = _TestSet(f"{data} {name}", source, target, (corpus.source_language, corpus.target_language))
    elif data is None and split is None and src is not None and ref is not None:
        source, target = read_lines(src), read_lines(ref)
        if len(source) != len(target):
            raise UserError(f"{src} has {len(source)} lines, {ref} has {len(target)}; line i must translate line i")
        test_set = _TestSet(str(src), source, target)
    else:
        raise UserError("give a test set: either --data (and --split), or --src and --ref")
    if not test_set.source:
        raise UserError(f"{test_set.name} has no sentences")
    return _TestSet(test_set.name, test_set.source[:limit], test_set.target[:limit], test_set.languages)


def _translate(by: _Contestant, test_set: _TestSet, batch_tokens: int, device: str) -> _Result:
    import hasten
    from hasten.training.metrics import quality

    name = by.label
    translator = hasten.load(by.model, device=device, decoding=by.decoding, shortlist=by.shortlist)
    judge = None if by.rescorer is None else hasten.load(by.rescorer, device=device)
    _warn(by.model, translator, test_set)
    typer.echo(f"{name}: translating {len(test_set.source):,} sentences", err=True)
    began = time.perf_counter()
    lines = translator.translate(test_set.source, beam=by.beam, rescorer=judge, batch_tokens=batch_tokens)
    seconds = time.perf_counter() - began
    translations = [" ".join(line.splitlines()) for line in lines]
    return _Result(by, translations, quality(translations, test_set.target), round(seconds, 3))


def _warn(name: str, translator: "Translator", test_set: _TestSet) -> None:
    """Say so where the model's training data is at hand and speaks against this test set."""
    corpus = _training_data(translator)
    if corpus is None:
        return
    languages = (corpus.source_language, corpus.target_language)
    if test_set.languages not in (None, languages):
        got = "-".join(test_set.languages)
        typer.echo(f"warning: {name} was trained on {'-'.join(languages)}, {test_set.name} is {got}", err=True)
    known = set(corpus.pairs("train")[0])
    seen = sum(line in known for line in test_set.source)
    if seen:
        share = f"{seen:,} of {len(test_set.source):,}"
        typer.echo(f"warning: {name} was trained on {share} source sentences of {test_set.name}", err=True)


def _training_data(translator: "Translator") -> "Corpus | None":
    """The corpus that the model's configuration names, where it is still there."""
    from hasten.data.corpus import Corpus

    if translator.spec is None:
        return None
    try:
        corpus = Corpus.open(translator.spec.data.path)
        corpus.pairs("train")
    except UserError:
        return None
    return corpus


def _compare(results: Sequence[_Result], references: Sequence[str]) -> "list[Difference]":
    from hasten.training.metrics import paired_bootstrap

    if len(results) == 1:
        return []
    return paired_bootstrap(results[0].translations, results[1].translations, references)


def _write_json(
    path: Path, test_set: _TestSet, results: Sequence[_Result], differences: "Sequence[Difference]"
) -> None:
    import json

    table: dict[str, Any] = {"data": test_set.name, "sentences": len(test_set.source), **results[0].as_dict()}
    if differences:
        table["baseline"] = results[1].as_dict()
        table["differences"] = [difference.as_dict() for difference in differences]
    write_text(path, json.dumps(table, indent=1, ensure_ascii=False) + "\n")


def _print(test_set: _TestSet, results: Sequence[_Result], differences: "Sequence[Difference]") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_ELSEWHERE
    typer.echo(f"{test_set.name}: {len(test_set.source):,} sentences")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", overflow="fold")
    for heading in ("beam", "BLEU", "chrF2", "length", "repetition", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        scores = result.quality
        numbers = (f"{scores.bleu:.2f}", f"{scores.chrf:.2f}", f"{scores.length_ratio:.3f}", f"{scores.repetition:.2%}")
        table.add_row(result.by.label, str(result.by.beam), *numbers, f"{result.seconds:.1f}")
    if differences:
        shown = {difference.metric: difference for difference in differences}
        deltas = (f"{shown[name].delta:+.2f}" for name in ("BLEU", "chrF2"))
        chances = (f"p={shown[name].p_value:.3f}" for name in ("BLEU", "chrF2"))
        table.add_section()
        table.add_row("difference", "", *deltas, "", "", "")
        ranges = ("{:+.2f} to {:+.2f}".format(*shown[name].delta_interval) for name in ("BLEU", "chrF2"))
        table.add_row("95% of resampled", "", *ranges, "", "", "")
        table.add_row("by chance", "", *chances, "", "", "")
    console.print(table)
    signatures = [results[0].quality.bleu_signature, results[0].quality.chrf_signature]
    signatures = [difference.signature for difference in differences] or signatures
    for name, signature in zip(("BLEU", "chrF2"), signatures, strict=True):
        typer.echo(f"{name}: {signature}")
