"""Attention over tiles: the sum of a few at a time, with its own gradient, against all at once; precision; replay."""

import itertools
import math

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.clustering.placed import build
from hasten.attention import Mask
from hasten.attention.clustering import gathered
from hasten.attention.clustering.gathered import TileOperator
from hasten.attention.clustering.lsh import LSHSpec
from hasten.attention.clustering.nearest import nearest
from hasten.attention.clustering.routing import RoutingSpec

SPECS = [
    LSHSpec(chunk=8, rounds=3, buckets=8),
    LSHSpec(chunk=5, rounds=2, buckets=4, strict=True),
    RoutingSpec(clusters=5),
    RoutingSpec(clusters=40, window=3, shared_qk=False),
    RoutingSpec(clusters=3, window=7, strict=True),
]


def rows(n: int, width: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, n, width, generator=generator, dtype=torch.float64) for _ in range(3))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def out_and_gradients(operator: TileOperator, qkv: tuple[Tensor, ...]) -> list[Tensor]:
    out = operator.apply(qkv[2])
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).cos()
    return [
        out,
        *torch.autograd.grad(out, qkv, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True),
    ]


@pytest.mark.parametrize("group", [1, 2000, 2**18])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind} {spec.strict}")
def test_tiles_a_few_at_a_time_give_what_all_at_once_do(
    spec: LSHSpec | RoutingSpec, causal: bool, group: int, monkeypatch: pytest.MonkeyPatch
):
    qkv = rows(83)
    keys = torch.rand(2, 83, generator=torch.Generator().manual_seed(1)) < 0.8
    operator = build(spec).eval().operator(*qkv[:2], Mask(causal=causal, keys=keys))
    assert isinstance(operator, TileOperator)
    monkeypatch.setattr(gathered, "GROUP", group)
    blockwise = out_and_gradients(operator, qkv)
    monkeypatch.setattr(gathered._Blockwise, "apply", gathered._plainly)
    torch.testing.assert_close(blockwise, out_and_gradients(operator, qkv), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("spec", SPECS[::2], ids=lambda spec: f"{spec.kind} {spec.strict}")
def test_autocast_does_not_reach_the_arithmetic(spec: LSHSpec | RoutingSpec):
    qkv = tuple(x.detach().float().requires_grad_() for x in rows(40))
    attention = build(spec).eval()
    plain = out_and_gradients(attention.operator(*qkv[:2], Mask()), qkv)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = out_and_gradients(attention.operator(*qkv[:2], Mask()), qkv)
    assert all(torch.equal(one, other) for one, other in zip(plain, mixed, strict=True))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind} {spec.strict}")
def test_gradients_are_the_same_under_checkpointing(spec: LSHSpec | RoutingSpec):
    q, k, v = rows(50)
    attention = build(spec)

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.operator(q, k, Mask(causal=True)).apply(v)

    out = torch.utils.checkpoint.checkpoint(mixed, q, k, v, use_reentrant=False)
    replayed = torch.autograd.grad(out.square().sum(), (q, k, v), allow_unused=True, materialize_grads=True)
    gradients = torch.autograd.grad(mixed(q, k, v).square().sum(), (q, k, v), allow_unused=True, materialize_grads=True)
    assert all(torch.equal(one, other) for one, other in zip(replayed, gradients, strict=True))
    assert replayed[0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind} {spec.strict}")
def test_half_precision_is_finite_and_accurate_with_scores_of_forty(spec: LSHSpec | RoutingSpec, dtype: torch.dtype):
    q, k, v = (x.detach() for x in rows(60))
    q = (q * 40 * math.sqrt(6) / q.norm(dim=-1, keepdim=True)).to(dtype)
    half = (q.requires_grad_(), k.to(dtype).requires_grad_(), v.to(dtype).requires_grad_())
    exact = tuple(x.detach().double().requires_grad_() for x in half)
    attention = build(spec).eval()
    actual = out_and_gradients(attention.operator(*half[:2], Mask(causal=True)), half)
    expected = out_and_gradients(attention.operator(*exact[:2], Mask(causal=True)), exact)
    assert all(x.isfinite().all() for x in actual)
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(actual[3].double(), expected[3], rtol=2e-2, atol=2e-2)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 90), most=st.integers(1, 12), wanted=st.integers(0, 12), values=st.integers(1, 40))
def test_the_nearest_are_the_first_of_a_stable_sort_among_many_equals(n: int, most: int, wanted: int, values: int):
    generator = torch.Generator().manual_seed(n)
    nearness = torch.randint(values, (2, 3, 4, n), generator=generator).double()
    real = torch.rand(2, n, generator=generator) < 0.8
    wanted = min(wanted, most)
    taken = nearest(nearness, real, torch.tensor([wanted, most])[:, None, None, None], most)
    for b, h, c in itertools.product(range(2), range(3), range(4)):
        order = sorted(real[b].nonzero()[:, 0].tolist(), key=lambda i: (-float(nearness[b, h, c, i]), i))
        assert taken[b, h, c].nonzero()[:, 0].tolist() == sorted(order[: (wanted, most)[b]])
