"""Files that options name."""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from hasten.errors import UserError


def check_distinct(read: Mapping[str, Path | None], written: Mapping[str, Path | None]) -> None:
    """`UserError` where an option names a file to be written that another one reads or writes."""
    for (one, path), (other, another) in combinations([*written.items(), *read.items()], 2):
        if one in written and path is not None and another is not None and _same(path, another):
            raise UserError(f"{one} and {other} both name {path}; give two different files")


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
