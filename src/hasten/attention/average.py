"""Average attention: every token reads the mean of the tokens up to it."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hasten.attention.base import Operator, State, StepOperator, Traits
from hasten.attention.kernels.kernel import KernelOperator, KernelState, wide
from hasten.attention.masks import Mask
from hasten.attention.mechanism import MechanismSpec
from hasten.attention.multihead import Attended, SelfState, cut
from hasten.attention.own_layer import Layered, SelfLayer

# Width of the inner layer of the feed-forward network over that of the model, as usual in Transformers.
_INNER = 4


@dataclass(frozen=True, kw_only=True)
class AverageSpec(MechanismSpec):
    """Average attention: the mean of all tokens up to each one, mixed with the token itself through gates."""

    kind: Literal["average"] = "average"
    """The mechanism's name."""
    gate: bool = True
    """Mix the mean and the token through learnt gates, instead of projections around heads."""
    feed_forward: bool = False
    """Pass the mean through a feed-forward network, as the paper does; its authors' code can leave it out, too."""

    def build(self) -> "AverageAttention":
        """The mechanism this spec describes."""
        return AverageAttention(gate=self.gate, feed_forward=self.feed_forward)


class AverageAttention(Layered):
    """out_i = the mean of v_j over the real keys j that the mask lets i read: in causal masks, those up to i.

    Queries and keys are not read: their shapes say how many positions there are. A query that may read nothing gets
    exactly 0. Sums are taken in float32 or wider. Cost: one cumulative sum, S Dv additions a head, and no T x S matrix;
    decoding keeps one sum a head and a count, whatever the length.
    gate, feed_forward: what the layer adds (`AverageLayer`, built by `multi_head`); the operator is the same.
    Does not: read another sequence (all queries would read the same there); drop weights; take patterns.
    Source: Zhang, Xiong and Su, 2018, "Accelerating Neural Transformer via an Average Attention Network".
    """

    traits = Traits(
        causal="strict",
        cross=False,
        step=True,
        normalised=True,
        key_padding=True,
        empty=True,
        dropout=False,
        suffix=True,
        needs=frozenset(),
        memory=1.0,
    )

    def __init__(self, *, gate: bool = False, feed_forward: bool = False):
        super().__init__()
        self.gate, self.feed_forward = gate, feed_forward
        self.traits = replace(type(self).traits, unprojected=gate or feed_forward)

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Operator:
        """Running means, or the mean of everything."""
        self.check(q, k, mask)
        n_queries, n_keys = q.shape[2], k.shape[2]
        if mask.keys is None:
            real = torch.ones(1, 1, n_keys, 1, dtype=torch.int64, device=k.device)
        else:
            real = mask.keys[:, None, :, None].long()
        means = RunningMeans(real, n_queries) if mask.causal else Mean(real, n_queries)
        # Padding is zeroed even where it is promised to be zero: the identity, of which `dense` is made, is not.
        return KernelOperator(means, k, mask.keys)

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition: a row of equal weights for every query."""
        (batch, heads, n_queries, _), n_keys = q.shape, k.shape[2]
        weights = q.new_zeros(batch, heads, n_queries, n_keys)
        for b in range(batch):
            real = [j for j in range(n_keys) if mask.keys is None or mask.keys[b, j]]
            for i in range(n_queries):
                readable = [j for j in real if not mask.causal or j <= i + n_keys - n_queries]
                if readable:
                    weights[b, :, i, readable] = 1 / len(readable)
        return weights

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple[StepOperator, State]:
        """Keys so far are their number."""
        assert keys is None or isinstance(keys, KernelState)
        past = k.new_zeros(k.shape[0], 1, 1, 1, dtype=wide(k)) if keys is None else keys.total
        counts = past + torch.arange(1, k.shape[2] + 1, dtype=past.dtype, device=k.device)[:, None]
        return AverageStep(counts), KernelState(counts[:, :, -1:])

    def layer(self, d_model: int, n_heads: int, *, bias: bool) -> "AverageLayer":
        """The layer with gates, a network, or both."""
        return AverageLayer(d_model, n_heads, self, bias=bias)

    def extra_repr(self) -> str:
        """Shown in the module's print-out."""
        return f"gate={self.gate}, feed_forward={self.feed_forward}"


@dataclass(frozen=True)
class RunningMeans:
    """v -> the means of the real keys up to each query, the last query being aligned with the last key.

    real (B or 1, 1, S, 1): 1 at real keys, else 0. Values are zero where it is 0.
    """

    real: Int[Tensor, "#B 1 S 1"]
    n_queries: int

    def __call__(self, v: Tensor) -> Tensor:
        """Values (B, H, S, D) to means (B, H, T, D)."""
        return self._at_queries(v.cumsum(2)) / self._at_queries(self.real.cumsum(2)).clamp_min(1)

    def _at_queries(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, self.n_queries - x.shape[2], 0))  # fewer queries than keys: the first rows are cut off


@dataclass(frozen=True)
class Mean:
    """v -> the mean of all real keys, the same for every query; fields as in `RunningMeans`."""

    real: Int[Tensor, "#B 1 S 1"]
    n_queries: int

    def __call__(self, v: Tensor) -> Tensor:
        """Values (B, H, S, D) to means (B, H, T, D)."""
        mean = v.sum(2, keepdim=True) / self.real.sum(2, keepdim=True).clamp_min(1)
        return mean.expand(-1, -1, self.n_queries, -1)


class AverageStep(StepOperator):
    """n new positions; counts (B, 1, n, 1) are how many there are up to each. Of past values their sum is kept."""

    def __init__(self, counts: Float[Tensor, "B 1 n 1"]):
        self.counts = counts

    def apply(self, v: Float[Tensor, "B H n Dv"], values: State | None) -> tuple[Float[Tensor, "B H n Dv"], State]:
        """Means up to each new position, and the sum with the new values added."""
        assert values is None or isinstance(values, KernelState)
        with torch.autocast(v.device.type, enabled=False):
            sums = v.to(self.counts.dtype).cumsum(2)
            if values is not None:
                sums = sums + values.total
            after = KernelState(sums[:, :, -1:].clone())  # a view would keep the sums of all n positions
            return (sums / self.counts).to(v.dtype), after


class AverageLayer(SelfLayer):
    """Average attention as a layer: gates mix the input y with what is read of it, and there are no projections.

    g = FFN(mean of y up to here); (i, f) = sigmoid(W [y; g] + b); out = i * y + f * g, entry by entry.
    FFN(x) = W_2 relu(W_1 x), 4 d_model wide inside, if the mechanism has `feed_forward`, else g is the mean itself; out
    is g without `gate`. y (B, T, d_model) is what the stack hands over, so in pre-norm stacks it is normalised.
    Heads only say how the operator is shared: layers that use its weights
    apply them to projected values of their own.
    Errors: `UserError` where heads do not divide the width, and for a memory.
    Source: Zhang, Xiong and Su, 2018, for the idea; the formula is the one computed here.
    """

    def __init__(self, d_model: int, n_heads: int, attention: AverageAttention, *, bias: bool = True):
        super().__init__()
        cut(d_model, n_heads)
        attention.fits(n_heads, d_model // n_heads)
        self.d_model, self.n_heads, self.attention = d_model, n_heads, attention
        self.network = _network(d_model, bias) if attention.feed_forward else nn.Identity()
        self.gate = Gate(d_model, bias) if attention.gate else NoGate()
        self._form = _as_it_is

    def read(self, x: Float[Tensor, "B T D"], mask: Mask) -> Attended:
        """The whole sequence at once; the context is the means."""
        heads = self._heads(x)
        operator = self._form(self.attention.operator(heads, heads, mask))
        return self._attended(x, operator.apply(heads), operator)

    def attend_step(
        self, x: Float[Tensor, "B n D"], state: SelfState | None, carried: Attended | None = None
    ) -> tuple[Attended, SelfState]:
        """`step`, and what other layers can share."""
        heads = self._heads(x)
        operator, keys = self.attention.step(heads, heads, state.keys if state else None)
        out, values = operator.apply(heads, state.values if state else None)
        return self._attended(x, out, operator), SelfState(keys, values)

    def lead(self) -> None:
        """Let other layers apply this one's weights: they are formed once, then."""
        self._form = _materialised

    def _heads(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T d"]:
        return x.unflatten(2, (self.n_heads, -1)).transpose(1, 2)

    def _attended(self, x: Tensor, out: Float[Tensor, "B H T d"], operator: Operator | StepOperator) -> Attended:
        context = out.transpose(1, 2).flatten(2)
        return Attended(self.gate(x, self.network(context)), context, operator)


class Gate(nn.Module):
    """(i, f) = sigmoid(W [y; g] + b), W (2 d, 2 d); i * y + f * g."""

    def __init__(self, d_model: int, bias: bool):
        super().__init__()
        self.gates = nn.Linear(2 * d_model, 2 * d_model, bias=bias)
        _start(self.gates)

    def forward(self, y: Float[Tensor, "B T D"], g: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """The input y and what was read, g."""
        i, f = self.gates(torch.cat((y, g.to(y.dtype)), -1)).sigmoid().chunk(2, -1)
        return i * y + f * g


class NoGate(nn.Module):
    """g as it is."""

    def forward(self, y: Float[Tensor, "B T D"], g: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """What was read, g."""
        return g


def _network(d_model: int, bias: bool) -> nn.Sequential:
    inner, outer = nn.Linear(d_model, _INNER * d_model, bias=bias), nn.Linear(_INNER * d_model, d_model, bias=bias)
    _start(inner)
    _start(outer)
    return nn.Sequential(inner, nn.ReLU(), outer)


def _start(linear: nn.Linear) -> None:
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def _as_it_is(operator: Operator) -> Operator:
    return operator


def _materialised(operator: Operator) -> Operator:
    return operator.materialised()
