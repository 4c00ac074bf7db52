"""Longformer: a sliding window, and global tokens that read, and are read by, all others."""

from dataclasses import dataclass, replace
from typing import Literal

from hasten.attention.mechanism import MechanismSpec
from hasten.attention.patterns.algebra import Pattern
from hasten.attention.patterns.attention import PatternAttention
from hasten.attention.patterns.global_shapes import Global, Marked
from hasten.attention.patterns.shapes import Local
from hasten.fields import NonNegativeInt, PositiveInt, Share


@dataclass(frozen=True, kw_only=True)
class LongformerSpec(MechanismSpec):
    """Longformer: a sliding window and global tokens, which have projections of their own.

    With second projections the mechanism is what ordinary tokens do, Local | Global(rows=False) | Marked(rows=False);
    a layer made by `multi_head` adds what global tokens do as queries. Without them, or without global tokens, it is
    the plain expression Local | Global | Marked. Heads that differ, such as a few dilated ones, are groups of `heads`.
    Source: Beltagy et al., 2020, section 3.1.
    """

    kind: Literal["longformer"] = "longformer"
    """The mechanism's name."""
    window: NonNegativeInt = 256
    """Tokens read on each side; the paper's window is the sum of both sides, its 512 are 256 here."""
    dilation: PositiveInt = 1
    """Every dilation-th token is read, so that the window is that much wider."""
    first: NonNegativeInt = 1
    """Global tokens at the beginning of the sequence."""
    marked: bool = False
    """Whether tokens marked in the call (`Mask.marked`), a number of its own for each example, are global, too."""
    second_projections: bool = True
    """Whether global tokens, as queries, are read through queries, keys and values of their own."""
    dropout: Share = 0.0
    """Share of attention weights dropped in training."""

    def build(self) -> PatternAttention:
        """The mechanism this spec describes."""
        second = self.second_projections and (self.first > 0 or self.marked)
        pattern: Pattern = Local(self.window, dilation=self.dilation)
        if self.first:
            pattern = pattern | Global(first=self.first, rows=not second)
        if self.marked:
            pattern = pattern | Marked(rows=not second)
        attention = PatternAttention(pattern, dropout=self.dropout)
        attention.traits = replace(attention.traits, second_projections=second)
        return attention
