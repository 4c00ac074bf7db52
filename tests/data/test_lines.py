import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.data.lines import Chunk, read_chunks
from hasten.errors import UserError


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for end in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(end)


def lines_of(data: bytes, most: int = 1024) -> list[str]:
    reading, writing = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(writing, data), os.close(writing)))
    writer.start()
    chunks = list(read_chunks(reading, "stdin", most))
    writer.join()
    os.close(reading)
    assert [chunk.first for chunk in chunks] == [1 + sum(len(c.lines) for c in chunks[:i]) for i in range(len(chunks))]
    assert all(0 < len(chunk.lines) <= most for chunk in chunks)
    return [line for chunk in chunks for line in chunk.lines]


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\n"), max_size=9), max_size=9))
@settings(max_examples=100, deadline=None)
def test_every_line_comes_once_and_in_order(lines: list[str]):
    data = "".join(line + "\n" for line in lines).encode()
    assert lines_of(data, most=3) == [line.removesuffix("\r") for line in lines]


def test_only_a_line_feed_ends_a_line():
    text = "a\rb\vc\fd\x1ce\x85f\u2028g\u2029h\x00i"
    assert lines_of(f"{text}\nsecond\n".encode()) == [text, "second"]


def test_a_carriage_return_before_the_line_feed_goes():
    assert lines_of(b"a\r\n\r\nb\r\r\nc\r") == ["a", "", "b\r", "c"]


def test_the_last_line_needs_no_end():
    assert lines_of(b"a\nb") == ["a", "b"]
    assert lines_of(b"a\n\n") == ["a", ""]
    assert lines_of(b"") == []


def test_lines_and_characters_survive_the_cuts_of_reading(tmp_path: Path):
    lines = ["ö" * 70_000, "", "😀" * 50_000, "x"]
    path = tmp_path / "text"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    with path.open("rb") as file:
        assert [line for chunk in read_chunks(file.fileno(), "text") for line in chunk.lines] == lines


def test_a_line_is_given_before_the_next_one_is_written(pipe: tuple[int, int]):
    reading, writing = pipe
    chunks = read_chunks(reading, "stdin")
    for number, text in enumerate(["one", "two", "three"], start=1):
        os.write(writing, text.encode() + b"\n")
        assert next(chunks) == Chunk(number, [text])
    os.write(writing, b"begun ")
    os.write(writing, b"and ended\nbegun")
    assert next(chunks) == Chunk(4, ["begun and ended"])
    os.close(writing)
    assert list(chunks) == [Chunk(5, ["begun"])]


def test_lines_that_wait_are_taken_together(pipe: tuple[int, int]):
    reading, writing = pipe
    os.write(writing, b"a\n" * 500)
    assert [len(chunk.lines) for chunk in [next(read_chunks(reading, "stdin"))]] == [500]


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
def test_what_is_no_utf8_is_named_after_the_lines_before_it(bad: bytes, pipe: tuple[int, int]):
    reading, writing = pipe
    os.write(writing, b"a\nb\nok" + bad + b"\nd\n")
    os.close(writing)
    chunks = read_chunks(reading, "stdin")
    assert next(chunks) == Chunk(1, ["a", "b"])
    with pytest.raises(UserError, match=r"line 3 of stdin is not valid UTF-8 \(byte 3: 0x"):
        next(chunks)


def test_what_cannot_be_read_is_one_line(tmp_path: Path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(UserError, match="cannot read here"):
        next(read_chunks(descriptor, "here"))
    os.close(descriptor)


def test_a_byte_order_mark_is_no_text_at_the_beginning_and_text_elsewhere():
    mark = "\ufeff"
    assert lines_of(f"{mark}a\n{mark}b\nc{mark}\n".encode()) == ["a", f"{mark}b", f"c{mark}"]
    assert lines_of(mark.encode()) == [""]
