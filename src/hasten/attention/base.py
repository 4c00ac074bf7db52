"""The contract: attention makes, from queries, keys and a mask, an operator that acts linearly on values."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hasten.attention.masks import Mask, silence
from hasten.errors import UserError
from hasten.nn.loss import LossTerm


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts about a mechanism, checked when a model is built and by the conformance suite.

    causal: "strict": output i depends on nothing later. "value": later values never enter, later keys may move the
        pattern. None: the mechanism cannot be causal.
    not_strict: why it is not strictly causal, for messages.
    cross: queries and keys may come from different sequences, of different lengths.
    suffix: queries may be fewer (or more) than keys of the same sequence: query i is token i + S - T of it.
    step: `step` decodes one position (or a chunk) at a time, equal to the whole sequence.
    rewind: its states of decoding can drop their last positions again, of each row as many as asked (`Rewinding`).
    normalised: the weights of a row that may read something sum to 1.
    key_padding: padded keys (`Mask.keys`) are as good as absent.
    allowed: any pattern (`Mask.allowed`) is honoured.
    marked: tokens marked by the call (`Mask.marked`) mean something.
    dropout: attention weights can be dropped in training.
    needs: which of the projections "query" and "key" the mechanism reads.
    shared_qk: one projection serves as query and key.
    max_length: longest sequence, None where there is no limit.
    empty: sequences without positions are taken, too.
    n_heads, d_head: the heads it is made for and their width, None for any.
    external: how many learnt tokens must stand before the sequence.
    second_projections: marked and first tokens are read, as queries, through projections of their own.
    unprojected: it is made for a layer of its own, without projections around heads; `multi_head` builds this layer.
    memory: peak memory grows with length to at most this power.

    A call outside the traits raises `UserError`, naming the mechanism and the trait; `step` without the trait raises
    `TypeError`.
    """

    causal: Literal["strict", "value"] | None
    cross: bool
    step: bool
    normalised: bool
    key_padding: bool
    dropout: bool
    suffix: bool = False
    allowed: bool = False
    marked: bool = False
    needs: frozenset[str] = field(default_factory=lambda: frozenset({"query", "key"}))
    shared_qk: bool = False
    max_length: int | None = None
    empty: bool = False
    n_heads: int | None = None
    d_head: int | None = None
    external: int = 0
    rewind: bool = False
    second_projections: bool = False
    unprojected: bool = False
    memory: float = 2.0
    not_strict: str = ""


class Operator(ABC):
    """The linear map that one attention call applies to values."""

    losses: tuple[LossTerm, ...] = ()

    @abstractmethod
    def apply(self, v: Float[Tensor, "B H S Dv"]) -> Float[Tensor, "B H T Dv"]:
        """Mix the values of the keys for every query."""

    @abstractmethod
    def dense(self) -> Float[Tensor, "B H T S"]:
        """The matrix of this map, formed; for tests, pictures and divergences."""

    def materialised(self) -> "Operator":
        """The same map with its weights computed once: what layers that share weights apply."""
        return Weights(self.dense())


class Weights(Operator):
    """A map given by its matrix. With `keys` (B, S), values at False keys are not read: a NaN there is harmless."""

    def __init__(self, weights: Float[Tensor, "B H T S"], keys: Bool[Tensor, "B S"] | None = None):
        self.weights, self.keys = weights, keys

    def apply(self, v: Float[Tensor, "B H S Dv"]) -> Float[Tensor, "B H T Dv"]:
        """Weights times values."""
        return self.weights @ silence(v, self.keys)

    def dense(self) -> Float[Tensor, "B H T S"]:
        """The weights themselves."""
        return self.weights

    def materialised(self) -> "Operator":
        """Already formed."""
        return self


S = TypeVar("S", bound="State")


@runtime_checkable
class State(Protocol):
    """What decoding carries from step to step: tensors, batch first."""

    def select(self: S, rows: Tensor) -> S:
        """The state of the given batch rows: reorders beams, drops finished sentences."""
        ...


@runtime_checkable
class Rewinding(State, Protocol):
    """A state that can go back."""

    def rewind(self: S, dropped: Int[Tensor, "B"]) -> S:
        """The state without the last positions, so many of each row: as if they had never been."""
        ...


@dataclass(frozen=True)
class Cache:
    """All keys or all values so far, (B, H, t, D).

    Rows end together. Those that were rewound farther than others begin later: their first `empty` (B,) places hold
    zeros, which nobody reads; None: there are no such places.
    """

    past: Float[Tensor, "B H t D"]
    empty: Int[Tensor, "B"] | None = None

    @property
    def real(self) -> Bool[Tensor, "B t"] | None:
        """Which places hold something; None: all."""
        if self.empty is None:
            return None
        return torch.arange(self.past.shape[2], device=self.past.device) >= self.empty[:, None]

    def append(self, new: Float[Tensor, "B H n D"]) -> "Cache":
        """With `new` after the past."""
        return Cache(torch.cat((self.past, new), dim=2), self.empty)

    def select(self, rows: Tensor) -> "Cache":
        """Batch rows by index."""
        return Cache(self.past.index_select(0, rows), None if self.empty is None else self.empty.index_select(0, rows))

    def rewind(self, dropped: Int[Tensor, "B"]) -> "Cache":
        """Without the last positions of each row, its others moved to the end."""
        empty = dropped if self.empty is None else dropped + self.empty
        least, first, length = int(dropped.min()), int(empty.min()), self.past.shape[2]
        if int(empty.max()) == first and least == int(dropped.max()):
            return Cache(self.past[:, :, first - least : length - least])
        places = torch.arange(first, length, device=dropped.device) - dropped[:, None]
        index = places.clamp(min=0)[:, None, :, None].expand(-1, self.past.shape[1], -1, self.past.shape[3])
        rest = Cache(self.past.gather(2, index), empty - first)
        return Cache(silence(rest.past, rest.real), rest.empty)


class StepOperator(ABC):
    """The map of one decoding step. It owns no values: their state goes in and comes out."""

    @abstractmethod
    def apply(self, v: Float[Tensor, "B H n Dv"], values: State | None) -> tuple[Float[Tensor, "B H n Dv"], State]:
        """Outputs for the n new positions, given their values and the value state so far (None: empty)."""

    def materialised(self) -> "StepOperator":
        """The same map with its weights computed once, where `apply` would compute them at each call."""
        return self


class Attention(nn.Module, ABC):
    """A mechanism. Queries (B, H, T, D) and keys (B, H, S, D) in, an operator out."""

    traits: Traits

    def fits(self, n_heads: int, d_head: int) -> None:
        """Refuse, with a `UserError`, heads that the mechanism was not made for."""
        own, mechanism = self.traits, type(self).__name__
        for name, made_for, given in (("n_heads", own.n_heads, n_heads), ("d_head", own.d_head, d_head)):
            if made_for is not None and made_for != given:  # a form that is traced with any sizes
                raise UserError(f"{mechanism} was made for {name} = {made_for}, got {given}; give both the same")

    def check(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> None:
        """Refuse what does not fit, and what the traits do not claim: `UserError`. Every `operator` begins with it."""
        if q.dim() != 4 or not q.is_floating_point() or not q.shape[3]:
            raise UserError(f"queries are {tuple(q.shape)} of {q.dtype}; give floating-point numbers (B, H, T, D)")
        if k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
            raise UserError(f"keys are {tuple(k.shape)}, queries {tuple(q.shape)}; all but the lengths must be equal")
        for name, given in (("keys", mask.keys), ("marked", mask.marked)):
            if given is not None and given.shape != (k.shape[0], k.shape[2]):
                wanted = (k.shape[0], k.shape[2])
                raise UserError(f"Mask: {name} is {tuple(given.shape)}; give {wanted}, batch and keys")
        self.fits(q.shape[1], q.shape[3])
        traits, name = self.traits, type(self).__name__
        refused = {
            "a causal mask": mask.causal and traits.causal is None,
            "padded keys (Mask.keys)": mask.keys is not None and not traits.key_padding,
            "a pattern (Mask.allowed)": mask.allowed is not None and not traits.allowed,
            "marked tokens (Mask.marked)": mask.marked is not None and not traits.marked,
        }
        for what, is_given in refused.items():
            if is_given:
                raise UserError(f"{name} takes no mask with {what}; FullAttention takes every kind but marked tokens")
        if not (traits.cross or traits.suffix) and q.shape[2] != k.shape[2]:
            raise UserError(f"{name} is for self-attention: got {q.shape[2]} queries and {k.shape[2]} keys")
        if not traits.empty and not (q.shape[2] and k.shape[2]):
            raise UserError(f"{name} got {q.shape[2]} queries and {k.shape[2]} keys; give at least one of each")
        if traits.max_length is not None and max(q.shape[2], k.shape[2]) > traits.max_length:
            raise UserError(
                f"{name} was made for at most {traits.max_length} positions, "
                f"got {max(q.shape[2], k.shape[2])}; build it with a larger length"
            )

    @abstractmethod
    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Operator:
        """The map that these queries and keys define."""

    @abstractmethod
    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The plain dense definition, (B, H, T, S); slow and obvious. It is the specification."""

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple[StepOperator, State]:
        """Causal decoding of n new positions, given the key state so far (None: empty)."""
        raise TypeError(f"{type(self).__name__} cannot decode step by step (traits.step is {self.traits.step})")
