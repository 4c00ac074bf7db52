"""An ONNX graph written node by node: the arithmetic that our models consist of.

Rows are tokens: states are (tokens, width) throughout, so that every linear map is one matrix product with its bias.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from torch import Tensor, nn

from hasten.errors import MissingExtra
from hasten.export.calibration import Range, Ranges

OPSET, IR_VERSION = 17, 8
ONNX_RUNTIME = "com.microsoft"
"""The name under which ONNX Runtime has operations of its own."""
MASKED = "masked"
"""The input (B, 1, 1, S) that is added to scores: 0 on real keys, -inf on padding."""


def onnx_package() -> Any:
    """The onnx package; `MissingExtra` where it is not installed."""
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        raise MissingExtra("onnx", "onnx") from error


class Graph(ABC):
    """Nodes, constants, inputs and outputs under way; names of tensors go in and come out of its methods.

    Subclasses say how numbers of weights are held: `linear` and `rows`.
    """

    def __init__(self) -> None:
        self._onnx = onnx_package()
        types = self._onnx.TensorProto
        self.FLOAT, self.INT64, self.BOOL = int(types.FLOAT), int(types.INT64), int(types.BOOL)
        self._prefix = ""
        self._nodes: list[Any] = []
        self._constants: dict[str, Any] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    @abstractmethod
    def linear(self, x: str, weight: Tensor, bias: Tensor | None = None) -> str:
        """x W^T + b, of x (N, in) and W (out, in)."""

    @abstractmethod
    def rows(self, table: Tensor, ids: str) -> str:
        """Rows of a table (V, D) by ids of any shape."""

    def some_rows(self, weight: Tensor, ids: str) -> None:
        """Outputs: the rows of a matrix (V, D) by a vector of ids, as floats: packing bytes anew at every product would
        cost more than they save."""
        self.output(self.rows(weight, ids), "rows", ["listed", weight.shape[1]])

    def given_rows(self, width: int) -> None:
        """Inputs: rows W (n, D) of width D, as `some_rows` leaves them."""
        self.input("rows", "FLOAT", ["listed", width])

    def linear_by_rows(self, x: str, plus: str = "") -> str:
        """x W^T, of x (N, D) and the given rows W (n, D); plus (N or 1, n), where it is given."""
        return self.op("Gemm", x, "rows", *[plus] * bool(plus), attributes={"transB": 1})

    def rows_at(self, places: str) -> str:
        """(N, D): the given rows at these places (N)."""
        return self.op("Gather", "rows", places)

    @abstractmethod
    def _empty(self) -> "Graph":
        """Another graph of this kind."""

    def input(self, name: str, kind: str, shape: Sequence[str | int]) -> str:
        """Declare an input: its element type as onnx names it, its sizes or their names."""
        element = getattr(self._onnx.TensorProto, kind)
        self._inputs.append(self._onnx.helper.make_tensor_value_info(name, element, list(shape)))
        return name

    def output(self, x: str, name: str, shape: Sequence[str | int], kind: str = "FLOAT") -> None:
        """Declare that `x` leaves the graph, under `name`."""
        self._node("Identity", [x], [name], {})
        element = getattr(self._onnx.TensorProto, kind)
        self._outputs.append(self._onnx.helper.make_tensor_value_info(name, element, list(shape)))

    def constant(self, value: np.ndarray) -> str:
        """A constant; equal small ones are kept once."""
        value = np.asarray(value, order="C")  # unlike ascontiguousarray it leaves single numbers without axes
        same = str((value.dtype, value.shape, value.tobytes())) if value.size <= 16 else str(len(self._constants))
        if same not in self._constants:
            self._constants[same] = self._onnx.numpy_helper.from_array(value, f"constant_{len(self._constants)}")
        return self._constants[same].name

    def numbers(self, *values: int) -> str:
        """A constant vector of int64."""
        return self.constant(np.array(values, dtype=np.int64))

    def number(self, value: float) -> str:
        """A constant of float32."""
        return self.constant(np.array(value, dtype=np.float32))

    def op(self, kind: str, *inputs: str, attributes: dict[str, Any] | None = None) -> str:
        """A node with one output."""
        return self._node(kind, inputs, [f"{self._prefix}{kind.lower()}_{len(self._nodes)}"], attributes or {})[0]

    def fused(self, kind: str, *inputs: str, attributes: dict[str, Any] | None = None) -> str:
        """A node with one output of ONNX Runtime's own, several of the standard's in one."""
        return self.op(kind, *inputs, attributes={**(attributes or {}), "domain": ONNX_RUNTIME})

    def split(self, x: str, parts: int, axis: int) -> list[str]:
        """Equal parts of `x` along an axis, which need not be named: they must divide a size that is known."""
        names = [f"{self._prefix}split_{len(self._nodes)}_{i}" for i in range(parts)]
        return self._node("Split", [x], names, {"axis": axis})

    def norm(self, x: str, norm: nn.Module) -> str:
        """Layer normalisation."""
        assert isinstance(norm, nn.LayerNorm)
        scale, shift = self.constant(array(norm.weight)), self.constant(array(norm.bias))
        return self.op("LayerNormalization", x, scale, shift, attributes={"axis": -1, "epsilon": norm.eps})

    def reshape(self, x: str, *sizes: int) -> str:
        """`x` in another shape; -1 once, for what the others leave."""
        return self.op("Reshape", x, self.numbers(*sizes))

    def transpose(self, x: str, *axes: int) -> str:
        """`x` with its axes in another order."""
        return self.op("Transpose", x, attributes={"perm": list(axes)})

    def concat(self, *parts: str, axis: int = 0) -> str:
        """Parts one after the other."""
        return self.op("Concat", *parts, attributes={"axis": axis})

    def body(self) -> "Graph":
        """An empty graph for `repeat`, which sees everything of this one; its constants are kept here."""
        inner = self._empty()
        inner._constants, inner._prefix = self._constants, f"{self._prefix}body_{len(self._nodes)}_"
        return inner

    def repeat(self, most: str, body: "Graph", start: Sequence[str]) -> list[str]:
        """Run `body` at most `most` times (a number of int64), and what it leaves.

        Inputs of the body: the number of the round, a truth value that it need not read, and what the round before has
        left, at first `start`. Outputs: whether to go on, what is left, and what is collected of every round.
        """
        helper = self._onnx.helper
        inner = helper.make_graph(body._nodes, "body", body._inputs, body._outputs)
        names = [f"{self._prefix}repeat_{len(self._nodes)}_{i}" for i in range(len(body._outputs) - 1)]
        return self._node("Loop", [most, self.constant(np.array(True)), *start], names, {"body": inner})

    def model(self, name: str) -> Any:
        """The finished graph, checked."""
        helper, own = self._onnx.helper, [*self._constants.values()]
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, own)
        sets = [helper.make_opsetid("", OPSET), helper.make_opsetid(ONNX_RUNTIME, 1)]
        model = helper.make_model(graph, opset_imports=sets, producer_name="hasten")
        model.ir_version = IR_VERSION
        self._onnx.checker.check_model(model)
        return model

    def _node(self, kind: str, inputs: Sequence[str], outputs: list[str], attributes: dict[str, Any]) -> list[str]:
        self._nodes.append(self._onnx.helper.make_node(kind, list(inputs), outputs, **attributes))
        return outputs


@final
class Float32Graph(Graph):
    """Weights as they are."""

    def _empty(self) -> Graph:
        return Float32Graph()

    def linear(self, x: str, weight: Tensor, bias: Tensor | None = None) -> str:
        """One matrix product."""
        shift = [] if bias is None else [self.constant(array(bias))]
        return self.op("Gemm", x, self.constant(array(weight).T), *shift)

    def rows(self, table: Tensor, ids: str) -> str:
        """A look-up."""
        return self.op("Gather", self.constant(array(table)), ids)


@final
class Int8Graph(Graph):
    """Weights as 8 bit integers, one scale for each output; activations as 8 bit integers, one scale for each product.

    w = scale_out (q_w - 128) and x = scale (q_x - zero), both unsigned: a product of two unsigned bytes is summed
    without saturating on every processor (signed weights saturate where there is no VNNI). Scales of activations are
    constants, from what calibration saw, so that what a sentence decodes to cannot depend on its batch.
    """

    def __init__(self, ranges: Ranges) -> None:
        super().__init__()
        self._ranges = ranges

    def _empty(self) -> Graph:
        return Int8Graph(self._ranges)

    def linear(self, x: str, weight: Tensor, bias: Tensor | None = None) -> str:
        """A product of integers, times both scales."""
        integers, scales = quantised(array(weight))
        scale, zero = (self.constant(value) for value in steps(self._ranges.of(weight)))
        rounded, middle = self.op("QuantizeLinear", x, scale, zero), self.constant(np.array(128, dtype=np.uint8))
        columns, each = self.constant(integers.T), self.constant(scales)
        shift = [] if bias is None else [self.constant(array(bias))]
        return self.fused("MatMulIntegerToFloat", rounded, columns, scale, each, zero, middle, *shift)

    def rows(self, table: Tensor, ids: str) -> str:
        """A look-up of integers, and of a scale for each row."""
        integers, scales = quantised(array(table))
        found = self.op("Gather", self.constant((integers.astype(np.int16) - 128).astype(np.int8)), ids)
        real = self.op("Cast", found, attributes={"to": self.FLOAT})
        return self.op("Mul", real, self.op("Gather", self.constant(scales[:, None]), ids))


def quantised(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A matrix as unsigned bytes around 128 and the scale of each row: weight = scale (bytes - 128), rounded."""
    scales = np.maximum(np.abs(weight).max(1), np.float32(1e-20)) / np.float32(127)
    return (np.rint(weight / scales[:, None]) + 128).astype(np.uint8), scales


def steps(reach: Range) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the zero of unsigned bytes that hold a range which has 0 in it: x = scale (bytes - zero)."""
    scale = np.float32(max(reach.high - reach.low, 1e-20) / 255)
    return np.array(scale), np.array(np.rint(-reach.low / scale), dtype=np.uint8)


def array(tensor: Tensor) -> np.ndarray:
    """Float32, whatever the weights are held in."""
    return tensor.detach().float().cpu().numpy()
