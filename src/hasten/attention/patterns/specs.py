"""Patterns by name: what a configuration can ask for."""

from dataclasses import dataclass
from typing import Literal

from hasten.attention.mechanism import MechanismSpec
from hasten.attention.patterns.algebra import Pattern
from hasten.attention.patterns.attention import PatternAttention
from hasten.attention.patterns.expression import parse
from hasten.attention.patterns.global_shapes import External, Global
from hasten.attention.patterns.random_blocks import RandomBlocks
from hasten.attention.patterns.shapes import Blocks, Local
from hasten.fields import NonNegativeInt, PositiveInt, Seed, Share


@dataclass(frozen=True, kw_only=True)
class PatternSpec(MechanismSpec):
    """Sparse attention over a pattern written as an expression."""

    kind: Literal["pattern"] = "pattern"
    """The mechanism's name."""
    pattern: str
    """Shapes united by | and restricted by &, for example "Local(64) | Global(first=2)"."""
    dropout: Share = 0.0
    """Share of attention weights dropped in training."""
    seed: Seed = 0
    """Seed of random blocks."""

    def __post_init__(self) -> None:
        parse(self.pattern)

    def build(self) -> PatternAttention:
        """The mechanism this spec describes."""
        return PatternAttention(parse(self.pattern), dropout=self.dropout, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class LocalSpec(MechanismSpec):
    """Sliding-window attention: every token reads its neighbours."""

    kind: Literal["local"] = "local"
    """The mechanism's name."""
    left: NonNegativeInt = 128
    """Tokens read before each token."""
    right: NonNegativeInt | None = None
    """Tokens read after each token; as many as before where it is not given. Causal models read none."""
    dilation: PositiveInt = 1
    """Every dilation-th token is read, so that the window is that much wider."""
    dropout: Share = 0.0
    """Share of attention weights dropped in training."""

    def build(self) -> PatternAttention:
        """The mechanism this spec describes."""
        right = self.left if self.right is None else self.right
        return PatternAttention(Local(self.left, right, self.dilation), dropout=self.dropout)


@dataclass(frozen=True, kw_only=True)
class BlocksSpec(MechanismSpec):
    """Blocked local attention: every token reads its block and some blocks beside it."""

    kind: Literal["blocks"] = "blocks"
    """The mechanism's name."""
    block: PositiveInt = 64
    """Tokens in a block."""
    back: NonNegativeInt = 1
    """Blocks read before the own one."""
    ahead: NonNegativeInt = 1
    """Blocks read after the own one; causal models read none."""
    dropout: Share = 0.0
    """Share of attention weights dropped in training."""

    def build(self) -> PatternAttention:
        """The mechanism this spec describes."""
        return PatternAttention(Blocks(self.block, self.back, self.ahead), dropout=self.dropout)


@dataclass(frozen=True, kw_only=True)
class BigBirdSpec(MechanismSpec):
    """BigBird: blocked windows, global blocks and random blocks.

    Without external tokens the first and the last block are global; a causal model cannot know the last one, so there
    `last` must be false. With external tokens these are the global ones. Source: Zaheer et al., 2020.
    """

    kind: Literal["bigbird"] = "bigbird"
    """The mechanism's name."""
    block: PositiveInt = 64
    """Tokens in a block."""
    random: NonNegativeInt = 3
    """Random blocks that each block reads."""
    external: NonNegativeInt = 0
    """Learnt global tokens before the sequence; 0: tokens of the sequence are global."""
    last: bool = True
    """Whether the last block is global, too."""
    dropout: Share = 0.0
    """Share of attention weights dropped in training."""
    seed: Seed = 0
    """Seed of the random blocks."""

    def build(self) -> PatternAttention:
        """The mechanism this spec describes."""
        pattern: Pattern = Blocks(self.block, 1, 1)
        if self.external:
            pattern = External(self.external) | pattern
        else:
            pattern = pattern | Global(first=self.block, last=self.block if self.last else 0)
        if self.random:
            pattern = pattern | RandomBlocks(self.random, self.block, near=1, ends=not self.external)
        return PatternAttention(pattern, dropout=self.dropout, seed=self.seed)
