"""Linformer where the conformance suite does not reach: its matrices, who shares them, and what it must ignore."""

import io
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from conformance.mechanisms import assert_equal, gradients, inputs, make_mask
from hasten.attention import FullAttention, Mask
from hasten.attention.fewer_keys.linformer import LinformerAttention, LinformerSpec
from hasten.errors import UserError
from hasten.nn.stack import Encoder
from hasten.training import checkpoint

PROJECTIONS = pytest.mark.parametrize("projection", ["learnt", "mean", "convolution"])


def trained(**settings) -> LinformerAttention:
    """With random weights, also where the first ones are means."""
    attention, generator = LinformerSpec(**settings).build().eval(), torch.Generator().manual_seed(3)
    for parameter in attention.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return attention


@pytest.mark.parametrize("sharing", ["none", "key-value"])
def test_identities_are_full_attention(sharing):
    attention = LinformerSpec(max_length=9, rank=9, sharing=sharing, n_heads=2).build()
    for matrix in attention.parameters():
        matrix.data = torch.eye(9).expand_as(matrix)
    q, k, v = inputs(9)
    assert_equal(attention.operator(q, k, Mask()).apply(v), FullAttention().operator(q, k, Mask()).apply(v))


@pytest.mark.parametrize("length", [1, 5, 9])
def test_means_of_single_tokens_are_full_attention_at_every_length(length: int):
    q, k, v = inputs(length)
    attention, keys = LinformerSpec(max_length=9, rank=9, projection="mean").build(), make_mask("keys", 1, length).keys
    for mask in (Mask(), Mask(keys=keys)):
        assert_equal(attention.operator(q, k, mask).apply(v), FullAttention().operator(q, k, mask).apply(v))


@PROJECTIONS
@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value"])
@pytest.mark.parametrize("mask", ["no mask", "padded keys"])
def test_trained_projections_give_the_definition_and_its_gradients(projection, sharing, mask: str):
    attention = trained(max_length=12, rank=5, projection=projection, sharing=sharing, n_heads=2)
    q, k, v = inputs(10)
    given, wrt = make_mask(mask, 10, 10), (q, k, v, *attention.parameters())
    out, expected = attention.operator(q, k, given).apply(v), attention.reference(q, k, given) @ v
    assert_equal(out, expected)
    assert_equal(gradients(out, wrt), gradients(expected, wrt), 1e-6)  # parameters are float32


def test_segments_are_pooled_as_torch_pools():
    _, k, v = inputs(11)
    mean = LinformerSpec(max_length=12, rank=4, projection="mean").build().projection
    count = torch.tensor([11])
    expected = F.avg_pool1d(k.transpose(2, 3).flatten(0, 1), 3, ceil_mode=True).view(2, 2, 4, 4).transpose(2, 3)
    assert_equal(mean.mix(k, count, "key"), expected)
    settings = {"projection": "convolution", "sharing": "none", "n_heads": 2}
    convolution = trained(max_length=12, rank=4, **settings).projection
    for x, role, kernel in zip((k, v), ("key", "value"), convolution.parameters(), strict=True):
        channels = F.pad(x, (0, 0, 0, 1)).transpose(2, 3).flatten(1, 2)
        weight = kernel.double().repeat_interleave(4, dim=0)[:, None]
        expected = F.conv1d(channels, weight, stride=3, groups=8).view(2, 2, 4, 4).transpose(2, 3)
        assert_equal(convolution.mix(x, count, role), expected)


# Sharing


@pytest.mark.parametrize(
    ("sharing", "one", "three"),
    [
        ("none", 2 * 4 * 8 * 32, 3 * 2 * 4 * 8 * 32),
        ("headwise", 2 * 8 * 32, 3 * 2 * 8 * 32),
        ("key-value", 8 * 32, 3 * 8 * 32),
        ("layerwise", 8 * 32, 8 * 32),
    ],
)
def test_parameters_are_those_of_the_sharing(sharing, one: int, three: int):
    spec = LinformerSpec(max_length=32, rank=8, sharing=sharing, n_heads=4)
    layers = torch.nn.ModuleList(spec.build_layers(3))
    assert sum(parameter.numel() for parameter in spec.build().parameters()) == one
    assert sum(parameter.numel() for parameter in layers.parameters()) == three


def test_layers_share_one_storage_and_sum_their_gradients():
    first, second = LinformerSpec(max_length=7, rank=3, sharing="layerwise").build_layers(2)
    (matrix,), (same,) = first.parameters(), second.parameters()
    assert matrix is same
    assert first.projection.matrices[0].data_ptr() == second.projection.matrices[0].data_ptr()

    def loss(layer: LinformerAttention, seed: int) -> torch.Tensor:
        q, k, v = inputs(seed=seed)
        return layer.operator(q, k, Mask()).apply(v).square().sum()

    alone = [torch.autograd.grad(loss(layer, seed), matrix)[0] for layer, seed in ((first, 0), (second, 1))]
    (loss(first, 0) + loss(second, 1)).backward()
    assert matrix.grad is not None
    assert_equal(matrix.grad, alone[0] + alone[1], 1e-5)
    assert all(gradient.any() for gradient in alone)


def test_layers_built_apart_share_nothing():
    for spec in (LinformerSpec(sharing="layerwise"), LinformerSpec(sharing="key-value")):
        (one,), (other,) = spec.build().parameters(), spec.build().parameters()
        assert one.data_ptr() != other.data_ptr()
        assert not torch.equal(one, other)


def test_sharing_survives_saving():
    layers, again = (
        torch.nn.ModuleList(LinformerSpec(max_length=7, rank=3, sharing="layerwise").build_layers(2)) for _ in range(2)
    )
    saved = io.BytesIO()
    torch.save(layers.state_dict(), saved)
    again.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    assert len(list(again.parameters())) == 1
    for mine, theirs in zip(layers.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def encoder(**settings) -> Encoder:
    return Encoder(3, 8, 2, 16, 0.0, (LinformerSpec(max_length=7, rank=3, **settings),)).eval()


@pytest.mark.parametrize(
    ("sharing", "own"), [("none", 3 * 2 * 2 * 3 * 7), ("headwise", 3 * 2 * 3 * 7), ("key-value", 63), ("layerwise", 21)]
)
def test_a_stack_holds_the_matrices_of_its_sharing(sharing, own: int):
    stack = encoder(sharing=sharing)
    matrices = [p for name, p in stack.named_parameters() if "projection.matrices" in name]
    assert sum(matrix.numel() for matrix in matrices) == own
    assert sum(p.numel() for p in stack.parameters()) - own == sum(
        p.numel() for p in encoder(projection="mean").parameters()
    )


def test_a_stack_that_shares_one_matrix_survives_its_file(tokenizer, tmp_path: Path):
    (stack, again), path = (encoder(sharing="layerwise") for _ in range(2)), tmp_path / "model.safetensors"
    x, mask = torch.randn(2, 7, 8), torch.ones(2, 7, dtype=torch.bool)
    expected = stack(x, mask)
    assert not torch.equal(again(x, mask), expected)
    checkpoint.save_weights(path, stack.state_dict(), tokenizer)
    checkpoint.fill(again, checkpoint.read_weights(path, tokenizer), "the file")
    assert torch.equal(again(x, mask), expected)
    pointers = {layer.self_attention.attention.projection.matrices[0].data_ptr() for layer in again.layers}
    assert len(pointers) == 1
    again(x, mask).square().sum().backward()
    (matrix,) = (p for name, p in again.named_parameters() if "projection.matrices" in name)
    assert matrix.grad is not None
    assert matrix.grad.any()


# Lengths and padding


@PROJECTIONS
@pytest.mark.parametrize("sharing", ["none", "headwise"])
def test_eight_tokens_of_garbage_after_twelve_real_ones_change_nothing(projection, sharing):
    attention = trained(max_length=24, rank=6, projection=projection, sharing=sharing, n_heads=2)
    (q, k, v), keys = inputs(12), (torch.arange(20) < 12).expand(2, -1)
    garbage = torch.full((2, 2, 8, 4), 1e6, dtype=torch.float64)
    k_long, v_long = (torch.cat((x, garbage), dim=2) for x in (k, v))
    alone = attention.operator(q, k, Mask()).apply(v)
    assert_equal(attention.operator(q, k_long, Mask(keys=keys)).apply(v_long), alone, 1e-13)
    assert (attention.operator(q, k_long, Mask()).apply(v_long) - alone).abs().max() > 1


def test_first_columns_serve_shorter_sequences():
    attention = trained(max_length=24, rank=6)
    (q, k, v), (e, f) = inputs(12), (matrix[0, :, :12].double() for matrix in attention.parameters())
    expected = (q @ (e @ k).transpose(2, 3) / 2).softmax(-1) @ (f @ v)
    assert_equal(attention.operator(q, k, Mask()).apply(v), expected)


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="linformer: n_heads is not set"):
        LinformerSpec(sharing="none").build()
    attention = LinformerSpec(max_length=10, rank=4).build()
    q, k, _ = inputs(8)
    with pytest.raises(UserError, match="at most 10"):
        attention.operator(*inputs(11)[:2], Mask())
    with pytest.raises(UserError, match="causal"):
        attention.operator(q, k, Mask(causal=True))


def test_first_projections_keep_lengths_on_average():
    attention = LinformerSpec(max_length=64, rank=128, sharing="none", n_heads=8).build()
    for matrix in attention.parameters():
        assert matrix.std().item() == pytest.approx(128**-0.5, rel=0.02)
        assert matrix.square().sum(1).mean().item() == pytest.approx(1, rel=0.02)


@PROJECTIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_of_forty_in_half_precision_are_finite(projection, dtype: torch.dtype):
    attention = LinformerSpec(max_length=12, rank=5, projection=projection).build()
    qkv = q, k, v = tuple((5 * x.detach().sign()).to(dtype).requires_grad_() for x in inputs(10))
    out = attention.operator(q, k, Mask()).apply(v)
    assert out.dtype == dtype
    assert all(x.isfinite().all() for x in (out, *gradients(out, qkv)))
