"""Multi-head attention around any mechanism, with the parameters of `torch.nn.MultiheadAttention`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from hasten.attention.base import Attention, Cache, Operator, Rewinding, State, StepOperator
from hasten.attention.losses import gather
from hasten.attention.masks import Mask, padding, silence
from hasten.attention.packed import attend_packed
from hasten.errors import UserError

_EVERYTHING = Mask()


@dataclass(frozen=True)
class SelfState:
    """Decoding state of one self-attention: the mechanism's keys and this layer's values."""

    keys: State
    values: State

    def select(self, rows: Tensor) -> "SelfState":
        """Batch rows by index."""
        return SelfState(self.keys.select(rows), self.values.select(rows))

    def rewind(self, dropped: Int[Tensor, "B"]) -> "SelfState":
        """Without the last positions of each row, where the mechanism's traits say that it can."""
        assert isinstance(self.keys, Rewinding)
        assert isinstance(self.values, Rewinding)
        return SelfState(self.keys.rewind(dropped), self.values.rewind(dropped))


@dataclass(frozen=True)
class CrossState:
    """Keys and values of a memory, projected once: (B, H, S, D) each, zero where the memory's mask (B, S) is False.

    mask is None where every position is real: then no step spends time on it.
    """

    keys: Cache
    values: Cache
    mask: Tensor | None

    def select(self, rows: Tensor) -> "CrossState":
        """Batch rows by index."""
        mask = None if self.mask is None else self.mask.index_select(0, rows)
        return CrossState(self.keys.select(rows), self.values.select(rows), mask)


@dataclass(frozen=True)
class Attended:
    """What attention leaves to its layer, and to others that share it.

    output (B, T, D); context (B, T, D), the heads side by side before the output projection; the operator that made it.
    """

    output: Float[Tensor, "B T D"]
    context: Float[Tensor, "B T D"]
    operator: Operator | StepOperator


def _as_it_is(operator: Any) -> Any:
    return operator


def _materialised(operator: Any) -> Any:
    return operator.materialised()


@dataclass(frozen=True)
class _Rows:
    """The blocks of `in_proj_weight` that an input passes, and which of the results are picked; -1: the input."""

    first: int
    last: int
    picked: tuple[int, ...]


def _rows(wanted: Sequence[str], projected: Sequence[str]) -> _Rows:
    """The rows for the wanted roles, given the roles that have rows."""
    places = [projected.index(role) if role in projected else -1 for role in wanted]
    used = [place for place in places if place >= 0]
    first, last = (min(used), max(used) + 1) if used else (0, 0)
    return _Rows(first, last, tuple(place - first if place >= 0 else -1 for place in places))


def cut(d_model: int, n_heads: int) -> None:
    """`UserError` unless the heads divide the width."""
    if n_heads < 1 or d_model < 1 or d_model % n_heads:
        raise UserError(f"d_model {d_model} cannot be cut into {n_heads} heads; n_heads must divide d_model")


class MultiHeadAttention(nn.Module):
    """Projections around a mechanism: out = W_o concat_h(operator(q_h, k_h) v_h).

    The parameters, their names and shapes are those of `torch.nn.MultiheadAttention` (`in_proj_weight` (3 d, d) =
    queries, keys, values on rows; `in_proj_bias`; `out_proj`), so state dicts are exchanged unchanged.
    A mechanism that reads no queries, no keys, or the same projection as both (`traits.needs`, `traits.shared_qk`) has
    no rows for them: then `in_proj_weight` holds, in this order, queries, keys and values as far as each is projected.
    As a query or key that is not projected the mechanism gets the input itself, cut into heads, for its shape.
    Inputs are batch first, (B, length, d_model); the mask says True = may attend.
    Errors: `UserError` where heads do not divide the width or are not those the mechanism was made for, for a mechanism
    that asks for second projections or for none (`multi_head` builds its layer), and for a memory where the mechanism
    is for self-attention only.
    Source: Vaswani et al., 2017, section 3.2.2.
    """

    def __init__(self, d_model: int, n_heads: int, attention: Attention, *, bias: bool = True):
        super().__init__()
        cut(d_model, n_heads)
        if not isinstance(attention, Attention):
            raise TypeError(f"attention is {attention!r}; give an instance of a mechanism, for example FullAttention()")
        traits = attention.traits
        attention.fits(n_heads, d_model // n_heads)
        if traits.second_projections and type(self) is MultiHeadAttention:
            raise UserError(
                f"{type(attention).__name__} is made for second projections (traits.second_projections), which this "
                "layer lacks; build the layer by multi_head(d_model, n_heads, attention)"
            )
        if traits.unprojected:
            raise UserError(
                f"{type(attention).__name__} is made for a layer without projections (traits.unprojected); build the "
                "layer by multi_head(d_model, n_heads, attention)"
            )
        self.d_model, self.n_heads, self.attention = d_model, n_heads, attention
        self._form: Callable[[Any], Any] = _as_it_is
        projected = [role for role in ("query", "key", "value") if role == "value" or role in traits.needs]
        if traits.shared_qk:
            projected = ["query", "value"]
        key = "query" if traits.shared_qk else "key"
        self._all = _rows(("query", key, "value"), projected)
        self._query, self._memory = _rows(("query",), projected), _rows((key, "value"), projected)
        self.in_proj_weight = Parameter(torch.empty(len(projected) * d_model, d_model))
        self.in_proj_bias = Parameter(torch.zeros(len(projected) * d_model)) if bias else None
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        # Every projection starts as it would among all three.
        nn.init.xavier_uniform_(self.in_proj_weight, gain=math.sqrt((len(projected) + 1) / 4))
        nn.init.xavier_uniform_(self.out_proj.weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self, x: Float[Tensor, "B T D"], mask: Mask = _EVERYTHING, memory: Float[Tensor, "B S D"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Self-attention over `x`, or attention from `x` over `memory`; without a mask every query reads every key."""
        return self.attend(x, mask, memory).output

    def attend(
        self,
        x: Float[Tensor, "B T D"],
        mask: Mask = _EVERYTHING,
        memory: Float[Tensor, "B S D"] | None = None,
        carried: Attended | None = None,
    ) -> Attended:
        """`forward`, and what other layers can share; `carried` from another layer is not read."""
        if not isinstance(mask, Mask):
            raise TypeError(
                f"mask is a {type(mask).__name__}; give a Mask, for example Mask(keys=mask), True = may attend"
            )
        if memory is None:
            q, k, v = self._project(x, self._all)
        else:
            self._check_memory()
            (q,), (k, v) = self._project(x, self._query), self._project(memory, self._memory)
        operator = self.attention.operator(q, k, mask)
        gather(operator.losses)
        return self._attended(self._form(operator), v)

    def packed(
        self, x: Float[Tensor, "total D"], lengths: Int[Tensor, " B"], causal: bool = False
    ) -> Float[Tensor, "total D"]:
        """Self-attention within sequences laid end to end, as `pack` does; equal to `forward` on each alone.

        Projections are computed for tokens only; attention pads as little as `attend_packed` says.
        """
        q, k, v = (part[0].transpose(0, 1) for part in self._project(x[None], self._all))
        out = attend_packed(self.attention, q, k, v, lengths, causal=causal)
        return self._merge(out.transpose(0, 1)[None])[0]

    def step(self, x: Float[Tensor, "B n D"], state: SelfState | None) -> tuple[Float[Tensor, "B n D"], SelfState]:
        """Causal self-attention of n new positions after `state` (None: the beginning)."""
        attended, after = self.attend_step(x, state)
        return attended.output, after

    def attend_step(
        self, x: Float[Tensor, "B n D"], state: SelfState | None, carried: Attended | None = None
    ) -> tuple[Attended, SelfState]:
        """`step`, and what other layers can share."""
        q, k, v = self._project(x, self._all)
        operator, keys = self.attention.step(q, k, state.keys if state else None)
        operator = self._form(operator)
        out, values = operator.apply(v, state.values if state else None)
        context = out.transpose(1, 2).flatten(2)
        return Attended(self._out(context), context, operator), SelfState(keys, values)

    def remember(self, memory: Float[Tensor, "B S D"], mask: Tensor) -> CrossState:
        """Project a memory once, for many calls of `recall`; `mask` (B, S) is True on real keys."""
        self._check_memory()
        k, v = self._project(memory, self._memory)
        keys = padding(mask).keys
        return CrossState(Cache(silence(k, keys).contiguous()), Cache(silence(v, keys).contiguous()), keys)

    def recall(self, x: Float[Tensor, "B n D"], memory: CrossState) -> Float[Tensor, "B n D"]:
        """Attention from `x` over a remembered memory."""
        return self.attend_memory(x, memory).output

    def attend_memory(self, x: Float[Tensor, "B n D"], memory: CrossState, carried: Attended | None = None) -> Attended:
        """`recall`, and what other layers can share."""
        (q,) = self._project(x, self._query)
        mask = Mask(keys=memory.mask, silent=True)
        operator = self._form(self.attention.operator(q, memory.keys.past, mask))
        return self._attended(operator, memory.values.past)

    def lead(self) -> None:
        """Let other layers apply this one's weights: they are computed once, then, and never dropped."""
        self._form = _materialised

    def _check_memory(self) -> None:
        if not self.attention.traits.cross:
            raise UserError(
                f"{type(self.attention).__name__} is for self-attention: its queries and keys are places of one "
                "sequence; over a memory take another mechanism, for example FullAttention"
            )

    def _project(self, x: Tensor, rows: _Rows) -> tuple[Tensor, ...]:
        """What is picked of the projections of x, and of x itself: each (B, H, length, d_head)."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if rows is not self._all:
            part = slice(rows.first * self.d_model, rows.last * self.d_model)
            weight, bias = weight[part], None if bias is None else bias[part]
        y = F.linear(x, weight, bias)
        batch, length, d_head = *x.shape[:2], self.d_model // self.n_heads
        y = y.view(batch, length, rows.last - rows.first, self.n_heads, d_head).permute(2, 0, 3, 1, 4)
        parts = (*y.unbind(0), x.view(batch, length, self.n_heads, d_head).transpose(1, 2))
        return tuple(parts[i] for i in rows.picked)

    def _attended(self, operator: Operator, v: Float[Tensor, "B H S d"]) -> Attended:
        context = operator.apply(v).transpose(1, 2).flatten(2)
        return Attended(self._out(context), context, operator)

    def _merge(self, out: Float[Tensor, "B H T d"]) -> Float[Tensor, "B T D"]:
        return self._out(out.transpose(1, 2).flatten(2))

    def _out(self, context: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        # A function, since a module call costs as much as the arithmetic of one decoding step.
        return F.linear(context, self.out_proj.weight, self.out_proj.bias)
