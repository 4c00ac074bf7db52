"""Causal sums as one operation of a traced graph: their chunks depend on the length, which a tracer does not know."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hasten.attention.kernels.log_sums import averaging_log_sums, scaled_log_sums
from hasten.attention.kernels.prefix_sums import decayed_prefix_sums, prefix_sums

Kind = Literal["plain", "decayed", "scaled", "averaging"]
Sums = Callable[[Tensor], Tensor]

_MAKERS: dict[str, Callable[..., Sums]] = {
    "plain": prefix_sums,
    "decayed": decayed_prefix_sums,
    "scaled": scaled_log_sums,
    "averaging": averaging_log_sums,
}


def causal_sums(kind: Kind, *features: Tensor) -> Sums:
    """v -> sums over the keys up to each query: `prefix_sums`, `decayed_prefix_sums` and so on, of their features.

    In a graph traced by `torch.compile` or `torch.export` they are the operation `hasten::causal_sums`: whoever runs an
    exported graph imports hasten first.
    """
    return _Traced(kind, features) if torch.compiler.is_compiling() else _MAKERS[kind](*features)


@dataclass(frozen=True)
class _Traced:
    kind: Kind
    features: tuple[Tensor, ...]

    def __call__(self, v: Tensor) -> Tensor:
        return _sums_op(self.kind, [*self.features, v])


def _sums(kind: str, inputs: Sequence[Tensor]) -> Tensor:
    return _MAKERS[kind](*inputs[:-1])(inputs[-1])


@torch.library.custom_op("hasten::causal_sums", mutates_args=())
def _sums_op(kind: str, inputs: Sequence[Tensor]) -> Tensor:
    return _sums(kind, inputs).contiguous()


@torch.library.custom_op("hasten::causal_sums_backward", mutates_args=())
def _backward_op(kind: str, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    gradients = torch.func.vjp(lambda *given: _sums(kind, given), *inputs)[1]
    return [gradient.contiguous() for gradient in gradients(grad)]


@_sums_op.register_fake
def _(kind: str, inputs: Sequence[Tensor]) -> Tensor:
    q, v = inputs[0], inputs[-1]
    return v.new_empty(*q.shape[:3], v.shape[3])


@_backward_op.register_fake
def _(kind: str, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _remember(ctx: Any, inputs: tuple[str, Sequence[Tensor]], output: Tensor) -> None:
    ctx.kind = inputs[0]
    ctx.save_for_backward(*inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[None, list[Tensor]]:
    return None, _backward_op(ctx.kind, list(ctx.saved_tensors), grad)


_sums_op.register_autograd(_backward, setup_context=_remember)
