"""Directories that are made before the work whose results they are for."""

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hasten.errors import UserError

_GROWING = ".growing"
"""Where new files are kept until all are there; what kills a process leaves it behind."""


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


def replaceable(directory: Path, what: str, own: Collection[str], others: Collection[str], *, force: bool) -> list[str]:
    """The files of `what` there, to be replaced: with `force` alone, and where there is nothing else.

    own: names of files of which it has one at least. others: names that it may have, too. `UserError` for a file, and
    for a directory that holds anything else.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file; give a directory that --out may write")
    there = list(directory.iterdir()) if directory.is_dir() else []
    found = sorted(path.name for path in there if path.name != _GROWING)
    if found and not force:
        raise UserError(f"{directory} is not empty; choose another --out or give --force")
    known = {*own, *others}
    if found and (
        not known.issuperset(found) or not set(own) & set(found) or any((directory / n).is_dir() for n in found)
    ):
        raise UserError(f"{directory} holds something else than {what}; it is not overwritten")
    return found


@contextmanager
def renewed(directory: Path, old: Sequence[str], *, last: str) -> Iterator[Path]:
    """A folder for new files, which take the place of the `old` ones of the directory when all are written.

    Where anything fails before that, the directory is what it was; one that was not there is gone again. The file named
    `last`, without which the others are of no use, leaves first and comes last.
    """
    growing = directory / _GROWING
    with made(directory, "cannot write"):
        try:
            shutil.rmtree(growing, ignore_errors=True)
            growing.mkdir()
            yield growing
            for name in sorted(old, key=lambda name: name != last):
                (directory / name).unlink()
            for path in sorted(growing.iterdir(), key=lambda path: path.name == last):
                os.replace(path, directory / path.name)
        finally:
            shutil.rmtree(growing, ignore_errors=True)
