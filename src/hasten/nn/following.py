"""Attention of layers that reuse what another layer has computed. Source: Xiao et al., 2019."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from hasten.attention.base import Cache, Operator, Rewinding, State, StepOperator
from hasten.attention.masks import Mask, padding, silence
from hasten.attention.multihead import Attended, cut


@dataclass(frozen=True)
class ValueState:
    """Decoding state of a layer that has values and no keys."""

    values: State

    def select(self, rows: Tensor) -> "ValueState":
        """Batch rows by index."""
        return ValueState(self.values.select(rows))

    def rewind(self, dropped: Int[Tensor, "B"]) -> "ValueState":
        """Without the last positions of each row."""
        assert isinstance(self.values, Rewinding)
        return ValueState(self.values.rewind(dropped))


@dataclass(frozen=True)
class NoState:
    """Decoding state of a layer that keeps nothing."""

    def select(self, rows: Tensor) -> "NoState":
        """Still nothing."""
        return self


class ReuseWeights(nn.Module):
    """out = W_o concat_h(S_h v_h), with the weights S of another layer and this layer's own values.

    It has no queries and no keys: `in_proj_weight` (d, d) are the values' rows, named and laid out as in
    `MultiHeadAttention`; decoding keeps values only. Head h reads by the other layer's head h.
    """

    def __init__(self, d_model: int, n_heads: int, *, bias: bool = True):
        super().__init__()
        cut(d_model, n_heads)
        self.n_heads = n_heads
        self.in_proj_weight = Parameter(torch.empty(d_model, d_model))
        self.in_proj_bias = Parameter(torch.zeros(d_model)) if bias else None
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        nn.init.xavier_uniform_(self.in_proj_weight, gain=0.5**0.5)  # as among the three of a layer on its own
        nn.init.xavier_uniform_(self.out_proj.weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def attend(
        self,
        x: Float[Tensor, "B T D"],
        mask: Mask,
        memory: Float[Tensor, "B S D"] | None,
        carried: Attended,
    ) -> Attended:
        """The other layer's weights over this layer's values, of `x` or of a memory."""
        assert isinstance(carried.operator, Operator)
        return self._attended(carried, carried.operator.apply(self._values(x if memory is None else memory)))

    def attend_step(
        self, x: Float[Tensor, "B n D"], state: ValueState | None, carried: Attended
    ) -> tuple[Attended, ValueState]:
        """The same at n new positions."""
        assert isinstance(carried.operator, StepOperator)
        out, values = carried.operator.apply(self._values(x), state.values if state else None)
        return self._attended(carried, out), ValueState(values)

    def remember(self, memory: Float[Tensor, "B S D"], mask: Tensor) -> ValueState:
        """Project a memory once, for many steps; `mask` (B, S) is True on real positions."""
        return ValueState(Cache(silence(self._values(memory), padding(mask).keys).contiguous()))

    def attend_memory(self, x: Float[Tensor, "B n D"], memory: ValueState, carried: Attended) -> Attended:
        """The other layer's weights over this layer's values of a memory."""
        assert isinstance(carried.operator, Operator)
        assert isinstance(memory.values, Cache)
        return self._attended(carried, carried.operator.apply(memory.values.past))

    def _values(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B H S d"]:
        return F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(2, (self.n_heads, -1)).transpose(1, 2)

    def _attended(self, carried: Attended, out: Float[Tensor, "B H T d"]) -> Attended:
        context = out.transpose(1, 2).flatten(2)
        output = F.linear(context, self.out_proj.weight, self.out_proj.bias)
        return Attended(output, context, carried.operator)


class ReuseContext(nn.Module):
    """out = W_o c, with the context c of another layer: what its heads read, before its output projection.

    It has no queries, keys or values, and keeps nothing in decoding.
    """

    def __init__(self, d_model: int, n_heads: int, *, bias: bool = True):
        super().__init__()
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def attend(
        self, x: Float[Tensor, "B T D"], mask: Mask, memory: Float[Tensor, "B S D"] | None, carried: Attended
    ) -> Attended:
        """The other layer's context through this layer's output projection."""
        output = F.linear(carried.context, self.out_proj.weight, self.out_proj.bias)
        return Attended(output, carried.context, carried.operator)

    def remember(self, memory: Float[Tensor, "B S D"], mask: Tensor) -> NoState:
        """Nothing."""
        return NoState()

    def attend_memory(self, x: Float[Tensor, "B n D"], memory: NoState, carried: Attended) -> Attended:
        """The same, step by step."""
        return self.attend(x, _ANY, None, carried)


class ReuseOutput(nn.Module):
    """The output of another layer's attention, as it is: no parameters, no arithmetic, nothing kept."""

    def __init__(self, d_model: int, n_heads: int, *, bias: bool = True):
        super().__init__()

    def attend(
        self, x: Float[Tensor, "B T D"], mask: Mask, memory: Float[Tensor, "B S D"] | None, carried: Attended
    ) -> Attended:
        """What the other layer's attention gave."""
        return carried

    def remember(self, memory: Float[Tensor, "B S D"], mask: Tensor) -> NoState:
        """Nothing."""
        return NoState()

    def attend_memory(self, x: Float[Tensor, "B n D"], memory: NoState, carried: Attended) -> Attended:
        """What the other layer's attention gave."""
        return carried


_ANY = Mask()
REUSE: dict[str, type[ReuseWeights | ReuseContext | ReuseOutput]] = {
    "weights": ReuseWeights,
    "context": ReuseContext,
    "output": ReuseOutput,
}
