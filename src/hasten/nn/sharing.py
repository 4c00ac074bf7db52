"""Layers that share attention: which layer computes what, and what is carried from it to the others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from hasten.attention import Attention, multi_head
from hasten.attention.multihead import Attended
from hasten.errors import UserError
from hasten.nn.following import REUSE

Shared = Literal["weights", "context", "output"]


@dataclass(frozen=True)
class SourceMap:
    """For each layer, from 0, the layer whose attention it uses; its own number where it computes it itself.

    A source computes its own. So a map of blocks is one where each layer points to the first of its block; a layer may
    also point farther back, over others.
    """

    sources: tuple[int, ...]

    @staticmethod
    def of(numbers: Sequence[int], n_layers: int, name: str) -> "SourceMap":
        """From numbers that count layers from 1; none at all: every layer its own. Errors: `UserError` naming them."""
        sources = tuple(number - 1 for number in numbers) if numbers else tuple(range(n_layers))
        if len(sources) != n_layers:
            raise UserError(f"{name} has {len(sources)} entries; give one for each of the {n_layers} layers, or none")
        for layer, source in enumerate(sources):
            if not 0 <= source <= layer or sources[source] != source:
                raise UserError(
                    f"{name}: layer {layer + 1} cannot use the attention of layer {source + 1}; give its own number, "
                    "or that of an earlier layer that computes its own, for example [1, 1, 3, 3]"
                )
        return SourceMap(sources)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Counted from 1, as in configurations."""
        return tuple(source + 1 for source in self.sources)

    def leads(self, layer: int) -> bool:
        """Whether others use the attention of this layer."""
        return self.sources.count(layer) > 1

    def follows(self, layer: int) -> bool:
        """Whether this layer uses that of another."""
        return self.sources[layer] != layer

    def last(self, source: int) -> int:
        """The last layer that uses the attention of this one."""
        return max(layer for layer, own in enumerate(self.sources) if own == source)


class Carry:
    """What layers have computed and later ones are still to use: dropped after its last use."""

    def __init__(self, plan: SourceMap):
        self.plan = plan
        self.held: dict[int, Attended] = {}

    def take(self, layer: int) -> Attended | None:
        """What a layer uses of another; None where it computes its own."""
        source = self.plan.sources[layer]
        if source == layer:
            return None
        return self.held.pop(source) if self.plan.last(source) == layer else self.held[source]

    def put(self, layer: int, attended: Attended) -> None:
        """Keep what a layer has computed, if others are to use it."""
        if self.plan.leads(layer):
            self.held[layer] = attended


def attention_layers(
    attentions: Sequence[Attention | None], plan: SourceMap, d_model: int, n_heads: int, shared: Shared, name: str
) -> Iterator[nn.Module]:
    """The attention of every layer, one at a time: projections around a mechanism, or what reuses another layer's."""
    for layer, attention in enumerate(attentions):
        if attention is None:
            yield REUSE[shared](d_model, n_heads)
            continue
        own = multi_head(d_model, n_heads, attention)
        if plan.leads(layer) and shared == "weights":
            try:
                own.lead()
            except UserError as error:
                raise UserError(f"{name}, layer {layer + 1}: {error}") from error
        yield own
