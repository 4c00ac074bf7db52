"""What a decoder shows after every edit."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.data.tokenizer import PAD

EditKind = Literal["append", "insert", "delete", "fill", "mask", "collapse"]


@dataclass(frozen=True)
class Frame:
    """The canvas after one edit, for the rows still being decoded.

    iteration counts from 0. rows (R,) are the batch rows shown; tokens (R, L) are padded with PAD on the right;
    scores (R, L) are log probabilities; done (R,) marks rows for which this is the last frame.
    """

    iteration: int
    kind: EditKind
    rows: Int[Tensor, "R"]
    tokens: Int[Tensor, "R L"]
    scores: Float[Tensor, "R L"]
    done: Bool[Tensor, "R"]

    def records(self, pieces: Sequence[str], confidence: float = 0.0) -> Iterator[dict[str, Any]]:
        """Each row in JSON types, with pieces for ids: part (its row), iteration, kind, pieces, scores, unsure, done.

        unsure: numbers of the pieces whose probability is below `confidence`.
        """
        for i, part in enumerate(self.rows.tolist()):
            real = self.tokens[i] != PAD
            scores = self.scores[i][real].tolist()
            yield {
                "part": part,
                "iteration": self.iteration,
                "kind": self.kind,
                "pieces": [pieces[token] for token in self.tokens[i][real].tolist()],
                "scores": [round(score, 6) for score in scores],
                "unsure": [place for place, score in enumerate(scores) if math.exp(score) < confidence],
                "done": bool(self.done[i]),
            }
