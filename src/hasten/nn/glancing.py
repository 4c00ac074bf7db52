"""Glancing training: a share of what the model gets wrong is shown to it, so that it learns the rest in company.

Source: Qian et al., 2021, section 3 ("Glancing Transformer for Non-Autoregressive Neural Machine Translation").
"""

from jaxtyping import Bool, Float
from torch import Tensor


def shown(
    wrong: Bool[Tensor, "B T"], real: Bool[Tensor, "B T"], share: float, draws: Float[Tensor, "B T"]
) -> Bool[Tensor, "B T"]:
    """Which positions of a row are shown: round(share * how many are wrong) of all its real ones.

    draws: numbers from [0, 1); the positions with the lowest are taken, so every set of so many is equally probable.
    """
    count = (wrong.sum(1) * share).round()
    order = draws.masked_fill(~real, 2.0).argsort(1).argsort(1)
    return (order < count[:, None]) & real


def share_at(fraction: float, start: float, end: float) -> float:
    """The share when this fraction of the run is over: linear, so that it fits runs of every length."""
    return start + fraction * (end - start)
