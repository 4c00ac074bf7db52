"""A process that answers: JSON lines to its stdin, JSON lines from its stdout."""

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hasten.errors import UserError

Row = dict[str, Any]


class EndedEarly(UserError):
    """The process is gone, with a request unanswered."""


class Process:
    """One worker, in an environment that sets its threads before any library starts. `label` names it in errors."""

    def __init__(self, label: str, command: Sequence[str], threads: int):
        self.label = label
        settings = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **settings},
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            raise UserError(f"{label}: cannot start {command[0]}: {error.strerror}") from error

    def ask(self, request: Row) -> Row:
        """The answer to a request; `EndedEarly` where the process ends instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EndedEarly(f"{self.label} ended early (status {self._process.wait()}); see above")
        return json.loads(line)

    def close(self) -> None:
        """Let the process end."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()
