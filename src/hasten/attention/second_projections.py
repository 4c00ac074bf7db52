"""A second set of projections for tokens that read everything."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.parameter import Parameter

from hasten.attention.base import Attention
from hasten.attention.full import FullAttention
from hasten.attention.masks import Mask, padding, silence
from hasten.attention.mechanism import MechanismSpec, Place
from hasten.attention.multihead import Attended, CrossState, MultiHeadAttention, SelfState, cut
from hasten.attention.own_layer import Layered, SelfLayer
from hasten.attention.packed import unpack
from hasten.attention.patterns.algebra import Causal, walk
from hasten.attention.patterns.attention import PatternAttention, PatternOperator
from hasten.attention.patterns.global_shapes import Global, Marked, MarkedRows
from hasten.errors import UserError

_EVERYTHING = Mask()


def multi_head(
    d_model: int, n_heads: int, attention: Attention | MechanismSpec, *, layer: int = 0, bias: bool = True
) -> MultiHeadAttention | SelfLayer:
    """The layer that a mechanism asks for.

    It has second projections where `traits.second_projections`, is the mechanism's own where `traits.unprojected`, else
    the usual one.
    A spec is built for these heads; mechanisms of different layers draw differently. Tokens that a mechanism wants
    before the sequence (`traits.external`) are the caller's to put into x. Errors: those of `MultiHeadAttention`.
    """
    if isinstance(attention, MechanismSpec):
        cut(d_model, n_heads)
        attention = attention.at(Place(layer=layer, n_heads=n_heads, d_head=d_model // n_heads)).build()
    if isinstance(attention, Layered) and attention.traits.unprojected:
        return attention.layer(d_model, n_heads, bias=bias)
    second = isinstance(attention, Attention) and attention.traits.second_projections
    kind = SecondProjections if second else MultiHeadAttention
    return kind(d_model, n_heads, attention, bias=bias)


@dataclass(frozen=True)
class SecondState(SelfState):
    """Decoding state; `second` holds second keys and values of the tokens so far while global ones are to come."""

    second: SelfState | None
    now: int

    def select(self, rows: Tensor) -> "SecondState":
        """Batch rows by index."""
        second = self.second and self.second.select(rows)
        return SecondState(self.keys.select(rows), self.values.select(rows), second, self.now)


class SecondProjections(MultiHeadAttention):
    """Multi-head attention in which global tokens, as queries, have queries, keys and values of their own.

    An ordinary token i gets W_o concat_h(operator(q_h, k_h) v_h)_i, also where it reads global tokens. A global one
    gets W_o concat_h(softmax(q'_hi k'_h^T / sqrt(d)) v'_h) over all real tokens, in causal masks over those up to i.
    q', k', v' are the rows of `second_proj_weight` (3 d, d) and `second_proj_bias`, which start as copies of the first
    projections. Which tokens are global the mechanism's patterns say: the first ones, the marked ones (`Mask.marked`),
    never padding. k' and v' are computed for all tokens, q' for global ones (in traced graphs for all, too).
    Errors: `UserError` for a mechanism whose heads differ in global tokens or dropout, and for a memory.
    Source: Beltagy et al., 2020, section 3.1. Attention over another sequence is not defined.
    """

    def __init__(self, d_model: int, n_heads: int, attention: Attention, *, bias: bool = True):
        super().__init__(d_model, n_heads, attention, bias=bias)
        self.first, self.marked, self.dropout = _global_tokens(attention)
        self.second_proj_weight = Parameter(torch.empty_like(self.in_proj_weight))
        self.second_proj_bias = Parameter(torch.empty(3 * d_model)) if bias else None
        self.copy_projections()

    def copy_projections(self) -> None:
        """Make the second projections equal to the first: where weights were loaded that know only one set."""
        with torch.no_grad():
            self.second_proj_weight.copy_(self.in_proj_weight)
            if self.second_proj_bias is not None and self.in_proj_bias is not None:
                self.second_proj_bias.copy_(self.in_proj_bias)

    def attend(
        self,
        x: Float[Tensor, "B T D"],
        mask: Mask = _EVERYTHING,
        memory: Float[Tensor, "B S D"] | None = None,
        carried: Attended | None = None,
    ) -> Attended:
        """Self-attention over `x`; without a mask every token is real and none is marked."""
        if memory is not None:
            raise UserError("second projections are for self-attention; leave out memory")
        if not isinstance(mask, Mask):
            raise TypeError(f"mask is a {type(mask).__name__}; give a Mask, for example Mask(keys=mask)")
        q, k, v = self._project(x, self._all)
        operator = self.attention.operator(q, k, mask)
        is_global = self.is_global(x, mask)
        rows = self._global_rows(x, is_global, mask)
        context = torch.where(is_global[:, None, :, None], rows, operator.apply(v)).transpose(1, 2).flatten(2)
        return Attended(self._out(context), context, operator)

    def lead(self) -> None:
        """Refused: global tokens do not read by the weights of the operator."""
        raise UserError("weights of a layer with second projections cannot be shared: its global tokens have others")

    def is_global(self, x: Float[Tensor, "B T D"], mask: Mask) -> Bool[Tensor, "B T"]:
        """Which tokens read everything: the first real ones, and the real ones among those marked."""
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask.keys is None else mask.keys
        found = real & (real.cumsum(1) <= self.first)
        return found if mask.marked is None else found | (real & mask.marked)

    def _global_rows(self, x: Tensor, is_global: Tensor, mask: Mask) -> Float[Tensor, "B H T d"]:
        """What global tokens read; other rows mean nothing."""
        traced = torch.compiler.is_compiling()
        k, v = self._heads(x, 1, 3)
        (q,) = self._heads(x, 0, 1) if traced else self._queries(x, is_global)
        pattern = MarkedRows() & Causal() if mask.causal else MarkedRows()
        own = Mask(causal=mask.causal, keys=mask.keys, marked=is_global)
        seed, share = torch.zeros((), dtype=torch.int64, device="cpu"), self.dropout if self.training else 0.0
        # Traced calls know patterns by name, and this part of Marked has none: there its columns are computed, too.
        text = "Marked() & Causal()" if mask.causal else "Marked()"
        return PatternOperator(q, silence(k, mask.keys), own, pattern, text, seed, 0, share).apply(v)

    def _queries(self, x: Tensor, is_global: Tensor) -> tuple[Tensor]:
        """Second queries of global tokens, zero elsewhere."""
        weight, bias = self.second_proj_weight[: self.d_model], self.second_proj_bias
        some = F.linear(x[is_global], weight, None if bias is None else bias[: self.d_model])
        q = some.new_zeros(x.shape).index_put((is_global,), some)
        return (q.unflatten(2, (self.n_heads, -1)).transpose(1, 2),)

    def _heads(self, x: Tensor, first: int, last: int) -> tuple[Tensor, ...]:
        """Second projections number first .. last - 1 (queries, keys, values), (B, H, T, d) each."""
        part, bias = slice(first * self.d_model, last * self.d_model), self.second_proj_bias
        y = F.linear(x, self.second_proj_weight[part], None if bias is None else bias[part])
        return y.unflatten(2, (last - first, self.n_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def packed(
        self, x: Float[Tensor, "total D"], lengths: Int[Tensor, " B"], causal: bool = False
    ) -> Float[Tensor, "total D"]:
        """Self-attention within sequences laid end to end; they are padded to the longest."""
        padded, keys = unpack(x, lengths)
        return self.forward(padded, Mask(causal=causal, keys=padding(keys).keys))[keys]

    def attend_step(
        self, x: Float[Tensor, "B n D"], state: SelfState | None, carried: Attended | None = None
    ) -> tuple[Attended, SecondState]:
        """Causal self-attention of n new positions after `state` (None: the beginning)."""
        assert state is None or isinstance(state, SecondState)
        q, k, v = self._project(x, self._all)
        operator, keys = self.attention.step(q, k, state.keys if state else None)
        out, values = operator.apply(v, state.values if state else None)
        now, second = (state.now, state.second) if state else (0, None)
        if now < self.first:
            # Only first tokens are global here: their keys are all that later global ones read.
            rows, second = self._second_step(x[:, : self.first - now], second)
            out = torch.cat((rows, out[:, :, rows.shape[2] :]), 2)
        now += x.shape[1]
        context = out.transpose(1, 2).flatten(2)
        after = SecondState(keys, values, second if now < self.first else None, now)
        return Attended(self._out(context), context, operator), after

    def _second_step(self, x: Tensor, state: SelfState | None) -> tuple[Tensor, SelfState]:
        q, k, v = self._heads(x, 0, 3)
        operator, keys = _FULL.step(q, k, state.keys if state else None)
        out, values = operator.apply(v, state.values if state else None)
        return out, SelfState(keys, values)

    def remember(self, memory: Float[Tensor, "B S D"], mask: Tensor) -> CrossState:
        """Refused."""
        raise UserError("second projections are for self-attention; a memory is read without them")


_FULL = FullAttention()


def _global_tokens(attention: Attention) -> tuple[int, bool, float]:
    """How many first tokens are global, whether marked ones are, and the dropout: the same in all heads."""
    found = set()
    for part in attention.modules():
        if isinstance(part, PatternAttention):
            shapes = list(walk(part.pattern))
            first = max((shape.first for shape in shapes if isinstance(shape, Global)), default=0)
            found.add((first, any(isinstance(shape, Marked) for shape in shapes), part.dropout))
    if len(found) != 1:
        raise UserError(
            "second projections: all heads must have the same global tokens and the same dropout, "
            f"got (first, marked, dropout) = {', '.join(map(str, sorted(found)))}"
        )
    return found.pop()
