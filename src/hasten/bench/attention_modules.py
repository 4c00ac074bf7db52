"""hasten's own contestants for the worker of `hasten bench attention`, and their parity check. A contestant is a spec.

Run inside `attention_worker.py`, which says what its functions mean.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hasten.attention import Attention, Mask, multi_head
from hasten.attention.mechanism import Place
from hasten.bench.mechanism import mechanism, settings
from hasten.errors import UserError

REFUSALS = (UserError,)
# Lengths of the parity check: short ones with gradients; and one beyond the windows and blocks in use.
_SHORT, _LONG = (1, 33), 600
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3}
Sizes = dict[str, Any]


class Core(nn.Module):
    """The operator alone: made from q and k, applied to v."""

    def __init__(self, attention: Attention, mask: Mask):
        super().__init__()
        self.attention, self.mask = attention, mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, N, D) each."""
        return self.attention.operator(q, k, self.mask).apply(v)


class SelfAttention(nn.Module):
    """Attention with its projections."""

    def __init__(self, attention: Attention, mask: Mask, sizes: Sizes):
        super().__init__()
        self.attention = multi_head(sizes["heads"] * sizes["width"], sizes["heads"], attention)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, d_model)."""
        return self.attention(x, self.mask)


def build(name: str, sizes: Sizes) -> nn.Module:
    """The mechanism at the level asked for."""
    attention, mask = _mechanism(name, sizes), Mask(causal=sizes["causal"])
    return Core(attention, mask) if sizes["level"] == "core" else SelfAttention(attention, mask, sizes)


def _mechanism(name: str, sizes: Sizes) -> Attention:
    return mechanism(name).at(Place(n_heads=sizes["heads"], d_head=sizes["width"])).build()


def facts(name: str) -> dict[str, Any]:
    """Kind and settings."""
    spec = mechanism(name)
    return {"kind": spec.kind, "setting": settings(spec)}


def names() -> dict[str, Any]:
    """Any mechanism can be described, so none are listed."""
    return {}


def check(name: str, sizes: Sizes) -> str:
    """Compare operator and dense reference: outputs in single and double precision, gradients in double; "" or why not.

    The heads and their width are those of the benchmark, the lengths are short.
    """
    torch.manual_seed(0)
    attention = _mechanism(name, sizes).eval()
    for dtype, tolerance in _TOLERANCE.items():
        attention.to(dtype)
        for length in sorted({min(length, attention.traits.max_length or length) for length in (*_SHORT, _LONG)}):
            q, k, v = _inputs(length, sizes, dtype)
            with torch.set_grad_enabled(length <= max(_SHORT) and dtype == torch.float64):
                mask = Mask(causal=sizes["causal"])
                fast = attention.operator(q, k, mask).apply(v)
                slow = attention.reference(q, k, mask).to(dtype) @ v
            pairs = {"output": (fast, slow)}
            if fast.requires_grad:
                inputs, cotangent = (q, k, v), torch.linspace(-1, 1, v.numel(), dtype=dtype).view(v.shape)
                found, wanted = (_gradients(x, inputs, cotangent) for x in (fast, slow))
                pairs |= {f"gradient of {name}": pair for name, *pair in zip("qkv", found, wanted, strict=True)}
            for what, (found, wanted) in pairs.items():
                error = (found - wanted).abs().max().item() / max(1.0, wanted.abs().max().item())
                if not error <= tolerance:  # a NaN is an error as well
                    return f"the {what} at N={length} is off by {error:.1e} ({str(dtype).removeprefix('torch.')})"
    return ""


def _inputs(length: int, sizes: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, sizes["heads"], length, sizes["width"])
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    return q, k, v


def _gradients(out: Tensor, inputs: tuple[Tensor, ...], cotangent: Tensor) -> tuple[Tensor, ...]:
    if not out.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    return torch.autograd.grad(out, inputs, cotangent, allow_unused=True, materialize_grads=True)
