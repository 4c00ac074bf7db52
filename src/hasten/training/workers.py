"""An ordered map over processes that survives nothing silently: a dead worker is an error, a dead parent ends all."""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from hasten.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers(Generic[Item, Result]):
    """Processes that each call `make()` once and then apply what it returned to items.

    `make`, items and results must be picklable. Use it in a `with` statement: leaving it ends the processes, whatever
    they are doing.
    """

    def __init__(self, make: Callable[[], Callable[[Item], Result]], n_workers: int):
        context = get_context("spawn")
        self._processes = []
        self._connections: list[Connection] = []
        for _ in range(n_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def __enter__(self) -> "Workers[Item, Result]":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process, ours in zip(self._processes, self._connections, strict=True):
            process.join()
            ours.close()

    def map(self, items: Sequence[Item]) -> Iterator[Result]:
        """Results in the order of the items, each as soon as it and those before it are there.

        A `UserError` of a worker is raised here; so is the end of a worker, as a `UserError`.
        """
        waiting = iter(enumerate(items))
        at_work = {ours: number for ours in self._connections if (number := self._give(ours, waiting)) is not None}
        results: dict[int, Result] = {}
        for wanted in range(len(items)):
            while wanted not in results:
                for ours in connection.wait(list(at_work)):
                    assert isinstance(ours, Connection)
                    results[at_work.pop(ours)] = self._take(ours)
                    if (number := self._give(ours, waiting)) is not None:
                        at_work[ours] = number
            yield results.pop(wanted)

    def _give(self, ours: Connection, waiting: Iterator[tuple[int, Item]]) -> int | None:
        number, item = next(waiting, (None, None))
        if number is not None:
            try:
                ours.send(item)
            except OSError as error:
                raise self._death(ours) from error
        return number

    def _take(self, ours: Connection) -> Result:
        try:
            result, error = ours.recv()
        except (EOFError, OSError) as lost:
            raise self._death(ours) from lost
        if isinstance(error, UserError):
            raise error
        if error is not None:
            raise RuntimeError(f"a worker process failed:\n{error}")
        return result

    def _death(self, ours: Connection) -> UserError:
        process = self._processes[self._connections.index(ours)]
        process.join(timeout=5)
        return UserError(
            f"a worker process ended unexpectedly (exit code {process.exitcode}; -9 often means: out of memory, "
            "use fewer --workers or a smaller --batch-tokens); the same command goes on where this one stopped"
        )


def _serve(theirs: Connection, make: Callable[[], Callable[[Any], Any]]) -> None:
    """The life of a worker process; Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    work: Callable[[Any], Any] | None = None
    while True:
        try:
            item = theirs.recv()
        except EOFError:
            return
        result, failure = None, None
        try:
            work = work or make()
            result = work(item)
        except UserError as error:
            failure = UserError(str(error))
        except Exception:  # whatever it was, the parent has to hear of it
            failure = traceback.format_exc()
        theirs.send((result, failure))


def _leave_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def usable_cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
