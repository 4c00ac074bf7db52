"""`hasten distill`: let a teacher translate the training text."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hasten.cli.limits import MOST_THREADS
from hasten.errors import UserError

if TYPE_CHECKING:
    from hasten.training.distill import DistillProgress
    from hasten.training.teachers import Teacher

_SECONDS_BETWEEN_LINES = 30.0
_MOST_WORKERS = 8


def distill(
    src: Annotated[Path, typer.Option(help="Source lines to translate, UTF-8, may be .gz.", show_default=False)],
    out: Annotated[Path, typer.Option(help="File to write, a line for every source line.", show_default=False)],
    teacher: Annotated[
        str | None,
        typer.Option(help="A bundled model, a run directory, a hub id or ctranslate2:DIR.", show_default=False),
    ] = None,
    teacher_command: Annotated[
        str | None,
        typer.Option(help="Instead: a shell command that writes a translation for every line.", show_default=False),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="With --teacher-command: count pieces of this model, not words.", show_default=False),
    ] = None,
    beam: Annotated[int | None, typer.Option(min=1, help="Width of the search; 4.", show_default=False)] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Padded source pieces of a batch; 4096.", show_default=False)
    ] = None,
    max_ratio: Annotated[float, typer.Option(help="Leave out pairs whose lengths differ by more than this.")] = 3.0,
    max_tokens: Annotated[int, typer.Option(help="Leave out pairs with a side of more pieces.")] = 250,
    keep_copies: Annotated[bool, typer.Option("--keep-copies", help="Keep those that equal their source.")] = False,
    limit: Annotated[int | None, typer.Option(help="Only the first lines.", show_default=False)] = None,
    shard_lines: Annotated[int, typer.Option(help="Lines saved at a time.")] = 1000,
    device: Annotated[str | None, typer.Option(help="Where the teacher computes; cpu.", show_default=False)] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; by default the CPUs, at most 8; 1 on other devices.", show_default=False),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=MOST_THREADS, help="CPU threads of each process; 1.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace --out and unfinished work on it.")] = False,
) -> None:
    """Translate training sources by a teacher, line for line; lines of pairs that a filter leaves out are empty.

    ctranslate2:DIR is a directory of CTranslate2: one by `hasten export`, or a conversion of an OPUS-MT model with its
    source.spm and target.spm beside it.

    After an interruption the same command goes on where it stopped. The counts also go to OUT.report.json.

    Example: hasten distill --teacher en-de-teacher --src data/en-de/train.en --out runs/train.distilled.de
    """
    from hasten.training.distill import DistillSpec
    from hasten.training.distill import distill as run

    chosen = _teacher(
        teacher, teacher_command, tokenizer, beam=beam, batch_tokens=batch_tokens, device=device, threads=threads
    )
    spec = DistillSpec(
        max_ratio=max_ratio, max_tokens=max_tokens, keep_copies=keep_copies, limit=limit, shard_lines=shard_lines
    )
    with _Bar() as bar:
        try:
            report = run(
                chosen,
                src,
                out,
                spec,
                workers=workers or (_cpus() if teacher is not None and device in (None, "cpu") else 1),
                force=force,
                observe=bar.observe,
            )
        except KeyboardInterrupt:
            typer.echo(f"stopped after {bar.done} lines; the same command (without --force) goes on", err=True)
            raise typer.Exit(130) from None
    _print_summary(report)


def _teacher(
    name: str | None, command: str | None, tokenizer: str | None, *, beam: int | None, batch_tokens: int | None,
    device: str | None, threads: int | None,
) -> "Teacher":  # fmt: skip
    from hasten.training.ctranslate2_teacher import PREFIX, CTranslate2Teacher
    from hasten.training.teachers import CommandTeacher, ModelTeacher

    if (name is None) == (command is None):
        raise UserError("give one teacher: either --teacher or --teacher-command")
    if name is not None:
        if tokenizer is not None:
            raise UserError("--tokenizer goes with --teacher-command; a --teacher brings its own")
        kind = CTranslate2Teacher if name.startswith(PREFIX) else ModelTeacher
        return kind(name, beam or 4, batch_tokens or 4096, device or "cpu", threads or 1)
    assert command is not None
    foreign = {"--beam": beam, "--batch-tokens": batch_tokens, "--device": device, "--threads": threads}
    for option, value in foreign.items():
        if value is not None:
            raise UserError(f"{option} goes with --teacher; tell a --teacher-command by its own options")
    return CommandTeacher(command, tokenizer)


def _cpus() -> int:
    from hasten.training.workers import usable_cpus

    return min(_MOST_WORKERS, usable_cpus())


def _print_summary(report: dict[str, Any]) -> None:
    counts, lines = report["counts"], report["source"]["lines"]
    kept = counts.get("kept", 0)
    typer.echo(f"{report['out']}: {lines:,} lines in {report['seconds']:,.0f} s")
    for name, count in counts.items():
        typer.echo(f"{count:>10,}  {count / lines:>6.1%}  {name}")
    if kept < lines / 2:
        typer.echo(f"warning: the filters left only {kept} of {lines} translations; is the teacher good?", err=True)


class _Bar:
    """Lines done on stderr: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
        self._plain = not console.is_terminal
        self._bar = Progress(*columns, console=console, disable=self._plain)
        self._task = self._bar.add_task("distill", total=None, rate="")
        self._last = time.monotonic()
        self._begun = False
        self.done = 0

    def __enter__(self) -> "_Bar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def observe(self, progress: "DistillProgress") -> None:
        """Work begins, or a shard is saved."""
        if not self._begun and progress.done:
            self._bar.console.print(f"going on after line {progress.done} of {progress.lines}", highlight=False)
        self._begun, self.done = True, progress.done
        rate = f"{progress.lines_per_second:,.1f} lines/s"
        self._bar.update(self._task, completed=progress.done, total=progress.lines, rate=rate)
        if self._plain and time.monotonic() - self._last > _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            left = time.strftime("%H:%M:%S", time.gmtime(progress.seconds_left))
            print(f"line {progress.done}/{progress.lines}  {rate}  {left} left", file=sys.stderr, flush=True)
