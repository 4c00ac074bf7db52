"""What every kernel attention obeys where the conformance suite does not reach: any shape, long and extreme inputs."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hasten.attention import Attention, EfficientSpec, LinearSpec, Mask, PerformerSpec, Place, RFASpec
from hasten.attention.kernels import kernel

WIDTH = 8
SPECS = {
    "elu": LinearSpec(),
    "relu": LinearSpec(feature="relu"),
    "efficient": EfficientSpec(),
    "performer": PerformerSpec(features=12),
    "performer, symmetric": PerformerSpec(features=5, symmetric=True),
    "rfa": RFASpec(features=12),
    "rfa, gate": RFASpec(features=12, gate=True),
}
# At so sharp a kernel many denominators are at the floor.
SHARP = {"rfa, sharp": RFASpec(features=12, sigma=20.0), "rfa, sharp, gate": RFASpec(features=6, sigma=20.0, gate=True)}

each = pytest.mark.parametrize("name", SPECS)
both = pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])


def build(name: str, n_heads: int = 2, width: int = WIDTH) -> Attention:
    """The mechanism with its parameters in float64, the gate's away from where it starts."""
    attention = {**SPECS, **SHARP}[name].at(Place(n_heads=n_heads, d_head=width)).build().double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return attention


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(dtype).requires_grad_()


def inputs(n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (draw(1, 2, n, WIDTH, seed=seed, dtype=dtype) for seed in range(3))
    return q, k, v


def close(actual, expected, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def stepwise(attention: Attention, q: Tensor, k: Tensor, v: Tensor, sizes: list[int]) -> Tensor:
    outs, keys, values = [], None, None
    for q_now, k_now, v_now in zip(*(x.split(sizes, dim=2) for x in (q, k, v)), strict=True):
        step, keys = attention.step(q_now, k_now, keys)
        out, values = step.apply(v_now, values)
        outs.append(out)
    return torch.cat(outs, dim=2)


# The definition


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize("name", [*SPECS, *SHARP])
def test_outputs_and_gradients_are_those_of_the_definition_at_any_shape_length_and_padding(name: str, data):
    lengths = st.integers(1, 12) | st.integers(60, 140)  # the latter of two or three chunks
    batch, n_heads, width, wide = (data.draw(st.integers(1, most)) for most in (2, 3, WIDTH, 5))
    n_queries, n_keys = data.draw(lengths), data.draw(lengths)
    numbers = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 20)))
    share = data.draw(st.sampled_from([0.0, 0.2, 0.9]))
    keys = torch.rand(batch, n_keys, generator=numbers) >= share if share else None
    mask = Mask(causal=data.draw(st.booleans()), keys=keys)
    q, k, v = (
        torch.randn(batch, n_heads, *shape, generator=numbers, dtype=torch.float64).requires_grad_()
        for shape in ((n_queries, width), (n_keys, width), (n_keys, wide))
    )
    attention = build(name, n_heads, width)
    out, expected = attention.operator(q, k, mask).apply(v), attention.reference(q, k, mask) @ v
    close(out, expected)
    cotangent = torch.randn(out.shape, generator=numbers, dtype=torch.float64)
    wrt = (q, k, v, *attention.parameters())
    gradients, wanted = (
        torch.autograd.grad(x, wrt, cotangent, allow_unused=True, materialize_grads=True) for x in (out, expected)
    )
    # At the floor the gradient of a weight is up to 1 / FLOOR^2 as large as that of a product of features.
    close(gradients, wanted, 1e-7 if name in SHARP else 1e-9)


@pytest.mark.parametrize("name", [*SPECS, *SHARP])
def test_chunks_and_steps_equal_the_definition_beyond_one_chunk(name: str):
    qkv = inputs(300)
    attention, mask = build(name), Mask(causal=True)
    expected = attention.reference(*qkv[:2], mask) @ qkv[2]
    wrt = (*qkv, *attention.parameters())
    wanted = torch.autograd.grad(expected.sum(), wrt)
    tolerance = 1e-7 if name in SHARP else 1e-9
    for out in (attention.operator(*qkv[:2], mask).apply(qkv[2]), stepwise(attention, *qkv, [150, 1, 1, 148])):
        close(out, expected)
        close(torch.autograd.grad(out.sum(), wrt), wanted, tolerance)


@each
@both
def test_heads_made_apart_equal_the_definition(name: str, causal: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel, "SMALL", 0)
    (q, k, v), attention = inputs(70), build(name)
    mask = Mask(causal=causal, keys=torch.arange(70)[None] % 5 > 0)
    out, expected = attention.operator(q, k, mask).apply(v), attention.reference(q, k, mask) @ v
    close(out, expected)
    wrt = (q, k, v, *attention.parameters())
    close(torch.autograd.grad(out.square().sum(), wrt), torch.autograd.grad(expected.square().sum(), wrt), 1e-9)


@each
def test_chunks_steps_and_definition_agree_in_float32_at_sixteen_thousand_positions(name: str):
    length, last = 16384, 4
    q, k, v = (draw(1, 1, length, WIDTH, seed=seed, dtype=torch.float32).detach() for seed in range(3))
    v += 1.0
    attention = build(name, n_heads=1)
    exact = stepwise(attention.double(), q.double(), k.double(), v.double(), [1] * 64 + [255] * 64)
    # What came before the last 2048 weighs less than 1e-16 with the gate; without it, RFA is made of plain products.
    seen = 2048 if name == "rfa, gate" else length
    queries, keys = q[:, :, -last:].double(), k[:, :, -seen:].double()
    if name == "rfa":
        products = (attention.features(queries) @ attention.features(keys).mT).tril(length - last)
        weights = products / products.sum(-1, keepdim=True)
    else:
        weights = attention.reference(queries, keys, Mask(causal=True))
    close(exact[:, :, -last:], weights @ v[:, :, -seen:].double(), 1e-10)
    attention.float()
    whole = attention.operator(q, k, Mask(causal=True)).apply(v)
    steps = stepwise(attention, q, k, v, [8000, 1, 1, 382] + [1000] * 8)
    # Sums of n numbers are off by up to about sqrt(n) half units in the last place, 8e-6; numerator and denominator are
    # both such sums. Outputs are of the order of 1.
    close(whole.double(), exact, 2e-5)
    close(steps.double(), exact, 2e-5)


# Causality, padding


@each
@pytest.mark.parametrize("factor", [3.0, 100.0, -100.0])
def test_a_large_last_key_changes_nothing_before_it(name: str, factor: float):
    q, k, v = (x.detach() for x in inputs(300, torch.float32))
    attention, mask, later = build(name).float(), Mask(causal=True), k.clone()
    later[:, :, -1] *= factor
    before, after = (attention.operator(q, x, mask).apply(v) for x in (k, later))
    close(after[:, :, :-1], before[:, :, :-1], 1e-6)
    if factor < 0:
        assert (after[:, :, -1] - before[:, :, -1]).abs().max() > 1e-3


@each
@both
@pytest.mark.parametrize("pads", [1, 7, 90])
def test_appending_padding_changes_nothing(name: str, causal: bool, pads: int):
    qkv, attention = inputs(90), build(name)
    alone = attention.operator(*qkv[:2], Mask(causal=causal)).apply(qkv[2])
    longer = tuple(torch.cat((x, torch.full((1, 2, pads, WIDTH), 3.0, dtype=torch.float64)), 2) for x in qkv)
    mask = Mask(causal=causal, keys=torch.arange(90 + pads)[None] < 90)
    out = attention.operator(*longer[:2], mask).apply(longer[2])[:, :, :90]
    close(out, alone)
    close(torch.autograd.grad(out.square().sum(), qkv), torch.autograd.grad(alone.square().sum(), qkv), 1e-9)


# Numbers


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_finite_at_logits_of_forty(name: str, dtype: torch.dtype):
    direction = torch.nn.functional.normalize(draw(WIDTH).detach(), dim=0)
    signs = draw(1, 2, 150, 1, seed=1).detach().sign()
    size = math.sqrt(40 * math.sqrt(WIDTH))
    q, k = (size * direction).expand(1, 2, 150, WIDTH), signs * size * direction
    close((q @ k.mT / math.sqrt(WIDTH)).abs(), torch.full((1, 2, 150, 150), 40.0, dtype=torch.float64))
    q, k, v = (x.to(dtype).detach().requires_grad_() for x in (q, k, draw(1, 2, 150, WIDTH, seed=2)))
    attention = build(name).float()
    for mask in (Mask(), Mask(causal=True)):
        with torch.autocast("cpu", dtype):
            out = attention.operator(q, k, mask).apply(v)
        assert out.dtype == dtype
        assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.float().square().mean(), (q, k, v))))
    step, _ = attention.step(q, k, None)
    assert step.apply(v, None)[0].isfinite().all()


# State


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("elu", WIDTH * (5 + 1)),
        ("relu", WIDTH * (5 + 1)),
        ("efficient", WIDTH * (5 + 1)),
        ("performer", 12 * (5 + 1)),
        ("performer, symmetric", 10 * (5 + 1)),
        ("rfa", 24 * (5 + 1) + 1),  # one for the floor
        ("rfa, gate", 24 * (5 + 1) + 1),
    ],
)
def test_the_state_of_decoding_is_as_large_after_a_hundred_steps_as_before(name: str, numbers: int):
    q, k, v = (x.detach() for x in inputs(150))
    attention, keys, values, sizes = build(name), None, None, set()
    for now in torch.arange(150).split([50] + [1] * 100):
        step, keys = attention.step(q[:, :, now], k[:, :, now], keys)
        _, values = step.apply(v[:, :, now, :5], values)
        held = [getattr(state, field.name) for state in (keys, values) for field in dataclasses.fields(state)]
        sizes.add(sum(x.numel() for x in held))
        assert all(x.untyped_storage().nbytes() == x.numel() * x.itemsize for x in held)  # no view of something larger
    assert sizes == {2 * numbers}  # two heads


@each
def test_it_is_built_without_memory_and_filled_by_loading(name: str):
    place = Place(n_heads=2, d_head=WIDTH)
    with torch.device("meta"):
        empty = SPECS[name].at(place).build()
    assert all(x.is_meta for x in (*empty.parameters(), *empty.buffers()))
    attention = SPECS[name].at(place).build()
    empty.load_state_dict(attention.state_dict(), assign=True)
    q, k, v = inputs(9)
    close(empty.operator(q, k, Mask()).apply(v), attention.operator(q, k, Mask()).apply(v))
