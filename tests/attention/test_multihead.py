"""Multi-head attention against `torch.nn.MultiheadAttention`, whose parameters it has."""

import pytest
import torch
from torch import Tensor, nn

from hasten.attention import FullSpec, Mask, MultiHeadAttention
from hasten.errors import UserError

D, H = 12, 3


def ours(bias: bool = True, dropout: float = 0.0) -> MultiHeadAttention:
    torch.manual_seed(0)
    attention = MultiHeadAttention(D, H, FullSpec(dropout=dropout).build(), bias=bias).double().eval()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    return attention


def theirs(bias: bool = True) -> nn.MultiheadAttention:
    torch.manual_seed(1)
    attention = nn.MultiheadAttention(D, H, bias=bias, batch_first=True).double().eval()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    return attention


def sequences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(2, n, D, generator=generator, dtype=torch.float64).requires_grad_() for n in lengths]


def assert_same(out: Tensor, expected: Tensor, x: list[Tensor], a: nn.Module, b: nn.Module) -> None:
    """Outputs, gradients of inputs, and gradients of the parameters of the same name."""
    names = [name for name, _ in a.named_parameters()]
    left = torch.autograd.grad(out.square().sum(), [*x, *a.parameters()])
    right = torch.autograd.grad(expected.square().sum(), [*x, *(b.get_parameter(name) for name in names)])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
def test_state_dicts_are_exchanged_both_ways(bias: bool):
    a, b = ours(bias), theirs(bias)
    x = torch.randn(2, 5, D, dtype=torch.float64)
    assert {name: p.shape for name, p in a.state_dict().items()} == {
        name: p.shape for name, p in b.state_dict().items()
    }
    expected = b(x, x, x)[0]
    assert not torch.allclose(a(x, Mask()), expected)
    a.load_state_dict(b.state_dict())
    torch.testing.assert_close(a(x, Mask()), expected)
    c = ours(bias)
    b.load_state_dict(c.state_dict())
    torch.testing.assert_close(b(x, x, x)[0], c(x, Mask()))


@pytest.mark.parametrize("bias", [True, False])
def test_self_attention_equals_torchs(bias: bool):
    a, b = ours(bias), theirs(bias)
    b.load_state_dict(a.state_dict())
    (x,) = sequences(5)
    assert_same(a(x, Mask()), b(x, x, x, need_weights=False)[0], [x], a, b)


def test_key_padding_is_torchs_turned_round():
    a, b = ours(), theirs()
    b.load_state_dict(a.state_dict())
    x, memory = sequences(4, 6)
    keys = torch.tensor([[True] * 6, [True, False, True, True, False, False]])
    out, expected = a(x, Mask(keys=keys), memory), b(x, memory, memory, key_padding_mask=~keys)[0]
    assert_same(out, expected, [x, memory], a, b)


def test_causal_attention_equals_torchs():
    a, b = ours(), theirs()
    b.load_state_dict(a.state_dict())
    (x,) = sequences(5)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert_same(a(x, Mask(causal=True)), b(x, x, x, attn_mask=later)[0], [x], a, b)


def test_a_pattern_per_head_equals_torchs():
    a, b = ours(), theirs()
    b.load_state_dict(a.state_dict())
    (x,) = sequences(5)
    allowed = torch.rand(2, H, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.7
    allowed |= torch.eye(5, dtype=torch.bool)
    assert_same(a(x, Mask(allowed=allowed)), b(x, x, x, attn_mask=~allowed.flatten(0, 1))[0], [x], a, b)


def test_an_initial_layer_has_torchs_scale_and_no_bias():
    torch.manual_seed(0)
    a = MultiHeadAttention(64, 4, FullSpec().build())
    bound = (6 / (4 * 64)) ** 0.5
    assert a.in_proj_weight.abs().max() <= bound
    assert a.in_proj_weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not a.in_proj_bias.any()
    assert not a.out_proj.bias.any()


@pytest.mark.parametrize("bias", [True, False])
def test_the_number_of_parameters_is_known(bias: bool):
    a = MultiHeadAttention(64, 4, FullSpec().build(), bias=bias)
    assert sum(parameter.numel() for parameter in a.parameters()) == 4 * 64 * 64 + bias * 4 * 64


@pytest.mark.parametrize(("d_model", "n_heads"), [(12, 5), (12, 0), (0, 1), (12, -3)])
def test_heads_that_do_not_divide_the_width_are_an_error(d_model: int, n_heads: int):
    with pytest.raises(UserError, match=f"d_model {d_model} .* {n_heads} heads"):
        MultiHeadAttention(d_model, n_heads, FullSpec().build())


def test_a_sentence_of_padding_leaves_only_the_bias():
    a = ours()
    x, memory = sequences(4, 3)
    keys = torch.tensor([[False] * 3, [True] * 3])
    out = a(x, Mask(keys=keys), memory)
    torch.testing.assert_close(out[0], a.out_proj.bias.expand(4, D))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), [x, memory, *a.parameters()]))


@pytest.mark.parametrize("chunks", [[1] * 5, [2, 3], [5]], ids=str)
def test_steps_equal_causal_attention(chunks: list[int]):
    a = ours()
    (x,) = sequences(5)
    outs, state = [], None
    for part in x.split(chunks, dim=1):
        out, state = a.step(part, state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, dim=1), a(x, Mask(causal=True)), rtol=1e-10, atol=1e-10)


def test_recalling_a_memory_equals_attending_to_it_and_follows_rows():
    a = ours()
    x, memory = sequences(4, 6)
    keys = torch.tensor([[True] * 6, [True, False, True, True, False, False]])
    expected = a(x, Mask(keys=keys), memory)
    state = a.remember(memory, keys)
    torch.testing.assert_close(a.recall(x, state), expected, rtol=1e-10, atol=1e-10)
    rows = torch.tensor([1, 1, 0])
    torch.testing.assert_close(a.recall(x[rows], state.select(rows)), expected[rows], rtol=1e-10, atol=1e-10)


def test_without_a_mask_every_query_reads_every_key():
    attention, (x, memory) = ours(), sequences(4, 6)
    assert torch.equal(attention(x), attention(x, Mask()))
    assert torch.equal(attention(x, memory=memory), attention(x, Mask(), memory))


def test_a_tensor_is_no_mask_and_a_class_no_mechanism():
    (x,) = sequences(4)
    with pytest.raises(TypeError):
        ours()(x, torch.ones(2, 4, dtype=torch.bool))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        MultiHeadAttention(D, H, FullSpec)  # type: ignore[arg-type]
