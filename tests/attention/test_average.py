"""Average attention against the lower-triangular matrix of means, and its layer against the gate's formula."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.attention import FullSpec, HeadsAttention, Mask, MultiHeadAttention, Place, multi_head
from hasten.attention.average import AverageAttention, AverageLayer, AverageSpec
from hasten.attention.kernels.kernel import KernelState
from hasten.errors import UserError
from hasten.nn.stack import Decoder

D, H, N = 12, 3, 9
KEYS = torch.tensor([[True] * 9, [False, True, True, False, True, True, True, False, False]])
SETTINGS = [(True, False), (True, True), (False, True)]
settings = pytest.mark.parametrize(("gate", "feed_forward"), SETTINGS)


def layer(*, gate: bool = True, feed_forward: bool = False, bias: bool = True) -> AverageLayer:
    torch.manual_seed(0)
    made = multi_head(D, H, AverageSpec(gate=gate, feed_forward=feed_forward), bias=bias).double()
    assert isinstance(made, AverageLayer)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def sequence(n: int = N, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, n, D, generator=generator, dtype=torch.float64, requires_grad=True)


def means(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]


def definition(m: AverageLayer, x: Tensor, average: Tensor) -> Tensor:
    """The layer, given the matrix of means, with its weights taken from the state dict."""
    own = m.state_dict(keep_vars=True)
    g = average @ x
    if m.attention.feed_forward:
        g = F.linear(g, own["network.0.weight"], own.get("network.0.bias")).relu()
        g = F.linear(g, own["network.2.weight"], own.get("network.2.bias"))
    if not m.attention.gate:
        return g
    weight, bias = own["gate.gates.weight"], own.get("gate.gates.bias", torch.zeros(2 * D, dtype=x.dtype))
    i = torch.sigmoid(x @ weight[:D, :D].T + g @ weight[:D, D:].T + bias[:D])
    f = torch.sigmoid(x @ weight[D:, :D].T + g @ weight[D:, D:].T + bias[D:])
    return i * x + f * g


def gradients(out: Tensor, *wrt: Tensor) -> tuple[Tensor, ...]:
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return torch.autograd.grad(out, wrt, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("length", [1, 2, 9, 70])
def test_the_causal_map_is_the_lower_triangular_matrix_of_means(length):
    q = torch.zeros(2, H, length, 4, dtype=torch.float64)
    v = torch.randn(2, H, length, 5, dtype=torch.float64, requires_grad=True)
    operator, attention = AverageAttention().operator(q, q, Mask(causal=True)), AverageAttention()
    expected = means(length).expand(2, H, -1, -1)
    torch.testing.assert_close(attention.reference(q, q, Mask(causal=True)), expected, rtol=1e-14, atol=0)
    for same in (operator, operator.materialised()):
        torch.testing.assert_close(same.dense(), expected, rtol=1e-14, atol=0)
        torch.testing.assert_close(same.apply(v), expected @ v, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients(same.apply(v), v), gradients(expected @ v, v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["whole", "steps"])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_five_thousand_positions_in_single_precision_are_as_exact_as_their_numbers(how, shift):
    v = torch.randn(1, 2, 5000, 8, generator=torch.Generator().manual_seed(3)) + shift
    exact = v.double().cumsum(2) / torch.arange(1, 5001)[:, None]
    attention = AverageAttention()
    if how == "whole":
        out = attention.operator(v, v, Mask(causal=True)).apply(v)
    else:
        outs, keys, values = [], None, None
        for part in v.split(1, 2):
            step, keys = attention.step(part, part, keys)
            now, values = step.apply(part, values)
            outs.append(now)
        out = torch.cat(outs, 2)
    assert (out - exact).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_summed_in_single(dtype):
    v = torch.ones(1, 1, 4500, 1, dtype=dtype)
    attention = AverageAttention()
    for causal in (True, False):
        assert torch.equal(attention.operator(v, v, Mask(causal=causal)).apply(v), v)
    keys = values = None
    for part in v.split(1500, 2):
        step, keys = attention.step(part, part, keys)
        out, values = step.apply(part, values)
        assert torch.equal(out, part)
    for kept in (keys, values):
        assert isinstance(kept, KernelState)
        assert kept.total.dtype == torch.float32


@settings
@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_equals_its_formula_and_so_do_its_gradients(gate, feed_forward, bias):
    m, x = layer(gate=gate, feed_forward=feed_forward, bias=bias), sequence()
    wrt = (x, *m.parameters())
    for mask, average in ((Mask(causal=True), means(N)), (Mask(), torch.full((N, N), 1 / N, dtype=torch.float64))):
        out, expected = m(x, mask), definition(m, x, average)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients(out, *wrt), gradients(expected, *wrt), rtol=1e-10, atol=1e-10)
        assert all(moved.any() for moved in gradients(m(x, mask), *wrt))


@pytest.mark.parametrize("causal", [True, False])
@settings
def test_padding_is_the_same_as_dropping(gate, feed_forward, causal):
    m, x = layer(gate=gate, feed_forward=feed_forward), sequence()
    for junk in (math.nan, 1e10):
        padded = x.detach().masked_fill(~KEYS[..., None], junk).requires_grad_()
        out = m(padded, Mask(causal=causal, keys=KEYS))
        for row, real in enumerate(KEYS):
            alone = m(x[row : row + 1, real], Mask(causal=causal))[0]
            torch.testing.assert_close(out[row, real], alone, rtol=1e-12, atol=1e-12)
            if math.isfinite(junk):  # padding is its own query, too, and 0 * NaN arises in its gates
                (moved,), (expected,) = gradients(out[row, real], padded), gradients(alone, x)
                torch.testing.assert_close(moved[row, real], expected[row, real], rtol=1e-10, atol=1e-10)
                assert not moved[row, ~real].any()


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 3, 1], [9], [2, 7]], ids=str)
@settings
def test_steps_of_any_size_equal_the_whole_sequence(gate, feed_forward, chunks):
    m, x = layer(gate=gate, feed_forward=feed_forward), sequence()
    whole, outs, state = m(x, Mask(causal=True)), [], None
    for part in x.split(chunks, 1):
        out, state = m.step(part, state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-12, atol=1e-12)
    wrt = (x, *m.parameters())
    torch.testing.assert_close(gradients(torch.cat(outs, 1), *wrt), gradients(whole, *wrt), rtol=1e-10, atol=1e-10)


def test_what_decoding_keeps_does_not_grow():
    m, state = layer(), None
    for part in sequence(40).split(7, 1):
        _, state = m.step(part, state)
        for kept in (state.keys, state.values):
            assert isinstance(kept, KernelState)
            assert kept.total.untyped_storage().nbytes() <= 2 * D * 8


def test_states_follow_their_rows():
    m, x, rows = layer(), sequence(), torch.tensor([1, 0, 0, 1])
    _, state = m.step(x[:, :5], None)
    out, _ = m.step(x[rows, 5:], state.select(rows))
    torch.testing.assert_close(out, m(x[rows], Mask(causal=True))[:, 5:], rtol=1e-12, atol=1e-12)


@settings
def test_packed_sequences_are_each_alone(gate, feed_forward):
    m, x, lengths = layer(gate=gate, feed_forward=feed_forward), sequence(8)[0], torch.tensor([3, 1, 4])
    for causal in (True, False):
        alone = torch.cat([m(part[None], Mask(causal=causal))[0] for part in x.split([3, 1, 4])])
        torch.testing.assert_close(m.packed(x, lengths, causal=causal), alone, rtol=1e-12, atol=1e-12)


def test_without_gate_and_network_it_is_a_mechanism_between_projections():
    made = multi_head(D, H, AverageSpec(gate=False)).double()
    assert type(made) is MultiHeadAttention
    assert made.in_proj_weight.shape == (D, D)
    x = sequence()
    expected = made.out_proj(means(N) @ F.linear(x, made.in_proj_weight, made.in_proj_bias))
    torch.testing.assert_close(made(x, Mask(causal=True)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("gate", "feed_forward"), [*SETTINGS, (False, False)])
def test_layers_share_its_weights_in_whole_sequences_and_step_by_step(gate, feed_forward):
    torch.manual_seed(0)
    own, cross = AverageSpec(gate=gate, feed_forward=feed_forward), FullSpec()
    stack = Decoder(3, D, H, 16, 0.0, [own, FullSpec(), own], [cross], sharing=[1, 2, 1]).double().eval()
    x, memory, mask = sequence(), sequence(4, seed=1), torch.ones(2, 4, dtype=torch.bool)
    seen = []
    whole = stack(x, memory, mask, lambda kind, i, attended: seen.append((kind, i, attended)))
    operators = [attended.operator for kind, i, attended in seen if kind == "self" and i in (0, 2)]
    torch.testing.assert_close(operators[1].dense(), means(N).expand(2, H, -1, -1), rtol=1e-12, atol=1e-12)
    order, rows = torch.tensor([1, 0]), torch.arange(2)
    state, outs = stack.begin(memory, mask), []
    for part in x.split([1, 1, 3, 1, 3], 1):
        # Rows change places after every step, as beams do.
        out, state = stack.step(part[rows], state)
        outs.append(out[rows])
        rows, state = rows[order], tuple(one.select(order) for one in state)
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-10, atol=1e-10)
    follower = [x for name, x in stack.named_parameters() if name.startswith("layers.2.self_attention")]
    assert all(moved.any() for moved in gradients(whole, *follower))
    assert len(follower) == 4


@pytest.mark.usefixtures("unchecked")
def test_a_tensor_is_no_mask():
    with pytest.raises(TypeError, match="mask is a Tensor; give a Mask"):
        layer()(sequence(), KEYS)


def test_memories_other_masks_and_other_widths_are_refused():
    m, x = layer(), sequence()
    with pytest.raises(UserError, match="AverageAttention is for self-attention"):
        m(x, Mask(), x)
    with pytest.raises(UserError, match="AverageAttention is for self-attention"):
        m.remember(x, KEYS)
    with pytest.raises(UserError, match="takes no mask with a pattern"):
        m(x, Mask(allowed=torch.ones(1, 1, N, N, dtype=torch.bool)))
    with pytest.raises(UserError, match="d_model 12 cannot be cut into 5 heads"):
        multi_head(D, 5, AverageSpec())


def test_only_a_layer_with_gate_or_network_is_without_projections():
    for gate, feed_forward in (*SETTINGS, (False, False)):
        spec = AverageSpec(gate=gate, feed_forward=feed_forward).at(Place(n_heads=H, d_head=D // H))
        assert spec.build().traits.unprojected is (gate or feed_forward)


@pytest.mark.usefixtures("unchecked")
@settings
def test_the_layer_is_traced_for_all_lengths(gate, feed_forward):
    m = layer(gate=gate, feed_forward=feed_forward).eval()

    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = m

        def forward(self, x, keys):
            return self.layer(x, Mask(causal=True, keys=keys))

    call, length = Causal(), torch.export.Dim("length", min=2, max=4096)
    exported = torch.export.export(call, (sequence().detach(), KEYS), dynamic_shapes=({1: length}, {1: length}))
    x, keys = sequence(13).detach(), torch.ones(2, 13, dtype=torch.bool)
    torch.testing.assert_close(exported.module()(x, keys), call(x, keys))
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, keys), call(x, keys))


@settings
def test_places_that_would_leave_out_gate_or_network_refuse_it(gate, feed_forward):
    attention = AverageAttention(gate=gate, feed_forward=feed_forward)
    with pytest.raises(UserError, match="build the layer by multi_head"):
        MultiHeadAttention(D, H, attention)
    with pytest.raises(UserError, match="average attention does not with gate = false"):
        HeadsAttention([(1, AverageAttention()), (2, attention)])
