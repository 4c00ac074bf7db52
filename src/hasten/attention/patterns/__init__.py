"""Sparse attention by patterns: an algebra of shapes, and a compiler from it to work."""

from hasten.attention.patterns.algebra import Causal, Everything, Pattern, Scene
from hasten.attention.patterns.attention import PatternAttention, PatternOperator
from hasten.attention.patterns.expression import parse
from hasten.attention.patterns.global_shapes import External, Global, Marked
from hasten.attention.patterns.random_blocks import RandomBlocks
from hasten.attention.patterns.shapes import Blocks, Local, Strided, Summary

__all__ = [
    "Blocks",
    "Causal",
    "Everything",
    "External",
    "Global",
    "Local",
    "Marked",
    "Pattern",
    "PatternAttention",
    "PatternOperator",
    "RandomBlocks",
    "Scene",
    "Strided",
    "Summary",
    "parse",
]
