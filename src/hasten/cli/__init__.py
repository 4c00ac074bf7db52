"""The command line: one small file a verb. Heavy imports wait inside the verbs, so that help answers at once."""

import sys
from typing import NoReturn

import typer
from typer.exceptions import Abort, TyperException

from hasten.cli import bench, data, demo, distill, evaluate, export, train, translate
from hasten.errors import UserError

app = typer.Typer(
    name="hasten",
    help="Fast Transformers: prepare text, train, distil, translate, and measure what each way buys.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("distill")(distill.distill)
app.command("evaluate")(evaluate.evaluate)
app.command("translate")(translate.translate)
app.add_typer(bench.app, name="bench")
app.command("export")(export.export)


def main() -> None:
    """Run a verb: a user's mistake is one line on stderr and exit 2, an interruption exit 130."""
    try:
        code = app(standalone_mode=False)
    except TyperException as error:
        _fail(error.format_message() or "no command given; see hasten --help")
    except UserError as error:
        _fail(str(error))
    except (KeyboardInterrupt, Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
