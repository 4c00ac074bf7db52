"""hasten translate: lines in, lines out."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import typer

from hasten.cli.files import check_distinct, check_writable
from hasten.cli.limits import MOST_THREADS
from hasten.data.lines import Chunk, read_chunks
from hasten.errors import UserError

if TYPE_CHECKING:
    from hasten.data.parts import Candidate
    from hasten.translator import Translator

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
        typer.Option(help="Model whose outputs --model checks: its own, in fewer passes.", show_default=False),
    ] = None,
    decoding: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="A setting of the model's decoding; may be repeated.", show_default=False
        ),
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

    --draft changes nothing about the translations: --model, an autoregressive one, reads the output of another, which
    may be of any kind, and keeps of it what it would have said itself. --trace then has an object for every pass.

    A line of --trace is an object: line, part (of a long line), iteration, kind (of edit), pieces, scores, unsure (the
    numbers of the pieces that are less probable than --confidence), done. A file name that ends in .txt gets the same
    to read: a line for every edit, what is unsure in [brackets].

    --runtime onnx translates with a model that `hasten export --to onnx` wrote, in ONNX Runtime and without PyTorch:
    greedily, with the same outputs.

    Example: hasten translate --model en-de-teacher --beam 4 < english.txt > german.txt
    """
    width = beam or nbest or 1
    if nbest is not None and nbest > width:
        raise UserError(f"--nbest {nbest} is more than --beam {width}; widen the beam")
    if trace is not None and width > 1:
        raise UserError("--trace follows a single translation; leave out --beam and --nbest")
    if rescorer is not None and width == 1:
        raise UserError("--rescorer has one output to choose from; widen --beam")
    if draft is not None and width > 1:
        raise UserError("--draft is for one output without a beam; leave out --beam and --nbest")
    if runtime == "onnx":
        _only_torch(
            {
                "--draft": draft is not None,
                "--beam": width > 1,
                "--nbest": nbest is not None,
                "--decoding": bool(decoding),
                "--trace": trace is not None,
                "--device": device != "cpu",
            }
        )
    check_distinct(read={"--input": input}, written={"--output": output, "--trace": trace})
    with ExitStack() as files:
        source = _stdin() if input is None else files.enter_context(_open(input, "rb"))
        if runtime == "onnx":
            translator, drafter, search = None, None, _onnx_search(model, threads, batch_tokens, on_long)
        else:
            translator = _load(model, device, threads, decoding or [])
            judge, drafter = (None if one is None else _load(one, device, threads, []) for one in (rescorer, draft))
            search = partial(
                translator.candidates,
                beam=width,
                n_best=nbest or 1,
                rescorer=judge,
                draft=drafter,
                batch_tokens=batch_tokens or _BATCH_TOKENS,
                on_long=on_long,
            )
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

    search: "Callable[[Sequence[str]], list[list[Candidate]]]"
    translator: "Translator | None"
    draft: "Translator | None"
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


def _only_torch(given: dict[str, bool]) -> None:
    """Refuse options that --runtime onnx has no use for."""
    if found := [name for name, is_given in given.items() if is_given]:
        raise UserError(f"--runtime onnx decodes greedily on a CPU: leave out {', '.join(found)}, or --runtime")


def _onnx_search(
    model: str, threads: int | None, batch_tokens: int | None, on_long: Literal["split", "error"]
) -> "Callable[[Sequence[str]], list[list[Candidate]]]":
    from hasten.runtime.translator import BATCH_TOKENS, load

    translator = load(model, threads=threads or 0)
    return partial(translator.candidates, batch_tokens=batch_tokens or BATCH_TOKENS, on_long=on_long)


def _load(model: str, device: str, threads: int | None, decoding: Sequence[str]) -> "Translator":
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    from hasten.translator import load

    return load(model, device, decoding=decoding)


def _stdin() -> BinaryIO:
    if sys.stdin is None:
        raise UserError("stdin is closed; give --input FILE")
    return sys.stdin.buffer


def _open(path: Path, mode: Literal["rb", "wb"]) -> FileIO:
    try:
        return path.open(mode, buffering=0)
    except OSError as error:
        raise UserError(f"cannot open {path}: {error.strerror}") from error
