"""Efficient attention: every mechanism behind one contract.

Adding a mechanism is one file, one test and one line in each tuple below.
"""

from hasten.attention.base import Attention, Operator, StepOperator, Traits
from hasten.attention.full import FullAttention, FullSpec
from hasten.attention.masks import Mask
from hasten.attention.multihead import MultiHeadAttention

ATTENTIONS = (FullAttention,)
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
