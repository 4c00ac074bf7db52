"""The nearest tokens of every centroid, the first of equals by position."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.attention.clustering.gathered import split

_BLOCKS = 4  # times as many blocks of tokens as are wanted


def nearest(
    nearness: Float[Tensor, "B H clusters N"],
    real: Bool[Tensor, "B N"] | None,
    wanted: Int[Tensor, "B 1 1 1"],
    most: int,
) -> Bool[Tensor, "B H clusters N"]:
    """Which real tokens are the `wanted` of largest nearness, or all if there are fewer; at most `most` are wanted."""
    if real is None:
        return _all_nearest(nearness, wanted, most)
    real = real[:, None, None]
    return _all_nearest(nearness.masked_fill(~real, -math.inf), wanted, most) & real


def _all_nearest(
    nearness: Float[Tensor, "B H clusters N"], wanted: Int[Tensor, "B 1 1 1"], most: int
) -> Bool[Tensor, "B H clusters N"]:
    if split(nearness.device):
        return _narrowed(nearness.contiguous(), wanted, min(most, nearness.shape[3]))
    # For all lengths: more tokens than are wanted.
    best = F.pad(nearness, (0, most), value=-math.inf).topk(most, dim=-1).values
    return _first(nearness, best, wanted)


def _first(
    nearness: Float[Tensor, "B H clusters n"], best: Float[Tensor, "B H clusters most"], wanted: Int[Tensor, "B 1 1 1"]
) -> Bool[Tensor, "B H clusters n"]:
    last = best.gather(-1, (wanted - 1).clamp(0, best.shape[3] - 1).expand(*best.shape[:3], 1))
    nearer, equal = nearness > last, nearness == last
    # Those equally near as the last are taken by position, whatever order topk gives them.
    return nearer | equal & (equal.cumsum(-1) <= wanted - nearer.sum(-1, keepdim=True))


def _narrowed(
    nearness: Float[Tensor, "B H clusters N"], wanted: Int[Tensor, "B 1 1 1"], most: int
) -> Bool[Tensor, "B H clusters N"]:
    """Among candidates: whoever is as near as the nearest of the blocks that come last among the `wanted` best.

    As many blocks hold as many tokens at least that near. To sort the blocks' nearest is several times faster.
    """
    size = max(1, nearness.shape[3] // (_BLOCKS * most))
    blocks = F.pad(nearness, (0, -nearness.shape[3] % size), value=-math.inf).unflatten(3, (size, -1)).amax(3)
    best = blocks.topk(most, dim=-1).values
    candidates = nearness >= best.gather(-1, (wanted - 1).clamp(0, most - 1).expand(*best.shape[:3], 1))
    counts = candidates.sum(-1, keepdim=True)
    slots = torch.arange(max(1, *counts.flatten().tolist(), 1), device=counts.device) < counts
    few = nearness.new_full(slots.shape, -math.inf).masked_scatter_(slots, nearness[candidates])
    taken = _first(few, few.topk(min(most, few.shape[3]), dim=-1).values, wanted)
    return torch.zeros_like(candidates).masked_scatter_(candidates, taken[slots])
