"""Linformer: keys and values are projected along time to a fixed number of rows, by matrices over positions."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hasten.attention.base import Attention, Operator, Traits
from hasten.attention.fewer_keys.blocks import Packing, blocks, identity, wide
from hasten.attention.full import FullOperator
from hasten.attention.masks import Mask
from hasten.attention.mechanism import MechanismSpec
from hasten.fields import PositiveInt


@dataclass(frozen=True, kw_only=True)
class LinformerSpec(MechanismSpec):
    """Linformer: every query reads a fixed number of mixtures of all keys; for sequences up to a fixed length."""

    kind: Literal["linformer"] = "linformer"
    """The mechanism's name."""
    max_length: PositiveInt = 512
    """Longest sequence: the projections have a column for each position."""
    rank: PositiveInt = 128
    """Mixtures of keys that a query reads (k in the paper)."""
    projection: Literal["learnt", "mean", "convolution"] = "learnt"
    """Any learnt matrix; or means, or one learnt kernel, over segments of max_length / rank tokens."""
    sharing: Literal["none", "headwise", "key-value", "layerwise"] = "headwise"
    """What shares a projection: nothing; all heads; heads, keys and values; and all layers made by `build_layers`."""
    n_heads: PositiveInt | None = None
    """Attention heads, where each has projections of its own; a model sets it."""

    def build(self) -> "LinformerAttention":
        """One layer's mechanism, with a projection of its own."""
        return LinformerAttention(self._project(), self.max_length)

    def build_layers(self, n_layers: int) -> Sequence[Attention]:
        """Mechanisms of several layers, which hold one and the same projection where sharing is layerwise."""
        if self.sharing != "layerwise":
            return super().build_layers(n_layers)
        projection = self._project()
        return [LinformerAttention(projection, self.max_length) for _ in range(n_layers)]

    def _project(self) -> "Projection":
        heads, segment = 1, (self.max_length + self.rank - 1) // self.rank
        if self.projection == "mean":
            return MeanProjection(segment)
        if self.sharing == "none":
            heads = self.size("n_heads")
        once = self.sharing in ("key-value", "layerwise")
        if self.projection == "convolution":
            return ConvolutionProjection(segment, heads, once)
        return LearntProjection(self.rank, self.max_length, heads, once)


Role = Literal["key", "value"]


class Projection(nn.Module, ABC):
    """A linear map along time for keys and one for values, for sequences of any length up to a limit."""

    normalised: bool
    n_heads: int | None = None  # where each head has maps of its own

    @abstractmethod
    def mix(self, x: Float[Tensor, "B H S D"], count: Int[Tensor, "#B"], role: Role) -> Float[Tensor, "B H rows D"]:
        """Rows that are mixtures of the first `count` tokens, after which `x` is zero."""

    @abstractmethod
    def readable(self, n_rows: int, count: Int[Tensor, "#B"]) -> Bool[Tensor, "#B rows"] | None:
        """Which rows are read, given the number of tokens; None: all."""

    @abstractmethod
    def matrix(self, length: int, role: Role) -> Float[Tensor, "heads rows S"]:
        """The definition: the map of a sequence of this length."""


class LearntProjection(Projection):
    """E for keys and F for values, (heads, rank, max_length), normal with variance 1 / rank at first; `once`: F is E.

    A shorter sequence uses the first columns. All rows are read, also those in which little stands.
    """

    normalised = False

    def __init__(self, rank: int, max_length: int, heads: int, once: bool):
        super().__init__()
        self.n_heads = heads if heads > 1 else None
        matrices = (torch.randn(heads, rank, max_length) / math.sqrt(rank) for _ in range(1 if once else 2))
        self.matrices = nn.ParameterList(matrices)

    def mix(self, x: Float[Tensor, "B H S D"], count: Int[Tensor, "#B"], role: Role) -> Float[Tensor, "B H rows D"]:
        """E k or F v."""
        matrix = self.matrix(x.shape[2], role).to(x.dtype)
        if len(matrix) > 1:
            return torch.einsum("hks,bhsd->bhkd", matrix, x)
        return torch.einsum("ks,bhsd->bhkd", matrix[0], x)  # one product, of which no head makes its own gradient

    def readable(self, n_rows: int, count: Int[Tensor, "#B"]) -> None:
        """Every row."""

    def matrix(self, length: int, role: Role) -> Float[Tensor, "heads rows S"]:
        """The first columns."""
        return self.matrices[0 if role == "key" else -1][:, :, :length]


class MeanProjection(Projection):
    """Means of segments of so many tokens. Segments without a token are not read."""

    normalised = True

    def __init__(self, segment: int):
        super().__init__()
        self.segment = segment

    def mix(self, x: Float[Tensor, "B H S D"], count: Int[Tensor, "#B"], role: Role) -> Float[Tensor, "B H rows D"]:
        """Sums over the tokens that are there, by their number."""
        sums = blocks(x, self.segment).sum(3)
        begins = torch.arange(sums.shape[2], device=x.device) * self.segment
        return sums / (count[:, None] - begins).clamp(1, self.segment)[:, None, :, None]

    def readable(self, n_rows: int, count: Int[Tensor, "#B"]) -> Bool[Tensor, "#B rows"]:
        """Segments that have begun."""
        return torch.arange(n_rows, device=count.device) * self.segment < count[:, None]

    def matrix(self, length: int, role: Role) -> Float[Tensor, "heads rows S"]:
        """1 / (tokens of the segment), segment by segment."""
        segments = torch.ones(1, length, dtype=torch.float64).split(self.segment, dim=1)
        return torch.block_diag(*(segment / segment.shape[1] for segment in segments))[None]


class ConvolutionProjection(Projection):
    """A learnt kernel over segments of so many tokens, a mean at first; `once`: one for keys and values."""

    normalised = False

    def __init__(self, segment: int, heads: int, once: bool):
        super().__init__()
        self.n_heads = heads if heads > 1 else None
        kernels = (torch.full((heads, segment), 1 / segment) for _ in range(1 if once else 2))
        self.segment, self.kernels = segment, nn.ParameterList(kernels)

    def mix(self, x: Float[Tensor, "B H S D"], count: Int[Tensor, "#B"], role: Role) -> Float[Tensor, "B H rows D"]:
        """Weighted sums; the last segment may run over the end, where zeros stand."""
        return (blocks(x, self.segment) * self._kernel(role).to(x.dtype)[:, None, :, None]).sum(3)

    def readable(self, n_rows: int, count: Int[Tensor, "#B"]) -> Bool[Tensor, "#B rows"]:
        """Segments that have begun."""
        return torch.arange(n_rows, device=count.device) * self.segment < count[:, None]

    def matrix(self, length: int, role: Role) -> Float[Tensor, "heads rows S"]:
        """The kernel, segment by segment."""
        n_rows = (length + self.segment - 1) // self.segment
        rows = (torch.block_diag(*[kernel[None]] * n_rows)[:, :length] for kernel in self._kernel(role))
        return torch.stack(tuple(rows))

    def _kernel(self, role: Role) -> Float[Tensor, "heads segment"]:
        return self.kernels[0 if role == "key" else -1]


class LinformerAttention(Attention):
    """softmax(q (E k)^T / sqrt(D)) (F v), with E and F maps along time from S positions to few rows.

    q (B, H, T, D), k (B, H, S, D); S is at most max_length. Columns of E and F are positions counted over real tokens:
    padding, wherever it stands, is as good as dropped. Not causal: every row mixes the whole sequence, and a
    triangular mask over rows would not change that. Memory for attention to other sequences must fit max_length too.
    Rows of the map sum to 1 only for means of segments (`traits.normalised`). Cost O((T + S) rank).
    Not offered: dropout of weights, since a weight here is that of a mixture.
    Several layers share one projection by holding the same `Projection`, as those of `LinformerSpec.build_layers` do;
    a state dict then lists it under each layer's name. Source: Wang et al., 2020, section 4.
    """

    def __init__(self, projection: Projection, max_length: int):
        super().__init__()
        self.projection = projection
        self.traits = Traits(
            causal=None,
            not_strict="its projections mix the whole sequence, what comes later too",
            cross=True,
            step=False,
            normalised=projection.normalised,
            key_padding=True,
            empty=True,
            dropout=False,
            max_length=max_length,
            n_heads=projection.n_heads,
            memory=1.0,
        )

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> "LinformerOperator":
        """The softmax map over rows; its weights are not formed unless asked for."""
        self.check(q, k, mask)
        packing = Packing(mask.keys, k.shape[2], k.device)
        with torch.autocast(q.device.type, enabled=False):
            keys = self.projection.mix(packing.pack(wide(k)), packing.count, "key")
        rows = self.projection.readable(keys.shape[2], packing.count)
        read = FullOperator(wide(q), keys, Mask(allowed=None if rows is None else rows[:, None, None]), 0.0)
        return LinformerOperator(read, self.projection, packing, q)

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition, on the real tokens of one sequence and head at a time."""
        weights = q.new_zeros(*q.shape[:3], k.shape[2])
        for b in range(q.shape[0]):
            real = torch.arange(k.shape[2]) if mask.keys is None else mask.keys[b].nonzero()[:, 0]
            if not len(real):
                continue
            keys, values = (self.projection.matrix(len(real), role).to(q) for role in ("key", "value"))
            for h in range(q.shape[1]):
                scores = q[b, h] @ (keys[h % len(keys)] @ k[b, h, real]).T / math.sqrt(q.shape[3])
                weights[b, h, :, real] = scores.softmax(-1) @ values[h % len(values)]
        return weights


class LinformerOperator(Operator):
    """Softmax weights of rows, applied to the rows of the values."""

    def __init__(self, read: Operator, projection: Projection, packing: Packing, like: Float[Tensor, "B H T D"]):
        self.read, self.projection, self.packing, self.like = read, projection, packing, like

    def apply(self, v: Float[Tensor, "B H S Dv"]) -> Float[Tensor, "B H T Dv"]:
        """Project the values and mix, in float32 or wider."""
        with torch.autocast(v.device.type, enabled=False):
            values = self.projection.mix(self.packing.pack(wide(v)), self.packing.count, "value")
            return self.read.apply(values).to(v.dtype)

    def dense(self) -> Float[Tensor, "B H T S"]:
        """The map of single tokens."""
        return self.apply(identity(self.like, self.packing.order.shape[1]))

    def materialised(self) -> "LinformerOperator":
        """The weights of rows, formed."""
        return LinformerOperator(self.read.materialised(), self.projection, self.packing, self.like)
