"""Lines from a stream as they come: one at a time from a person, many at once from a file."""

import codecs
import os
import select
from collections.abc import Iterator
from typing import NamedTuple

from hasten.errors import UserError

_READ_BYTES = 1 << 16


class Chunk(NamedTuple):
    """Lines that were there without waiting; the first one is number `first`, counted from 1."""

    first: int
    lines: list[str]


def read_chunks(descriptor: int, name: str, most: int = 1024) -> Iterator[Chunk]:
    """Lines of a file descriptor: waits for one, takes those that are there already, at most `most` at once.

    Only LF ends a line; a CR right before it goes too; the last line may lack its end. A byte order mark at the
    beginning is no text. A line that is not UTF-8 raises
    `UserError` with its number, after the lines before it were given.
    """
    number = 1
    for lines in _byte_chunks(descriptor, name, most):
        if number == 1:
            lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
        texts = []
        for line in lines:
            try:
                texts.append(line.removesuffix(b"\r").decode("utf-8"))
            except UnicodeDecodeError as error:
                if texts:
                    yield Chunk(number, texts)
                raise UserError(
                    f"line {number + len(texts)} of {name} is not valid UTF-8 (byte {error.start + 1}: "
                    f"0x{line[error.start]:02x}); convert the text first, for example with iconv -t utf-8"
                ) from error
        yield Chunk(number, texts)
        number += len(texts)


def _byte_chunks(descriptor: int, name: str, most: int) -> Iterator[list[bytes]]:
    lines: list[bytes] = []
    rest: list[bytes] = []  # the line under way, in pieces
    while data := _read(descriptor, name):
        *ended, last = data.split(b"\n")
        if ended:
            lines += [b"".join((*rest, ended[0])), *ended[1:]]
            rest = []
        rest.append(last)
        if lines and (len(lines) >= most or not _more_at_once(descriptor)):
            yield from _in_portions(lines, most)
            lines = []
    if unfinished := b"".join(rest):
        lines.append(unfinished)
    yield from _in_portions(lines, most)


def _read(descriptor: int, name: str) -> bytes:
    try:
        return os.read(descriptor, _READ_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}") from error


def _in_portions(lines: list[bytes], most: int) -> Iterator[list[bytes]]:
    for start in range(0, len(lines), most):
        yield lines[start : start + most]


def _more_at_once(descriptor: int) -> bool:
    """Whether a read would not wait."""
    try:
        return bool(select.select([descriptor], [], [], 0)[0])
    except OSError:  # Windows selects on sockets only
        return False
