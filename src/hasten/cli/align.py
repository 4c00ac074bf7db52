"""`hasten align`: from how many target pieces each source piece has, the labels of a model with fertility."""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from hasten.cli.files import check_distinct
from hasten.cli.limits import MOST_THREADS
from hasten.errors import UserError

if TYPE_CHECKING:
    from hasten.data.batch import Pair
    from hasten.data.corpus import Corpus
    from hasten.data.tokenizer import Tokenizer

_SECONDS_BETWEEN_LINES = 30.0
_CHUNK = 2048


def align(
    data: Annotated[Path, typer.Option(help="A data directory by `hasten data`.", show_default=False)],
    model: Annotated[
        str,
        typer.Option(
            help="Whose pieces are counted: a bundled model, a run directory or a hub id.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write, a line for every training pair.", show_default=False)],
    method: Annotated[
        Literal["eflomal", "attention"], typer.Option(help="An aligner, or what --model reads as it writes.")
    ] = "eflomal",
    distilled: Annotated[
        Path | None, typer.Option(help="Targets by `hasten distill`, in place of those of --data.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Leave out pairs with a side of more pieces.")] = 250,
    layer: Annotated[
        int | None, typer.Option(min=1, help="With attention: the decoder layer to read; the last.", show_default=False)
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="With attention: padded pieces of a batch; 4096.", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With attention: where the model computes; cpu.", show_default=False)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=MOST_THREADS, help="CPU threads; all.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace --out.")] = False,
) -> None:
    """Say for each piece of the training sources how many target pieces come from it.

    A model with fertility learns from such a file, named by data.fertilities, with the same data, tokenizer and
    distilled targets. A line has a number for every source piece and one for the end of the source; they sum to the
    number of target pieces. Lines of pairs that have no label are empty. For attention, --model is the autoregressive
    teacher; eflomal needs the extra `align` and gives slightly different labels each time.

    Example: hasten align --data data/en-de --model en-de-teacher --out runs/en-de.fertilities --method attention
    """
    from hasten.data.alignment import write_fertilities
    from hasten.data.corpus import Corpus

    check_distinct(read={"--distilled": distilled}, written={"--out": out})
    for option, value in {"--layer": layer, "--batch-tokens": batch_tokens, "--device": device}.items():
        if method != "attention" and value is not None:
            raise UserError(f"{option} goes with --method attention")
    if out.exists() and not force:
        raise UserError(f"{out} exists; give another --out, or --force to replace it")
    corpus = Corpus.open(data)
    began, counted = time.monotonic(), _Counted()
    if method == "eflomal":
        labels = _by_eflomal(corpus, model, distilled, max_tokens, threads)
    else:
        teacher = _Teacher(model, layer, batch_tokens or 4096, device or "cpu", threads)
        labels = _by_attention(corpus, teacher, distilled, max_tokens)
    write_fertilities(out, counted.passing(labels))
    counted.print(out, time.monotonic() - began)


def _encode(tokenizer: "Tokenizer", lines: Iterable[tuple[str, str]], longest: int) -> "Iterator[tuple[Pair, str]]":
    """The pairs as ids with why they are left out; "" where they are not. Pairs left out have no ids."""
    for source, target in lines:
        pair = (tokenizer.encode(source), tokenizer.encode(target))
        reason = "empty" if not all(pair) else "too long" if max(map(len, pair)) > longest else ""
        yield (([], []) if reason else pair), reason


_Labels = Iterator[tuple[list[int], str]]
"""A label after the other, with why it is empty."""


def _by_eflomal(corpus: "Corpus", model: str, distilled: Path | None, longest: int, threads: int | None) -> _Labels:
    from hasten.data import eflomal
    from hasten.data.alignment import fertilities_of_links
    from hasten.data.tokenizer import Tokenizer
    from hasten.pretrained import resolve
    from hasten.training.checkpoint import TOKENIZER
    from hasten.training.prepare import sides
    from hasten.training.workers import usable_cpus

    eflomal.require()
    tokenizer = Tokenizer.load(resolve(model) / TOKENIZER)
    encoded = list(_encode(tokenizer, zip(*sides(corpus, distilled), strict=True), longest))
    typer.echo(f"eflomal aligns {sum(not reason for _, reason in encoded):,} pairs", err=True)
    # From the first links on it is a matter of seconds; the waiting is before them.
    links = eflomal.align([pair for pair, _ in encoded], threads or usable_cpus())
    for ((source, target), reason), (forward, backward) in _shown(zip(encoded, links, strict=True), len(encoded)):
        label = fertilities_of_links(forward, backward, len(source) + 1, len(target))
        yield label, reason or ("" if label else "no alignment found")


@dataclass(frozen=True)
class _Teacher:
    """Whose attention is read, and how."""

    name: str
    layer: int | None
    batch_tokens: int
    device: str
    threads: int | None


def _by_attention(corpus: "Corpus", teacher: _Teacher, distilled: Path | None, longest: int) -> _Labels:
    import hasten
    from hasten.training.prepare import sides
    from hasten.training.teacher_alignment import attention_fertilities, check_teacher

    if teacher.threads is not None:
        import torch

        torch.set_num_threads(teacher.threads)
    translator = hasten.load(teacher.name, device=teacher.device)
    model = check_teacher(translator.model, teacher.name, teacher.layer)
    longest = min(longest, model.longest or longest)
    sources, targets = sides(corpus, distilled)

    def chunks() -> _Labels:
        for start in range(0, len(sources), _CHUNK):
            lines = zip(sources[start : start + _CHUNK], targets[start : start + _CHUNK], strict=True)
            encoded = list(_encode(translator.tokenizer, lines, longest))
            kept = [pair for pair, reason in encoded if not reason]
            labels = iter(attention_fertilities(model, kept, teacher.batch_tokens, teacher.layer))
            for _, reason in encoded:
                label = [] if reason else next(labels)
                yield label, reason or ("" if label else "nothing read")

    yield from _shown(chunks(), len(sources))


class _Counted:
    """What passes by, in numbers."""

    def __init__(self) -> None:
        self._pairs: Counter[str] = Counter()
        self._fertilities: Counter[int] = Counter()
        self._pieces = self._at_end = 0

    def passing(self, labels: _Labels) -> Iterator[list[int]]:
        """The labels, counted; `UserError` in the end where no pair has one."""
        for label, reason in labels:
            self._pairs[reason or "labelled"] += 1
            self._fertilities.update(label[:-1])
            self._pieces += sum(label)
            self._at_end += sum(label[-1:])
            yield label
        if not self._pairs["labelled"]:
            told = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self._pairs.items()))
            raise UserError(f"no pair has a label ({told}); nothing was written. --max-tokens says what is too long")

    def print(self, out: Path, seconds: float) -> None:
        """The counts, and a warning where there is little to learn from."""
        lines, labelled = self._pairs.total(), self._pairs["labelled"]
        typer.echo(f"{out}: {lines:,} lines in {seconds:,.0f} s")
        for reason, count in sorted(self._pairs.items(), key=lambda item: (item[0] != "labelled", item[0])):
            typer.echo(f"{count:>10,}  {count / lines:>6.1%}  {reason}")
        if labelled:
            sources = self._fertilities.total()
            shares = [f"{self._fertilities[n] / sources:.1%} have {n}" for n in range(3)]
            typer.echo(f"source pieces: {', '.join(shares)}, the most is {max(self._fertilities)}")
            typer.echo(f"target pieces that come from the end of the source: {self._at_end / self._pieces:.1%}")
        if labelled < lines / 2:
            typer.echo(f"warning: only {labelled:,} of {lines:,} pairs have a label", err=True)


_Item = TypeVar("_Item")


def _shown(items: Iterable[_Item], total: int) -> Iterator[_Item]:
    """The items, with how many there were on stderr: a bar on a terminal, a line now and then elsewhere."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(items, "pairs", total, console=console, transient=True)
        return
    began = last = time.monotonic()
    for done, item in enumerate(items):
        if not done:  # what came before the first says nothing of those that follow
            began = last = time.monotonic()
        elif (now := time.monotonic()) - last > _SECONDS_BETWEEN_LINES:
            last, rate = now, done / (now - began)
            left = time.strftime("%H:%M:%S", time.gmtime((total - done) / rate))
            print(f"pair {done}/{total}  {rate:,.1f} pairs/s  {left} left", file=sys.stderr, flush=True)
        yield item
