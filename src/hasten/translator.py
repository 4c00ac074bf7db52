"""A trained model with its tokenizer: text in, text out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hasten.data.batch import group_by_tokens, source_batch
from hasten.data.tokenizer import Tokenizer
from hasten.decoding.refine import Decoded, final, refine
from hasten.models.base import GenerationModel


@dataclass(frozen=True)
class Translator:
    """Translates lines; the result of a line depends on that line alone, whatever it is batched with."""

    model: GenerationModel
    tokenizer: Tokenizer
    directory: Path | None = None

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.model.embedding.weight.device

    def translate(self, lines: Sequence[str], *, batch_tokens: int = 4096) -> list[str]:
        """One translation a line, in order; lines without text stay empty."""
        results = [""] * len(lines)
        for i, decoded in self.decode(lines, batch_tokens=batch_tokens):
            results[i] = self.tokenizer.decode(self.model.output_ids(decoded.tokens))
        return results

    def decode(self, lines: Sequence[str], *, batch_tokens: int = 4096) -> Iterator[tuple[int, Decoded]]:
        """(index, decoded ids) for every line that has text, batch by batch, short lines first."""
        encoded = {i: ids for i, line in enumerate(lines) if (ids := self.tokenizer.encode(line.strip()))}
        order = list(encoded)
        for group in group_by_tokens([len(encoded[i]) + 1 for i in order], batch_tokens):
            members = [order[g] for g in group]
            source, mask = (t.to(self.device) for t in source_batch([encoded[i] for i in members]))
            frames = refine(self.model, source, mask)
            yield from zip(members, final(frames, len(members)), strict=True)
