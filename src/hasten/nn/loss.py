"""Loss terms that add up across batches, and label-smoothed cross-entropy."""

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class LossTerm:
    """A sum over `count` items with its weight in the objective: objective = sum over terms of weight * sum / count."""

    sum: Tensor
    count: Tensor
    weight: float = 1.0


def cross_entropy(logits: Float[Tensor, "N V"], target: Int[Tensor, "N"], smoothing: float = 0.0) -> Tensor:
    """Sum over N of the label-smoothed cross-entropy, in float32 or wider.

    loss = (1 - e) * -log p(target) + e * mean over V of -log p. Source: Szegedy et al., 2016, section 7.
    """
    wide = logits if logits.dtype.itemsize >= 4 else logits.float()
    return F.cross_entropy(wide, target, reduction="sum", label_smoothing=smoothing)
