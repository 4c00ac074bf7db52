"""Efficient attention: every mechanism behind one contract.

Adding a mechanism is one file, its entry in `specs.py`, and its line in the conformance suite.
"""

from hasten.attention.adapting import Adapting, after_update
from hasten.attention.average import AverageSpec
from hasten.attention.base import Attention, Operator, StepOperator, Traits
from hasten.attention.clustering.lsh import LSHSpec
from hasten.attention.clustering.routing import RoutingSpec
from hasten.attention.fewer_keys.compressed import CompressedSpec
from hasten.attention.fewer_keys.linformer import LinformerSpec
from hasten.attention.fewer_keys.nystrom import NystromSpec
from hasten.attention.fewer_keys.sinkhorn import SinkhornSpec
from hasten.attention.full import FullAttention, FullSpec
from hasten.attention.heads import HeadsAttention
from hasten.attention.kernels.efficient import EfficientSpec
from hasten.attention.kernels.linear import LinearSpec
from hasten.attention.kernels.performer import PerformerSpec
from hasten.attention.kernels.rfa import RFASpec
from hasten.attention.losses import attention_losses
from hasten.attention.masks import Mask
from hasten.attention.mechanism import MechanismSpec, Place
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
from hasten.attention.ssru import SSRUSpec
from hasten.attention.synthesizer import SynthesizerSpec

__all__ = [
    "ATTENTIONS",
    "Adapting",
    "Attention",
    "AttentionSpec",
    "AverageSpec",
    "BigBirdSpec",
    "Blocks",
    "BlocksSpec",
    "Causal",
    "CompressedSpec",
    "EfficientSpec",
    "Everything",
    "External",
    "FullAttention",
    "FullSpec",
    "Global",
    "HeadGroup",
    "HeadsAttention",
    "HeadsSpec",
    "LSHSpec",
    "LinearSpec",
    "LinformerSpec",
    "Local",
    "LocalSpec",
    "LongformerSpec",
    "Marked",
    "Mask",
    "MechanismSpec",
    "MultiHeadAttention",
    "NystromSpec",
    "Operator",
    "Pattern",
    "PatternAttention",
    "PatternSpec",
    "PerformerSpec",
    "Place",
    "RFASpec",
    "RandomBlocks",
    "RoutingSpec",
    "SSRUSpec",
    "SecondProjections",
    "SinkhornSpec",
    "SparseTransformerSpec",
    "StepOperator",
    "Strided",
    "Summary",
    "SynthesizerSpec",
    "Traits",
    "after_update",
    "attention_losses",
    "multi_head",
]
