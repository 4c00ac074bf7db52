"""Multi-head attention against `torch.nn.MultiheadAttention`, whose parameters it has."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.mechanisms import Case, those
from hasten.attention import FullAttention, FullSpec, Mask, MultiHeadAttention
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


class Frugal(FullAttention):
    """Full attention that may be told to need less: then what it reads is not projected."""

    def __init__(self, **traits: Any):
        super().__init__()
        self.traits = dataclasses.replace(FullAttention.traits, **traits)


# What is needed; whether one projection serves both; the rows of queries, keys and values; -1 is the input itself.
NEEDS = [
    ({"query", "key"}, False, (0, 1, 2)),
    ({"query"}, False, (0, -1, 1)),
    ({"key"}, False, (-1, 0, 1)),
    (set(), False, (-1, -1, 0)),
    ({"query", "key"}, True, (0, 0, 1)),
]


def name_of(value: object) -> str:
    """The same in every process: a set has no order."""
    return " and ".join(sorted(value)) or "nothing" if isinstance(value, set) else str(value)


each_need = pytest.mark.parametrize(("needs", "shared", "rows"), NEEDS, ids=name_of)


def frugal(needs: set[str], shared: bool, bias: bool = True) -> MultiHeadAttention:
    torch.manual_seed(0)
    mechanism = Frugal(needs=frozenset(needs), shared_qk=shared)
    layer = MultiHeadAttention(D, H, mechanism, bias=bias).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def projected(layer: MultiHeadAttention, x: Tensor, row: int) -> Tensor:
    """One block of d rows applied to x, cut into heads; x itself for -1."""
    width, y = x.shape[2], x
    if row >= 0:
        block = slice(row * width, (row + 1) * width)
        y = x @ layer.in_proj_weight[block].T + (0.0 if layer.in_proj_bias is None else layer.in_proj_bias[block])
    return torch.stack(y.split(width // layer.n_heads, dim=2), dim=1)


@each_need
@pytest.mark.parametrize("bias", [True, False])
def test_only_what_is_needed_has_parameters(needs: set[str], shared: bool, rows: tuple[int, ...], bias: bool):
    layer, n = frugal(needs, shared, bias), 1 + max(rows)
    assert layer.in_proj_weight.shape == (n * D, D)
    assert sum(parameter.numel() for parameter in layer.parameters()) == (n + 1) * (D * D + bias * D)


@each_need
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("way", ["self", "cross", "remembered", "steps"])
def test_every_projection_is_where_it_belongs(
    needs: set[str], shared: bool, rows: tuple[int, ...], bias: bool, way: str
):
    layer, (x, memory) = frugal(needs, shared, bias), sequences(4, 6)
    keys = torch.tensor([[True] * 6, [True, False, True, True, False, False]])
    source, mask, out = {
        "self": lambda: (x, Mask(), layer(x)),
        "cross": lambda: (memory, Mask(keys=keys), layer(x, Mask(keys=keys), memory)),
        "remembered": lambda: (memory, Mask(keys=keys), layer.recall(x, layer.remember(memory, keys))),
        "steps": lambda: (x, Mask(causal=True), layer.step(x, None)[0]),
    }[way]()
    q, k, v = (projected(layer, given, row) for given, row in zip((x, source, source), rows, strict=True))
    mixed = FullAttention().reference(q, k, mask) @ v
    assert_same(out, layer.out_proj(torch.cat(mixed.unbind(1), dim=2)), list({x, source}), layer, layer)


def test_one_projection_for_queries_and_keys_equals_two_of_the_same_rows():
    one, two = frugal({"query", "key"}, True), frugal({"query", "key"}, False)
    shared, (x, memory) = one.state_dict(), sequences(4, 6)
    twice = {name: torch.cat([p[:D], p]) if name.startswith("in_proj") else p for name, p in shared.items()}
    two.load_state_dict(twice)
    torch.testing.assert_close(one(x), two(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(one(x, memory=memory), two(x, memory=memory), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("needs", [{"query"}, set()], ids=name_of)
def test_fewer_projections_start_at_the_scale_of_three(needs: set[str]):
    torch.manual_seed(0)
    layer = MultiHeadAttention(64, 4, Frugal(needs=frozenset(needs)))
    bound = (6 / (4 * 64)) ** 0.5
    assert layer.in_proj_weight.abs().max() <= bound
    assert layer.in_proj_weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_another_number_of_heads_than_the_mechanism_was_made_for_is_an_error():
    assert MultiHeadAttention(D, H, Frugal(n_heads=H)).n_heads == H
    with pytest.raises(UserError, match=r"Frugal .* n_heads = 4, got 3"):
        MultiHeadAttention(D, H, Frugal(n_heads=4))


def test_a_memory_is_refused_by_a_mechanism_for_self_attention_whatever_its_length():
    layer, (x, memory) = MultiHeadAttention(D, H, Frugal(cross=False)).double(), sequences(4, 4)
    for call in (
        lambda: layer(x, Mask(), memory),
        lambda: layer.remember(memory, torch.ones(2, 4, dtype=torch.bool)),
    ):
        with pytest.raises(UserError, match="Frugal is for self-attention"):
            call()


@those(lambda case: not (case.traits.external or case.traits.second_projections or case.traits.unprojected))
def test_around_any_mechanism_a_layer_is_projections_of_what_it_needs(case: Case):
    layer, traits = MultiHeadAttention(8, 2, case.build()).double().eval(), case.traits
    roles = ["query"] if traits.shared_qk else [role for role in ("query", "key") if role in traits.needs]
    assert layer.in_proj_weight.shape == (8 * (len(roles) + 1), 8)
    x = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    rows = [roles.index(role) if role in roles else -1 for role in ("query", "query" if traits.shared_qk else "key")]
    q, k, v = (projected(layer, x, row) for row in (*rows, len(roles)))
    mixed = layer.attention.operator(q, k, Mask()).apply(v)
    found = torch.autograd.grad(layer(x).square().sum(), [x, layer.in_proj_weight])
    out = layer.out_proj(torch.cat(mixed.unbind(1), dim=2))
    torch.testing.assert_close(layer(x), out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found, torch.autograd.grad(out.square().sum(), [x, layer.in_proj_weight]))


@pytest.mark.usefixtures("unchecked")
@each_need
def test_it_compiles_into_one_graph(needs: set[str], shared: bool, rows: tuple[int, ...]):
    layer, (x, memory) = frugal(needs, shared), sequences(4, 6)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    torch.testing.assert_close(compiled(x, memory=memory), layer(x, memory=memory))
