"""The Sparse Transformer's two patterns, and the three ways to combine their halves."""

from dataclasses import dataclass, replace
from typing import Literal

from hasten.attention.base import Attention
from hasten.attention.heads import HeadsAttention
from hasten.attention.mechanism import MechanismSpec, Place
from hasten.attention.patterns.algebra import Pattern
from hasten.attention.patterns.attention import PatternAttention
from hasten.attention.patterns.shapes import Blocks, Local, Strided, Summary
from hasten.errors import UserError
from hasten.fields import NonNegativeInt, PositiveInt, Share


@dataclass(frozen=True, kw_only=True)
class SparseTransformerSpec(MechanismSpec):
    """Near tokens by one pattern, far ones by another: strided or fixed.

    strided: the `stride` neighbours, and every stride-th token. fixed: the own block of `stride` tokens, and the last
    `summary` tokens of every block. Both are symmetric here and one-sided in causal models. Source: Child et al.,
    2019, sections 4.2 and 4.3.
    """

    kind: Literal["sparse_transformer"] = "sparse_transformer"
    """The mechanism's name."""
    pattern: Literal["strided", "fixed"] = "strided"
    """Which pair of patterns."""
    stride: PositiveInt = 64
    """Distance of the far tokens (strided) or tokens in a block (fixed); best near the root of the length."""
    summary: PositiveInt = 8
    """Tokens of each block that all others read (fixed)."""
    combine: Literal["union", "heads", "layers"] = "union"
    """Both halves in every head, one half of the heads each, or in turn, layer by layer."""
    n_heads: PositiveInt | None = None
    """Heads of the layer, where they differ; a model sets it."""
    layer: NonNegativeInt = 0
    """Which layer of the stack this is, where layers take turns; a stack sets it itself."""
    dropout: Share = 0.0
    """Share of attention weights dropped in training."""

    def at(self, place: Place) -> "SparseTransformerSpec":
        """The spec at a place in a model."""
        return replace(super().at(place), layer=place.layer)

    def build(self) -> Attention:
        """The mechanism this spec describes."""
        if self.pattern == "fixed" and self.summary > self.stride:
            raise UserError(f"sparse_transformer: summary {self.summary} is more than stride {self.stride}")
        near, far = self._halves()
        if self.combine == "union":
            return PatternAttention(near | far, dropout=self.dropout)
        if self.combine == "layers":
            return PatternAttention((near, far)[self.layer % 2], dropout=self.dropout)
        n_heads = self.size("n_heads")
        if n_heads < 2:
            raise UserError('sparse_transformer: combine = "heads" needs 2 heads or more, the layer has 1')
        first, second = (PatternAttention(half, dropout=self.dropout) for half in (near, far))
        return HeadsAttention([(n_heads - n_heads // 2, first), (n_heads // 2, second)])

    def _halves(self) -> tuple[Pattern, Pattern]:
        if self.pattern == "strided":
            return Local(self.stride), Strided(self.stride)
        # A token that reads summaries alone reads nothing before the first one: it also reads itself.
        far = Summary(self.stride, self.summary)
        return Blocks(self.stride), far if self.combine == "union" else far | Local(0)
