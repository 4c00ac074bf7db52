"""`hasten data`: build a parallel corpus."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hasten.data.corpus import Corpus
    from hasten.data.text import TextFiles

app = typer.Typer(help="Build a parallel corpus.", no_args_is_help=True)

Out = Annotated[Path, typer.Option(help="Directory to write.", show_default=False)]
Seed = Annotated[int, typer.Option(help="Seed of the choice of held-out documents.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the corpus in a non-empty --out.")]


@app.command(short_help="Build a corpus out of Debian's translations.")
def debian(
    pair: Annotated[str, typer.Argument(help="Language pair: en-de, en-fr or en-es.")],
    out: Out,
    work: Annotated[
        Path | None, typer.Option(help="Where downloads are kept; ~/.cache/hasten/debian if not given.")
    ] = None,
    valid: Annotated[int, typer.Option(help="Pairs wanted in the validation split.", min=0)] = 2000,
    test: Annotated[int, typer.Option(help="Pairs wanted in the test split.", min=0)] = 3000,
    seed: Seed = 1,
    refresh: Annotated[bool, typer.Option("--refresh", help="Fetch the package lists anew.")] = False,
    force: Force = False,
) -> None:
    """Build a corpus out of the translations in Debian packages (about 80 MB of downloads, one to two minutes).

    Example: hasten data debian en-de --out runs/data/en-de
    """
    from rich.console import Console

    from hasten.data.debian import DebianOptions, build_debian_corpus

    console = Console(stderr=True)
    with console.status("starting") as status:

        def report(message: str) -> None:
            console.print(message, highlight=False, markup=False)
            status.update(message)

        corpus = build_debian_corpus(
            pair,
            out,
            work=work,
            options=DebianOptions(valid=valid, test=test, seed=seed),
            refresh=refresh,
            force=force,
            progress=report,
        )
    _print_summary(corpus)


@app.command()
def text(
    out: Out,
    src: Annotated[Path | None, typer.Option(show_default=False, help="Source lines, UTF-8, may be .gz.")] = None,
    tgt: Annotated[Path | None, typer.Option(show_default=False, help="Target lines, aligned with --src.")] = None,
    tsv: Annotated[
        Path | None, typer.Option(show_default=False, help="Instead of both: source, tab, target a line.")
    ] = None,
    source_language: Annotated[
        str | None, typer.Option(show_default=False, help="Code such as en; by default the ending of --src.")
    ] = None,
    target_language: Annotated[
        str | None, typer.Option(show_default=False, help="Code such as de; by default the ending of --tgt.")
    ] = None,
    docs: Annotated[
        Path | None, typer.Option(show_default=False, help="Document key of every line, to split by document.")
    ] = None,
    valid: Annotated[
        int | None, typer.Option(show_default=False, help="Pairs to hold out for validation; a 20th, at most 2000.")
    ] = None,
    test: Annotated[
        int | None, typer.Option(show_default=False, help="Pairs to hold out for testing; a 20th, at most 3000.")
    ] = None,
    valid_src: Annotated[Path | None, typer.Option(show_default=False, help="Your own validation set.")] = None,
    valid_tgt: Annotated[Path | None, typer.Option(show_default=False, help="Its translations.")] = None,
    test_src: Annotated[Path | None, typer.Option(show_default=False, help="Your own test set.")] = None,
    test_tgt: Annotated[Path | None, typer.Option(show_default=False, help="Its translations.")] = None,
    block_lines: Annotated[
        int | None, typer.Option(show_default=False, help="Lines that count as one document; 50, fewer for small text.")
    ] = None,
    max_words: Annotated[int, typer.Option(help="Most words on either side.")] = 250,
    max_ratio: Annotated[float, typer.Option(help="Most characters of one side for one of the other.")] = 3.0,
    seed: Seed = 1,
    force: Force = False,
) -> None:
    """Build a corpus out of files of your own.

    Example: hasten data text --src corpus.en.gz --tgt corpus.de.gz --out runs/data/mine
    """
    from hasten.data.text import TextOptions, build_text_corpus

    files, languages = _training_files(src, tgt, tsv, source_language, target_language)
    given = {
        name: _held_out_files(name, *paths)
        for name, paths in {"valid": (valid_src, valid_tgt), "test": (test_src, test_tgt)}.items()
        if any(paths)
    }
    options = TextOptions(
        valid=valid, test=test, max_words=max_words, max_ratio=max_ratio, block_lines=block_lines, seed=seed
    )
    corpus = build_text_corpus(files, out, languages, documents=docs, held_out=given, options=options, force=force)
    _print_summary(corpus)


@app.command(short_help="Build a small task: from letters to phonemes.")
def pronunciation(
    out: Out,
    valid: Annotated[int, typer.Option(help="Words of the validation split.", min=1)] = 1000,
    test: Annotated[int, typer.Option(help="Words of the test split.", min=1)] = 3000,
    train: Annotated[
        int | None, typer.Option(show_default=False, help="Words to learn from; all others if not given.", min=1)
    ] = None,
    force: Force = False,
) -> None:
    """Build a task that small models learn in minutes: from the letters of English words to their phonemes.

    Needs the extra `pronunciation`; nothing is downloaded.

    Example: hasten data pronunciation --out runs/data/pronunciation
    """
    from rich.console import Console

    from hasten.data.pronunciation import build_pronunciation_corpus

    corpus = build_pronunciation_corpus(out, valid=valid, test=test, train=train, force=force)
    counts = ", ".join(f"{name} {facts['pairs']:,}" for name, facts in corpus.manifest["splits"].items())
    Console(highlight=False).print(f"{corpus.directory}: letters to phonemes; {counts} words", soft_wrap=True)


def _training_files(
    src: Path | None, tgt: Path | None, tsv: Path | None, source_language: str | None, target_language: str | None
) -> tuple[TextFiles, tuple[str, str]]:
    from hasten.data.text import TextFiles, language_of
    from hasten.errors import UserError

    if tsv is not None and src is None and tgt is None:
        if source_language is None or target_language is None:
            raise UserError("--tsv needs --source-language and --target-language")
        return TextFiles(tsv), (source_language, target_language)
    if src is None or tgt is None or tsv is not None:
        raise UserError("give either --src and --tgt, or --tsv alone")
    return TextFiles(src, tgt), (source_language or language_of(src), target_language or language_of(tgt))


def _held_out_files(name: str, source: Path | None, target: Path | None) -> TextFiles:
    from hasten.data.text import TextFiles
    from hasten.errors import UserError

    if source is None or target is None:
        raise UserError(f"--{name}-src and --{name}-tgt belong together; one is missing")
    return TextFiles(source, target)


def _print_summary(corpus: Corpus) -> None:
    """Counts of the splits, of the sources and of what was filtered, as the manifest has them."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    def table(first: str, *headings: str) -> Table:
        made = Table(box=box.SIMPLE_HEAD)
        made.add_column(first)
        for heading in headings:
            made.add_column(heading, justify="right")
        return made

    manifest, names = corpus.manifest, corpus.splits
    splits = table("split", "pairs", "documents", "source words", "target words", "near train")
    for name, counts in manifest["splits"].items():
        removed = manifest["removed_from_held_out"].get(name, {})
        near = sum(removed.get(rule, 0) for rule in ("same source", "same target", "near source", "near target"))
        numbers = [counts[key] for key in ("pairs", "documents", "source_words", "target_words")]
        splits.add_row(name, *(f"{number:,}" for number in numbers), f"{near:,}" if removed else "")
    sources = table("source", *names, "filtered")
    reasons: Counter[str] = Counter()
    for name, facts in manifest["sources"].items():
        filtered = {reason: count for reason, count in facts["filtered"].items() if reason != "lines"}
        reasons.update(filtered)
        sources.add_row(
            name + (" (absent)" if "absent" in facts else ""),
            *(f"{facts['pairs'].get(split, 0):,}" for split in names),
            f"{sum(filtered.values()):,}",
        )
    console = Console(highlight=False)
    console.print(f"{corpus.directory}: {corpus.source_language} to {corpus.target_language}", soft_wrap=True)
    console.print(splits, "near train: nearly repeated training text, and was removed", sources)
    listed = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())
    console.print(f"filtered: {listed or 'nothing'}", soft_wrap=True)
    console.print(f"origins, counts and checksums: {corpus.directory}/manifest.json", soft_wrap=True)
