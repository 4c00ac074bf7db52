"""The command line: one small file a verb. Heavy imports wait inside the verbs, so that help answers at once."""

import os
import sys
from typing import Annotated, NoReturn

import typer
from typer.exceptions import Abort, TyperException

from hasten.cli import (
    align,
    bench,
    data,
    demo,
    distill,
    evaluate,
    export,
    importing,
    share,
    shortlist,
    show,
    train,
    translate,
)
from hasten.errors import UserError

app = typer.Typer(
    name="hasten",
    help="Fast Transformers: prepare text, train, distil, translate, and measure what each way buys.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("demo", short_help="Translate some sentences with the models that ship.")(demo.demo)
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("distill", short_help="Let a teacher translate the text a student learns from.")(distill.distill)
app.command("align", short_help="Count the target pieces that come from each source piece.")(align.align)
app.command("shortlist", short_help="List the pieces that each sentence may be said in.")(shortlist.shortlist)
app.command("evaluate", short_help="Score a model: BLEU, chrF, length, repetition.")(evaluate.evaluate)
app.command("translate", short_help="Translate lines from stdin to stdout.")(translate.translate)
app.add_typer(bench.app, name="bench")
app.add_typer(share.app, name="share")
app.command("show", short_help="Draw a sparse attention pattern.")(show.show)
app.command("export", short_help="Write a model for another engine, certified.")(export.export)
app.add_typer(importing.app, name="import")


_NO_MEMORY = "this machine has too little memory for that; use smaller batches, a smaller model or less text"
_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
)  # as torch says it, which has no type for it


def _print_version(wanted: bool) -> None:
    if wanted:
        import hasten

        typer.echo(f"hasten {hasten.__version__}")
        raise typer.Exit


@app.callback()
def _group(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a verb: what the user or the machine has to mend is one line on stderr and exit 2, an interruption 130."""
    _fill_closed_streams()
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        if error.format_message().startswith("Usage:"):  # a group without a verb: its help
            print(error.format_message(), file=sys.stderr)
            sys.exit(2)
        _fail(error.format_message() or "no command given; see hasten --help")
    except UserError as error:
        _fail(str(error))
    except BrokenPipeError:
        _drop_stdout()
        sys.exit(1)
    except OSError as error:  # a full disk, a missing permission, ...: nothing that a traceback would explain
        _drop_stdout()
        _fail(": ".join(str(part) for part in (error.filename, error.strerror or str(error)) if part))
    except MemoryError:
        _fail(_NO_MEMORY)
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _OF_MEMORY):
            raise
        _fail(_NO_MEMORY)
    except (KeyboardInterrupt, Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _fill_closed_streams() -> None:
    """Refuse a closed stdout; let nothing be said where stderr is closed.

    The number of a closed stream goes to the next file that is opened, which would then receive messages.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (as long as the process)
    if sys.stdout is None:
        _fail("stdout is closed; results go there, send them to a file or to /dev/null")


def _drop_stdout() -> None:
    """What is still buffered goes nowhere, so that Python does not fail again when it leaves."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _fail(message: str) -> NoReturn:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
