"""What every spec of a mechanism can do: be built, by itself or for a place in a model."""

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hasten.attention.base import Attention
from hasten.errors import UserError
from hasten.fields import Spec

Some = TypeVar("Some", bound="MechanismSpec")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a mechanism stands in a model: its layer in the stack, from 0, and the heads; None: not known."""

    layer: int = 0
    n_heads: int | None = None
    d_head: int | None = None


class MechanismSpec(Spec, ABC):
    """Base of the specs of mechanisms. Fields of these names have one meaning in all of them:

    n_heads, d_head: the heads of the layer and their width. None leaves them to the place, `at`.
    seed: what the mechanism draws follows from it; each layer of a stack has draws of its own.
    """

    def at(self: Some, place: Place) -> Some:
        """The spec at a place in a model: sizes left open are those of the place, the seed is that of its layer."""
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        sizes = {name: getattr(place, name) for name in ("n_heads", "d_head") if name in own and own[name] is None}
        seeds = {"seed": seed_of_layer(own["seed"], place.layer)} if "seed" in own else {}
        return dataclasses.replace(self, **sizes, **seeds)  # type: ignore[type-var]

    @abstractmethod
    def build(self) -> Attention:
        """The mechanism this spec describes; `UserError` where it contradicts itself or lacks a size."""

    def build_layers(self, n_layers: int) -> Sequence[Attention]:
        """Mechanisms of several layers of one stack, which may hold parameters in common."""
        return [self.build() for _ in range(n_layers)]

    def size(self, name: str) -> int:
        """The field `name`, `n_heads` or `d_head`; `UserError` where it was left open and no place has set it."""
        value: int | None = getattr(self, name)
        if value is None:
            raise UserError(
                f"{vars(self)['kind']}: {name} is not set; give it, or let multi_head or a model build the mechanism, "
                "which know their heads"
            )
        return value


def seed_of_layer(seed: int, layer: int) -> int:
    """Seeds of 32 bits that differ from layer to layer; the first layer has the seed itself."""
    if not layer:
        return seed
    return int.from_bytes(hashlib.blake2s(f"{seed} {layer}".encode(), digest_size=4).digest(), "big")
