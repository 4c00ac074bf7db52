"""hasten translate: lines in, lines out."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, TypeAlias

import typer

from hasten.cli.files import check_distinct, check_writable
from hasten.cli.limits import MOST_THREADS
from hasten.data.lines import Chunk, read_chunks
from hasten.errors import UserError

if TYPE_CHECKING:
    from hasten.data.parts import Candidate
    from hasten.translator import Drafter, Translator

_Search: TypeAlias = "Callable[[Sequence[str]], list[list[Candidate]]]"
_BATCH_TOKENS = 4096
Model = Annotated[str, typer.Option(help="Bundled name, run directory or Hugging Face hub id.", show_default=False)]


def translate(
    model: Model,
    beam: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Width of the beam; default: 1, or that of --nbest.")
    ] = None,
    nbest: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="So many for a line: line number, tab, score, tab, text."),
    ] = None,
    rescorer: Annotated[
        str | None, typer.Option(help="Model that chooses among the outputs of --beam.", show_default=False)
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Model, or its export to ONNX, whose outputs --model checks.", show_default=False),
    ] = None,
    decoding: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="A setting of the model's decoding; may be repeated.", show_default=False
        ),
    ] = None,
    shortlist: Annotated[
        Path | None,
        typer.Option(help="A table by `hasten shortlist`: what each line may be said in.", show_default=False),
    ] = None,
    scores: Annotated[bool, typer.Option("--scores", help="Write score, tab, text.")] = False,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, show_default=False, help="Padded source pieces times beam at once; default: 4096, for onnx 1024."
        ),
    ] = None,
    runtime: Annotated[
        Literal["torch", "onnx"],
        typer.Option(help="What computes. onnx: without PyTorch, a directory by `hasten export --to onnx`."),
    ] = "torch",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, max=MOST_THREADS, show_default=False, help="CPU threads; default: all.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(show_default=False, help="Write the state after every edit here, as JSON lines.")
    ] = None,
    confidence: Annotated[
        float, typer.Option(min=0, max=1, help="--trace marks tokens of a lower probability as unsure.")
    ] = 0.5,
    on_long: Annotated[
        Literal["split", "error"],
        typer.Option(help="A line longer than the model learnt: split it into parts, or stop with an error."),
    ] = "split",
    input: Annotated[Path | None, typer.Option(show_default=False, help="Read this file, not stdin.")] = None,
    output: Annotated[Path | None, typer.Option(show_default=False, help="Write this file, not stdout.")] = None,
) -> None:
    """Translate UTF-8 lines from stdin to stdout: a line a line, in order, each as soon as it is ready.

    Only a line feed ends a line; lines without text stay empty. A translation depends on its line alone. A score is
    the mean log probability of the tokens (with a beam on a CTC model: that of the whole text); higher is better.

    --beam on a model that says all at once is the number of outputs side by side (lengths, fertilities).

    --draft changes nothing about the translations: --model, an autoregressive one, reads the output of another, of any
    kind or in a directory of `hasten export --to onnx`, and keeps of it what it would have said itself. --trace then
    has an object for every pass.

    --shortlist says each line in the few hundred pieces that a table lists for it: the output layer is computed for
    these alone. Probabilities and scores are then over the list, as if no other piece existed.

    A line of --trace is an object: line, part (of a long line), iteration, kind (of edit), pieces, scores, unsure (the
    numbers of the pieces that are less probable than --confidence), done. A file name that ends in .txt gets the same
    to read: a line for every edit, what is unsure in [brackets].

    --runtime onnx translates with a model that `hasten export --to onnx` wrote, in ONNX Runtime and without PyTorch:
    greedily, with the same outputs.

    Example: hasten translate --model en-de-teacher --beam 4 < english.txt > german.txt
    """
    asked = _Asked(
        model=model,
        beam=beam,
        nbest=nbest,
        rescorer=rescorer,
        draft=draft,
        decoding=tuple(decoding or ()),
        shortlist=shortlist,
        batch_tokens=batch_tokens,
        runtime=runtime,
        device=device,
        threads=threads,
        trace=trace,
        on_long=on_long,
    )
    asked.check()
    check_distinct(read={"--input": input, "--shortlist": shortlist}, written={"--output": output, "--trace": trace})
    with ExitStack() as files:
        source = _stdin() if input is None else files.enter_context(_open(input, "rb"))
        search, translator, drafter = asked.search()
        search([])  # what the models cannot do is told while files are as they were
        target = _Sink("stdout", lambda: sys.stdout.buffer) if output is None else _Sink.at(output, files)
        log = None if trace is None else _Sink.at(trace, files)
        job = _Job(search, translator, drafter, nbest, scores, log, confidence)
        for chunk in read_chunks(source.fileno(), "stdin" if input is None else str(input)):
            for lines in filter(None, job.outputs(chunk)):
                target.write(lines)
        for sink in (target, log):
            if sink is not None:
                sink.write(())


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """How lines are to be translated, as it was typed."""

    model: str
    beam: int | None
    nbest: int | None
    rescorer: str | None
    draft: str | None
    decoding: tuple[str, ...]
    shortlist: Path | None
    batch_tokens: int | None
    runtime: Literal["torch", "onnx"]
    device: str
    threads: int | None
    trace: Path | None
    on_long: Literal["split", "error"]

    @property
    def width(self) -> int:
        """Outputs that are followed at once."""
        return self.beam or self.nbest or 1

    def check(self) -> None:
        """`UserError` for options that do not go together."""
        if self.nbest is not None and self.nbest > self.width:
            raise UserError(f"--nbest {self.nbest} is more than --beam {self.width}; widen the beam")
        if self.trace is not None and self.width > 1:
            raise UserError("--trace follows a single translation; leave out --beam and --nbest")
        if self.rescorer is not None and self.width == 1:
            raise UserError("--rescorer has one output to choose from; widen --beam")
        if self.draft is not None and self.width > 1:
            raise UserError("--draft is for one output without a beam; leave out --beam and --nbest")
        if self.draft is not None and self.shortlist is not None:
            raise UserError("--draft keeps what --model says by itself, which --shortlist would change; leave one out")
        only_torch = {
            "--draft": self.draft is not None,
            "--beam": self.width > 1,
            "--nbest": self.nbest is not None,
            "--decoding": bool(self.decoding),
            "--trace": self.trace is not None,
            "--device": self.device != "cpu",
        }
        found = [name for name, is_given in only_torch.items() if is_given]
        if self.runtime == "onnx" and found:
            raise UserError(f"--runtime onnx decodes greedily on a CPU: leave out {', '.join(found)}, or --runtime")

    def search(self) -> "tuple[_Search, Translator | None, Drafter | None]":
        """What translates lines; in PyTorch also the model and the one that drafts."""
        if self.runtime == "onnx":
            return self._in_onnx(), None, None
        translator = self._load(self.model, self.decoding, self.shortlist)
        judge = None if self.rescorer is None else self._load(self.rescorer)
        draft = None if self.draft is None else self._drafter(self.draft)
        search = partial(
            translator.candidates,
            beam=self.width,
            n_best=self.nbest or 1,
            rescorer=judge,
            draft=draft,
            batch_tokens=self.batch_tokens or _BATCH_TOKENS,
            on_long=self.on_long,
        )
        return search, translator, draft

    def _in_onnx(self) -> "_Search":
        from hasten.runtime.translator import BATCH_TOKENS, load

        translator = load(self.model, threads=self.threads or 0, shortlist=self.shortlist)
        return partial(translator.candidates, batch_tokens=self.batch_tokens or BATCH_TOKENS, on_long=self.on_long)

    def _load(self, model: str, decoding: Sequence[str] = (), shortlist: Path | None = None) -> "Translator":
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)
        from hasten.translator import load

        return load(model, self.device, decoding=decoding, shortlist=shortlist)

    def _drafter(self, draft: str) -> "Drafter":
        from hasten.translator import drafter

        return drafter(draft, self.device)


@dataclass(frozen=True)
class _Sink:
    """Where lines go, at once; it is opened when the first are there, so that no mistake before them empties a file."""

    name: str
    opened: Callable[[], BinaryIO]

    @classmethod
    def at(cls, path: Path, files: ExitStack) -> "_Sink":
        """A file, unbuffered: what could not be written is not tried again on closing."""
        check_writable(path)
        return cls(str(path), lambda: files.enter_context(_open(path, "wb")))

    @cached_property
    def file(self) -> BinaryIO:
        """What is written."""
        return self.opened()

    def write(self, lines: Iterable[str]) -> None:
        """Write lines and flush; a reader that has gone is `BrokenPipeError`, all else that fails `UserError`."""
        rest, file = memoryview("".join(line + "\n" for line in lines).encode("utf-8")), self.file
        try:
            while rest:
                rest = rest[file.write(rest) :]
            file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(f"cannot write {self.name}: {error.strerror}") from error


@dataclass(frozen=True)
class _Job:
    """One run of the verb."""

    search: "_Search"
    translator: "Translator | None"
    draft: "Drafter | None"
    nbest: int | None
    scores: bool
    log: _Sink | None
    confidence: float

    def outputs(self, chunk: Chunk) -> Iterator[list[str]]:
        """Output lines; a long line that is to be refused raises after the lines before it."""
        from hasten.data.parts import answered

        return answered(chunk.first, chunk.lines, lambda lines: self._results(chunk.first, lines))

    def _results(self, first: int, lines: Sequence[str]) -> list[str]:
        found = self.search(lines)
        if self.log is not None:
            for i, line in enumerate(lines):
                self.log.write(self._trace(first + i, line))
        return [self._format(first + i, candidate) for i, line in enumerate(found) for candidate in line]

    def _format(self, number: int, candidate: "Candidate") -> str:
        columns = [str(number)] if self.nbest else []
        columns += [f"{candidate.score:.6f}"] if self.nbest or self.scores else []
        return "\t".join([*columns, candidate.text])

    def _trace(self, number: int, line: str) -> Iterator[str]:
        assert self.translator is not None
        pieces = self.translator.tokenizer.pieces()
        for frame in self.translator.trace(line, draft=self.draft):
            for record in frame.records(pieces, self.confidence):
                yield self._traced({"line": number, **record})

    def _traced(self, record: dict[str, Any]) -> str:
        """A record as JSON; in a text file as something to read."""
        assert self.log is not None
        if not self.log.name.endswith(".txt"):
            return json.dumps(record, ensure_ascii=False)
        unsure = set(record["unsure"])
        pieces = [f"[{piece}]" if i in unsure else piece for i, piece in enumerate(record["pieces"])]
        place = f"{record['line']}.{record['part']}" if record["part"] else str(record["line"])
        return f"{place}\t{record['iteration']} {record['kind']}\t{' '.join(pieces)}"


def _stdin() -> BinaryIO:
    if sys.stdin is None:
        raise UserError("stdin is closed; give --input FILE")
    return sys.stdin.buffer


def _open(path: Path, mode: Literal["rb", "wb"]) -> FileIO:
    try:
        return path.open(mode, buffering=0)
    except OSError as error:
        raise UserError(f"cannot open {path}: {error.strerror}") from error
