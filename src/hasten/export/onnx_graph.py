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

OPSET, IR_VERSION = 17, 8
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

    @abstractmethod
    def some_rows(self, weight: Tensor, ids: str) -> None:
        """Outputs: the rows of a matrix (V, D) by a vector of ids, as `linear_by_rows` reads them."""

    @abstractmethod
    def given_rows(self, width: int) -> None:
        """Inputs: rows W (n, D) of width D, as `some_rows` leaves them."""

    @abstractmethod
    def linear_by_rows(self, x: str, plus: str = "") -> str:
        """x W^T, of x (N, D) and the given rows W (n, D); plus (N or 1, n), where it is given."""

    @abstractmethod
    def rows_at(self, places: str) -> str:
        """(N, D): the given rows at these places (N)."""

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
        inner = type(self)()
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
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="hasten")
        model.ir_version = IR_VERSION
        self._onnx.checker.check_model(model)
        return model

    def _node(self, kind: str, inputs: Sequence[str], outputs: list[str], attributes: dict[str, Any]) -> list[str]:
        self._nodes.append(self._onnx.helper.make_node(kind, list(inputs), outputs, **attributes))
        return outputs


@final
class Float32Graph(Graph):
    """Weights as they are."""

    def linear(self, x: str, weight: Tensor, bias: Tensor | None = None) -> str:
        """One matrix product."""
        shift = [] if bias is None else [self.constant(array(bias))]
        return self.op("Gemm", x, self.constant(array(weight).T), *shift)

    def rows(self, table: Tensor, ids: str) -> str:
        """A look-up."""
        return self.op("Gather", self.constant(array(table)), ids)

    def some_rows(self, weight: Tensor, ids: str) -> None:
        """One matrix."""
        self.output(self.rows(weight, ids), "rows", ["listed", weight.shape[1]])

    def given_rows(self, width: int) -> None:
        """One matrix."""
        self.input("rows", "FLOAT", ["listed", width])

    def linear_by_rows(self, x: str, plus: str = "") -> str:
        """One matrix product."""
        return self.op("Gemm", x, "rows", *[plus] * bool(plus), attributes={"transB": 1})

    def rows_at(self, places: str) -> str:
        """A look-up."""
        return self.op("Gather", "rows", places)


@final
class Int8Graph(Graph):
    """Weights as 8 bit integers, one scale for each output; activations as 8 bit integers, one scale for each row.

    w = scale_out (q_w - 128) and x = scale_row (q_x - 128), both symmetric and both unsigned: a product of two unsigned
    bytes is summed without saturating on every processor (signed weights saturate where there is no VNNI). Rows have
    scales of their own, found while decoding, so that what a sentence decodes to cannot depend on its batch.
    """

    def linear(self, x: str, weight: Tensor, bias: Tensor | None = None) -> str:
        """A product of integers, times both scales."""
        integers, scales = quantised(array(weight))
        y = self._product(x, self.constant(integers.T), self.constant(scales))
        return y if bias is None else self.op("Add", y, self.constant(array(bias)))

    def some_rows(self, weight: Tensor, ids: str) -> None:
        """Integers, as columns, and scales."""
        integers, scales = quantised(array(weight))
        columns = self.transpose(self.op("Gather", self.constant(integers), ids), 1, 0)
        self.output(columns, "columns", [weight.shape[1], "listed"], "UINT8")
        self.output(self.op("Gather", self.constant(scales), ids), "scales", ["listed"])

    def given_rows(self, width: int) -> None:
        """Integers, as columns, and scales."""
        self.input("columns", "UINT8", [width, "listed"])
        self.input("scales", "FLOAT", ["listed"])

    def linear_by_rows(self, x: str, plus: str = "") -> str:
        """The same integers, and so the same scores, as `linear` has for all rows."""
        y = self._product(x, "columns", "scales")
        return self.op("Add", y, plus) if plus else y

    def rows_at(self, places: str) -> str:
        """Integers times their scales, as `rows` has them."""
        found = self.transpose(self.op("Gather", "columns", places, attributes={"axis": 1}), 1, 0)
        centred = self.op("Sub", self.op("Cast", found, attributes={"to": self.FLOAT}), self.number(128.0))
        return self.op("Mul", centred, self.op("Unsqueeze", self.op("Gather", "scales", places), self.numbers(1)))

    def _product(self, x: str, integers: str, scales: str) -> str:
        largest = self.op("ReduceMax", self.op("Abs", x), attributes={"axes": [-1], "keepdims": 1})
        # A row of zeros has a scale, too; any but 0 serves.
        scale = self.op("Mul", self.op("Max", largest, self.number(1e-20)), self.number(1 / 127))
        centred = self.op("Add", self.op("Div", x, scale), self.number(128.0))
        rounded = self.op("Cast", self.op("Round", centred), attributes={"to": self._onnx.TensorProto.UINT8})
        zero = self.constant(np.array(128, dtype=np.uint8))
        total = self.op("MatMulInteger", rounded, integers, zero, zero)
        real = self.op("Cast", total, attributes={"to": self.FLOAT})
        return self.op("Mul", self.op("Mul", real, scales), scale)

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


def array(tensor: Tensor) -> np.ndarray:
    """Float32, whatever the weights are held in."""
    return tensor.detach().float().cpu().numpy()
