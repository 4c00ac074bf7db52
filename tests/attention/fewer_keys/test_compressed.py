"""Memory-compressed attention where the conformance suite does not reach: trained kernels, groups, decoding states."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conformance import test_attention_causality as causality
from conformance import test_attention_definition as definition
from conformance import test_attention_independence as independence
from conformance import test_attention_precision as precision
from conformance.mechanisms import Case, assert_equal, gradients, inputs, make_mask
from hasten.attention import Attention, FullAttention, Mask, Place
from hasten.attention.fewer_keys.compressed import CompressedLocalAttention, CompressedSpec, Groups
from hasten.errors import UserError

SETTINGS = {
    "plain": CompressedSpec(per_head=True),
    "averaged": CompressedSpec(values="average", stride=2, kernel=3, per_head=True),
    "over channels": CompressedSpec(stride=2, per_head=True, over_channels=True),
    "overlapping": CompressedSpec(stride=2, kernel=5),
    "local": CompressedSpec(local=4, per_head=True, over_channels=True),
    "local, overlapping": CompressedSpec(values="average", local=3, stride=2, kernel=4),
}
PLACE = Place(n_heads=2, d_head=4)
every = pytest.mark.parametrize("spec", SETTINGS.values(), ids=SETTINGS.keys())


def trained(spec: CompressedSpec) -> Attention:
    """For two heads 4 wide, with weights that are no longer means."""
    attention, generator = spec.at(PLACE).build().eval(), torch.Generator().manual_seed(3)
    for parameter in attention.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("values", ["convolution", "average"])
def test_groups_of_one_token_are_full_attention(causal: bool, values):
    q, k, v = inputs(8)
    out = (
        CompressedSpec(stride=1, values=values, over_channels=True, d_head=4)
        .build()
        .operator(q, k, Mask(causal=causal))
        .apply(v)
    )
    assert_equal(out, FullAttention().operator(q, k, Mask(causal=causal)).apply(v))


@pytest.mark.parametrize("values", ["convolution", "average"])
def test_means_of_constant_groups_are_full_attention_without_the_repetitions(values):
    q, k, v = inputs(5, 4)
    three_each = [x.repeat_interleave(3, dim=2) for x in (k, v)]
    attention = CompressedSpec(values=values).build().double()
    attention.compressor.key_weight.data.fill_(1 / 3)
    attention.compressor.value_weight.data.fill_(1 / 3)
    out = attention.operator(q, three_each[0], Mask()).apply(three_each[1])
    assert_equal(out, FullAttention().operator(q, k, Mask()).apply(v))


@every
@pytest.mark.parametrize("mask", ["no mask", "causal", "padded keys", "causal, padded keys"])
def test_trained_kernels_give_the_definition_and_its_gradients(spec: CompressedSpec, mask: str):
    attention, given = trained(spec), make_mask(mask, 7, 7)
    q, k, v = inputs()
    wrt = (q, k, v, *attention.parameters())
    out, expected = attention.operator(q, k, given).apply(v), attention.reference(q, k, given) @ v
    assert_equal(out, expected)
    assert_equal(gradients(out, wrt), gradients(expected, wrt), 1e-6)  # parameters are float32


def test_keys_are_convolved_as_torch_convolves():
    compressor = trained(CompressedSpec(stride=2, kernel=3, per_head=True, over_channels=True)).compressor
    _, k, _ = inputs(9)
    weight = compressor.key_weight.double()  # (H, kernel, in, out)
    channels = k.transpose(2, 3).flatten(1, 2)
    expected = F.conv1d(channels, weight.permute(0, 3, 2, 1).flatten(0, 1), stride=2, groups=2)
    assert_equal(compressor.keys(k, 4), expected.view(2, 2, 4, 4).transpose(2, 3))


@every
def test_a_token_more_leaves_complete_groups_as_they_are(spec: CompressedSpec):
    compressor, (_, k, _) = trained(spec).compressor, inputs(12)
    for length in range(spec.kernel or spec.stride, 12):
        groups = compressor.n_complete(length)
        before, after = (compressor.keys(k[:, :, :n], compressor.n_groups(n)) for n in (length, length + 1))
        assert groups > 0
        assert torch.equal(before[:, :, :groups], after[:, :, :groups])


@every
@pytest.mark.parametrize("chunks", [[1] * 13, [4, 1, 6, 2]], ids=str)
def test_steps_of_trained_kernels_equal_the_sequence(spec: CompressedSpec, chunks: list[int]):
    attention, (q, k, v) = trained(spec), inputs(13)
    whole = attention.operator(q, k, Mask(causal=True)).apply(v)
    outs, keys, values = [], None, None
    for parts in zip(*(x.split(chunks, dim=2) for x in (q, k, v)), strict=True):
        step, keys = attention.step(*parts[:2], keys)
        out, values = step.apply(parts[2], values)
        outs.append(out)
    assert_equal(torch.cat(outs, dim=2), whole)


@every
def test_the_state_holds_a_key_for_each_stride_and_a_short_rest(spec: CompressedSpec):
    attention, kernel = trained(spec), spec.kernel or spec.stride
    q, k, v = (x.detach() for x in inputs(40))
    step, keys = attention.step(q, k, None)
    _, values = step.apply(v, None)
    for state in (keys, values):
        assert isinstance(state, Groups)
        assert state.done.shape[2] == (40 - kernel) // spec.stride + 1
        assert state.open.shape[2] < kernel
        assert state.block.shape[2] < (spec.local or 1)


def test_the_first_queries_read_nothing_and_a_local_block_lets_them_read_themselves():
    q, k, v = inputs()
    out = CompressedSpec(stride=3).build().operator(q, k, Mask(causal=True)).apply(v)
    assert out[:, :, :2].eq(0).all()
    assert out[:, :, 2:].ne(0).all()
    attention = CompressedSpec(stride=3, local=4).build()
    assert isinstance(attention, CompressedLocalAttention)
    assert_equal(attention.operator(q, k, Mask(causal=True)).apply(v)[:, :, 0], v[:, :, 0])


@every
def test_a_last_key_a_hundred_times_as_large_changes_nothing_earlier(spec: CompressedSpec):
    attention, (q, k, v) = trained(spec), inputs(11)
    large = [torch.cat((x[:, :, :-1], 100 * x[:, :, -1:]), dim=2) for x in (q, k, v)]
    out, after = (attention.operator(*x[:2], Mask(causal=True)).apply(x[2]) for x in ((q, k, v), large))
    assert_equal(after[:, :, :-1], out[:, :, :-1], 1e-12)


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_of_forty_in_half_precision_are_finite(spec: CompressedSpec, dtype: torch.dtype):
    attention = spec.at(PLACE).build()
    q, k, v = (x.detach().to(dtype) for x in inputs(9))
    signs = torch.tensor([1, -1] * 5)[:9, None].to(dtype)
    q, k = torch.full_like(q, math.sqrt(20)), signs * torch.full_like(k, math.sqrt(20))
    qkv = q, k, v = tuple(x.requires_grad_() for x in (q, k, v))
    out = attention.operator(q, k, Mask(causal=True)).apply(v)
    assert out.dtype == dtype
    assert all(x.isfinite().all() for x in (out, *gradients(out, qkv)))


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="kernel 2 below stride 3"):
        CompressedSpec(kernel=2).build()
    q, k, _ = inputs(width=6)
    for spec in (SETTINGS["over channels"], SETTINGS["local"]):
        for call in (lambda a: a.operator(q, k, Mask()), lambda a: a.step(q, k, None)):
            with pytest.raises(UserError, match="d_head = 4"):
                call(spec.at(PLACE).build())
    for flag, size in (("per_head", "n_heads"), ("over_channels", "d_head")):
        with pytest.raises(UserError, match=f"compressed: {size} is not set"):
            CompressedSpec(**{flag: True}).build()
    with pytest.raises(UserError, match="made for n_heads = 2, got 1"):
        trained(SETTINGS["plain"]).operator(*(x[:, :1] for x in inputs()[:2]), Mask())


# The convolution over channels is made for one width, which not every law of the suite takes.


@pytest.mark.parametrize("mask", ["no mask", "causal", "padded keys", "causal, padded keys"])
def test_the_convolution_over_channels_keeps_the_laws(mask: str):
    case = Case("over channels", SETTINGS["over channels"], prefix=False, itself=False)
    definition.test_the_operator_equals_the_definition_and_so_do_its_gradients(case, mask, torch.float64, 1e-10)
    independence.test_a_row_of_a_batch_does_not_see_the_others(case, mask)
    precision.test_training_in_half_precision_is_finite_and_accurate_at_ordinary_scores(case, mask)
    attention, given = case.build(), make_mask(mask, 7, 7)

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.operator(q, k, given).apply(v)

    assert torch.autograd.gradcheck(mixed, inputs(), fast_mode=True)


@pytest.mark.usefixtures("unchecked")
def test_the_convolution_over_channels_is_causal_and_exported():
    case = Case("over channels", SETTINGS["over channels"], prefix=False, itself=False)
    causality.test_what_comes_later_changes_nothing(case)
    causality.test_states_follow_their_rows(case)
    independence.test_padding_is_the_same_as_dropping(case, "interior", True)
    definition.test_a_gradient_reaches_every_parameter(case)
    precision.test_it_exports_with_a_dynamic_length(case)
