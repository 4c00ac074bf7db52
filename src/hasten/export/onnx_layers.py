"""The layers of our models as graphs: embedded sources, stacks of layers over whole sequences."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hasten.attention.multihead import MultiHeadAttention
from hasten.export.onnx_graph import MASKED, Graph, array
from hasten.nn.following import ReuseContext, ReuseOutput, ReuseWeights
from hasten.nn.layers import FeedForward
from hasten.nn.parallel import ParallelDecoder
from hasten.nn.positions import sinusoids
from hasten.nn.stack import Encoder


def source(g: Graph, model: Any, longest: int) -> tuple[str, str]:
    """Embedded source tokens, one row below the other, and the vector (batch, length)."""
    ids, d_model = g.input("source", "INT64", ["batch", "length"]), model.spec.d_model
    g.input(MASKED, "FLOAT", ["batch", 1, 1, "length"])
    sizes = g.op("Shape", ids)
    x = g.op("Mul", g.rows(model.embedding.weight, ids), g.number(d_model**0.5))
    return positioned(g, x, sizes, d_model, longest), sizes


def positioned(g: Graph, x: str, sizes: str, d_model: int, longest: int) -> str:
    """x (B, S, D) plus positions, its rows one below the other; sizes is the vector (B, S)."""
    length = g.op("Slice", sizes, g.numbers(1), g.numbers(2))
    positions = g.op("Slice", g.constant(array(sinusoids(longest, d_model))), g.numbers(0), length)
    return g.reshape(g.op("Add", x, positions), -1, d_model)


def encode(g: Graph, stack: Encoder, x: str, sizes: str, masked: str, n_heads: int) -> str:
    """All layers over x (B S, D), and the final normalisation; sizes is the vector (B, S)."""
    attentions = OverItself(g, stack.plan.sources, stack.norm.normalized_shape[0], n_heads, sizes, masked)
    for number, layer in enumerate(stack.layers):
        x = g.op(
            "Add", x, attentions.output(number, layer.get_submodule("self_attention"), _normed(g, x, layer, "self"))
        )
        x = fed_forward(g, x, layer)
    return g.norm(x, stack.norm)


@dataclass(frozen=True)
class Source:
    """States of the encoder (B S, D), the vector (B, S), and what is added to scores of its places."""

    states: str
    sizes: str
    masked: str


def decode_at_once(
    g: Graph, stack: ParallelDecoder, x: str, sizes: str, masked: str, n_heads: int, read: Source
) -> str:
    """All layers of a parallel decoder over x (B T, D), and the final normalisation; sizes is the vector (B, T)."""
    sources, cross, d_model = stack.plan.sources, stack.cross_plan.sources, stack.norm.normalized_shape[0]
    attentions = OverItself(g, sources, d_model, n_heads, sizes, masked)
    reading = OverSource(g, cross, d_model, n_heads, sizes, read)
    for number, layer in enumerate(stack.layers):
        x = g.op(
            "Add", x, attentions.output(number, layer.get_submodule("self_attention"), _normed(g, x, layer, "self"))
        )
        normed = _normed(g, x, layer, "cross") if cross[number] == number else x
        x = g.op("Add", x, reading.output(number, layer.get_submodule("cross_attention"), normed))
        x = fed_forward(g, x, layer)
    return g.norm(x, stack.norm)


def _normed(g: Graph, x: str, layer: nn.Module, which: str) -> str:
    return g.norm(x, layer.get_submodule(f"{which}_norm"))


class OverItself:
    """Attention of a stack's layers over all places of their own sequences; sizes is the vector (B, T)."""

    def __init__(self, g: Graph, sources: Sequence[int], d_model: int, n_heads: int, sizes: str, masked: str):
        self._g, self._sources, self._d_model, self._n_heads = g, sources, d_model, n_heads
        self._heads = g.concat(sizes, g.numbers(-1, n_heads, d_model // n_heads))
        self._flat, self._masked = g.concat(sizes, g.numbers(-1)), masked
        batch, length = (g.op("Gather", sizes, g.numbers(axis)) for axis in (0, 1))
        self._every = g.op("Expand", masked, g.concat(batch, g.numbers(1), length, length))
        self._weights: dict[int, str] = {}

    def output(self, number: int, attention: Any, x: str) -> str:
        """Of a layer at normalised x (B T, D)."""
        g, source = self._g, self._sources[number]
        projected = g.linear(x, *projection(attention))
        if source == number and self._sources.count(number) == 1:
            q, k, v = g.split(g.op("Reshape", projected, self._flat), 3, 2)
            heads = {"num_heads": self._n_heads}
            context = g.fused("MultiHeadAttention", q, k, v, "", "", self._every, attributes=heads)
        else:  # weights that leave the layer
            parts = g.transpose(g.op("Reshape", projected, self._heads), 2, 0, 3, 1, 4)  # (roles, B, H, T, D)
            if source == number:
                q, k, parts = g.split(parts, 3, 0)
                q = scaled(g, q, self._d_model // self._n_heads)
                scores = g.op("MatMul", q, g.transpose(k, 0, 1, 2, 4, 3))
                self._weights[number] = g.op("Softmax", g.op("Add", scores, self._masked), attributes={"axis": -1})
            context = g.transpose(g.op("MatMul", self._weights[source], parts), 0, 1, 3, 2, 4)
        context = g.reshape(context, -1, self._d_model)
        return g.linear(context, attention.out_proj.weight, attention.out_proj.bias)


class Reading:
    """What layers' attention over the source leaves, and what of it other layers use (`shared_of_cross`)."""

    def __init__(self, g: Graph):
        self._g = g
        self._left: dict[int, tuple[str, str, str]] = {}

    def output(
        self, number: int, source: int, attention: Any, weigh: Callable[[], str], mix: Callable[[str], str]
    ) -> str:
        """Of a layer that follows layer `source`, perhaps itself: `weigh` gives weights, `mix` contexts from these."""
        g = self._g
        if isinstance(attention, ReuseOutput):
            return self._left[source][2]
        weights = weigh() if source == number else self._left[source][0]
        context = self._left[source][1] if isinstance(attention, ReuseContext) else mix(weights)
        output = g.linear(context, attention.out_proj.weight, attention.out_proj.bias)
        if source == number:
            self._left[number] = weights, context, output
        return output


class OverSource:
    """Attention of a decoder's layers over the encoder's states, for all places at once; sizes is the vector (B, T)."""

    def __init__(self, g: Graph, sources: Sequence[int], d_model: int, n_heads: int, sizes: str, read: Source):
        self._g, self._sources, self._d_model, self._read = g, sources, d_model, read
        heads = g.numbers(n_heads, d_model // n_heads)
        self._places, self._there = g.concat(sizes, heads), g.concat(read.sizes, heads)
        self._width, self._reading = d_model // n_heads, Reading(g)

    def output(self, number: int, attention: Any, x: str) -> str:
        """Of a layer at normalised x (B T, D): its own, or what it uses of another's."""
        g = self._g
        there = {
            role: g.transpose(g.op("Reshape", g.linear(self._read.states, weight, bias), self._there), *AXES[role])
            for role, weight, bias in of_memory(attention, self._d_model)
        }

        def weights() -> str:
            weight, bias = projection(attention)
            q = g.linear(x, weight[: self._d_model], None if bias is None else bias[: self._d_model])
            q = scaled(g, g.transpose(g.op("Reshape", q, self._places), 0, 2, 1, 3), self._width)
            scores = g.op("Add", g.op("MatMul", q, there["key"]), self._read.masked)
            return g.op("Softmax", scores, attributes={"axis": -1})

        def mixed(weights: str) -> str:
            return g.reshape(g.transpose(g.op("MatMul", weights, there["value"]), 0, 2, 1, 3), -1, self._d_model)

        return self._reading.output(number, self._sources[number], attention, weights, mixed)


AXES = {"key": (0, 2, 3, 1), "value": (0, 2, 1, 3)}
"""The order of the axes (B, S, H, D) in which keys and values are multiplied."""


def of_memory(attention: nn.Module, d_model: int) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """What a layer's attention over the encoder projects of its states: roles, weights and biases."""
    roles = {MultiHeadAttention: ("key", "value"), ReuseWeights: ("value",)}.get(type(attention), ())
    for number, role in enumerate(roles):
        rows = slice((number - len(roles)) * d_model, (number - len(roles) + 1) * d_model or None)
        bias: Any = attention.in_proj_bias
        yield role, attention.in_proj_weight[rows], None if bias is None else bias[rows]  # type: ignore[index]


def projection(attention: Any) -> tuple[Tensor, Tensor | None]:
    """Weights and bias of what a layer projects of its inputs."""
    return attention.in_proj_weight, attention.in_proj_bias


def scaled(g: Graph, q: str, width: int) -> str:
    """Queries of heads of this width, for products with keys."""
    return g.op("Mul", q, g.number(width**-0.5))


def fed_forward(g: Graph, x: str, layer: nn.Module) -> str:
    """x plus the feed-forward network of its normalised rows."""
    feed_forward = layer.get_submodule("feed_forward")
    assert isinstance(feed_forward, FeedForward)
    inner, outer = feed_forward.inner, feed_forward.outer
    hidden = g.op("Relu", g.linear(g.norm(x, layer.get_submodule("feed_forward_norm")), inner.weight, inner.bias))
    return g.op("Add", x, g.linear(hidden, outer.weight, outer.bias))
