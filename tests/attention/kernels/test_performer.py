"""Performer where the conformance suite does not reach: the statistics of its features, their state, extreme inputs."""

import io
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from hasten.attention import FullSpec, Mask, MultiHeadAttention, after_update
from hasten.attention.kernels.directions import Directions
from hasten.attention.kernels.performer import PerformerAttention, PerformerSpec
from hasten.errors import UserError

WIDTH = 16
VARIANTS = [{}, {"symmetric": True}]


def close(actual, expected, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def draw(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, WIDTH, generator=generator, dtype=dtype).requires_grad_() for _ in range(3))
    return q, k, v


def build(**options) -> PerformerAttention:
    return PerformerSpec(**{"features": 32, "d_head": WIDTH, **options}).build()


def kernel(x: Tensor, y: Tensor, **options) -> Tensor:
    """phi(x) . phi(y) by the formula, with the directions of the mechanism; x, y (n, width) count as scaled."""
    rows = build(**options).directions.rows.double()
    rows = torch.cat((rows, -rows)) if options.get("symmetric") else rows
    return (
        (x @ rows.T - x.square().sum(-1, keepdim=True) / 2 + y @ rows.T - y.square().sum(-1, keepdim=True) / 2)
        .exp()
        .mean(-1)
    )


def points(n: int = 40) -> tuple[Tensor, Tensor]:
    """Scaled queries and keys of norm about 1."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) / math.sqrt(WIDTH) for _ in range(2))
    return x, y


# The estimate


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_kernel_is_estimated_without_bias(variant: dict):
    x, y = points(20)
    estimates = torch.stack([kernel(x, y, seed=seed, **variant) for seed in range(300)])
    error = estimates.mean(0) / (x * y).sum(-1).exp() - 1
    deviation = estimates.std(0) / (x * y).sum(-1).exp() / math.sqrt(300)
    # 20 means, each within 4 of its standard deviations.
    assert (error.abs() < 4 * deviation).all()
    assert deviation.max() < 0.05


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_its_error_falls_with_the_square_root_of_the_features(variant: dict):
    x, y = points()
    exact = (x * y).sum(-1).exp()
    scaled = []
    for m in (16, 64, 256):
        errors = torch.stack([kernel(x, y, features=m, seed=seed, **variant) / exact - 1 for seed in range(60)])
        scaled.append(errors.square().mean().sqrt() * math.sqrt(m))
    assert max(scaled) / min(scaled) < 1.35


def test_opposite_directions_and_orthogonal_ones_lower_the_error():
    x, y = points()
    exact = (x * y).sum(-1).exp()

    def error(**options) -> Tensor:
        return torch.stack([kernel(x, y, seed=seed, **options) / exact - 1 for seed in range(100)]).square().mean()

    assert error(features=16, symmetric=True) < 0.8 * error(features=32)  # as many features
    rows = torch.randn(100, 16, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logs = [z @ rows.mT - z.square().sum(-1, keepdim=True) / 2 for z in (x, y)]
    assert error(features=16) < (sum(logs).exp().mean(-1) / exact - 1).square().mean()


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_attention_comes_near_softmax_as_features_grow(causal: bool):
    q, k, v = (scale * x.detach() for scale, x in zip((0.5, 0.5, 1.0), draw(60), strict=True))
    exact = FullSpec().build().operator(q, k, Mask(causal=causal)).apply(v)
    errors = [
        torch.stack([build(features=m, seed=s).operator(q, k, Mask(causal=causal)).apply(v) - exact for s in range(8)])
        .square()
        .mean()
        .sqrt()
        for m in (16, 256, 4096)
    ]
    assert errors[1] < errors[0] / 2
    assert errors[2] < errors[1] / 2
    assert errors[2] < 0.1


# The directions


def test_directions_are_orthogonal_within_a_block_and_gaussian_in_length():
    rows = Directions(5 * WIDTH + 3, WIDTH, seed=1, orthogonal=True).rows.double()
    units = rows / rows.norm(dim=1, keepdim=True)
    for block in units.split(WIDTH):
        close(block @ block.T, torch.eye(len(block), dtype=torch.float64), 1e-6)
    squares = Directions(4000, WIDTH, seed=1, orthogonal=True).rows.square().sum(1)
    assert squares.mean() == pytest.approx(WIDTH, rel=0.03)
    assert squares.var() == pytest.approx(2 * WIDTH, rel=0.1)


def test_the_first_direction_of_a_block_has_no_preferred_sign():
    first = torch.stack([Directions(WIDTH, WIDTH, seed=s, orthogonal=True).rows for s in range(400)])
    assert (first.sign().mean(0).abs() < 4 / math.sqrt(400)).all()


def test_regularised_directions_have_one_length():
    rows = build(regularised=True).directions.rows
    close(rows.norm(dim=1), torch.full((32,), math.sqrt(WIDTH)), 1e-6)


def test_a_head_of_another_width_is_refused_with_what_to_do():
    for width in (WIDTH - 1, WIDTH + 1):
        with pytest.raises(UserError, match=f"made for d_head = {WIDTH}, got {width}; give both the same"):
            build().operator(torch.zeros(1, 1, 3, width), torch.zeros(1, 1, 3, width), Mask())


# Their state


def test_equal_seeds_draw_equal_directions_and_other_seeds_others():
    rows = [build(seed=seed).directions.rows for seed in (0, 0, 1)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.isclose(rows[0], rows[2]).any()


def test_the_draw_touches_no_global_generator():
    state = torch.get_rng_state()
    build().redraw()
    assert torch.equal(torch.get_rng_state(), state)


def test_redrawing_is_a_sequence_that_continues_after_loading():
    first, second = build(seed=5), build(seed=6)
    seen = [first.directions.rows.clone()]
    for _ in range(2):
        first.redraw()
        seen.append(first.directions.rows.clone())
    assert not any(torch.isclose(a, b).any() for a, b in itertools.pairwise(seen))
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    second.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    assert torch.equal(second.directions.rows, seen[-1])
    first.redraw()
    second.redraw()
    assert torch.equal(first.directions.rows, second.directions.rows)


def test_a_schedule_redraws_in_training_only_and_only_when_told():
    model = nn.Sequential(MultiHeadAttention(32, 2, build(redraw_every=3)), MultiHeadAttention(32, 2, build()))
    layer = model[0].attention
    start = layer.directions.rows.clone()
    for _ in range(5):
        model(torch.randn(1, 4, 32))
    assert torch.equal(layer.directions.rows, start)  # forward passes draw nothing
    changed = []
    for _ in range(7):
        before = layer.directions.rows.clone()
        after_update(model)
        changed.append(not torch.equal(layer.directions.rows, before))
    assert changed == [False, False, True, False, False, True, False]
    assert torch.equal(model[1].attention.directions.rows, start)  # no schedule
    model.eval()
    for _ in range(3):
        after_update(model)
    assert int(layer.directions.updates) == 7
    assert int(layer.directions.draws) == 2


# Numbers


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_chunks_and_steps_equal_the_definition_beyond_one_chunk(variant: dict):
    q, k, v = draw(300)
    attention, mask = build(**variant), Mask(causal=True)
    out, expected = attention.operator(q, k, mask).apply(v), attention.reference(q, k, mask) @ v
    close(out, expected)
    close(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)))
    outs, keys, values = [], None, None
    for now in torch.arange(300).split([150, 1, 1, 148]):
        step, keys = attention.step(q[:, :, now], k[:, :, now], keys)
        part, values = step.apply(v[:, :, now], values)
        outs.append(part)
    close(torch.cat(outs, 2), expected)


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_long_sequences_make_each_head_apart_and_equal_the_definition(causal: bool):
    q, k, v = (x.detach().float() for x in draw(1200))
    attention, mask = build(features=256), Mask(causal=causal)
    out = attention.operator(q, k, mask).apply(v)
    close(out, attention.reference(q, k, mask) @ v, 1e-5)


def test_a_large_last_key_changes_nothing_before_it():
    q, k, v = draw(300, torch.float32)
    attention, mask = build(), Mask(causal=True)
    before = attention.operator(q, k, mask).apply(v)
    for factor in (3, 100):
        later = k.detach().clone()
        later[:, :, -1] *= factor
        close(attention.operator(q, later, mask).apply(v)[:, :, :-1], before[:, :, :-1], 1e-6)


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_lone_key_is_read_whatever_its_size_and_direction(variant: dict, causal: bool):
    q, _, v = (x.detach() for x in draw(1, torch.float32))
    for size in (1.0, 30.0, 1000.0):
        for sign in (1, -1):
            out = build(**variant).operator(size * q, sign * size * q, Mask(causal=causal)).apply(v)
            close(out, v, 1e-6)


def test_keys_that_shrink_within_a_chunk_leave_no_row_empty():
    # Large keys have features below exp(-3000), small ones of about 1: rows before the small ones must still read.
    q, k, v = draw(100, torch.float32)
    k = (k.detach() * torch.linspace(100, 1, 100)[:, None]).requires_grad_()
    attention, mask = build(), Mask(causal=True)
    out = attention.operator(q, k, mask).apply(v)
    ones = attention.operator(q, k, mask).apply(torch.ones_like(v))
    close(ones, torch.ones_like(v), 1e-5)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().mean(), (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_half_precision_is_finite_at_logits_of_forty(variant: dict, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    direction = torch.nn.functional.normalize(torch.randn(WIDTH, generator=generator), dim=0)
    signs = torch.randint(0, 2, (1, 2, 150, 1), generator=generator) * 2.0 - 1
    size = math.sqrt(40 * math.sqrt(WIDTH))
    q = (size * direction).expand(1, 2, 150, WIDTH)
    k = signs * size * direction
    assert (q @ k.mT / math.sqrt(WIDTH)).abs().allclose(torch.tensor(40.0))
    v = torch.randn(1, 2, 150, WIDTH, generator=generator)
    q, k, v = (x.to(dtype).detach().requires_grad_() for x in (q, k, v))
    attention = build(**variant)
    for mask in (Mask(), Mask(causal=True)):
        with torch.autocast("cpu", dtype):
            out = attention.operator(q, k, mask).apply(v)
        assert out.dtype == dtype
        assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.float().square().mean(), (q, k, v))))
    step, _ = attention.step(q, k, None)
    assert step.apply(v, None)[0].isfinite().all()


@pytest.mark.parametrize("pads", [1, 7, 90])
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_appending_padding_changes_nothing(causal: bool, pads: int):
    q, k, v = draw(90)
    attention = build()
    alone = attention.operator(q, k, Mask(causal=causal)).apply(v)
    longer = [torch.cat((x, torch.full((1, 2, pads, WIDTH), 3.0, dtype=torch.float64)), 2) for x in (q, k, v)]
    mask = Mask(causal=causal, keys=torch.arange(90 + pads)[None] < 90)
    close(attention.operator(longer[0], longer[1], mask).apply(longer[2])[:, :, :90], alone)
