"""Files that options name."""

import os
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from hasten.errors import UserError


def check_distinct(read: Mapping[str, Path | None], written: Mapping[str, Path | None]) -> None:
    """`UserError` where an option names a file to be written that another one reads or writes."""
    for (one, path), (other, another) in combinations([*written.items(), *read.items()], 2):
        if one in written and path is not None and another is not None and _same(path, another):
            raise UserError(f"{one} and {other} both name {path}; give two different files")


def check_writable(path: Path) -> None:
    """`UserError` where a file cannot be written; it stays as it is, and one that is not there is not made."""
    there, folder = path.exists(), path.parent
    reason = ""
    if path.is_dir():
        reason = "Is a directory"
    elif not there and not folder.is_dir():
        reason = "Not a directory" if folder.exists() else "No such file or directory"
    elif not os.access(path if there else folder, os.W_OK):
        reason = "Permission denied"
    if reason:
        raise UserError(f"cannot open {path}: {reason}")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8; `UserError` names the file where that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other) and not path.is_char_device()
    except OSError:  # one is not there yet
        return path.absolute() == other.absolute()
