"""Global tokens with projections of their own, against a definition by loops with two sets of projections."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from hasten.attention import FullAttention, FullSpec, HeadsAttention, Mask, MultiHeadAttention
from hasten.attention.patterns.longformer import LongformerSpec
from hasten.attention.patterns.specs import LocalSpec
from hasten.attention.second_projections import SecondProjections, SecondState, multi_head
from hasten.errors import UserError

D, H, N = 12, 3, 9
KEYS = torch.tensor([[True] * 9, [False, True, True, False, True, True, True, False, False]])
MARKED = torch.tensor([[0, 0, 0, 1, 0, 0, 0, 1, 1], [0, 0, 0, 1, 0, 0, 1, 0, 0]]).bool()


def layer(spec: LongformerSpec, *, bias: bool = True) -> SecondProjections:
    torch.manual_seed(0)
    made = multi_head(D, H, spec.build(), bias=bias).double().eval()
    assert isinstance(made, SecondProjections)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def sequence(n: int = N, batch: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(batch, n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head(x: Tensor, weight: Tensor, bias: Tensor | None, block: int, h: int) -> Tensor:
    """(n, d) of one head: rows of block `block` (queries, keys, values) of a set of projections."""
    rows = slice(block * D + h * D // H, block * D + (h + 1) * D // H)
    return x @ weight[rows].T + (0.0 if bias is None else bias[rows])


def definition(m: SecondProjections, spec: LongformerSpec, x: Tensor, mask: Mask) -> Tensor:
    """Token by token over the real tokens of each example; rows of padding are left zero."""
    out = torch.zeros_like(x)
    for b in range(len(x)):
        real = torch.arange(x.shape[1]) if mask.keys is None else mask.keys[b].nonzero()[:, 0]
        own = x[b, real]
        marks = torch.zeros(x.shape[1], dtype=torch.bool) if mask.marked is None else mask.marked[b]
        is_global = [p < spec.first or bool(marks[place]) for p, place in enumerate(real)]
        for p, place in enumerate(real):
            second = is_global[p]
            weight, bias = (m.second_proj_weight, m.second_proj_bias) if second else (m.in_proj_weight, m.in_proj_bias)
            readable = []
            for j in range(len(real)):
                near = abs(p - j) <= spec.window * spec.dilation and (p - j) % spec.dilation == 0
                if (near or is_global[p] or is_global[j]) and (j <= p or not mask.causal):
                    readable.append(j)
            parts = []
            for h in range(H):
                q, k, v = (head(own, weight, bias, block, h) for block in range(3))
                parts.append((k[readable] @ q[p] / math.sqrt(D // H)).softmax(0) @ v[readable])
            out[b, place] = m.out_proj(torch.cat(parts))
    return out


SPECS = [
    LongformerSpec(window=1),
    LongformerSpec(window=2, first=3),
    LongformerSpec(window=1, first=2, marked=True),
    LongformerSpec(window=0, first=0, marked=True),
    LongformerSpec(window=1, dilation=2, marked=True),
    LongformerSpec(window=2, first=20),
]
each_spec = pytest.mark.parametrize(
    "spec", SPECS, ids=lambda spec: f"{spec.window}-{spec.dilation}-{spec.first}-{spec.marked}"
)
each_mask = pytest.mark.parametrize(
    "mask",
    [Mask(), Mask(keys=KEYS), Mask(causal=True), Mask(causal=True, keys=KEYS)],
    ids=["all", "padded", "causal", "causal, padded"],
)


def with_marks(mask: Mask, spec: LongformerSpec) -> Mask:
    return dataclasses.replace(mask, marked=MARKED) if spec.marked else mask


def gradients(out: Tensor, wrt: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a random linear function of `out`; zero where there is no path."""
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return torch.autograd.grad(out, wrt, cotangent, allow_unused=True, materialize_grads=True)


def assert_equal(actual, expected, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@each_spec
@each_mask
@pytest.mark.parametrize("bias", [True, False])
def test_two_sets_of_projections_equal_the_definition_by_loops(spec: LongformerSpec, mask: Mask, bias: bool):
    m, x, mask = layer(spec, bias=bias), sequence().requires_grad_(), with_marks(mask, spec)
    real = torch.ones(2, N, dtype=torch.bool) if mask.keys is None else mask.keys
    out, expected = m(x, mask)[real], definition(m, spec, x, mask)[real]
    assert_equal(out, expected)
    wrt = [x, *m.parameters()]
    assert_equal(gradients(out, wrt), gradients(expected, wrt), 1e-9)


def test_the_definition_tells_the_two_sets_apart():
    spec = SPECS[2]
    m, x, mask = layer(spec), sequence(), Mask(marked=MARKED)
    right, is_global = definition(m, spec, x, mask), m.is_global(x, mask)
    m.copy_projections()
    wrong = definition(m, spec, x, mask)
    assert ((right - wrong).abs().amax(-1) > 1e-3).equal(is_global)


# The ends: all tokens global, none


@pytest.mark.parametrize("how", ["first", "marked"])
@pytest.mark.parametrize("causal", [False, True])
def test_all_tokens_global_is_full_attention_by_the_second_projections(how: str, causal: bool):
    spec = LongformerSpec(window=1, first=N if how == "first" else 0, marked=how == "marked")
    m, x = layer(spec), sequence()
    full = MultiHeadAttention(D, H, FullAttention()).double().eval()
    full.load_state_dict(m.state_dict(), strict=False)
    full.in_proj_weight.data, full.in_proj_bias.data = m.second_proj_weight.data, m.second_proj_bias.data
    marked = torch.ones(2, N, dtype=torch.bool) if how == "marked" else None
    assert_equal(
        m(x, Mask(causal=causal, keys=KEYS, marked=marked))[KEYS], full(x, Mask(causal=causal, keys=KEYS))[KEYS]
    )


@pytest.mark.parametrize("marked", [None, torch.zeros(2, N, dtype=torch.bool)], ids=["no marks", "no marked token"])
def test_no_global_token_is_local_attention(marked: Tensor | None):
    m, x = layer(LongformerSpec(window=2, first=0, marked=True)), sequence()
    local = multi_head(D, H, LocalSpec(left=2).build()).double().eval()
    local.load_state_dict({name: value for name, value in m.state_dict().items() if "second" not in name})
    assert_equal(m(x, Mask(keys=KEYS, marked=marked))[KEYS], local(x, Mask(keys=KEYS))[KEYS])


def test_equal_projections_are_the_symmetric_pattern():
    spec = LongformerSpec(window=1, first=2, marked=True)
    m, x, mask = layer(spec), sequence(), Mask(keys=KEYS, marked=MARKED)
    m.copy_projections()
    plain = multi_head(D, H, dataclasses.replace(spec, second_projections=False).build()).double().eval()
    plain.load_state_dict({name: value for name, value in m.state_dict().items() if "second" not in name})
    assert_equal(m(x, mask)[KEYS], plain(x, mask)[KEYS])


def test_second_projections_start_as_copies_of_the_first():
    m = multi_head(D, H, LongformerSpec().build())
    assert isinstance(m, SecondProjections)
    assert torch.equal(m.second_proj_weight, m.in_proj_weight)
    assert torch.equal(m.second_proj_bias, m.in_proj_bias)
    assert m.second_proj_weight.data_ptr() != m.in_proj_weight.data_ptr()


# Choosing when building


@pytest.mark.parametrize(
    "attention",
    [FullSpec().build(), LongformerSpec(second_projections=False).build(), LongformerSpec(first=0).build()],
    ids=["full", "one set", "no global tokens"],
)
def test_only_a_mechanism_that_asks_for_it_gets_a_second_set(attention):
    assert type(multi_head(D, H, attention)) is MultiHeadAttention
    assert not attention.traits.second_projections


def test_a_plain_layer_refuses_a_mechanism_that_asks_for_it():
    with pytest.raises(UserError, match=r"second projections .* multi_head"):
        MultiHeadAttention(D, H, LongformerSpec().build())


@pytest.mark.parametrize("bias", [True, False])
def test_the_number_of_parameters_is_known(bias: bool):
    m = multi_head(D, H, LongformerSpec().build(), bias=bias)
    assert sum(parameter.numel() for parameter in m.parameters()) == 7 * D * D + 7 * bias * D


def test_only_global_rows_pay_for_second_queries():
    m, seen, linear = layer(LongformerSpec(window=1, first=1, marked=True)), [], torch.nn.functional.linear

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append((x.numel() // D, weight.shape[0] // D))
        return linear(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hasten.attention.second_projections.F.linear", spy)
        m(sequence(), Mask(keys=KEYS, marked=MARKED))
    # One more than it has is projected: the first set and the output, all tokens each; then keys and values, queries.
    assert sorted(seen) == [(6, 1), (2 * N, 1), (2 * N, 2), (2 * N, 3)]


def test_heads_may_differ_in_their_windows_but_not_in_their_global_tokens():
    groups = [(2, LongformerSpec(window=1).build()), (1, LongformerSpec(window=1, dilation=3).build())]
    torch.manual_seed(0)
    m = multi_head(D, H, HeadsAttention(groups)).double()
    assert isinstance(m, SecondProjections)
    nn.init.normal_(m.second_proj_weight)
    x, parts = sequence(), []
    for spec in (LongformerSpec(window=1), LongformerSpec(window=1, dilation=3)):
        alone = layer(spec)
        alone.load_state_dict(m.state_dict())
        alone.out_proj = nn.Identity()
        parts.append(definition(alone, spec, x, Mask()))
    mixed = torch.cat((parts[0][..., : 2 * D // H], parts[1][..., 2 * D // H :]), -1)
    assert_equal(m(x), m.out_proj(mixed))
    with pytest.raises(UserError, match=r"all heads must have the same global tokens"):
        multi_head(D, H, HeadsAttention([groups[0], (1, LongformerSpec(first=2).build())]))


def test_another_sequence_cannot_be_read():
    m, x = layer(SPECS[0]), sequence()
    with pytest.raises(UserError, match="leave out memory"):
        m(x, Mask(), sequence(5))
    with pytest.raises(UserError, match="self-attention"):
        m.remember(x, KEYS)


# Padding, packing, steps


@pytest.mark.parametrize("junk", [math.nan, 1e10, 0.0])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_the_same_as_dropping_and_is_never_global(junk: float, causal: bool):
    spec = LongformerSpec(window=1, first=2, marked=True)
    m, x = layer(spec), sequence()
    junked = x.masked_fill(~KEYS[..., None], junk).requires_grad_()
    out = m(junked, Mask(causal=causal, keys=KEYS, marked=MARKED | ~KEYS))
    assert not m.is_global(x, Mask(keys=KEYS, marked=MARKED | ~KEYS))[~KEYS].any()
    for b in range(2):
        alone = m(x[b : b + 1, KEYS[b]], Mask(causal=causal, marked=MARKED[b : b + 1, KEYS[b]]))
        assert_equal(out[b : b + 1, KEYS[b]], alone)
    if math.isfinite(junk):
        (gradient,) = torch.autograd.grad(out[KEYS].sum(), junked)
        assert gradient[KEYS].isfinite().all()
        assert not gradient[~KEYS].any()


def test_a_sentence_of_padding_is_finite_and_gives_no_gradient():
    m, x = layer(SPECS[2]), sequence().requires_grad_()
    out = m(x, Mask(keys=torch.zeros(2, N, dtype=torch.bool), marked=MARKED))
    assert_equal(out, m.out_proj.bias.expand_as(out))
    assert not torch.autograd.grad(out.sum(), x)[0].any()


def test_packed_sequences_equal_each_alone():
    m, lengths = layer(LongformerSpec(window=1, first=2)), torch.tensor([4, 1, 7])
    rows = [sequence(int(n), 1, i) for i, n in enumerate(lengths)]
    for causal in (False, True):
        expected = torch.cat([m(row, Mask(causal=causal))[0] for row in rows])
        assert_equal(m.packed(torch.cat(rows, 1)[0], lengths, causal), expected)


@pytest.mark.parametrize("chunks", [[1] * N, [3, 1, 4, 1], [N], [2, 7]], ids=str)
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[1], SPECS[5]], ids=lambda spec: str(spec.first))
def test_steps_of_any_size_equal_the_whole_sequence(spec: LongformerSpec, chunks: list[int]):
    m, x, outs, state = layer(spec), sequence().requires_grad_(), [], None
    for part in x.split(chunks, 1):
        out, state = m.step(part, state)
        outs.append(out)
    whole = m(x, Mask(causal=True))
    assert_equal(torch.cat(outs, 1), whole)
    wrt = [x, *m.parameters()]
    assert_equal(gradients(torch.cat(outs, 1), wrt), gradients(whole, wrt), 1e-9)
    assert (state.second is None) is (spec.first <= N)


def test_a_state_follows_its_rows():
    m, x, rows = layer(SPECS[1]), sequence(batch=3), torch.tensor([2, 0, 0, 1])
    _, state = m.step(x[:, :2], None)
    assert isinstance(state, SecondState)
    out, _ = m.step(x[rows, 2:], state.select(rows))
    assert_equal(out, m(x[rows], Mask(causal=True))[:, 2:])


@pytest.mark.parametrize("t", range(N))
def test_what_comes_later_changes_nothing_in_a_causal_layer(t: int):
    m, x, mask = layer(SPECS[2]), sequence(), Mask(causal=True, marked=MARKED)
    changed = x.clone()
    changed[:, t:] += sequence(N - t, seed=5)
    assert_equal(m(changed, mask)[:, :t], m(x, mask)[:, :t], 1e-12)


def test_marked_tokens_cannot_be_decoded_step_by_step():
    m = layer(SPECS[2])
    assert not m.attention.traits.step
    with pytest.raises(TypeError, match="step by step"):
        m.step(sequence(1), None)


# Training, precision, tracing


def test_every_projection_learns():
    m, x = layer(SPECS[2]), sequence()
    m(x, Mask(marked=MARKED)).square().sum().backward()
    for weight in (m.in_proj_weight, m.second_proj_weight):
        assert all(block.any() for block in weight.grad.split(D))


def test_dropout_drops_weights_of_global_rows_too_and_only_in_training():
    spec = LongformerSpec(window=1, first=2, dropout=0.5)
    m, x = layer(spec), sequence()
    still = m(x)
    assert_equal(still, definition(m, spec, x, Mask()))
    m.train()
    torch.manual_seed(1)
    first = m(x)
    assert ((first - still).abs().amax(-1) > 1e-3).all()
    torch.manual_seed(1)
    assert torch.equal(m(x), first)
    assert_equal(m(x[:1].expand(3000, -1, -1)).mean(0), still[0], 0.15)


def test_half_precision_stays_close():
    spec = LongformerSpec(window=2, first=1, marked=True)
    m, x = layer(spec).float(), sequence().float()
    exact = m(x, Mask(keys=KEYS, marked=MARKED))[KEYS]
    with torch.autocast("cpu", torch.bfloat16):
        half = m(x, Mask(keys=KEYS, marked=MARKED))[KEYS]
    assert half.dtype == torch.bfloat16
    assert_equal(half.float(), exact, 0.1)


@pytest.mark.usefixtures("unchecked")
def test_it_compiles_into_one_graph_for_all_lengths():
    m = layer(SPECS[2])
    torch.compiler.reset()
    compiled = torch.compile(m, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (N, 7):
        x = sequence(n).requires_grad_()
        mask = Mask(causal=True, keys=KEYS[:, :n], marked=MARKED[:, :n])
        out, expected = compiled(x, mask)[KEYS[:, :n]], m(x, mask)[KEYS[:, :n]]
        assert_equal(out, expected)
        wrt = [x, *m.parameters()]
        assert_equal(gradients(out, wrt), gradients(expected, wrt), 1e-9)


class Call(nn.Module):
    def __init__(self, m: SecondProjections):
        super().__init__()
        self.m = m

    def forward(self, x: Tensor, keys: Tensor, marked: Tensor) -> Tensor:
        return self.m(x, Mask(keys=keys, marked=marked))


@pytest.mark.usefixtures("unchecked")
def test_it_exports_with_a_dynamic_length():
    call, length = Call(layer(SPECS[2])), torch.export.Dim("length", min=2, max=4096)
    shapes = ({1: length}, {1: length}, {1: length})
    exported = torch.export.export(call, (sequence(), KEYS, MARKED), dynamic_shapes=shapes).module()
    for n in (N, 5, 2):
        x, keys, marked = sequence(n), KEYS[:, :n], MARKED[:, :n]
        assert_equal(exported(x, keys, marked)[keys], call(x, keys, marked)[keys])
