"""Synthesizer: attention weights that need no products of queries and keys."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from hasten.attention.adapting import numbers
from hasten.attention.base import Attention, Cache, Operator, State, StepOperator, Traits, Weights
from hasten.attention.masks import Mask, silence
from hasten.attention.mechanism import MechanismSpec
from hasten.errors import UserError
from hasten.fields import PositiveInt, Seed, Share

PartName = Literal["dense", "random", "factorised_dense", "factorised_random", "dot_product"]

_NETWORKS = frozenset({"dense", "factorised_dense"})
_TABLES = frozenset({"random", "factorised_random"})


@dataclass(frozen=True, kw_only=True)
class SynthesizerSpec(MechanismSpec):
    """Weights made from the query alone, or from nothing but the positions."""

    kind: Literal["synthesizer"] = "synthesizer"
    """The mechanism's name."""
    parts: tuple[PartName, ...] = ("dense",)
    """Where scores come from; of several parts a mixture is learnt. `dot_product` only beside another."""
    max_length: PositiveInt = 1024
    """Longest sequence; the parameters grow with it."""
    n_heads: PositiveInt | None = None
    """Attention heads; a model sets it."""
    d_head: PositiveInt | None = None
    """Width of the heads, read by the dense parts; a model sets it."""
    factor: PositiveInt | None = None
    """Keys this many places apart share a factor of the factorised dense score; none: sqrt(max_length)."""
    rank: PositiveInt = 8
    """Rank of the factorised random scores."""
    frozen: bool = False
    """The random parts stay as drawn."""
    dropout: Share = 0.0
    """Share of attention weights dropped in training."""
    seed: Seed = 0
    """Draws the first weights; each layer of a model has draws of its own."""

    def build(self) -> "Synthesizer":
        """The mechanism this spec describes; `UserError` where it contradicts itself."""
        names = get_args(PartName)
        if not self.parts or len(set(self.parts)) < len(self.parts) or not set(self.parts) <= set(names):
            raise UserError(
                f"synthesizer: parts is {list(self.parts)}; choose one or more, each once, of {', '.join(names)}"
            )
        if self.parts == ("dot_product",):
            raise UserError("synthesizer: dot_product alone is full attention; take kind full, or add another part")
        if self.frozen and not _TABLES & set(self.parts):
            raise UserError("synthesizer: frozen is for random and factorised_random, and parts names neither")
        return Synthesizer(self)


class Synthesizer(Attention):
    """softmax over the keys the mask allows of sum_p alpha_p S_p; alpha, a learnt softmax, weighs the parts.

    S_ij for query i and key j, one head, N = max_length:

    - dense: (W relu(q_i) + b)_j, W (N, d_head). The layer's query projection is the first of the two linear maps, so
      scores are a two-layer network of the layer's input with d_head hidden units a head.
    - factorised_dense: a_(j mod p) c_(j div p), a and c such networks of q_i with p and ceil(N / p) outputs.
    - random: R_ij, R (N, N), learnt or frozen. factorised_random: (R1 R2^T)_ij, R1 and R2 (N, rank).
    - dot_product: q_i . k_j / sqrt(d_head), of the same q as a dense part beside it.

    Places are counted in the tensor, padding included: only padding on the right is as good as absent. Query i of T
    stands at place i + S - T; before place 0 random scores are 0. So random parts are for self-attention only.
    Cost: it saves projections and the products of queries and keys, not the T x S weights: time and memory grow with
    T S, and memory more than that of fused full attention. Random parts alone form one T x S matrix a head for the
    whole batch where nothing is padded. Scores and softmax are in float32 or wider.
    Source: Tay et al., 2021 (Synthesizer), section 3.
    """

    def __init__(self, spec: SynthesizerSpec):
        super().__init__()
        parts, dot = frozenset(spec.parts), "dot_product" in spec.parts
        reads_queries = dot or parts & _NETWORKS
        self.traits = Traits(
            causal="strict",
            cross=not parts & _TABLES,
            step=True,
            normalised=True,
            key_padding=True,
            empty=True,
            dropout=True,
            suffix=True,
            allowed=True,
            needs=frozenset({"query"} if reads_queries else ()) | frozenset({"key"} if dot else ()),
            max_length=spec.max_length,
            n_heads=spec.size("n_heads"),
            d_head=spec.size("d_head") if parts & _NETWORKS else None,
        )
        self.dropout = spec.dropout
        # Decoding keeps this many columns of the keys: where only their number is read, one is enough.
        self.kept = None if dot else 1
        generator = numbers(spec.seed, 0)
        self.parts = nn.ModuleList(_PARTS[name](spec, generator) for name in spec.parts)
        self.mixture = Mixture(len(spec.parts)) if len(spec.parts) > 1 else Alone()

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> "SynthesizerOperator":
        """The map, its weights formed."""
        self.check(q, k, mask)
        unread = None if mask.silent else mask.keys
        wide = torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            inputs = q.to(wide), silence(k, unread).to(wide)
            scores = self.mixture([part(*inputs) for part in self.parts])
        scores, empty = _masked(scores, mask.dense(q.shape[2], k.shape[2], q.device))
        weights = scores.softmax(-1).to(q.dtype)
        return SynthesizerOperator(weights, q.shape[0], empty, unread, self.dropout if self.training else 0.0)

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition, one query at a time."""
        (batch, heads, n_queries, _), n_keys = q.shape, k.shape[2]
        allowed = torch.ones(batch, heads, n_queries, n_keys, dtype=torch.bool, device=q.device)
        dense = mask.dense(n_queries, n_keys, q.device)
        allowed = allowed if dense is None else allowed & dense
        weights = q.new_zeros(batch, heads, n_queries, n_keys)
        shares, parts = self.mixture.shares(q.dtype), [part for part in self.parts if isinstance(part, ScorePart)]
        for b in range(batch):
            for h in range(heads):
                for i in range(n_queries):
                    rows = [part.row(q[b, h, i], k[b, h], h, i + n_keys - n_queries) for part in parts]
                    readable = allowed[b, h, i].nonzero()[:, 0]
                    if len(readable):
                        scores = (shares[:, None] * torch.stack(rows)).sum(0)
                        weights[b, h, i, readable] = scores[readable].softmax(-1)
        return weights

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple[StepOperator, State]:
        """The rows of n new positions, over all positions so far."""
        assert keys is None or isinstance(keys, Cache)
        new = k[..., : self.kept]
        keys = Cache(new) if keys is None else keys.append(new)
        past = keys.past.expand(*keys.past.shape[:3], k.shape[3])
        return SynthesizerStep(self.operator(q, past, Mask(causal=True)).materialised()), keys


class SynthesizerOperator(Operator):
    """Weights (B, H, T, S), or (1, H, T, S) where one matrix a head serves the whole batch; empty rows are zeroed."""

    def __init__(
        self, weights: Tensor, batch: int, empty: Tensor | None, unread: Bool[Tensor, "B S"] | None, dropout: float
    ):
        self.weights, self.batch, self.empty, self.unread, self.dropout = weights, batch, empty, unread, dropout

    def apply(self, v: Float[Tensor, "B H S Dv"]) -> Float[Tensor, "B H T Dv"]:
        """Weights times values."""
        weights, v = self.weights.to(v.dtype), silence(v, self.unread)
        if self.dropout:
            weights = F.dropout(self._whole(weights), self.dropout)
        # A matrix for the whole batch meets the values of all sequences in one product.
        return self._zeroed(torch.einsum("bhts,bhsd->bhtd", weights, v))

    def dense(self) -> Float[Tensor, "B H T S"]:
        """The weights; without dropout."""
        return self._zeroed(self._whole(self.weights))

    def materialised(self) -> Weights:
        """The weights, without dropout; padded values stay unread."""
        return Weights(self.dense(), self.unread)

    def _whole(self, weights: Tensor) -> Tensor:
        return weights.expand(self.batch, *weights.shape[1:])

    def _zeroed(self, rows: Tensor) -> Tensor:
        return rows if self.empty is None else rows.masked_fill(self.empty, 0.0)


class SynthesizerStep(StepOperator):
    """The rows of the new positions, applied to all values so far."""

    def __init__(self, rows: Weights):
        self.rows = rows

    def apply(self, v: Float[Tensor, "B H n Dv"], values: State | None) -> tuple[Float[Tensor, "B H n Dv"], State]:
        """Append the new values and read all of them."""
        assert values is None or isinstance(values, Cache)
        values = Cache(v) if values is None else values.append(v)
        return self.rows.apply(values.past), values


def _masked(scores: Tensor, allowed: Bool[Tensor, "#B #H T S"] | None) -> tuple[Tensor, Tensor | None]:
    """Scores of -inf where reading is not allowed, and the rows (.., T, 1) where nothing is: these stay open."""
    if allowed is None:
        return scores, None
    empty = ~allowed.any(-1, keepdim=True)
    return torch.where(allowed | empty, scores, -torch.inf), empty


class Alone(nn.Module):
    """One part: nothing to mix."""

    def shares(self, dtype: torch.dtype) -> Tensor:
        """(1,)."""
        return torch.ones(1, dtype=dtype)

    def forward(self, scores: list[Tensor]) -> Tensor:
        """The only scores."""
        return scores[0]


class Mixture(nn.Module):
    """sum_p softmax(logits)_p S_p; equal shares at first."""

    def __init__(self, n_parts: int):
        super().__init__()
        self.logits = Parameter(torch.zeros(n_parts))

    def shares(self, dtype: torch.dtype) -> Tensor:
        """alpha, (parts,)."""
        return self.logits.to(dtype).softmax(0)

    def forward(self, scores: list[Tensor]) -> Tensor:
        """Mixed scores."""
        shares = self.shares(scores[0].dtype)
        mixed = shares[0] * scores[0]
        for share, part in zip(shares[1:], scores[1:], strict=True):
            mixed = mixed + share * part
        return mixed


class ScorePart(nn.Module, ABC):
    """One way to make scores from queries and keys in float32 or wider."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores (B, H, T, S), or (1, H, T, S) where they are the same for every sequence."""

    @abstractmethod
    def row(self, q: Tensor, k: Tensor, head: int, place: int) -> Tensor:
        """The plain definition for one query (D) at a place and the keys (S, D): (S,)."""


class Network(nn.Module):
    """W relu(q) + b of every head: (B, H, T, d_head) to (B, H, T, outputs)."""

    def __init__(self, spec: SynthesizerSpec, n_outputs: int, generator: torch.Generator):
        super().__init__()
        drawn = torch.randn(spec.size("n_heads"), n_outputs, spec.size("d_head"), generator=generator, device="cpu")
        self.weight = Parameter(drawn / math.sqrt(drawn.shape[2]))
        self.bias = Parameter(torch.zeros(drawn.shape[:2]))

    def forward(self, q: Tensor, n_outputs: int) -> Tensor:
        """The first outputs."""
        # A hidden unit that is always 1 carries the bias: adding it to T x S scores costs as much as the product.
        weight = torch.cat((self.weight[:, :n_outputs], self.bias[:, :n_outputs, None]), dim=2).to(q)
        return F.pad(q.relu(), (0, 1), value=1.0) @ weight.transpose(1, 2)

    def row(self, q: Tensor, head: int) -> Tensor:
        """All outputs for one query of one head."""
        return self.weight[head].to(q) @ q.clamp(min=0) + self.bias[head].to(q)


class Dense(ScorePart):
    """A score for every place from the query."""

    def __init__(self, spec: SynthesizerSpec, generator: torch.Generator):
        super().__init__()
        self.network = Network(spec, spec.max_length, generator)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, T, S)."""
        return self.network(q, k.shape[2])

    def row(self, q: Tensor, k: Tensor, head: int, place: int) -> Tensor:
        """The outputs up to the number of keys."""
        return self.network.row(q, head)[: len(k)]


class FactorisedDense(ScorePart):
    """Products of a factor tiled over the places and one that stays for `period` places."""

    def __init__(self, spec: SynthesizerSpec, generator: torch.Generator):
        super().__init__()
        self.period = spec.factor or math.isqrt(spec.max_length - 1) + 1
        self.n_periods = -(-spec.max_length // self.period)
        self.tiled = Network(spec, self.period, generator)
        self.repeated = Network(spec, self.n_periods, generator)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, T, S)."""
        place, shape = torch.arange(k.shape[2], device=q.device), (*q.shape[:3], k.shape[2])
        tiled, repeated = self.tiled(q, self.period), self.repeated(q, self.n_periods)
        # An outer product, cut to length, would be quicker, but torch.export does not take it for every length.
        tiled = tiled.gather(3, (place % self.period).expand(shape))
        return tiled * repeated.gather(3, (place // self.period).expand(shape))

    def row(self, q: Tensor, k: Tensor, head: int, place: int) -> Tensor:
        """One key at a time."""
        tiled, repeated = self.tiled.row(q, head), self.repeated.row(q, head)
        return torch.stack([tiled[j % self.period] * repeated[j // self.period] for j in range(len(k))])


class Random(ScorePart):
    """A table of scores that depends on nothing."""

    table: Tensor

    def __init__(self, spec: SynthesizerSpec, generator: torch.Generator):
        super().__init__()
        drawn = torch.randn(spec.size("n_heads"), spec.max_length, spec.max_length, generator=generator, device="cpu")
        _hold(self, "table", drawn, spec.frozen)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """(1, H, T, S)."""
        return _last_rows(self.table[:, :, : k.shape[2]], q.shape[2], k.shape[2]).to(q)[None]

    def row(self, q: Tensor, k: Tensor, head: int, place: int) -> Tensor:
        """A row of the table."""
        return self.table[head, place, : len(k)].to(q) if place >= 0 else q.new_zeros(len(k))


class FactorisedRandom(ScorePart):
    """A table of low rank."""

    queries: Tensor
    keys: Tensor

    def __init__(self, spec: SynthesizerSpec, generator: torch.Generator):
        super().__init__()
        for name in ("queries", "keys"):
            drawn = torch.randn(spec.size("n_heads"), spec.max_length, spec.rank, generator=generator, device="cpu")
            _hold(self, name, drawn / spec.rank**0.25, spec.frozen)  # the products have variance 1

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """(1, H, T, S)."""
        rows = _last_rows(self.queries, q.shape[2], k.shape[2]).to(q)
        return (rows @ self.keys[:, : k.shape[2]].to(q).transpose(1, 2))[None]

    def row(self, q: Tensor, k: Tensor, head: int, place: int) -> Tensor:
        """One key at a time."""
        if place < 0:
            return q.new_zeros(len(k))
        query, keys = self.queries[head, place].to(q), self.keys[head].to(q)
        return torch.stack([(query * keys[j]).sum() for j in range(len(k))])


class DotProduct(ScorePart):
    """The scores of full attention."""

    def __init__(self, spec: SynthesizerSpec, generator: torch.Generator):
        super().__init__()

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, T, S)."""
        return (q / math.sqrt(q.shape[3])) @ k.transpose(2, 3)

    def row(self, q: Tensor, k: Tensor, head: int, place: int) -> Tensor:
        """Scaled products with all keys."""
        return k @ q / math.sqrt(len(q))


_PARTS = {
    "dense": Dense,
    "random": Random,
    "factorised_dense": FactorisedDense,
    "factorised_random": FactorisedRandom,
    "dot_product": DotProduct,
}


def _hold(module: nn.Module, name: str, drawn: Tensor, frozen: bool) -> None:
    """Keep what was drawn, to be learnt or as it is."""
    if frozen:
        module.register_buffer(name, drawn)
    else:
        module.register_parameter(name, Parameter(drawn))


def _last_rows(table: Tensor, n_queries: int, n_keys: int) -> Tensor:
    """Rows n_keys - n_queries .. n_keys of a table (H, N, columns); rows before the first are 0."""
    if n_queries == n_keys:
        return table[:, :n_keys]
    before = max(n_queries - n_keys, 0)
    return F.pad(table[:, max(n_keys - n_queries, 0) : n_keys], (0, 0, before, 0))
