"""`hasten shortlist`: the target pieces that each sentence may need, so that a model computes no others."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hasten.cli.files import check_distinct, check_writable
from hasten.errors import UserError

if TYPE_CHECKING:
    from hasten.data.lexicon import IdPair
    from hasten.data.shortlist import Shortlist
    from hasten.data.tokenizer import Tokenizer


def shortlist(
    model: Annotated[
        str,
        typer.Option(help="Whose pieces are listed: a bundled model, a run directory or a hub id.", show_default=False),
    ],
    data: Annotated[Path, typer.Option(help="A data directory by `hasten data`.", show_default=False)],
    out: Annotated[Path, typer.Option(help="File to write.", show_default=False)],
    distilled: Annotated[
        Path | None, typer.Option(help="Targets by `hasten distill`, in place of those of --data.", show_default=False)
    ] = None,
    translations: Annotated[int, typer.Option(min=0, help="Target pieces of each source piece.")] = 100,
    frequent: Annotated[int, typer.Option(min=0, help="Most frequent target pieces, in every list.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Of learning which pieces translate which.")] = 5,
    pairs: Annotated[int, typer.Option(min=1, help="At most so many pairs, spread evenly over the data.")] = 200_000,
    max_tokens: Annotated[int, typer.Option(min=1, help="Leave out pairs with a side of more pieces.")] = 200,
    force: Annotated[bool, typer.Option("--force", help="Replace --out.")] = False,
) -> None:
    """Write a table of the target pieces that each source piece is translated by most often.

    The list of a sentence has those of its pieces, the most frequent pieces of all, and the sentence's own pieces,
    since names and numbers stay what they are. `hasten translate --shortlist` computes the scores of these alone.

    Which pieces translate which is learnt by IBM model 1 from the training split. On the validation split, where there
    is one, it tells which share of the target pieces the lists have, and how long they are.

    Example: hasten shortlist --model en-de-ctc --data data/en-de --out runs/en-de.shortlist
    """
    from hasten.data import shortlist as tables
    from hasten.data.corpus import Corpus
    from hasten.data.tokenizer import Tokenizer
    from hasten.pretrained import resolve
    from hasten.training.checkpoint import TOKENIZER
    from hasten.training.prepare import sides

    check_distinct(read={"--distilled": distilled}, written={"--out": out})
    if out.exists() and not force:
        raise UserError(f"{out} exists; give another --out, or --force to replace it")
    check_writable(out)
    corpus, tokenizer = Corpus.open(data), Tokenizer.load(resolve(model) / TOKENIZER)
    source, target = sides(corpus, distilled)
    chosen = _spread(list(zip(source, target, strict=True)), pairs)
    encoded = _encoded(tokenizer, chosen, max_tokens)
    if not encoded:
        raise UserError(f"{data} has no pair with text on both sides and at most {max_tokens} pieces a side")
    typer.echo(f"learning from {len(encoded):,} of {len(source):,} pairs", err=True)
    table = tables.build(encoded, tokenizer, translations=translations, frequent=frequent, rounds=rounds)
    table.save(out)
    typer.echo(f"{out}: {len(table.targets):,} entries, {out.stat().st_size / 1e6:.2f} MB")
    if "valid" in corpus.splits:
        _tell(table, _encoded(tokenizer, list(zip(*corpus.pairs("valid"), strict=True)), max_tokens))


def _spread(lines: Sequence[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """At most so many, spread evenly."""
    count = min(most, len(lines))
    return [lines[i * len(lines) // count] for i in range(count)]


def _encoded(tokenizer: "Tokenizer", lines: Iterable[tuple[str, str]], longest: int) -> "list[IdPair]":
    """The pairs as ids, without those that are empty or too long."""
    pairs = ((tokenizer.encode(source.strip()), tokenizer.encode_target(target.strip())) for source, target in lines)
    return [pair for pair in pairs if all(pair) and max(map(len, pair)) <= longest]


def _tell(table: "Shortlist", pairs: "Sequence[IdPair]") -> None:
    """How much of these pairs' targets the lists have, and how long they are."""
    from hasten.data.shortlist import coverage

    if pairs:
        found = coverage(table, pairs)
        typer.echo(
            f"valid: {found.pieces:.2%} of target pieces and {found.sentences:.1%} of whole sentences are in their "
            f"lists, of {found.size:,.0f} pieces on average ({table.vocab_size:,} in all)"
        )
