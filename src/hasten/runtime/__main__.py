"""`python -m hasten.runtime DIR`: lines in, lines out, without PyTorch and without the command line's packages."""

import argparse
import os
import sys
from collections.abc import Sequence

from hasten.data.lines import read_chunks
from hasten.data.parts import answered
from hasten.errors import UserError
from hasten.runtime.translator import BATCH_TOKENS, load


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(prog="python -m hasten.runtime", description="Translate lines of stdin to stdout.")
    parser.add_argument("directory", help="written by: hasten export --to onnx")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; default: as ONNX Runtime thinks best")
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="padded source pieces at once")
    parser.add_argument("--on-long", choices=("split", "error"), default="split", help="what becomes of long lines")
    parser.add_argument("--shortlist", help="a table by hasten shortlist: the pieces that each sentence may be said in")
    parser.add_argument("--scores", action="store_true", help="write score, tab, text")
    return parser.parse_args(given)


def run(given: Sequence[str] | None = None) -> None:
    """Translate stdin to stdout, each line as soon as it is ready."""
    wanted = arguments(given)
    if sys.stdin is None:
        raise UserError("stdin is closed; give lines to translate")
    if sys.stdout is None:
        raise UserError("stdout is closed; translations go there, send them to a file or to /dev/null")
    translator = load(wanted.directory, threads=wanted.threads, shortlist=wanted.shortlist)
    translator.candidates([], batch_tokens=wanted.batch_tokens)  # what it cannot do is told before it waits for lines

    def said(lines: Sequence[str]) -> str:
        found = translator.candidates(lines, batch_tokens=wanted.batch_tokens, on_long=wanted.on_long)
        return "".join((f"{one.score:.6f}\t" if wanted.scores else "") + one.text + "\n" for [one] in found)

    for chunk in read_chunks(sys.stdin.fileno(), "stdin"):
        for text in answered(chunk.first, chunk.lines, said):
            _write(text.encode("utf-8"))


def _write(data: bytes) -> None:
    """Write and flush; a reader that has gone is `BrokenPipeError`, all else that fails `UserError`."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what could not be written is not tried again at the end
        raise UserError(f"cannot write stdout: {error.strerror}") from error


def main() -> None:
    """`run`; a mistake is one line on stderr and exit 2."""
    try:
        run()
    except UserError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except MemoryError:
        print("error: this machine has too little memory for that; use smaller --batch-tokens", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
