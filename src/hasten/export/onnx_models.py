"""The graphs of our models: what `encode`, one step of decoding, and the output layer compute."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from hasten.attention.average import AverageLayer, Gate
from hasten.attention.ssru import SSRULayer
from hasten.data.tokenizer import EOS, PLACEHOLDER
from hasten.export.onnx_graph import MASKED, Graph, array
from hasten.export.onnx_layers import (
    AXES,
    Reading,
    Source,
    decode_at_once,
    encode,
    fed_forward,
    of_memory,
    positioned,
    projection,
    scaled,
    source,
)
from hasten.models.autoregressive import Autoregressive
from hasten.models.ctc import CTC
from hasten.models.dag import DAG
from hasten.nn.links import Links
from hasten.nn.positions import sinusoids

Holdable = Autoregressive | CTC | DAG
"""Kinds of models that can be written."""


def beta(model: DAG) -> float:
    """The weight of a word beside the edge to it: that of lookahead; greedy asks for no words."""
    return model.spec.decoding.beta if model.spec.decoding.method == "lookahead" else 0.0


def dag_graphs(graph: Callable[[], Graph], model: DAG, longest: int) -> dict[str, Any]:
    """encoder.onnx: sources of at most `longest` tokens to the states of their vertices and the links between them,
    log E (B, L, L). output.onnx, rows.onnx and listed.onnx are as of `ctc_graphs`."""
    g, spec = graph(), model.spec
    vertices_masked = g.input("frames_masked", "FLOAT", ["batch", 1, 1, "frames"])
    x, sizes = source(g, model, longest)
    read = Source(encode(g, model.encoder, x, sizes, MASKED, spec.n_heads), sizes, MASKED)
    shape = g.concat(g.op("Mul", sizes, g.numbers(1, spec.upsample)), g.numbers(spec.d_model))
    if spec.decoder_input == "copy":
        each = g.op("Reshape", read.states, g.concat(sizes, g.numbers(1, spec.d_model)))
        copies = g.op("Expand", each, g.concat(sizes, g.numbers(spec.upsample, spec.d_model)))
        inputs = g.op("Reshape", copies, shape)
    else:
        inputs = g.op("Expand", g.constant(array(model.look_up(torch.tensor([[PLACEHOLDER]])))), shape)
    sizes = g.op("Mul", sizes, g.numbers(1, spec.upsample))
    x = positioned(g, inputs, sizes, spec.d_model, spec.upsample * longest)
    states = decode_at_once(g, model.decoder, x, sizes, vertices_masked, spec.n_heads, read)
    g.output(states, "states", ["rows", spec.d_model])
    placed = positioned(g, g.op("Reshape", states, shape), sizes, spec.d_model, spec.upsample * longest)
    g.output(_links(g, model.links, placed, sizes, vertices_masked), "links", ["batch", "frames", "frames"])
    return {"encoder.onnx": g.model("encoder"), **_output_graphs(graph, model)}


def _links(g: Graph, links: Links, x: str, sizes: str, masked: str) -> str:
    """log E (B, L, L) from states with their positions (B L, D); -inf where there is no edge."""
    shape = g.concat(sizes, g.numbers(links.n_heads, links.d_head))
    q, k = (g.op("Reshape", g.linear(x, y.weight, y.bias), shape) for y in (links.queries, links.keys))
    q, k = scaled(g, g.transpose(q, 0, 2, 1, 3), links.d_head), g.transpose(k, 0, 2, 3, 1)
    gate = g.op("LogSoftmax", g.linear(x, links.gate.weight, links.gate.bias), attributes={"axis": -1})
    gate = g.op("Reshape", gate, g.concat(sizes, g.numbers(links.n_heads, 1)))
    length = g.op("Gather", sizes, g.constant(np.array(1)))
    places = g.op("Range", g.constant(np.array(0)), length, g.constant(np.array(1)))
    later = g.op("Less", g.op("Unsqueeze", places, g.numbers(1)), g.op("Unsqueeze", places, g.numbers(0)))
    edges = g.op("And", later, g.op("Equal", masked, g.number(0.0)))
    # A finite filler: rows without successors stay numbers.
    scores = g.op("Where", edges, g.op("MatMul", q, k), g.number(-1e30))
    each = g.op("Add", g.op("LogSoftmax", scores, attributes={"axis": -1}), g.transpose(gate, 0, 2, 1, 3))
    mixed = g.op("ReduceLogSumExp", each, attributes={"axes": [1], "keepdims": 1})
    return g.op("Squeeze", g.op("Where", edges, mixed, g.number(-np.inf)), g.numbers(1))


def ctc_graphs(graph: Callable[[], Graph], model: CTC, longest: int) -> dict[str, Any]:
    """encoder.onnx: sources of at most `longest` tokens to the states of their frames. output.onnx: states to logits.
    rows.onnx: ids to their rows of the output layer. listed.onnx: states and such rows to logits, of these ids.

    The output layer stands alone so that it runs over real frames only, a few at a time.
    """
    g, spec = graph(), model.spec
    frames_masked = g.input("frames_masked", "FLOAT", ["batch", 1, 1, "frames"])
    x, sizes = source(g, model, longest)
    states = encode(g, model.encoder, x, sizes, MASKED, spec.n_heads)
    frames = g.linear(states, model.upsample.weight, model.upsample.bias)
    sizes = g.op("Mul", sizes, g.numbers(1, spec.upsample))
    frames = g.op("Reshape", frames, g.concat(sizes, g.numbers(spec.d_model)))
    x = positioned(g, frames, sizes, spec.d_model, spec.upsample * longest)
    g.output(encode(g, model.refiner, x, sizes, frames_masked, spec.n_heads), "states", ["rows", spec.d_model])
    return {"encoder.onnx": g.model("encoder"), **_output_graphs(graph, model)}


def _output_graphs(graph: Callable[[], Graph], model: CTC | DAG) -> dict[str, Any]:
    """States to logits: of the whole vocabulary, or of rows that are given."""
    last = graph()
    logits = last.linear(last.input("states", "FLOAT", ["rows", model.spec.d_model]), model.embedding.weight)
    last.output(logits, "logits", ["rows", len(model.embedding.weight)])
    return {
        "output.onnx": last.model("output"),
        "rows.onnx": _rows_graph(graph(), model),
        "listed.onnx": _listed_graph(graph(), model),
    }


def _rows_graph(g: Graph, model: Holdable) -> Any:
    """Ids to their rows of the output layer."""
    g.some_rows(model.embedding.weight, g.input("ids", "INT64", ["listed"]))
    return g.model("rows")


def _listed_graph(g: Graph, model: CTC | DAG) -> Any:
    """States and rows of the output layer to logits, of the ids whose rows these are."""
    states = g.input("states", "FLOAT", ["rows", model.spec.d_model])
    g.given_rows(model.spec.d_model)
    g.output(g.linear_by_rows(states), "logits", ["rows", "listed"])
    return g.model("listed")


def autoregressive_graphs(graph: Callable[[], Graph], model: Autoregressive, longest: int) -> dict[str, Any]:
    """encoder.onnx: sources of at most `longest` tokens to what the decoder reads of them. steps.onnx: what is said
    next, token by token, until a row ends. rows.onnx: ids to their rows of the output layer. listed_steps.onnx: the
    same where only such pieces can be said whose rows are given.

    `memory_key_*` (B, H, D, S) and `memory_value_*` (B, H, S, D) are of the source, `past_*` of the tokens said and
    `next_*` the same after these; only layers that compute them have them. Keys and values of the past are
    (B, H, t, D), the cells of recurrent units and the sums of averages (B, d_model).
    """
    g, heads = graph(), (model.spec.n_heads, model.spec.d_model // model.spec.n_heads)
    x, sizes = source(g, model, longest)
    states = encode(g, model.encoder, x, sizes, MASKED, model.spec.n_heads)
    shape = g.concat(sizes, g.numbers(*heads))
    kept: dict[str, list[str | int]] = {}
    for number, layer in enumerate(model.decoder.layers):
        for role, weight, bias in of_memory(layer.get_submodule("cross_attention"), model.spec.d_model):
            y, name = g.op("Reshape", g.linear(states, weight, bias), shape), f"memory_{role}_{number}"
            kept[name] = ["batch", heads[0], *([heads[1], "length"] if role == "key" else ["length", heads[1]])]
            g.output(g.transpose(y, *AXES[role]), name, kept[name])
    return {
        "encoder.onnx": g.model("encoder"),
        "steps.onnx": _steps_graph(graph(), model, kept, longest, listed=False),
        "rows.onnx": _rows_graph(graph(), model),
        "listed_steps.onnx": _steps_graph(graph(), model, kept, longest, listed=True),
    }


def _steps_graph(
    g: Graph, model: Autoregressive, kept: dict[str, list[str | int]], longest: int, *, listed: bool
) -> Any:
    """The most probable tokens after `last`, one after another: at most `most`, until any row has said its end.

    Tokens and their log probabilities are (t, B). `banned` (n) is -inf at what none may say. Where they are `listed`, n
    rows of the output layer are given, those of the special ids first, tokens are places among them, and `outside` (B
    or 1, n) is -inf at what a row of the batch does not list; else n is the whole vocabulary.
    """
    d_model, batch, table = model.spec.d_model, ["batch"], model.embedding.weight
    last, position, most = (g.input(n, "INT64", s) for n, s in (("last", ["batch"]), ("position", [1]), ("most", [])))
    g.input(MASKED, "FLOAT", ["batch", 1, 1, "length"])
    banned = g.input("banned", "FLOAT", ["listed" if listed else len(table)])
    if listed:
        g.given_rows(d_model)
        g.input("outside", "FLOAT", ["lists", "listed"])
    for name, shape in kept.items():
        g.input(name, "FLOAT", shape)
    b = g.body()
    position = b.op("Add", position, b.input("round", "INT64", []))
    b.input("again", "BOOL", [])
    token = b.input("token", "INT64", batch)
    x = b.op("Mul", b.rows_at(token) if listed else b.rows(table, token), b.number(d_model**0.5))
    x = b.op("Add", x, b.op("Gather", b.constant(array(sinusoids(2 * longest + 20, d_model))), position))
    layers = _StepLayers(b, model.spec.n_heads, d_model, position)
    for number, layer in enumerate(model.decoder.layers):
        attention: Any = layer.get_submodule("self_attention")
        normed = b.norm(x, layer.get_submodule("self_norm"))
        x = b.op("Add", x, layers.over_past(number, model.decoder.plan.sources[number], attention, normed))
        attention, source = layer.get_submodule("cross_attention"), model.decoder.cross_plan.sources[number]
        normed = b.norm(x, layer.get_submodule("cross_norm")) if source == number else x
        x = b.op("Add", x, layers.over_memory(number, source, attention, normed))
        x = fed_forward(b, x, layer)
    x = b.norm(x, model.decoder.norm)
    logits = b.linear_by_rows(x, "outside") if listed else b.linear(x, table)
    chosen = b.op("ArgMax", b.op("Add", logits, banned), attributes={"axis": -1, "keepdims": 1})
    log_probs = b.op("LogSoftmax", logits, attributes={"axis": -1})
    said = b.reshape(chosen, -1)
    score = b.reshape(b.op("GatherElements", log_probs, chosen, attributes={"axis": -1}), -1)
    ended = b.op("Cast", b.op("Equal", said, b.numbers(EOS)), attributes={"to": b.INT64})
    any_ended = b.op("Cast", b.op("ReduceMax", ended, attributes={"keepdims": 0}), attributes={"to": b.BOOL})
    b.output(b.op("Not", any_ended), "going", [], "BOOL")
    for name, value, shape, kind in (("next", said, batch, "INT64"), *layers.after):
        b.output(value, f"{name}_", shape, kind)
    b.output(said, "said", batch, "INT64")
    b.output(score, "score", batch)
    starts = [g.input(name, "FLOAT", shape) for name, shape in layers.before]
    _, *after, tokens, scores = g.repeat(most, b, [last, *starts])
    for (name, _, shape, _), value in zip(layers.after, after, strict=True):
        g.output(value, name, shape)
    g.output(tokens, "tokens", ["saying", "batch"], "INT64")
    g.output(scores, "scores", ["saying", "batch"])
    return g.model("steps")


@dataclass
class _StepLayers:
    """The attention of a decoder's layers at one position, and what those that others use have left."""

    g: Graph
    n_heads: int
    d_model: int
    position: str
    own: dict[int, str] = field(default_factory=dict)
    """Weights over the past, by layer."""
    cross: Reading = field(init=False)
    """Of attention over the source."""
    before: list[tuple[str, list[str | int]]] = field(default_factory=list)
    """Names and sizes of what is read of the past."""
    after: list[tuple[str, str, list[str | int], str]] = field(default_factory=list)
    """The same, with this position: name, tensor, sizes, type."""

    def __post_init__(self) -> None:
        self.cross = Reading(self.g)

    def over_past(self, number: int, source: int, attention: Any, x: str) -> str:
        """Self-attention of a layer at the new position, after its values (and keys) joined those so far."""
        if isinstance(attention, SSRULayer):
            return self._recurrent(number, attention, x)
        if isinstance(attention, AverageLayer):
            return self._average(number, attention, x)
        g, weight, bias = self.g, *projection(attention)
        parts = [g.linear(x, weight, bias)]
        if source == number:
            q, key, *parts = g.split(parts[0], 3, 1)
            keys = self._joined("key", number, key)
            scores = g.op("MatMul", scaled(g, self._heads(q), self._width), g.transpose(keys, 0, 1, 3, 2))
            self.own[number] = g.op("Softmax", scores, attributes={"axis": -1})
        values = self._joined("value", number, parts[0])
        context = g.reshape(g.op("MatMul", self.own[source], values), -1, self.d_model)
        return g.linear(context, attention.out_proj.weight, attention.out_proj.bias)

    def _recurrent(self, number: int, layer: SSRULayer, x: str) -> str:
        """relu(c) with c = v + f (past c - v)."""
        g, bias = self.g, layer.forget_bias
        gates, values = g.split(g.linear(x, layer.in_proj.weight), 2, 1)
        gates = gates if bias is None else g.op("Add", gates, g.constant(array(bias)))
        kept = g.op("Mul", g.op("Sigmoid", gates), g.op("Sub", self._past("cells", number), values))
        return g.op("Relu", self._next("cells", number, g.op("Add", values, kept)))

    def _average(self, number: int, layer: AverageLayer, x: str) -> str:
        """The mean of all inputs up to here, through the layer's network and gates."""
        g = self.g
        total = self._next("total", number, g.op("Add", self._past("total", number), x))
        count = g.op("Cast", g.op("Add", self.position, g.numbers(1)), attributes={"to": g.FLOAT})
        mean = g.op("Div", total, count)
        if isinstance(layer.network, nn.Sequential):
            inner, outer = layer.network[0], layer.network[2]
            assert isinstance(inner, nn.Linear)
            assert isinstance(outer, nn.Linear)
            mean = g.linear(g.op("Relu", g.linear(mean, inner.weight, inner.bias)), outer.weight, outer.bias)
        if not isinstance(layer.gate, Gate):
            return mean
        gates = layer.gate.gates
        opened = g.op("Sigmoid", g.linear(g.concat(x, mean, axis=1), gates.weight, gates.bias))
        entering, keeping = g.split(opened, 2, 1)
        return g.op("Add", g.op("Mul", entering, x), g.op("Mul", keeping, mean))

    def _past(self, role: str, number: int) -> str:
        return self._carried(role, number, [self.d_model])

    def _next(self, role: str, number: int, value: str) -> str:
        self.after.append((f"next_{role}_{number}", value, ["batch", self.d_model], "FLOAT"))
        return value

    def over_memory(self, number: int, source: int, attention: Any, x: str) -> str:
        """A layer's attention over the source: its own, or what it uses of another layer's."""

        def mixed(weights: str) -> str:
            return self.g.reshape(self.g.op("MatMul", weights, f"memory_value_{number}"), -1, self.d_model)

        return self.cross.output(number, source, attention, lambda: self._weights(number, attention, x), mixed)

    def _weights(self, number: int, attention: Any, x: str) -> str:
        g, (weight, bias) = self.g, projection(attention)
        q = g.linear(x, weight[: self.d_model], None if bias is None else bias[: self.d_model])
        scores = g.op("MatMul", scaled(g, self._heads(q), self._width), f"memory_key_{number}")
        return g.op("Softmax", g.op("Add", scores, MASKED), attributes={"axis": -1})

    def _joined(self, role: str, number: int, new: str) -> str:
        """What was so far and what is new."""
        past = self._carried(role, number, [self.n_heads, "said", self._width])
        joined = self.g.concat(past, self._heads(new), axis=2)
        self.after.append((f"next_{role}_{number}", joined, ["batch", self.n_heads, "saying", self._width], "FLOAT"))
        return joined

    def _carried(self, role: str, number: int, sizes: list[str | int]) -> str:
        self.before.append((f"past_{role}_{number}", ["batch", *sizes]))
        return self.g.input(f"so_far_{role}_{number}", "FLOAT", ["batch", *sizes])

    @property
    def _width(self) -> int:
        return self.d_model // self.n_heads

    def _heads(self, x: str) -> str:
        """(B, D) as (B, H, 1, D / H)."""
        return self.g.reshape(x, -1, self.n_heads, 1, self._width)
