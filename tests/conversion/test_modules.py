"""Converted models of torch's own layers against the originals."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hasten
from conversion_mechanisms import BandSpec
from hasten.attention import FullSpec
from hasten.attention.dropin import DropInAttention
from torch_models import D, H, T, decoder, encoder, padded, run, states, whole

MODELS: dict[str, Callable[[], Any]] = {
    "encoder": encoder,
    "encoder, norm first": lambda: encoder(norm_first=True),
    "encoder, gelu, no bias": lambda: encoder(activation="gelu", bias=False),
    "decoder": decoder,
    "transformer": whole,
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
each_padding = pytest.mark.parametrize("with_padding", [False, True], ids=["whole", "padded"])


@pytest.fixture(autouse=True)
def no_dropout(monkeypatch: pytest.MonkeyPatch):
    """Training without noise, so that it can be compared."""
    monkeypatch.setattr(nn.functional, "dropout", lambda x, *_, **__: x)


def without_dropout(module: nn.Module) -> nn.Module:
    for attention in (m for m in module.modules() if isinstance(m, nn.MultiheadAttention)):
        attention.dropout = 0.0
    return module


@each_model
@each_padding
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # the original's
@pytest.mark.parametrize("mode", ["train", "eval", "eval, no gradients"])
def test_with_full_attention_the_converted_model_is_the_original(make: Callable, with_padding: bool, mode: str):
    original = without_dropout(make()).train(mode == "train")
    converted = copy.deepcopy(original)
    conversion = hasten.convert(converted, FullSpec())
    assert not conversion.kept
    for causal in (False, True):
        with torch.set_grad_enabled(mode != "eval, no gradients"):
            (expected, _), (out, _) = (run(module, with_padding, causal) for module in (original, converted))
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        if mode != "eval, no gradients":
            expected = torch.autograd.grad(expected.square().sum(), list(original.parameters()))
            gradients = torch.autograd.grad(out.square().sum(), list(converted.parameters()))
            scale = max(g.abs().max() for g in expected)
            torch.testing.assert_close(
                [g / scale for g in gradients], [g / scale for g in expected], rtol=1e-5, atol=1e-6
            )


@each_model
@each_padding
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference"])
def test_the_new_attention_is_used_in_every_mode_and_without_warnings(make: Callable, with_padding: bool, mode: str):
    """A band of width 1 is told apart from full attention, and every stand-in is called."""
    model = without_dropout(make()).train(mode == "train")
    full = copy.deepcopy(model)
    hasten.convert(model, BandSpec()), hasten.convert(full, FullSpec())
    called: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, DropInAttention):
            module.attention.full.operator = counting(called, name, module.attention.full.operator)
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, torch.enable_grad)
    with context():
        out, _ = run(model, with_padding)
        other, _ = run(full, with_padding)
    assert (out - other).abs().max() > 1e-3
    assert sorted(called) == sorted(name for name, m in model.named_modules() if isinstance(m, DropInAttention))


def counting(called: dict[str, int], name: str, function: Callable) -> Callable:
    def counted(*arguments: Any) -> Any:
        called[name] = called.get(name, 0) + 1
        return function(*arguments)

    return counted


def test_a_band_of_one_key_is_the_value_itself():
    """By hand: a query that reads only itself gets its own projected value, in eval as well."""
    torch.manual_seed(0)
    holder = nn.ModuleDict({"attention": nn.MultiheadAttention(D, H, batch_first=True)}).eval()
    hasten.convert(holder, BandSpec(width=0))
    attention = holder["attention"]
    x = states()
    with torch.no_grad():
        value = nn.functional.linear(x, attention.in_proj_weight[2 * D :], attention.in_proj_bias[2 * D :])
        torch.testing.assert_close(attention(x, x, x)[0], attention.out_proj(value))


def test_a_band_around_encoder_layers_confines_what_a_position_depends_on():
    model = encoder().eval()
    hasten.convert(model, BandSpec())
    x, other = states(), states()
    other[:, -1] += 1.0
    with torch.no_grad():
        same = torch.isclose(model(x), model(other)).all(-1).all(0)
    assert same.tolist() == [True] * (T - 3) + [False] * 3


def test_an_optimiser_made_before_trains_the_converted_model():
    model = encoder()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: p for name, p in model.named_parameters()}
    hasten.convert(model, FullSpec())
    assert {name: p for name, p in model.named_parameters()}.keys() == before.keys()
    assert all(p is before[name] for name, p in model.named_parameters())
    first = model.layers[0].self_attn.in_proj_weight.detach().clone()
    model(states()).square().sum().backward()
    optimiser.step()
    assert not torch.equal(first, model.layers[0].self_attn.in_proj_weight)


def test_state_dicts_are_exchanged_with_the_original():
    model, original = encoder(), encoder()
    hasten.convert(model, FullSpec())
    assert list(model.state_dict()) == list(original.state_dict())
    model.load_state_dict(original.state_dict(), assign=True)
    original.load_state_dict(model.state_dict())


def test_restoring_puts_the_very_modules_back_with_what_they_learnt():
    model = encoder().eval()
    originals = [layer.self_attn for layer in model.layers]
    conversion = hasten.convert(model, BandSpec())
    other = encoder().state_dict()
    model.load_state_dict({name: value + 0.1 for name, value in other.items()}, assign=True)
    model.train()
    conversion.restore()
    assert [layer.self_attn for layer in model.layers] == originals
    assert model.use_nested_tensor
    assert all(module.training for module in model.modules())
    expected = encoder()
    expected.load_state_dict({name: value + 0.1 for name, value in other.items()})
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(states()), expected.eval()(states()))
    conversion.restore()


@pytest.mark.parametrize("first_back", [0, 1])
def test_layers_get_different_mechanisms_and_are_restored_in_any_order(first_back: int):
    model = encoder().eval()
    conversions = [
        hasten.convert(model, BandSpec(), where="layers.0.*"),
        hasten.convert(model, FullSpec(), where="layers.1.*"),
    ]
    kinds = [type(layer.self_attn.attention).__name__ for layer in model.layers]
    assert kinds == ["Band", "FullAttention"]
    assert conversions[1].kept == (("layers.0.self_attn", "not chosen by where"),)
    with torch.no_grad():
        conversions[first_back].restore()
        assert not model.use_nested_tensor
        model(states(), src_key_padding_mask=padded())
        conversions[1 - first_back].restore()
    assert model.use_nested_tensor
    assert all(isinstance(layer.self_attn, nn.MultiheadAttention) for layer in model.layers)


def test_what_is_converted_already_is_kept_and_said():
    model = encoder()
    hasten.convert(model, BandSpec())
    again = hasten.convert(model, FullSpec())
    assert again.replaced == ()
    assert {reason for _, reason in again.kept} == {"it is Band already; restore() that conversion first"}


class Shared(nn.Module):
    """One attention under two names."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x, x, x)[0], x, x)[0]


def test_a_module_under_two_names_stays_one():
    model = Shared()
    conversion = hasten.convert(model, FullSpec())
    assert model.first is model.second
    assert isinstance(model.first, DropInAttention)
    assert conversion.replaced == ("first",)
    conversion.restore()
    assert model.first is model.second
    assert isinstance(model.second, nn.MultiheadAttention)
