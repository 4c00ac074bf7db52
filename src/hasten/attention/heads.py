"""Different heads, different mechanisms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hasten.attention.base import Attention, Operator, State, StepOperator, Traits
from hasten.attention.masks import Mask
from hasten.errors import UserError
from hasten.nn.loss import LossTerm


class HeadsAttention(Attention):
    """The first heads by one mechanism, the next ones by another: operators side by side along the head axis.

    groups: (number of heads, mechanism), in the order of the heads. What the whole can do is what all of them can.
    """

    def __init__(self, groups: Sequence[tuple[int, Attention]]):
        super().__init__()
        if not groups:
            raise UserError("heads: give at least one group of heads")
        if any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size, _ in groups):
            sizes = [size for size, _ in groups]
            raise UserError(f"heads: got {sizes}; every group needs at least one head, a whole number of them")
        for _, attention in groups:
            if not isinstance(attention, Attention):
                raise TypeError(f"heads: {attention!r} is no mechanism; give one, for example FullAttention()")
        self.sizes = [size for size, _ in groups]
        self.groups = nn.ModuleList(attention for _, attention in groups)
        for size, attention in groups:
            if attention.traits.n_heads not in (None, size):
                name = type(attention).__name__
                raise UserError(f"heads: {name} was made for {attention.traits.n_heads} heads, the group has {size}")
        for _, attention in groups:
            if attention.traits.unprojected:
                name = type(attention).__name__
                raise UserError(
                    f"heads: {name} comes with a layer of its own (average attention does not with gate = false)"
                )
        widths = {attention.traits.d_head for _, attention in groups} - {None}
        if len(widths) > 1:
            raise UserError(f"heads: groups are made for heads of different widths, {sorted(widths)}; all are equal")  # type: ignore[type-var]
        self.traits = _common([attention.traits for _, attention in groups], sum(self.sizes))

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> "HeadsOperator":
        """One operator a group."""
        self.check(q, k, mask)
        parts = zip(self._attentions(), q.split(self.sizes, 1), k.split(self.sizes, 1), self._masks(mask), strict=True)
        return HeadsOperator(
            [attention.operator(own_q, own_k, own) for attention, own_q, own_k, own in parts], self.sizes
        )

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The groups' definitions, one above the other."""
        parts = zip(self._attentions(), q.split(self.sizes, 1), k.split(self.sizes, 1), self._masks(mask), strict=True)
        return torch.cat([attention.reference(own_q, own_k, own) for attention, own_q, own_k, own in parts], 1)

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple[StepOperator, State]:
        """One step of each group."""
        if not self.traits.step:
            return super().step(q, k, keys)
        assert keys is None or isinstance(keys, HeadsState)
        before = keys.parts if keys else (None,) * len(self.sizes)
        parts = zip(self._attentions(), q.split(self.sizes, 1), k.split(self.sizes, 1), before, strict=True)
        steps = [attention.step(own_q, own_k, own) for attention, own_q, own_k, own in parts]
        return HeadsStep([step for step, _ in steps], self.sizes), HeadsState(tuple(state for _, state in steps))

    def _attentions(self) -> list[Attention]:
        return list(self.groups)  # type: ignore[arg-type]

    def _masks(self, mask: Mask) -> list[Mask]:
        """The mask of each group: a pattern that differs between heads is cut."""
        if mask.allowed is None or mask.allowed.shape[1] == 1:
            return [mask] * len(self.sizes)
        if mask.allowed.shape[1] != sum(self.sizes):
            raise UserError(f"Mask: allowed has {mask.allowed.shape[1]} heads; give 1 or {sum(self.sizes)}")
        return [replace(mask, allowed=own) for own in mask.allowed.split(self.sizes, 1)]

    def extra_repr(self) -> str:
        """Shown in the module's print-out."""
        return f"heads={self.sizes}"


def _common(traits: Sequence[Traits], n_heads: int) -> Traits:
    """What all can do."""
    causal = None
    if all(one.causal for one in traits):
        causal = "strict" if all(one.causal == "strict" for one in traits) else "value"
    if len({(one.external, one.second_projections, one.shared_qk) for one in traits}) > 1:
        raise UserError("heads: external tokens, second projections and shared queries must be those of all groups")
    lengths = [one.max_length for one in traits if one.max_length is not None]

    def all_of(claim: Callable[[Traits], bool]) -> bool:
        return all(claim(one) for one in traits)

    return Traits(
        causal=causal,
        cross=all_of(lambda one: one.cross),
        suffix=all_of(lambda one: one.suffix or one.cross),
        step=all_of(lambda one: one.step),
        normalised=all_of(lambda one: one.normalised),
        key_padding=all_of(lambda one: one.key_padding),
        dropout=all_of(lambda one: one.dropout),
        allowed=all_of(lambda one: one.allowed),
        marked=all_of(lambda one: one.marked),
        needs=frozenset().union(*(one.needs for one in traits)),
        shared_qk=traits[0].shared_qk,
        max_length=min(lengths) if lengths else None,
        empty=all_of(lambda one: one.empty),
        n_heads=n_heads,
        d_head=next((one.d_head for one in traits if one.d_head is not None), None),
        external=traits[0].external,
        second_projections=traits[0].second_projections,
        memory=max(one.memory for one in traits),
    )


class HeadsOperator(Operator):
    """Operators side by side."""

    def __init__(self, parts: Sequence[Operator], sizes: Sequence[int]):
        self.parts, self.sizes = list(parts), list(sizes)

    @property
    def losses(self) -> tuple[LossTerm, ...]:  # type: ignore[override]
        """Those of all groups."""
        return tuple(loss for part in self.parts for loss in part.losses)

    def apply(self, v: Float[Tensor, "B H S Dv"]) -> Float[Tensor, "B H T Dv"]:
        """Each group's values by its operator."""
        if v.shape[1] != sum(self.sizes):
            raise UserError(f"values have {v.shape[1]} heads, the mechanism {sum(self.sizes)}; give both the same")
        return torch.cat([part.apply(own) for part, own in zip(self.parts, v.split(self.sizes, 1), strict=True)], 1)

    def dense(self) -> Float[Tensor, "B H T S"]:
        """One above the other."""
        return torch.cat([part.dense() for part in self.parts], 1)

    def materialised(self) -> "HeadsOperator":
        """Each materialised."""
        return HeadsOperator([part.materialised() for part in self.parts], self.sizes)


@dataclass(frozen=True)
class HeadsState:
    """The states of the groups."""

    parts: tuple[State, ...]

    def select(self, rows: Tensor) -> "HeadsState":
        """Batch rows by index."""
        return HeadsState(tuple(part.select(rows) for part in self.parts))


class HeadsStep(StepOperator):
    """Steps side by side."""

    def __init__(self, parts: Sequence[StepOperator], sizes: Sequence[int]):
        self.parts, self.sizes = list(parts), list(sizes)

    def apply(self, v: Float[Tensor, "B H n Dv"], values: State | None) -> tuple[Float[Tensor, "B H n Dv"], State]:
        """Each group's values by its step."""
        assert values is None or isinstance(values, HeadsState)
        before = values.parts if values else (None,) * len(self.sizes)
        parts = zip(self.parts, v.split(self.sizes, 1), before, strict=True)
        outs = [part.apply(own, state) for part, own, state in parts]
        return torch.cat([out for out, _ in outs], 1), HeadsState(tuple(state for _, state in outs))
