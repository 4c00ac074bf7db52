"""The proof that an exported model says what ours says: the same greedy tokens, the same log probabilities."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import torch

from hasten.data.batch import source_batch
from hasten.data.tokenizer import EOS, Tokenizer
from hasten.decoding.refine import Decoded, final, refine
from hasten.export.ctranslate2 import POSITIONS
from hasten.export.engine import CTranslate2Model
from hasten.models.autoregressive import Autoregressive
from hasten.models.base import Memory

TOLERANCE = 1e-3
"""Largest difference of two log probabilities of a token, in float32."""


@dataclass(frozen=True)
class Mismatch:
    """A sentence (counted from 1) on which the engines differ, and how."""

    number: int
    text: str
    reason: str


@dataclass(frozen=True)
class Certificate:
    """What was compared and what differed; `valid` where nothing did.

    largest_difference: of two log probabilities of the same token, over all tokens of all sentences.
    """

    sentences: int
    tokens: int
    largest_difference: float
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def valid(self) -> bool:
        """Both engines agree everywhere."""
        return self.sentences > 0 and not self.mismatches

    def __str__(self) -> str:
        compared = f"{self.sentences} sentences, {self.tokens} tokens"
        if self.valid:
            worst = f"log probabilities within {self.largest_difference:.1e} (allowed {TOLERANCE:.0e})"
            return f"certified: {compared}, greedy outputs equal, {worst}"
        first = self.mismatches[0] if self.mismatches else Mismatch(0, "", "there was nothing to compare")
        rest = f" ({len(self.mismatches)} of {self.sentences} sentences differ)"
        return f"NOT certified: sentence {first.number} {first.text!r}: {first.reason}{rest}"


def certify(
    model: Autoregressive,
    tokenizer: Tokenizer,
    directory: str | Path,
    lines: Sequence[str],
    *,
    compute: str = "float32",
) -> Certificate:
    """Decode every line with text greedily with both engines and compare ids and log probabilities.

    Tokens must be equal; the log probability of each, the end symbol included, may differ by `TOLERANCE`.
    """
    peer = CTranslate2Model(directory, tokenizer, compute=compute)
    mismatches, tokens, worst, sentences = [], 0, 0.0, 0
    for number, text, source in _sources(tokenizer, lines):
        decoded, said = _greedy(model, peer, source)
        ids = model.output_ids(decoded.tokens)
        sentences, tokens = sentences + 1, tokens + len(ids)
        if said != ids:
            ours, theirs = tokenizer.decode(ids), tokenizer.decode(said)
            mismatches.append(Mismatch(number, text, f"hasten says {ours!r}, CTranslate2 {theirs!r}"))
            continue
        # An output that was cut at the limit has no end symbol: then the scores differ in length by that one.
        [scores] = peer.score([source], [ids])
        assert len(scores) - len(decoded.scores) in ((0,) if EOS in decoded.tokens else (1,))
        gap = max(abs(a - b) for a, b in zip(decoded.scores, scores, strict=False))
        worst = max(worst, gap)
        if not gap <= TOLERANCE:
            mismatches.append(Mismatch(number, text, f"log probabilities differ by {gap:.2e}"))
    return Certificate(sentences, tokens, worst, mismatches)


def agreement(
    model: Autoregressive, tokenizer: Tokenizer, directory: str | Path, lines: Sequence[str]
) -> tuple[int, int]:
    """Sentences whose greedy output a quantised model leaves as it is, and sentences compared."""
    peer, same, total = CTranslate2Model(directory, tokenizer), 0, 0
    for _, _, source in _sources(tokenizer, lines):
        decoded, said = _greedy(model, peer, source)
        same, total = same + (said == model.output_ids(decoded.tokens)), total + 1
    return same, total


def sentences() -> list[str]:
    """200 plain English sentences that come with the package, for models whose data is not at hand."""
    return resources.files("hasten.export").joinpath("sentences.txt").read_text(encoding="utf-8").splitlines()


def _greedy(model: Autoregressive, peer: CTranslate2Model, source: list[int]) -> tuple[Decoded, list[int]]:
    """What each engine says."""
    ids, mask = source_batch([source])
    [decoded] = final(refine(model, ids, mask), 1)
    [said] = peer.decode([source], limit=int(model.limit(Memory(torch.empty(*mask.shape, 0), mask))))
    return decoded, said


def _sources(tokenizer: Tokenizer, lines: Sequence[str]) -> Iterator[tuple[int, str, list[int]]]:
    """Number, text and ids of the lines that have text and whose output surely fits the table of positions."""
    for number, line in enumerate(lines, 1):
        text = line.strip()
        ids = tokenizer.encode(text)
        if ids and 2 * len(ids) + 22 <= POSITIONS:
            yield number, text, ids
