"""Efficient attention: every mechanism behind one contract.

Adding a mechanism is one file, one test, its class in `ATTENTIONS` and its spec in `AttentionSpec`. From the second
spec on that is a union told apart by its kind: `Annotated[FullSpec | OtherSpec, Field(discriminator="kind")]`.
"""

from hasten.attention.base import Attention, Operator, StepOperator, Traits
from hasten.attention.full import FullAttention, FullSpec
from hasten.attention.masks import Mask
from hasten.attention.multihead import MultiHeadAttention

ATTENTIONS = (FullSpec,)
AttentionSpec = FullSpec

__all__ = [
    "ATTENTIONS",
    "Attention",
    "AttentionSpec",
    "FullAttention",
    "FullSpec",
    "Mask",
    "MultiHeadAttention",
    "Operator",
    "StepOperator",
    "Traits",
]
