"""Parallel text on disk: one sentence a line, one file a side and split, described by `manifest.json`."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, final

from hasten.directories import made
from hasten.errors import UserError

_NAME = re.compile(r"\w[\w.-]*")
KIND = "parallel-text"
MANIFEST = "manifest.json"
LICENCES = "LICENCES"
DOCUMENTS = "docs"


class Pair(NamedTuple):
    """One aligned sentence pair and the key of the document it was taken from."""

    source: str
    target: str
    document: str


@final
class Corpus:
    """A parallel-text directory opened for reading; files are read when a split is asked for."""

    def __init__(self, directory: Path, manifest: dict[str, Any]):
        self.directory = directory
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Open a directory written by `write_corpus`.

        Raises `UserError` when the directory or its manifest is missing or damaged, or holds another kind of data.
        """
        directory = Path(path)
        return cls(directory, _read_manifest(directory))

    @property
    def source_language(self) -> str:
        """Language code of the source side, as the manifest gives it."""
        return self.manifest["source"]

    @property
    def target_language(self) -> str:
        """Language code of the target side, as the manifest gives it."""
        return self.manifest["target"]

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits, in the manifest's order."""
        return tuple(self.manifest["splits"])

    def pairs(self, split: str) -> tuple[list[str], list[str]]:
        """Source and target sentences of one split, aligned line by line.

        Raises `UserError` for an unknown split, a missing file, invalid UTF-8, or line counts that differ between the
        two sides or from the manifest.
        """
        source = self._lines(split, self.source_language)
        target = self._lines(split, self.target_language)
        if len(source) != len(target):
            raise UserError(
                f"{self.directory}: {split}.{self.source_language} has {len(source)} lines, "
                f"{split}.{self.target_language} has {len(target)}; line i must translate line i, build it again"
            )
        return source, target

    def documents(self, split: str) -> list[str]:
        """Document key of every pair of one split."""
        return self._lines(split, DOCUMENTS)

    def verify(self) -> None:
        """Compare every file with the manifest's SHA-256; `UserError` names the first that differs."""
        for split in self.splits:
            for name, expected in self.manifest["splits"][split]["sha256"].items():
                if hashlib.sha256(self._bytes(name)).hexdigest() != expected:
                    raise UserError(f"{self.directory / name}: content differs from {MANIFEST}; build it again")

    def _lines(self, split: str, side: str) -> list[str]:
        if split not in self.splits:
            raise UserError(f"{self.directory}: no split {split!r}; it has {', '.join(self.splits)}")
        name = f"{split}.{side}"
        lines = decode_lines(self._bytes(name), self.directory / name)
        expected = self.manifest["splits"][split]["pairs"]
        if len(lines) != expected:
            raise UserError(f"{self.directory / name}: {len(lines)} lines, {MANIFEST} says {expected}; build it again")
        return lines

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.directory / name).read_bytes()
        except OSError as error:
            raise UserError(f"{self.directory / name}: {error.strerror or error}; build the corpus again") from None


def decode_lines(data: bytes, name: str | Path) -> list[str]:
    """Split UTF-8 bytes at LF (or CR LF) only; `UserError` names file and line of the first invalid byte."""
    lines = data.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    decoded = []
    for number, line in enumerate(lines, 1):
        try:
            decoded.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}, line {number}: invalid UTF-8 at byte {error.start + 1}; convert the file to UTF-8 first"
            ) from None
    if decoded:
        decoded[0] = decoded[0].removeprefix("\ufeff")
    return decoded


@contextmanager
def claimed_directory(path: str | Path, force: bool = False) -> Iterator[Path]:
    """The directory, new or empty, to be written meanwhile; a new one that stays empty is gone again afterwards.

    A non-empty one raises `UserError` unless `force`, as does one that cannot be written.
    """
    directory = Path(path)
    try:
        occupied = directory.exists() and any(directory.iterdir())
    except OSError as error:
        raise _unwritable(directory, error.strerror) from None
    if occupied and not force:
        raise UserError(f"{directory}: not empty; choose another --out, or give --force to replace a corpus there")
    with made(directory, "cannot write a corpus to"):
        if not os.access(directory, os.W_OK | os.X_OK):
            raise _unwritable(directory, "Permission denied")
        yield directory


def _unwritable(directory: Path, reason: str | None) -> UserError:
    return UserError(f"{directory}: cannot write there ({reason}); choose another --out")


def write_corpus(
    directory: str | Path,
    languages: tuple[str, str],
    splits: Mapping[str, Sequence[Pair]],
    facts: Mapping[str, Any],
    licences: str = "",
    force: bool = False,
) -> Corpus:
    """Write a parallel-text directory; the manifest goes last, so an interrupted write does not open.

    `facts` are further manifest entries (sources, filters, parameters). Equal arguments give equal bytes. With `force`,
    files of a corpus that was there are replaced; other files stay.
    """
    with claimed_directory(directory, force) as out:
        try:
            _remove_old_corpus(out)
            described = {name: _write_split(out, name, languages, pairs) for name, pairs in splits.items()}
            if licences:
                (out / LICENCES).write_bytes(licences.encode("utf-8"))
            manifest = {"kind": KIND, "source": languages[0], "target": languages[1], "splits": described, **facts}
            text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
            (out / MANIFEST).write_bytes(text.encode("utf-8"))
        except OSError as error:
            raise UserError(f"cannot write the corpus to {out}: {error.strerror or error}") from error
    return Corpus(out, manifest)


def _write_split(out: Path, name: str, languages: tuple[str, str], pairs: Sequence[Pair]) -> dict[str, Any]:
    columns = {
        languages[0]: [pair.source for pair in pairs],
        languages[1]: [pair.target for pair in pairs],
        DOCUMENTS: [pair.document for pair in pairs],
    }
    digests = {}
    for side, lines in columns.items():
        assert not any("\n" in line for line in lines), f"a line break inside a sentence of {name}.{side}"
        data = "".join(line + "\n" for line in lines).encode("utf-8")
        (out / f"{name}.{side}").write_bytes(data)
        digests[f"{name}.{side}"] = hashlib.sha256(data).hexdigest()
    return {
        "pairs": len(pairs),
        "documents": len(set(columns[DOCUMENTS])),
        "source_words": sum(len(pair.source.split()) for pair in pairs),
        "target_words": sum(len(pair.target.split()) for pair in pairs),
        "sha256": digests,
    }


def _remove_old_corpus(out: Path) -> None:
    if not (out / MANIFEST).exists():
        return
    old = Corpus(out, _read_manifest(out))
    (out / MANIFEST).unlink()
    (out / LICENCES).unlink(missing_ok=True)
    for split in old.splits:
        for side in (old.source_language, old.target_language, DOCUMENTS):
            (out / f"{split}.{side}").unlink(missing_ok=True)


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; build one with `hasten data debian` or `hasten data text`")
    if not path.is_file():
        raise UserError(f"{directory}: no {MANIFEST}; build it with `hasten data debian` or `hasten data text`")
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); build the corpus again") from None
    kind = manifest.get("kind") if isinstance(manifest, dict) else None
    if kind != KIND:
        raise UserError(f"{directory}: kind {kind!r}, expected {KIND!r}")
    missing = [key for key in ("source", "target", "splits") if key not in manifest]
    if missing:
        raise UserError(f"{path}: no entry {missing[0]!r}; build the corpus again")
    _check_manifest(manifest, path)
    return manifest


def _check_manifest(manifest: dict[str, Any], path: Path) -> None:
    """`UserError` unless languages and splits can name files of this directory, and counts are numbers."""
    splits = manifest["splits"] if isinstance(manifest["splits"], dict) else {"splits": None}
    for name in (manifest["source"], manifest["target"], *splits):
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(f"{path}: {name!r} cannot be a language or a split; build the corpus again")
    for name, facts in splits.items():
        if not isinstance(facts, dict) or not isinstance(facts.get("pairs"), int):
            raise UserError(f"{path}: split {name!r} has no number of pairs; build the corpus again")
