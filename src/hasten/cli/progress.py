"""Progress of a training run on stderr: a bar on a terminal, a line now and then elsewhere."""

import signal
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hasten.errors import MissingExtra

if TYPE_CHECKING:
    from hasten.training.loop import Report

_SECONDS_BETWEEN_LINES = 30.0


class TrainingProgress:
    """Shows reports, stores metric rows, and turns the first Ctrl-C into a request to save and stop."""

    def __init__(self, directory: Path, tensorboard: bool):
        self.directory = directory
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.completed:>6.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=None, status="")
        self._writer = _event_writer(directory) if tensorboard else None
        self._last_line = time.monotonic()
        self._stop = False
        self._previous: Any = None

    def __enter__(self) -> "TrainingProgress":
        self._previous = signal.signal(signal.SIGINT, self._interrupt)
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        signal.signal(signal.SIGINT, self._previous)
        if self._writer is not None:
            self._writer.close()

    def stop_requested(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._stop

    def observe(self, report: "Report") -> None:
        """One step is done."""
        status = f"loss {report.loss:.3f}  {report.tokens_per_second:,.0f} tokens/s"
        self._bar.update(self._task, completed=report.step, total=report.steps, status=status)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = time.strftime("%H:%M:%S", time.gmtime(report.seconds_left))
            print(f"step {report.step}/{report.steps}  {status}  {left} left", file=sys.stderr, flush=True)

    def announce(self, row: dict[str, Any]) -> None:
        """A row of metrics: to the file, to stderr, to TensorBoard."""
        from hasten.training.loop import append_metrics

        append_metrics(self.directory, row)
        shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        self._console.print(shown, highlight=False, soft_wrap=True)
        if self._writer is not None:
            for key, value in row.items():
                if isinstance(value, int | float) and key != "step":
                    self._writer.add_scalar(key, value, row.get("step", 0))

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        if self._stop:
            raise KeyboardInterrupt
        self._stop = True
        self._console.print("stopping after this step; Ctrl-C again to leave without saving", highlight=False)


def _event_writer(directory: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra("tensorboard", "tensorboard") from error
    return SummaryWriter(str(directory / "tensorboard"))
