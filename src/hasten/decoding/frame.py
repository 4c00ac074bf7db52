"""What a decoder shows after every edit."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

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
