"""The drop-in against the `torch.nn.MultiheadAttention` it stands in for."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.attention import FullSpec, Mask
from hasten.attention.base import Attention, Operator, Traits, Weights
from hasten.attention.dropin import DropInAttention, obstacle
from hasten.errors import UserError

D, H, B, T, S = 12, 3, 2, 5, 7
INFINITY = float("inf")


def pair(**options: Any) -> tuple[nn.MultiheadAttention, DropInAttention]:
    """torch's module and ours, with equal weights of their own each."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(D, H, **options).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    return theirs, DropInAttention(copy.deepcopy(theirs), FullSpec().build())


def sequences(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def assert_same(
    theirs: nn.MultiheadAttention, ours: DropInAttention, inputs: list[Tensor], call: tuple, **options: Any
) -> None:
    """Outputs, weights, and gradients of inputs and parameters, under the same call."""
    results = []
    for module in (theirs, ours):
        out, weights = module(*call, **options)
        loss = out.square().sum() if weights is None else out.square().sum() + weights.square().sum()
        wrt = [*inputs, *(module.get_parameter(name) for name, _ in theirs.named_parameters())]
        results.append((out, weights, torch.autograd.grad(loss, wrt, allow_unused=True)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


def ignored_keys() -> Tensor:
    ignored = torch.zeros(B, S, dtype=torch.bool)
    ignored[0, :2] = ignored[1, -3:] = True
    return ignored


def ignored_pairs(*shape: int) -> Tensor:
    ignored = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    ignored[..., 2] = False  # torch gives NaN where nothing may be read
    return ignored


def as_floats(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -INFINITY)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("weights", [(False, True), (True, True), (True, False)])
def test_self_and_cross_attention_equal_torchs(batch_first: bool, bias: bool, training: bool, weights: tuple):
    theirs, ours = pair(batch_first=batch_first, bias=bias)
    theirs.train(training), ours.train(training)
    shapes = [(B, T, D), (B, S, D), (B, S, D)] if batch_first else [(T, B, D), (S, B, D), (S, B, D)]
    x, key, value = sequences(*shapes)
    options = {"need_weights": weights[0], "average_attn_weights": weights[1]}
    assert_same(theirs, ours, [x], (x, x, x), **options)
    assert_same(theirs, ours, [x, key], (x, key, key), **options)
    assert_same(theirs, ours, [x, key, value], (x, key, value), **options)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("floats", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("shape", [None, (T, S), (B * H, T, S)])
@pytest.mark.parametrize("need_weights", [True, False])
def test_masks_say_true_is_ignore(batch_first: bool, floats: bool, padded: bool, shape: tuple | None, need_weights):
    theirs, ours = pair(batch_first=batch_first)
    shapes = [(B, T, D), (B, S, D)] if batch_first else [(T, B, D), (S, B, D)]
    x, memory = sequences(*shapes)
    pairs = None if shape is None else ignored_pairs(*shape)
    masks = {"key_padding_mask": ignored_keys() if padded else None, "attn_mask": pairs}
    masks = {name: as_floats(mask) if floats and mask is not None else mask for name, mask in masks.items()}
    assert_same(theirs, ours, [x, memory], (x, memory, memory), need_weights=need_weights, **masks)


@pytest.mark.parametrize("shape", [None, (T, S), (H, T, S)])
@pytest.mark.parametrize("average", [True, False])
def test_one_sequence_without_a_batch_equals_torchs(shape: tuple | None, average: bool):
    theirs, ours = pair()
    x, memory = sequences((T, D), (S, D))
    pairs = None if shape is None else ignored_pairs(*shape)
    options = {"key_padding_mask": ignored_keys()[1], "attn_mask": pairs, "average_attn_weights": average}
    assert_same(theirs, ours, [x, memory], (x, memory, memory), **options)
    assert_same(theirs, ours, [x], (x, x, x), average_attn_weights=average)


@pytest.mark.parametrize("need_weights", [True, False])
def test_causal_attention_equals_torchs(need_weights: bool):
    theirs, ours = pair(batch_first=True)
    (x,) = sequences((B, T, D))
    triangle = torch.ones(T, T, dtype=torch.bool).triu(1)
    for mask, hint in itertools.product((triangle, as_floats(triangle)), (True, False)):
        assert_same(theirs, ours, [x], (x, x, x), attn_mask=mask, is_causal=hint, need_weights=need_weights)


class Recorder(Attention):
    """Full attention that remembers the mask it was given; what it claims is set by the test."""

    def __init__(self, **claims: bool):
        super().__init__()
        self.inner, self.seen = FullSpec().build(), Mask()
        facts = {"causal": "strict", "cross": True, "step": False, "normalised": True, "key_padding": True}
        self.traits = Traits(**{**facts, "dropout": False, **claims})

    def operator(self, q: Tensor, k: Tensor, mask: Mask) -> Operator:
        self.check(q, k, mask)
        self.seen = mask
        return Weights(self.reference(q, k, mask))

    def reference(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        return self.inner.reference(q, k, mask)


def recorded(**call: Any) -> Mask:
    recorder = Recorder(allowed=True)
    x = torch.randn(B, T, D)
    DropInAttention(nn.MultiheadAttention(D, H, batch_first=True), recorder)(x, x, x, **call)
    return recorder.seen


def test_a_triangle_becomes_the_causal_mask_and_an_empty_mask_none():
    triangle = torch.ones(T, T, dtype=torch.bool).triu(1)
    for call in ({"attn_mask": triangle}, {"attn_mask": as_floats(triangle)}, {"is_causal": True}):
        seen = recorded(**call)
        assert seen.causal
        assert seen.allowed is None
    assert recorded(attn_mask=torch.zeros(T, T, dtype=torch.bool)) == Mask()
    assert recorded(key_padding_mask=torch.zeros(B, T, dtype=torch.bool)) == Mask()
    other = recorded(attn_mask=triangle.flip(0))
    assert not other.causal
    assert torch.equal(other.allowed, ~triangle.flip(0)[None, None])


def test_what_a_mechanism_does_not_claim_is_refused_clearly():
    x = torch.randn(B, T, D)
    module = DropInAttention(nn.MultiheadAttention(D, H, batch_first=True), Recorder(cross=False))
    pairs = torch.ones(T, T, dtype=torch.bool).tril(-1)
    with pytest.raises(UserError, match="Recorder takes no mask with a pattern"):
        module(x, x, x, attn_mask=pairs)
    with pytest.raises(UserError, match="self-attention: got 5 queries and 3 keys"):
        module(x, x[:, :3], x[:, :3])


def test_biases_and_masks_of_the_wrong_shape_or_type_are_refused():
    _, ours = pair(batch_first=True)
    (x,) = sequences((B, T, D))
    bias = torch.zeros(T, T, dtype=torch.float64)
    bias[0, 1] = -1.0
    with pytest.raises(UserError, match="attn_mask adds a bias"):
        ours(x, x, x, attn_mask=bias)
    with pytest.raises(UserError, match="key_padding_mask adds a bias"):
        ours(x, x, x, key_padding_mask=bias[:B])
    with pytest.raises(UserError, match=r"attn_mask is \(3, 5\), expected \(5, 5\) or \(6, 5, 5\)"):
        ours(x, x, x, attn_mask=bias[:3])
    with pytest.raises(UserError, match=r"key_padding_mask is \(5, 5\), expected \(2, 5\)"):
        ours(x, x, x, key_padding_mask=bias)
    with pytest.raises(UserError, match=r"of type torch\.int64; give torch\.bool, True = ignore"):
        ours(x, x, x, attn_mask=torch.zeros(T, T, dtype=torch.int64))
    with pytest.raises(UserError, match="is_causal is unclear for 5 queries and 3 keys"):
        ours(x, x[:, :3], x[:, :3], is_causal=True)


def test_nested_tensors_are_refused():
    _, ours = pair(batch_first=True)
    nested = torch.nested.nested_tensor([torch.randn(3, D), torch.randn(2, D)], layout=torch.jagged)
    with pytest.raises(UserError, match="no nested tensors"):
        ours(nested, nested, nested)


@pytest.mark.parametrize("training", [True, False])
def test_a_sequence_of_nothing_but_padding_gives_zeros_and_finite_gradients(training: bool):
    _, ours = pair(batch_first=True, bias=False)
    ours.train(training)
    (x,) = sequences((B, T, D))
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[0] = True
    outs = []
    for need_weights in (True, False):
        out, weights = ours(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        outs.append(out)
        assert not out[0].any()
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), [x, *ours.parameters()]))
    assert weights is None
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=0)


def test_asking_for_weights_changes_nothing():
    _, ours = pair(batch_first=True)
    (x,) = sequences((B, T, D))
    with_weights, weights = ours(x, x, x)
    assert weights is not None
    assert torch.equal(with_weights, ours(x, x, x, need_weights=False)[0])


def test_the_parameters_are_the_very_same_objects_under_the_same_names():
    module = nn.MultiheadAttention(D, H)
    ours = DropInAttention(module, FullSpec().build())
    before, after = dict(module.named_parameters()), dict(ours.named_parameters())
    assert list(before) == list(after)
    assert all(after[name] is before[name] for name in before)
    assert list(ours.state_dict()) == list(module.state_dict())
    other = nn.MultiheadAttention(D, H)
    ours.load_state_dict(other.state_dict())
    assert torch.equal(module.in_proj_weight, other.in_proj_weight)
    other.load_state_dict(ours.state_dict())


def hooked() -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(D, H)
    module.register_forward_hook(lambda *_: None)
    return module


def parametrised() -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(D, H)
    nn.utils.parametrize.register_parametrization(module, "in_proj_weight", nn.Identity())
    return module


class Doubled(nn.MultiheadAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        out, weights = super().forward(*args, **options)
        return 2 * out, weights


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.MultiheadAttention(D, H, add_bias_kv=True), "add_bias_kv"),
        (nn.MultiheadAttention(D, H, add_zero_attn=True), "add_zero_attn"),
        (nn.MultiheadAttention(D, H, kdim=4), "kdim 4, vdim 12"),
        (nn.MultiheadAttention(D, H, vdim=4), "kdim 12, vdim 4"),
        (Doubled(D, H), "Doubled computes in a forward of its own"),
        (hooked(), "hooks are attached"),
        (parametrised(), "parametrised"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_replaced_says_why(module: nn.MultiheadAttention, reason: str):
    assert reason in obstacle(module)
    with pytest.raises(UserError, match="DropInAttention cannot stand in"):
        DropInAttention(module, FullSpec().build())


def test_the_attention_weights_are_dropped_in_training_only():
    torch.manual_seed(0)
    ours = DropInAttention(nn.MultiheadAttention(D, H, batch_first=True), FullSpec(dropout=0.5).build())
    x = torch.randn(B, T, D)
    assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


@pytest.mark.parametrize("training", [True, False])
def test_it_trains_or_not_as_the_module_did(training: bool):
    ours = DropInAttention(nn.MultiheadAttention(D, H).train(training), FullSpec().build())
    assert all(module.training == training for module in ours.modules())


@pytest.mark.usefixtures("unchecked")
def test_it_compiles_to_one_graph_with_both_masks():
    _, ours = pair(batch_first=True)
    compiled = torch.compile(ours, fullgraph=True, backend="eager", dynamic=True)
    for length in (4, 9):
        (x,) = sequences((B, length, D))
        ignored = torch.zeros(B, length, dtype=torch.bool)
        ignored[0, -1] = True
        pairs = ignored_pairs(length, length)
        for call in ({"attn_mask": pairs}, {"is_causal": True}, {"key_padding_mask": as_floats(ignored)}):
            torch.testing.assert_close(compiled(x, x, x, **call), ours(x, x, x, **call))
