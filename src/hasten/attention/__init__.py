"""Efficient attention: every mechanism behind one contract.

Adding a mechanism is one file, its entry in `specs.py`, and its line in the conformance suite.
"""

from hasten.attention.base import Attention, Operator, StepOperator, Traits
from hasten.attention.full import FullAttention, FullSpec
from hasten.attention.heads import HeadsAttention
from hasten.attention.masks import Mask
from hasten.attention.multihead import MultiHeadAttention
from hasten.attention.patterns import (
    Blocks,
    Causal,
    Everything,
    External,
    Global,
    Local,
    Marked,
    Pattern,
    PatternAttention,
    RandomBlocks,
    Strided,
    Summary,
)
from hasten.attention.patterns.longformer import LongformerSpec
from hasten.attention.patterns.sparse_transformer import SparseTransformerSpec
from hasten.attention.patterns.specs import BigBirdSpec, BlocksSpec, LocalSpec, PatternSpec
from hasten.attention.second_projections import SecondProjections, multi_head
from hasten.attention.specs import ATTENTIONS, AttentionSpec, HeadGroup, HeadsSpec

__all__ = [
    "ATTENTIONS",
    "Attention",
    "AttentionSpec",
    "BigBirdSpec",
    "Blocks",
    "BlocksSpec",
    "Causal",
    "Everything",
    "External",
    "FullAttention",
    "FullSpec",
    "Global",
    "HeadGroup",
    "HeadsAttention",
    "HeadsSpec",
    "Local",
    "LocalSpec",
    "LongformerSpec",
    "Marked",
    "Mask",
    "MultiHeadAttention",
    "Operator",
    "Pattern",
    "PatternAttention",
    "PatternSpec",
    "RandomBlocks",
    "SecondProjections",
    "SparseTransformerSpec",
    "StepOperator",
    "Strided",
    "Summary",
    "Traits",
    "multi_head",
]
