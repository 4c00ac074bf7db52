"""SSRU: a recurrent unit in the place of self-attention; its matrix products do not wait for the past."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hasten.attention.base import Operator, State, StepOperator, Traits
from hasten.attention.kernels.kernel import KernelOperator, KernelStep, unread, wide
from hasten.attention.kernels.traced_sums import Sums, causal_sums
from hasten.attention.masks import Mask
from hasten.attention.mechanism import MechanismSpec
from hasten.attention.multihead import Attended, SelfState, cut
from hasten.attention.own_layer import Layered, SelfLayer
from hasten.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SSRUSpec(MechanismSpec):
    """Simpler simple recurrent unit: a forget gate for every channel, and no attention."""

    kind: Literal["ssru"] = "ssru"
    """The mechanism's name."""

    def build(self) -> "SSRU":
        """The mechanism this spec describes."""
        return SSRU()


class SSRU(Layered):
    """out_i = c_i = f_i c_(i-1) + (1 - f_i) v_i with c_0 = 0, so v_j has the weight (1 - f_j) f_(j+1) ... f_i.

    f = sigmoid of the sum of the key's entries: one gate a head. In its layer (`SSRULayer`) a head is one channel wide,
    so that every channel has a gate. Queries are not read. Padded keys change nothing. Without a causal mask every
    query reads the state after the last key. A query that may read nothing gets exactly 0.
    Sums are taken in float32 or wider. Cost: chunks of 64 keys, 64 (1 + Dv) multiplications a key and head; decoding
    keeps Dv numbers a head, whatever the length.
    Does not: read another sequence; drop weights; take patterns; sum to 1 (the weights of row i do to 1 - f_1 ... f_i).
    Source: Kim et al., 2019, "From Research to Production and Back: Ludicrously Fast Neural Machine Translation",
    after Lei et al., 2018 (SRU).
    """

    traits = Traits(
        causal="strict",
        cross=False,
        step=True,
        normalised=False,
        key_padding=True,
        dropout=False,
        suffix=True,
        needs=frozenset({"key"}),
        unprojected=True,
        memory=1.0,
    )

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Operator:
        """The states at the queries, or the last one."""
        self.check(q, k, mask)
        with torch.autocast(k.device.type, enabled=False):
            keep, enter = _gates(k, mask.keys)
            ones = torch.ones_like(keep)
            if mask.causal:
                sums: Sums = causal_sums("decayed", ones.new_ones(*q.shape[:3], 1), ones, keep, enter)
            else:
                sums = Last((keep.flip(2).cumsum(2).flip(2) - keep + enter).exp(), q.shape[2])
        return KernelOperator(sums, k, mask.keys)

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition, one position after another."""
        n_queries, n_keys = q.shape[2], k.shape[2]
        gates = unread(k.double(), mask.keys).sum(-1).sigmoid()
        row, rows = torch.zeros_like(gates), []
        for j in range(n_keys):
            f = gates[..., j] if mask.keys is None else torch.where(mask.keys[:, None, j], gates[..., j], 1.0)
            row = torch.cat((row[..., :j] * f[..., None], (1 - f)[..., None], row[..., j + 1 :]), -1)
            rows.append(row)
        if not mask.causal:
            rows = [row] * n_queries
        before = [torch.zeros_like(row)] * max(0, n_queries - n_keys)
        return torch.stack((before + rows)[-n_queries:], 2).to(q.dtype)

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple[StepOperator, State]:
        """Of keys nothing is kept."""
        with torch.autocast(k.device.type, enabled=False):
            keep, enter = _gates(k, None)
            so_far, ones = keep.cumsum(2), torch.ones_like(keep)
            write = (so_far[:, :, -1:] - so_far + enter).exp()
            among = causal_sums("decayed", ones, ones, keep, enter)
            return KernelStep(among, so_far.exp(), write, so_far[:, :, -1:].exp(), None), _NOTHING

    def layer(self, d_model: int, n_heads: int, *, bias: bool) -> "SSRULayer":
        """The layer with a gate for every channel."""
        return SSRULayer(d_model, n_heads, self, bias=bias)


@dataclass(frozen=True)
class Nothing:
    """A state that holds nothing."""

    def select(self, rows: Tensor) -> "Nothing":
        """Batch rows by index."""
        return self


_NOTHING = Nothing()


@dataclass(frozen=True)
class Cells:
    """c of every channel, after the positions so far."""

    c: Float[Tensor, "B D"]

    def select(self, rows: Tensor) -> "Cells":
        """Batch rows by index."""
        return Cells(self.c.index_select(0, rows))


@dataclass(frozen=True)
class Last:
    """v -> sum_j weights_j v_j, the same for all queries; weights (B, H, S, 1)."""

    weights: Tensor
    n_queries: int

    def __call__(self, v: Tensor) -> Tensor:
        """Values (B, H, S, D) to sums (B, H, T, D)."""
        return (self.weights * v).sum(2, keepdim=True).expand(-1, -1, self.n_queries, -1)


def _gates(k: Float[Tensor, "B H S D"], keys: Bool[Tensor, "B S"] | None) -> tuple[Tensor, Tensor]:
    """log f and log (1 - f), (B, H, S, 1); padded keys let everything pass and add nothing."""
    logits = unread(k.to(wide(k)), keys).sum(-1, keepdim=True)
    return unread(F.logsigmoid(logits), keys), unread(F.logsigmoid(-logits), keys)


class SSRULayer(SelfLayer):
    """out_i = relu(c_i), c_i = f_i * c_(i-1) + (1 - f_i) * (W y_i), f_i = sigmoid(W_f y_i + b_f), channel by channel.

    `in_proj` holds W_f above W. Its bias reaches f alone, as published; `bias` False leaves b_f out, too. y is what the
    stack hands over, so in pre-norm stacks it is normalised, where the paper normalises the sum with the input instead.
    The number of heads is not read. Errors: `UserError` for a memory, and where other layers are to use the weights:
    there is one for each channel, position and past position.
    Source: Kim et al., 2019.
    """

    def __init__(self, d_model: int, n_heads: int, attention: SSRU, *, bias: bool = True):
        super().__init__()
        cut(d_model, n_heads)
        self.d_model, self.n_heads, self.attention = d_model, n_heads, attention
        self.in_proj = nn.Linear(d_model, 2 * d_model, bias=False)
        nn.init.xavier_uniform_(self.in_proj.weight[:d_model])
        nn.init.xavier_uniform_(self.in_proj.weight[d_model:])
        self.forget_bias = nn.Parameter(torch.zeros(d_model)) if bias else None

    def read(self, x: Float[Tensor, "B T D"], mask: Mask) -> Attended:
        """The whole sequence at once; the context are the states."""
        logits, values = (_channels(part) for part in self._project(x))
        operator = self.attention.operator(logits, logits, mask)
        context = operator.apply(values).squeeze(3).transpose(1, 2)
        return Attended(context.relu(), context, operator)

    def attend_step(
        self, x: Float[Tensor, "B n D"], state: SelfState | None, carried: Attended | None = None
    ) -> tuple[Attended, SelfState]:
        """The recurrence as it is written, one new position after another; in float32 or wider, as sums are."""
        logits, values = self._project(x)
        gates, entering = logits.to(wide(logits)).sigmoid(), values.to(wide(values))
        past = Cells(torch.zeros_like(entering[:, 0])) if state is None else state.values
        assert isinstance(past, Cells)
        c = past.c
        states = []
        for f, v in zip(gates.unbind(1), entering.unbind(1), strict=True):
            c = torch.lerp(v, c, f)
            states.append(c)
        context = torch.stack(states, 1).to(values.dtype)
        return Attended(context.relu(), context, _Unshared()), SelfState(_NOTHING, Cells(c))

    def lead(self) -> None:
        """Refused."""
        raise UserError("SSRU has a weight for each channel, not for each head, so other layers cannot use its weights")

    def _project(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, Tensor]:
        logits, values = self.in_proj(x).chunk(2, -1)
        return (logits if self.forget_bias is None else logits + self.forget_bias), values


def _channels(x: Float[Tensor, "B T D"]) -> Float[Tensor, "B D T 1"]:
    return x.transpose(1, 2)[..., None]


class _Unshared(StepOperator):
    """What no layer applies, since `SSRULayer.lead` refuses."""

    def apply(self, v: Tensor, values: State | None) -> tuple[Tensor, State]:
        raise AssertionError("the step of an SSRU is applied by its own layer only")
