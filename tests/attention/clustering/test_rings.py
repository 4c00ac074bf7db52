"""Decoding with rings of recent members: long enough for rings to fill, to be written and to forget."""

import pytest
import torch
from torch import Tensor

from attention.clustering.placed import build as placed
from hasten.attention import Mask
from hasten.attention.clustering import rings
from hasten.attention.clustering.lsh import LSHSpec, StrictLSHAttention
from hasten.attention.clustering.rings import Members, Ring
from hasten.attention.clustering.routing import RoutingSpec, StrictRoutingAttention

SPECS = [
    LSHSpec(chunk=5, rounds=3, buckets=4, strict=True),
    LSHSpec(chunk=1, rounds=2, buckets=2, strict=True),
    LSHSpec(chunk=40, rounds=2, buckets=1, strict=True),
    RoutingSpec(clusters=3, window=6, strict=True),
    RoutingSpec(clusters=2, window=1, strict=True),
]
each = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind} {getattr(spec, 'chunk', spec)}"[:12])


def build(spec: LSHSpec | RoutingSpec) -> StrictLSHAttention | StrictRoutingAttention:
    attention = placed(spec).eval()
    assert isinstance(attention, StrictLSHAttention | StrictRoutingAttention)
    return attention


def inputs(n: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    q, v = (torch.randn(batch, 2, n, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    return q.requires_grad_(), v.requires_grad_()


def decode(attention: StrictLSHAttention | StrictRoutingAttention, q: Tensor, v: Tensor, sizes: list[int]):
    outs, keys, values = [], None, None
    for now, value in zip(q.split(sizes, dim=2), v.split(sizes, dim=2), strict=True):
        step, keys = attention.step(now, now, keys)
        out, values = step.apply(value, values)
        outs.append(out)
    assert isinstance(keys, Members)
    assert isinstance(values, Ring)
    return torch.cat(outs, 2), keys, values


@pytest.mark.parametrize(
    "sizes", [[1] * 110, [110], [40, 1, 1, 1, 60, 7], [31, 1, 32, 33, 13]], ids=lambda s: str(s[:5])
)
@each
def test_long_decoding_in_steps_of_any_size_equals_the_whole(spec: LSHSpec | RoutingSpec, sizes: list[int]):
    attention, (q, v) = build(spec), inputs(110)
    whole = attention.operator(q, q, Mask(causal=True)).apply(v)
    out, _, _ = decode(attention, q, v, sizes)
    torch.testing.assert_close(out, whole, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn(v.shape, generator=torch.Generator().manual_seed(0), dtype=v.dtype)
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, v), cotangent, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(whole, (q, v), cotangent, allow_unused=True, materialize_grads=True),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("pending", [1, 2, 500])
@each
def test_when_the_rings_are_written_changes_nothing(
    spec: LSHSpec | RoutingSpec, pending: int, monkeypatch: pytest.MonkeyPatch
):
    attention, (q, v) = build(spec), inputs(70)
    whole = attention.operator(q, q, Mask(causal=True)).apply(v)
    monkeypatch.setattr(rings, "_PENDING", pending)
    out, keys, _ = decode(attention, q, v, [1] * 70)
    torch.testing.assert_close(out, whole, rtol=1e-10, atol=1e-10)
    assert keys.bucket.shape[3] == (70 if pending == 500 else 0)


@each
def test_the_state_stops_growing(spec: LSHSpec | RoutingSpec):
    attention, (q, v) = build(spec), inputs(200)

    def size(n: int) -> int:
        _, keys, values = decode(attention, q[:, :, :n], v[:, :, :n], [1] * n)
        return sum(x.numel() for x in (keys.keys.held, keys.keys.pending, keys.positions, keys.bucket, values.held))

    assert size(64) == size(192)
    assert size(70) == size(198)


@each
def test_rows_keep_their_own_rings(spec: LSHSpec | RoutingSpec):
    attention, (q, v), rows = build(spec), inputs(90, batch=3), torch.tensor([2, 0, 0, 1])
    _, keys, values = decode(attention, q[:, :, :75], v[:, :, :75], [75])
    step, _ = attention.step(q[rows][:, :, 75:], q[rows][:, :, 75:], keys.select(rows))
    out, _ = step.apply(v[rows][:, :, 75:], values.select(rows))
    whole = attention.operator(q, q, Mask(causal=True)).apply(v)
    torch.testing.assert_close(out, whole[rows][:, :, 75:], rtol=1e-10, atol=1e-10)


@each
def test_a_state_can_be_continued_twice(spec: LSHSpec | RoutingSpec):
    attention, (q, v) = build(spec), inputs(66)
    _, keys, values = decode(attention, q[:, :, :65], v[:, :, :65], [65])
    first, second = (
        attention.step(q[:, :, 65:], q[:, :, 65:], keys)[0].apply(v[:, :, 65:], values)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


@each
def test_steps_in_half_precision_give_what_the_whole_gives(spec: LSHSpec | RoutingSpec):
    attention, (q, v) = build(spec), (x.detach().bfloat16() for x in inputs(90))
    with torch.autocast("cpu", torch.bfloat16):
        out, _, values = decode(attention, q, v, [1] * 40 + [50])
        whole = attention.operator(q, q, Mask(causal=True)).apply(v)
    assert out.dtype == values.held.dtype == torch.bfloat16
    torch.testing.assert_close(out, whole, rtol=1e-2, atol=1e-2)
