"""Mechanisms for tests of conversion: a band that claims what a test needs it to claim."""

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hasten.attention import FullSpec, Mask
from hasten.attention.base import Attention, Operator, Traits
from hasten.attention.full import FullAttention


@dataclass(frozen=True, kw_only=True)
class BandSpec:
    """Every query reads keys at most `width` away; query i is token i + S - T."""

    width: int = 1
    dropout: float = 0.0
    claims: dict = field(default_factory=dict)
    parameters: int = 0

    def build(self) -> "Band":
        return Band(self)


class Band(Attention):
    def __init__(self, spec: BandSpec):
        super().__init__()
        self.full, self.width = FullSpec(dropout=spec.dropout).build(), spec.width
        self.traits: Traits = dataclasses.replace(FullAttention.traits, **spec.claims)
        if spec.parameters:
            self.own = nn.Parameter(torch.zeros(spec.parameters))

    def _within(self, q: Tensor, k: Tensor, mask: Mask) -> Mask:
        n_queries, n_keys = q.shape[2], k.shape[2]
        i = torch.arange(n_queries, device=q.device)[:, None] + n_keys - n_queries
        near = ((torch.arange(n_keys, device=q.device) - i).abs() <= self.width)[None, None]
        return Mask(allowed=near if mask.allowed is None else near & mask.allowed, causal=mask.causal, keys=mask.keys)

    def operator(self, q: Tensor, k: Tensor, mask: Mask) -> Operator:
        self.check(q, k, mask)
        return self.full.operator(q, k, self._within(q, k, mask))

    def reference(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        return self.full.reference(q, k, self._within(q, k, mask))
