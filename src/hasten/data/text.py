"""A corpus out of a user's own line-aligned files, plain or gzipped, two files or one of tab-separated columns."""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from hasten.data.corpus import DOCUMENTS, Corpus, Pair, claimed_directory, decode_lines, write_corpus
from hasten.data.splits import HELD_OUT, Sizes, covering_sentences, split_corpus
from hasten.errors import UserError

LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]+)*")
LARGEST_BLOCK = 50


class TextFiles(NamedTuple):
    """Where aligned sentences come from: two line-aligned files, or one file of two tab-separated columns."""

    source: Path
    target: Path | None = None

    def __str__(self) -> str:
        return str(self.source) if self.target is None else f"{self.source} and {self.target}"


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How a user's text becomes a corpus."""

    valid: int | None = None
    """Pairs wanted in the validation split; by default a twentieth of all, at most 2000."""
    test: int | None = None
    """Pairs wanted in the test split; by default a twentieth of all, at most 3000."""
    max_words: int = 250
    """Most whitespace-separated words on either side."""
    max_ratio: float = 3.0
    """Most characters of the longer side for one of the shorter; sides of up to 20 characters always pass."""
    block_lines: int | None = None
    """Consecutive lines that count as one document; by default 50, fewer below 10,000 pairs."""
    overlap: float = 0.7
    """Share of word trigrams in one training sentence from which a held-out sentence counts as its near-duplicate."""
    seed: int = 1
    """Seed of the choice of documents."""

    def __post_init__(self) -> None:
        for name, least in (("valid", 0), ("test", 0), ("max_words", 1), ("block_lines", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}; it must be at least {least}")
        if not self.max_ratio >= 1:  # NaN is not either
            raise UserError(f"max_ratio is {self.max_ratio}; it must be at least 1")
        if not 0 < self.overlap <= 1:
            raise UserError(f"overlap is {self.overlap}; it must be above 0 and at most 1")


def build_text_corpus(
    files: TextFiles,
    out: Path,
    languages: tuple[str, str],
    *,
    documents: Path | None = None,
    held_out: dict[str, TextFiles] | None = None,
    options: TextOptions | None = None,
    force: bool = False,
) -> Corpus:
    """Write a corpus from `files`, drawing valid and test by document where `held_out` does not give them.

    A given held-out set is kept as it is but for empty lines; instead, training pairs that make one of its sentences a
    near-duplicate go. `documents` names the document of every line, one key a line. Equal input gives equal bytes.
    """
    options, held_out = options or TextOptions(), held_out or {}
    check_languages(languages)
    _check_files([files, *held_out.values()], documents, out)
    for name in held_out:
        if getattr(options, name) is not None:
            raise UserError(f"{name} is given as a file and as a number of pairs to hold out; leave out one of them")
    with claimed_directory(out, force):
        pairs, counts = _usable(read_pairs(files), options)
        if not pairs:
            raise UserError(f"{files}: no usable pairs, dropped: {_listed(counts)}")
        given = {name: _without_empty(read_pairs(where), where) for name, where in held_out.items()}
        pairs, close = _without_covering(pairs, [pair for kept in given.values() for pair in kept], options.overlap)
        sizes = _sizes(len(pairs), options, given)
        pairs = _with_documents(pairs, documents, _block_lines(len(pairs), options, sizes))
        split = split_corpus({"text": pairs}, sizes, options.seed, options.overlap, one_target=False)
        splits = {name: given.get(name, kept) for name, kept in split.pairs.items()}
        _check_filled(splits, sizes, files)
        facts = {
            "sources": {
                "text": {
                    "files": [path.name for path in files if path],
                    "filtered": counts,
                    "pairs": {name: len(kept) for name, kept in splits.items() if name not in given},
                }
            },
            "removed_from_held_out": {name: counts for name, counts in split.removed.items() if name not in given},
            "removed_from_train": {"near a given held-out sentence": close},
            "options": asdict(options),
        }
        return write_corpus(out, languages, splits, facts, force=True)


def check_languages(languages: tuple[str, str]) -> None:
    """Raise `UserError` unless both are language codes that name different files."""
    for code in languages:
        if not LANGUAGE.fullmatch(code):
            raise UserError(f"language code {code!r}: expected two or three letters, such as en or pt-BR")
    if languages[0].casefold() == languages[1].casefold():  # some file systems do not tell DE from de
        raise UserError(f"source and target language are both {languages[0]!r}; give two codes that differ")


def _check_files(files: Sequence[TextFiles], documents: Path | None, out: Path) -> None:
    """`UserError` where a text is said to translate itself, or a file to be read might be written."""
    for source, target in files:
        if target is not None and source.exists() and target.exists() and source.samefile(target):
            raise UserError(f"{source} is given as source and as target; give the file of its translations")
    for path in [path for pair in files for path in pair] + [documents]:
        if path is not None and path.resolve().parent == out.resolve():
            raise UserError(f"{path} lies in the directory that is to be written; choose another --out")


def read_lines(path: Path) -> list[str]:
    """Lines of a UTF-8 file, gunzipped when its name ends in `.gz`; `UserError` names file and line of a fault."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "damaged gzip data"
        raise UserError(f"{path}: {reason}") from None
    return decode_lines(data, path)


def read_pairs(files: TextFiles) -> list[Pair]:
    """Aligned lines without surrounding space, their line number as document key; the sides must agree in number."""
    source = read_lines(files.source)
    if files.target is None:
        columns = [line.split("\t") for line in source]
        for number, row in enumerate(columns, 1):
            if len(row) != 2:
                raise UserError(f"{files.source}, line {number}: {len(row)} tab-separated columns, expected 2")
        rows = [(row[0], row[1]) for row in columns]
    else:
        target = read_lines(files.target)
        if len(source) != len(target):
            raise UserError(
                f"{files.source} has {len(source)} lines, {files.target} has {len(target)}; "
                "line i of one must translate line i of the other"
            )
        rows = list(zip(source, target, strict=True))
    return [Pair(left.strip(), right.strip(), str(number)) for number, (left, right) in enumerate(rows)]


def drop_reason(pair: Pair, options: TextOptions) -> str | None:
    """Why a pair is not usable; None when it is."""
    if not pair.source or not pair.target:
        return "empty"
    if max(len(pair.source.split()), len(pair.target.split())) > options.max_words:
        return "long"
    shorter, longer = sorted((len(pair.source), len(pair.target)))
    if longer > 20 and longer > options.max_ratio * shorter:
        return "length ratio"
    return None


def _usable(pairs: Sequence[Pair], options: TextOptions) -> tuple[list[Pair], dict[str, int]]:
    counts: Counter[str] = Counter(lines=len(pairs))
    kept: dict[tuple[str, str], Pair] = {}
    for pair in pairs:
        reason = drop_reason(pair, options)
        if reason is None and (pair.source, pair.target) in kept:
            reason = "duplicate"
        if reason is None:
            kept[pair.source, pair.target] = pair
        else:
            counts[reason] += 1
    return list(kept.values()), dict(counts)


def _without_empty(pairs: Sequence[Pair], where: TextFiles) -> list[Pair]:
    kept = [pair for pair in pairs if pair.source and pair.target]
    if not kept:
        raise UserError(f"{where}: no pair with text on both sides")
    return [pair._replace(document="given") for pair in kept]


def _without_covering(pairs: list[Pair], given: list[Pair], overlap: float) -> tuple[list[Pair], int]:
    """Drop training pairs that make a given held-out sentence a near-duplicate, on either side; and their number."""
    if not given:
        return pairs, 0
    covering: set[int] = set()
    for side in ("source", "target"):
        covering |= covering_sentences(
            [getattr(pair, side) for pair in given], [getattr(pair, side) for pair in pairs], overlap
        )
    return [pair for index, pair in enumerate(pairs) if index not in covering], len(covering)


def _sizes(total: int, options: TextOptions, given: dict[str, list[Pair]]) -> Sizes:
    share = max(1, total // 20)
    valid = min(2000, share) if options.valid is None else options.valid
    test = min(3000, share) if options.test is None else options.test
    return Sizes(0 if "valid" in given else valid, 0 if "test" in given else test)


def _block_lines(total: int, options: TextOptions, sizes: Sizes) -> int:
    """Lines in a document: small enough that a held-out split draws from about ten places or more."""
    if options.block_lines is not None:
        return options.block_lines
    tenths = [max(1, size // 10) for size in sizes if size]
    return min([LARGEST_BLOCK, max(1, total // 200), *tenths])


def _with_documents(pairs: Sequence[Pair], documents: Path | None, block: int) -> list[Pair]:
    """Replace the line number of every pair by the key of its document."""
    if documents is None:
        return [pair._replace(document=f"lines/{int(pair.document) // block}") for pair in pairs]
    keys = read_lines(documents)
    last = max((int(pair.document) for pair in pairs), default=-1)
    if last >= len(keys):
        raise UserError(f"{documents} has {len(keys)} lines, fewer than the text; it needs one document key a line")
    return [pair._replace(document=keys[int(pair.document)].strip()) for pair in pairs]


def _check_filled(splits: dict[str, list[Pair]], sizes: Sizes, files: TextFiles) -> None:
    if not splits["train"]:
        raise UserError(f"{files}: nothing is left for training; ask for smaller held-out splits or bring more text")
    for name, size in zip(HELD_OUT, sizes, strict=True):
        if size and not splits[name]:
            raise UserError(
                f"{files}: too small or too uniform to hold out {size} pairs for {name}; bring more text, "
                f"give --{name}-src and --{name}-tgt, or do without it (--{name} 0)"
            )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if name != "lines") or "none (empty input)"


def language_of(path: Path) -> str:
    """The language a file name ends in (`corpus.de`, `corpus.de.gz`); `UserError` when it ends in none."""
    ending = Path(path.name.removesuffix(".gz")).suffix.removeprefix(".")
    if not LANGUAGE.fullmatch(ending) or ending in ("txt", "tsv", "csv", DOCUMENTS):
        raise UserError(f"{path}: cannot tell its language from the name; give --source-language and --target-language")
    return ending
