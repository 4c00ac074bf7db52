"""Nystrom attention where the conformance suite does not reach: landmarks, the pseudoinverse, the convolution."""

import pytest
import torch
import torch.nn.functional as F

from conformance.mechanisms import assert_equal, gradients, inputs, make_mask
from hasten.attention import Attention, FullAttention, Mask
from hasten.attention.fewer_keys.nystrom import NystromSpec, pseudoinverse
from hasten.attention.fewer_keys.time_convolution import TimeConvolution
from hasten.errors import UserError

CONVOLVED = NystromSpec(landmarks=4, residual=5, n_heads=2)


def build(spec: NystromSpec) -> Attention:
    torch.manual_seed(0)
    return spec.build().eval()


def error(attention: Attention, length: int, scale: float = 1.0) -> float:
    """Largest difference to softmax attention."""
    q, k, v = (x.detach() for x in inputs(length))
    full = FullAttention().operator(scale * q, k, Mask()).apply(v)
    return (attention.operator(scale * q, k, Mask()).apply(v) - full).abs().max().item()


def test_as_many_landmarks_as_tokens_are_softmax_in_the_limit():
    errors = [error(build(NystromSpec(landmarks=12, iterations=n)), 12) for n in (4, 6, 8, 20)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-13
    assert error(build(NystromSpec(landmarks=64, iterations=20)), 12) < 1e-13  # more change nothing


def test_tokens_that_repeat_their_landmark_lose_nothing():
    q, k, v = (x.repeat_interleave(3, dim=2) for x in inputs(5))
    out = build(NystromSpec(landmarks=5, iterations=30)).operator(q, k, Mask()).apply(v)
    assert_equal(out, FullAttention().operator(q, k, Mask()).apply(v), 1e-9)


def test_more_landmarks_are_nearer_to_softmax():
    errors = [error(build(NystromSpec(landmarks=m, iterations=20)), 64, 0.3) for m in (2, 16, 64)]
    assert errors[0] > errors[1] > errors[2]


def test_the_iteration_finds_the_inverse_of_each_matrix_by_itself():
    scores = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stochastic = torch.stack([(scale * matrix).softmax(-1) for scale, matrix in zip((1, 3, 9), scores, strict=True)])
    inverse = pseudoinverse(stochastic, 40)
    assert_equal(inverse @ stochastic, torch.eye(5, dtype=torch.float64).expand(3, 5, 5), 1e-8)
    six = pseudoinverse(stochastic, 6)
    for i in range(3):
        assert_equal(six[i : i + 1], pseudoinverse(stochastic[i : i + 1], 6), 1e-13)
    singular = torch.full((4, 4), 0.25, dtype=torch.float64)
    assert_equal(pseudoinverse(singular, 30), torch.linalg.pinv(singular), 1e-10)
    nothing = torch.zeros(3, 3, dtype=torch.float64)
    assert pseudoinverse(nothing, 6).eq(0).all()


@pytest.mark.parametrize(("length", "landmarks"), [(12, 4), (11, 4), (7, 3), (3, 5)])
def test_segments_hold_every_token_once_and_are_even(length: int, landmarks: int):
    attention = NystromSpec(landmarks=landmarks).build()
    seen = []
    q, k, _ = (x.detach() for x in inputs(length))
    for j in range(length):
        one = torch.zeros_like(k)
        one[:, :, j] = 1.0
        operator = attention.operator(q, one, Mask())
        landmark = operator.far.k[0, 0, :, 0]
        (index,) = landmark.nonzero()[:, 0].tolist()
        seen.append((index, round(1 / landmark[index].item())))
    assert [index for index, _ in seen] == sorted(index for index, _ in seen)
    sizes = dict(seen)
    assert set(sizes) == set(range(min(length, landmarks)))
    assert sum(sizes.values()) == length
    assert max(sizes.values()) - min(sizes.values()) <= 1


@pytest.mark.parametrize("landmarks", [256, 100])
@pytest.mark.parametrize("residual", [None, 33])
def test_a_landmark_that_is_masked_is_no_landmark(landmarks: int, residual: int | None):
    """1024 tokens of which the last three are masked: finite, and as without them."""
    attention = build(NystromSpec(landmarks=landmarks, residual=residual, n_heads=2))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 1024, 8, generator=generator) for _ in range(3))
    keys = (torch.arange(1024) < 1021)[None]
    k_nan, v_nan = (x.masked_fill(~keys[:, None, :, None], torch.nan) for x in (k, v))
    out = attention.operator(q, k_nan, Mask(keys=keys)).apply(v_nan)
    assert out.isfinite().all()
    alone = attention.operator(*(x[:, :, :1021] for x in (q, k)), Mask()).apply(v[:, :, :1021])
    assert_equal(out[:, :, :1021], alone, 2e-4)  # float32, through six products of inverses


# The convolution


def test_the_convolution_is_that_of_torch():
    for heads, kernel, length in ((1, 5, 40), (2, 3, 64), (2, 33, 7), (2, 1, 5)):
        convolution = TimeConvolution(kernel, heads).double()
        v = inputs(length)[2][:, :heads]
        expected = F.conv2d(v, convolution.weight[:, None, :, None], padding=(kernel // 2, 0), groups=heads)
        assert_equal(convolution(v), expected)
        wrt = (v, convolution.weight)
        assert_equal(gradients(convolution(v), wrt), gradients(expected, wrt))


@pytest.mark.parametrize("mask", ["no mask", "padded keys"])
@pytest.mark.parametrize("length", [7, 8, 40])
def test_trained_kernels_give_the_definition_and_its_gradients(mask: str, length: int):
    attention, given = build(CONVOLVED), make_mask(mask, length, length)
    q, k, v = inputs(length)
    wrt = (q, k, v, *attention.parameters())
    out, expected = attention.operator(q, k, given).apply(v), attention.reference(q, k, given) @ v
    assert_equal(out, expected, 1e-9)
    assert_equal(gradients(out, wrt), gradients(expected, wrt), 1e-6)  # parameters are float32


def test_the_convolution_has_a_kernel_for_each_head():
    assert [tuple(p.shape) for p in build(CONVOLVED).parameters()] == [(2, 5)]
    assert [tuple(p.shape) for p in build(NystromSpec(residual=5, n_heads=7)).parameters()] == [(7, 5)]
    assert not list(build(NystromSpec()).parameters())


# Precision, errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_of_forty_in_half_precision_are_finite(dtype: torch.dtype):
    attention = build(CONVOLVED)
    qkv = q, k, v = tuple((4.5 * x.detach().sign()).to(dtype).requires_grad_() for x in inputs(11))
    for mask in (Mask(), make_mask("padded keys", 11, 11)):
        out = attention.operator(q, k, mask).apply(v)
        assert out.dtype == dtype
        assert all(x.isfinite().all() for x in (out, *gradients(out, qkv)))


def test_equal_keys_are_no_trouble():
    """All landmarks equal: a matrix of rank one."""
    attention, (q, _, v) = build(NystromSpec(landmarks=4)), inputs(8)
    out = attention.operator(q, torch.ones_like(q), Mask()).apply(v)
    assert_equal(out, v.mean(2, keepdim=True).expand_as(v), 1e-6)
    assert all(x.isfinite().all() for x in gradients(out, (q, v)))


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="residual 4 is even"):
        NystromSpec(residual=4).build()
    with pytest.raises(UserError, match="nystrom: n_heads is not set"):
        NystromSpec(residual=3).build()
    q, k, _ = inputs(8)
    with pytest.raises(UserError, match="causal"):
        build(NystromSpec()).operator(q, k, Mask(causal=True))
    with pytest.raises(UserError, match="made for n_heads = 2, got 1"):
        build(CONVOLVED).operator(q[:, :1], k[:, :1], Mask())
