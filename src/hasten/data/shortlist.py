"""Which target pieces a sentence may need: a table, read and asked with numpy alone."""

import io
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hasten.data.lexicon import IdPair, Links, expected_links
from hasten.data.tokenizer import EOS, SPECIAL_IDS, Tokenizer
from hasten.errors import UserError

TRANSLATIONS = 100
FREQUENT = 100
_FORMAT = 1
_ADVICE = "make it again with `hasten shortlist`"


@dataclass(frozen=True)
class Shortlist:
    """For each source piece some target pieces, best first, and those that are in every list.

    fingerprint: of the tokenizer whose ids these are. common: ids in every list. Of source piece s the targets are
    targets[offsets[s] : offsets[s + 1]].
    """

    fingerprint: str
    common: np.ndarray
    offsets: np.ndarray
    targets: np.ndarray

    @property
    def vocab_size(self) -> int:
        """Pieces of the tokenizer."""
        return len(self.offsets) - 1

    def ids(self, source: Sequence[int]) -> np.ndarray:
        """The list of a sentence, ascending: `common`, the targets of its pieces (ids without the end symbol) and of
        the end symbol, and its pieces themselves, since names and numbers stay what they are."""
        listed = np.zeros(self.vocab_size, dtype=bool)
        listed[self.common] = True
        listed[np.asarray(source, dtype=np.int64)] = True
        for piece in {*source, EOS}:
            listed[self.targets[self.offsets[piece] : self.offsets[piece + 1]]] = True
        return np.flatnonzero(listed)

    def check(self, tokenizer: Tokenizer, name: str) -> "Shortlist":
        """Itself, where it is for this tokenizer; else a `UserError` that calls it `name`."""
        if self.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"{name} is for another tokenizer than the model's: make one for this model with `hasten shortlist`"
            )
        if self.vocab_size != tokenizer.vocab_size:
            raise UserError(
                f"{name} is damaged: it has {self.vocab_size} pieces, its tokenizer {tokenizer.vocab_size}; {_ADVICE}"
            )
        return self

    def save(self, path: str | Path) -> None:
        """Write it; equal tables are equal bytes. A file that is there stays whole until the new one is."""
        small = np.uint16 if self.vocab_size <= 2**16 else np.int32
        content = io.BytesIO()
        np.savez_compressed(
            content,
            format=np.array(_FORMAT),
            fingerprint=np.frombuffer(self.fingerprint.encode("ascii"), dtype=np.uint8),
            common=self.common.astype(small),
            offsets=self.offsets.astype(np.int32),
            targets=self.targets.astype(small),
        )
        try:
            _write(Path(path), content.getvalue())
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | Path) -> "Shortlist":
        """What `save` wrote; nothing in it is executed. `UserError` where it is missing or damaged."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(
                f"cannot read the shortlist {path}: {error.strerror}; `hasten shortlist` makes one"
            ) from error
        try:
            with warnings.catch_warnings(), np.load(io.BytesIO(content), allow_pickle=False) as file:
                warnings.simplefilter("error")  # numpy warns of what it doubts
                found: dict[str, Any] = {name: file[name] for name in file.files}
                version = int(found["format"])
                if version == _FORMAT:
                    return _checked(found)
        except Exception as error:  # of a dozen kinds: the archive's, the compression's, the header's, the numbers'
            raise UserError(f"{path} is no shortlist, or damaged; {_ADVICE}") from error
        raise UserError(f"{path} has format {version}, this hasten reads {_FORMAT}; {_ADVICE}")


def _write(path: Path, data: bytes) -> None:
    if path.exists() and not path.is_file():  # a device, a pipe
        path.write_bytes(data)
        return
    path = path.resolve()  # what a link leads to is replaced, not the link
    growing = path.with_name(f"{path.name}.new")
    try:
        growing.write_bytes(data)
        os.replace(growing, path)
    finally:
        growing.unlink(missing_ok=True)


def _checked(found: dict[str, Any]) -> Shortlist:
    """The table in a file's arrays; `ValueError` where they cannot be one."""
    fingerprint = found["fingerprint"].tobytes().decode("ascii")
    arrays = [found[name] for name in ("common", "offsets", "targets")]
    if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in arrays):
        raise ValueError("arrays that are no lists of whole numbers")
    common, offsets, targets = (array.astype(np.int64) for array in arrays)
    size = len(offsets) - 1
    ids = np.concatenate((common, targets))
    ordered = size > 0 and offsets[0] == 0 and offsets[-1] == len(targets) and (np.diff(offsets) >= 0).all()
    if not ordered or ids.min(initial=0) < 0 or ids.max(initial=0) >= size or not {*SPECIAL_IDS} <= {*common.tolist()}:
        raise ValueError("arrays that do not fit each other")
    return Shortlist(fingerprint, common, offsets, targets)


def build(
    pairs: Sequence[IdPair],
    tokenizer: Tokenizer,
    *,
    translations: int = TRANSLATIONS,
    frequent: int = FREQUENT,
    rounds: int = 5,
) -> Shortlist:
    """A table learnt from pairs of ids: of each source piece the `translations` target pieces that it is expected to
    have made most often (`expected_links`), and the `frequent` most frequent target pieces and all special ids for
    every sentence. Of equal counts the lower id."""
    size = tokenizer.vocab_size
    offsets, targets = _best(expected_links(pairs, size, rounds), size, translations)
    said = [np.asarray(target, dtype=np.int64) for _, target in pairs]
    seen = np.bincount(np.concatenate([np.zeros(0, dtype=np.int64), *said]), minlength=size)
    often = np.argsort(-seen, kind="stable")[:frequent]
    common = np.union1d(often[seen[often] > 0], SPECIAL_IDS)
    return Shortlist(tokenizer.fingerprint, common, offsets, targets)


class Coverage(NamedTuple):
    """Shares of target pieces, and of whole targets, that are in the lists of their sources; the mean list's length."""

    pieces: float
    sentences: float
    size: float


def coverage(table: Shortlist, pairs: Sequence[IdPair]) -> Coverage:
    """How much of the targets the lists have; there is at least one pair, and no target is empty."""
    within, sizes = [], []
    for source, target in pairs:
        ids = table.ids(source)
        sizes.append(len(ids))
        within.append(np.isin(target, ids))
    pieces = np.concatenate(within).mean()
    return Coverage(float(pieces), float(np.mean([own.all() for own in within])), float(np.mean(sizes)))


def everything(tokenizer: Tokenizer) -> Shortlist:
    """The table that leaves nothing out."""
    size = tokenizer.vocab_size
    return Shortlist(tokenizer.fingerprint, np.arange(size), np.zeros(size + 1, dtype=np.int64), np.zeros(0, np.int64))


def _best(links: Links, size: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the targets of each source begin, and the targets, best first."""
    order = np.lexsort((links.targets, -links.counts, links.sources))
    sources, targets = links.sources[order], links.targets[order]
    begins = np.searchsorted(sources, np.arange(size + 1))
    rank = np.arange(len(sources)) - begins[sources]
    kept = rank < most
    offsets = np.concatenate(([0], np.cumsum(np.bincount(sources[kept], minlength=size))))
    return offsets, targets[kept]
