"""The plain definition that the mechanisms of this family share, but for who reads whom."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from hasten.attention.masks import Mask


def defined(
    x: Float[Tensor, "B H N D"],
    y: Float[Tensor, "B H N D"],
    mask: Mask,
    read: Callable[[Float[Tensor, "n D"], Float[Tensor, "n D"], int], list[set[int]]],
) -> Float[Tensor, "B H N N"]:
    """Softmax of x_i y_j / sqrt(D) over what the tokens of a sheet read, `read(x, y, head)`; it has no padding."""
    weights = x.new_zeros(*x.shape[:3], x.shape[2])
    for b in range(x.shape[0]):
        real = list(range(x.shape[2])) if mask.keys is None else mask.keys[b].nonzero()[:, 0].tolist()
        for h in range(x.shape[1]):
            queries, keys = x[b, h, real], y[b, h, real]
            for i, others in enumerate(read(queries, keys, h)):
                js = sorted(others)
                scores = torch.stack([queries[i] @ keys[j] for j in js]) / math.sqrt(x.shape[3])
                weights[b, h, real[i], [real[j] for j in js]] = scores.softmax(0)
    return weights
