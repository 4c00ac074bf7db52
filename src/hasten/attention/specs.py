"""The mechanisms a configuration can choose from."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias, Union, get_args

from pydantic import Field

from hasten.attention.average import AverageSpec
from hasten.attention.clustering.lsh import LSHSpec
from hasten.attention.clustering.routing import RoutingSpec
from hasten.attention.fewer_keys.compressed import CompressedSpec
from hasten.attention.fewer_keys.linformer import LinformerSpec
from hasten.attention.fewer_keys.nystrom import NystromSpec
from hasten.attention.fewer_keys.sinkhorn import SinkhornSpec
from hasten.attention.full import FullSpec
from hasten.attention.heads import HeadsAttention
from hasten.attention.kernels.efficient import EfficientSpec
from hasten.attention.kernels.linear import LinearSpec
from hasten.attention.kernels.performer import PerformerSpec
from hasten.attention.kernels.rfa import RFASpec
from hasten.attention.mechanism import MechanismSpec, Place
from hasten.attention.patterns.longformer import LongformerSpec
from hasten.attention.patterns.sparse_transformer import SparseTransformerSpec
from hasten.attention.patterns.specs import BigBirdSpec, BlocksSpec, LocalSpec, PatternSpec
from hasten.attention.ssru import SSRUSpec
from hasten.attention.synthesizer import SynthesizerSpec
from hasten.fields import PositiveInt, Share, Spec

_Mechanisms: TypeAlias = (
    FullSpec
    | PatternSpec
    | LocalSpec
    | BlocksSpec
    | SparseTransformerSpec
    | LongformerSpec
    | BigBirdSpec
    | LSHSpec
    | RoutingSpec
    | SinkhornSpec
    | CompressedSpec
    | LinformerSpec
    | NystromSpec
    | LinearSpec
    | EfficientSpec
    | RFASpec
    | PerformerSpec
    | SynthesizerSpec
    | AverageSpec
    | SSRUSpec
)


@dataclass(frozen=True, kw_only=True)
class HeadGroup(Spec):
    """Some heads and their mechanism."""

    heads: PositiveInt
    """How many heads."""
    attention: Annotated[_Mechanisms, Field(discriminator="kind")]
    """Their mechanism."""


@dataclass(frozen=True, kw_only=True)
class HeadsSpec(MechanismSpec):
    """Different heads, different mechanisms; all heads of the layer must be given one."""

    kind: Literal["heads"] = "heads"
    """The mechanism's name."""
    groups: tuple[HeadGroup, ...]
    """Groups of heads, for example [{ heads = 2, attention = { kind = "local" } }, ...]."""
    dropout: Share = 0.0
    """Share of attention weights dropped in training, in groups that set none of their own."""

    def at(self, place: Place) -> "HeadsSpec":
        """The spec at a place in a model; a group's heads are its own."""
        groups = ((g, replace(place, n_heads=g.heads)) for g in self.groups)
        return replace(self, groups=tuple(replace(g, attention=g.attention.at(own)) for g, own in groups))

    def build(self) -> HeadsAttention:
        """The mechanism this spec describes."""
        return HeadsAttention([(group.heads, self._dropping(group.attention).build()) for group in self.groups])

    def _dropping(self, spec: "_Mechanisms") -> "_Mechanisms":
        if not self.dropout or getattr(spec, "dropout", None) != 0.0:
            return spec
        return replace(spec, dropout=self.dropout)  # type: ignore[arg-type]


AttentionSpec: TypeAlias = Annotated[Union[_Mechanisms, HeadsSpec], Field(discriminator="kind")]  # noqa: UP007
ATTENTIONS: tuple[type[MechanismSpec], ...] = get_args(get_args(AttentionSpec)[0])
"""The spec of every mechanism."""
