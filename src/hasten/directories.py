"""Directories that are made before the work whose results they are for."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hasten.errors import UserError


@contextmanager
def made(directory: Path, complaint: str = "--out: cannot create") -> Iterator[None]:
    """The directory is there meanwhile; what was not there before and is still empty at the end is gone again.

    `UserError`, which begins with the complaint, where it cannot be.
    """
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        for path in created:
            with suppress(OSError):
                path.rmdir()
        raise UserError(f"{complaint} {directory}: {error.strerror or error}") from error
    try:
        yield
    finally:
        with suppress(OSError):  # those that are in use
            for path in created:
                path.rmdir()
