"""Progress of a training run on stderr: a bar on a terminal, a line now and then elsewhere."""

import signal
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hasten.errors import MissingExtra

if TYPE_CHECKING:
    from hasten.training.loop import Report

_SECONDS_BETWEEN_LINES = 30.0


class TrainingProgress:
    """Shows reports and rows, and turns the first Ctrl-C or a SIGTERM into a request to save and stop.

    `events` is the directory for TensorBoard's files, if they are wanted; `quiet` shows nothing.
    """

    def __init__(self, events: Path | None, *, quiet: bool = False):
        self._console = Console(stderr=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("{task.completed:>6.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=1, status="")
        self._events, self._writer = events, None
        self._last_line = time.monotonic()
        self._stop = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "TrainingProgress":
        self._previous = {number: signal.signal(number, self._asked) for number in (signal.SIGINT, signal.SIGTERM)}
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._writer is not None:
            self._writer.close()

    def stop_requested(self) -> bool:
        """Whether somebody asked the run to save and stop."""
        return self._stop

    def observe(self, report: "Report") -> None:
        """One step is done."""
        status = f"loss {report.loss:.3f}  {report.tokens_per_second:,.0f} tokens/s  {clock(report.seconds_left)} left"
        self._bar.update(self._task, completed=report.step, total=report.steps, status=status)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(f"step {report.step}/{report.steps}  {status}", file=sys.stderr, flush=True)

    def announce(self, row: dict[str, Any]) -> None:
        """A row of metrics: to stderr, and its numbers to TensorBoard."""
        shown = "  ".join(f"{k} {readable(v)}" for k, v in row.items())
        self._console.print(shown, highlight=False, markup=False, soft_wrap=True)
        if self._events is None or "step" not in row:
            return
        if self._writer is None:
            self._writer = require_tensorboard()(str(self._events))
        for key, value in row.items():
            if isinstance(value, int | float) and key != "step":
                self._writer.add_scalar(key, value, row["step"])

    def _asked(self, number: int, _frame: FrameType | None) -> None:
        # A launcher answers Ctrl-C by SIGTERM to processes that have got the Ctrl-C, too: SIGTERM never hurries.
        if self._stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self._stop:
            self._stop = True
            self._console.print("stopping after this step; Ctrl-C again to leave without saving", highlight=False)


def readable(value: Any) -> str:
    """A value for people: four digits, but whole thousands without an exponent."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds; hours go beyond 24."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def require_tensorboard() -> Any:
    """TensorBoard's writer; `MissingExtra` where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra("tensorboard", "tensorboard") from error
    return SummaryWriter
