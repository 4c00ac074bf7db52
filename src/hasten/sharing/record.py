"""The result of a measurement on disk: similarities and what they were measured on, as JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.errors import UserError
from hasten.sharing.divergence import Similarity

NAME = "similarity.json"
TITLES = {
    "encoder": "encoder self-attention",
    "refiner": "refiner self-attention",
    "decoder": "decoder self-attention",
    "cross": "encoder-decoder attention",
}
_MEASURE = "1 - Jensen-Shannon divergence in bits, head by head; mean over heads, query positions and sentences"
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Record:
    """How alike the layers of a model attend, for each kind of attention, and on what that was measured.

    data, split: where the sentences are from. sentences: how many were read. versions: of the packages that were used.
    """

    kinds: Mapping[str, Similarity]
    model: str
    data: str
    split: str
    sentences: int
    versions: Mapping[str, str] = field(default_factory=dict)


def write(record: Record, directory: Path) -> Path:
    """Write `similarity.json` into the directory; returns its path."""
    table: dict[str, Any] = {
        "measure": _MEASURE,
        "model": record.model,
        "data": record.data,
        "split": record.split,
        "sentences": record.sentences,
        "versions": dict(record.versions),
        "kinds": {name: {"similarity": own.mu, "counts": own.counts} for name, own in record.kinds.items()},
    }
    path = directory / NAME
    try:
        path.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def read(directory: Path) -> Record:
    """The record of a directory; `UserError` where it is missing or damaged."""
    path = directory / NAME
    again = "measure again with hasten share analyse"
    if path.exists() and not path.is_file():  # a pipe would keep its reader waiting
        raise UserError(f"{path}: it is no regular file; {again}")
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or error}; hasten share analyse --out {directory} writes it"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); {again}") from None
    try:
        kinds = {str(name): _similarity(own) for name, own in table["kinds"].items()}
        facts = {name: str(table[name]) for name in ("model", "data", "split")}
        record = Record(kinds, **facts, sentences=int(table["sentences"]), versions=dict(table["versions"]))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        reason = f"no entry {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path}: {reason}; {again}") from None
    if odd := [name for name in record.kinds if not name.isidentifier()]:
        raise UserError(f"{path}: {odd[0]!r} is no kind of attention; {again}")
    if not record.kinds:
        raise UserError(f"{path}: it has no kinds of attention; {again}")
    return record


def _similarity(own: Any) -> Similarity:
    mu = tuple(tuple(float(value) for value in row) for row in own["similarity"])
    counts = tuple(tuple(int(value) for value in row) for row in own["counts"])
    for matrix in (mu, counts):
        if len(matrix) != len(mu) or not mu or any(len(row) != len(mu) for row in matrix):
            raise ValueError("a matrix is not square, one row for each layer")
    for i, row in enumerate(mu):
        if abs(row[i] - 1) > _ROUNDING:
            raise ValueError(f"a layer has similarity {row[i]} with itself, expected 1")
        for j, value in enumerate(row):
            if not 0 <= value <= 1 or abs(value - mu[j][i]) > _ROUNDING:
                raise ValueError(f"similarity {value} of two layers is not in 0 to 1, or differs the other way round")
    return Similarity(mu, counts)
