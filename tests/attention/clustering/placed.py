"""What the tests of clustering share: mechanisms built for two heads of width 6, and tokens for them."""

from typing import Any

import torch
from torch import Tensor

from hasten.attention import LSHSpec, Place, RoutingSpec


def build(spec: LSHSpec | RoutingSpec, n_heads: int = 2, d_head: int = 6) -> Any:
    return spec.at(Place(n_heads=n_heads, d_head=d_head)).build()


def tokens(n: int, width: int = 6, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Two sentences of two heads."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, n, width, generator=generator, dtype=dtype)
