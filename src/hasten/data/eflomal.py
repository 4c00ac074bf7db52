"""Alignments by eflomal, a program of its own (the extra `align`); nothing else here imports it."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hasten.data.alignment import Link
from hasten.data.batch import Pair
from hasten.errors import MissingExtra, UserError

_LONGEST = 1023
"""Sides with more pieces are left out by eflomal, as if they were empty."""


def require() -> Any:
    """The package; `MissingExtra` where it is not installed."""
    try:
        import eflomal  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtra("eflomal", "align") from error
    return eflomal


def align(pairs: Sequence[Pair], threads: int = 1) -> Iterator[tuple[list[Link], list[Link]]]:
    """For each pair the links of both directions; none for pairs with an empty side or more than 1023 pieces.

    In the first direction every target piece has at most one source, in the second every source piece one target.
    All pairs are learnt from together, so that a corpus is given at once, and ids stand for words.

    It draws from the system's random numbers and cannot be told otherwise: links differ a little from run to run.
    Errors: `MissingExtra`; `UserError` where there is nothing to align or eflomal fails.
    Source: Ostling and Tiedemann, 2016, a Bayesian model with Markov order and fertility, by Gibbs sampling.
    """
    aligner = require().Aligner()
    if not any(source and target for source, target in pairs):
        raise UserError("eflomal has nothing to align: no pair has text on both sides")
    with TemporaryDirectory(prefix="hasten-align-") as folder:
        ahead, back = str(Path(folder, "forward")), str(Path(folder, "backward"))
        try:
            with _threads(threads):
                aligner.align(
                    (_line(source, target) for source, target in pairs),
                    (_line(target, source) for source, target in pairs),
                    links_filename_fwd=ahead,
                    links_filename_rev=back,
                )
        except subprocess.CalledProcessError as error:
            raise UserError(f"eflomal ended with code {error.returncode}; what it said stands above") from error
        except OSError as error:
            raise UserError(f"eflomal does not run ({error}); install it again: pip install 'hasten[align]'") from error
        yield from _read(ahead, back, len(pairs))


def _line(side: Sequence[int], other: Sequence[int]) -> str:
    """Ids as words; nothing where eflomal would see one side only."""
    return " ".join(map(str, side)) if 0 < len(side) <= _LONGEST and 0 < len(other) <= _LONGEST else ""


def _read(ahead: str, back: str, n_pairs: int) -> Iterator[tuple[list[Link], list[Link]]]:
    given = 0
    with open(ahead, encoding="ascii") as forward, open(back, encoding="ascii") as backward:
        for one, other in zip(forward, backward, strict=False):
            given += 1
            yield _links(one), _links(other)
    if given != n_pairs:
        raise UserError(f"eflomal wrote the links of {given} pairs, it was given {n_pairs}; is the disk full?")


def _links(line: str) -> list[Link]:
    fields = [field.partition("-") for field in line.split()]
    return [(int(source), int(target)) for source, _, target in fields]


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Let programs started meanwhile use so many threads of OpenMP, all together."""
    names = ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(number)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
