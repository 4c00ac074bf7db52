"""Converted Hugging Face models against the originals."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hasten
from conversion_mechanisms import Band, BandSpec
from hasten.attention import FullSpec, Mask
from hasten.errors import UserError
from huggingface_models import (
    bart,
    batch,
    bert,
    each_generating,
    each_implementation,
    each_model,
    each_side,
    gpt2,
    llama,
    run,
    transformers,
)


@each_model
@each_side
@each_implementation
def test_with_full_attention_the_converted_model_is_the_original(make: Callable, side: str, implementation: str):
    original = make(attn_implementation=implementation)
    converted = copy.deepcopy(original)
    conversion = hasten.convert(converted, FullSpec())
    assert not conversion.kept
    given = batch(side)
    expected, out = run(original, given), run(converted, given)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    names = [name for name, p in original.named_parameters() if p.requires_grad and "pooler" not in name]
    expected = torch.autograd.grad(expected.square().mean(), [original.get_parameter(name) for name in names])
    gradients = torch.autograd.grad(out.square().mean(), [converted.get_parameter(name) for name in names])
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)


@each_model
@each_side
@each_implementation
def test_layers_that_are_not_chosen_go_on_as_before(make: Callable, side: str, implementation: str):
    original = make(attn_implementation=implementation)
    converted = copy.deepcopy(original)
    conversion = hasten.convert(converted, FullSpec(), where=lambda name, module: ".1." in name)
    assert len(conversion.kept) == len(conversion.replaced)
    given = batch(side)
    with torch.no_grad():
        torch.testing.assert_close(run(converted, given), run(original, given), rtol=1e-5, atol=1e-5)


@each_generating
@pytest.mark.parametrize("how", [{}, {"use_cache": False}, {"num_beams": 2}], ids=["greedy", "no cache", "beam"])
@pytest.mark.parametrize("where", ["*", "*.1.*"])
def test_generation_is_the_originals(make: Callable, how: dict, where: str):
    original = make()
    converted = copy.deepcopy(original)
    hasten.convert(converted, FullSpec(), where=where)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **how}
    for given in (batch("left"), batch("none"), batch("right" if original.config.is_encoder_decoder else "left", 4)):
        assert torch.equal(converted.generate(**given, **options), original.generate(**given, **options))


@each_implementation
def test_a_prefix_read_in_two_pieces_equals_the_whole(implementation: str):
    """The second piece has several queries and more keys: they stand at the end."""
    for where in ("*", "*.1.*"):
        model = llama(attn_implementation=implementation)
        expected = run(model, batch("none"))
        hasten.convert(model, FullSpec(), where=where)
        ids = batch("none")["input_ids"]
        first = model(ids[:, :4])
        second = model(ids[:, 4:], cache=first.cache)
        out = torch.cat((first.logits, second.logits), 1).flatten(0, 1)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def masks_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Mask]]:
    """What reaches the mechanisms, by the module's name."""
    seen: list[tuple[str, Mask]] = []
    for name, module in model.named_modules():
        if isinstance(mechanism := getattr(module, "hasten", None), Band):
            monkeypatch.setattr(mechanism, "operator", recording(seen, name, mechanism.operator))
    return seen


def recording(seen: list, name: str, function: Callable) -> Callable:
    def recorded(q: Tensor, k: Tensor, mask: Mask) -> Any:
        seen.append((name, mask))
        return function(q, k, mask)

    return recorded


@each_model
def test_padding_reaches_the_mechanism_as_keys_and_nothing_as_a_matrix(make: Callable, monkeypatch: pytest.MonkeyPatch):
    model = make()
    hasten.convert(model, BandSpec(claims={"allowed": False}))
    seen = masks_seen(model, monkeypatch)
    given = batch("left")
    run(model, given)
    assert len(seen) in (2, 6)
    for name, mask in seen:
        assert mask.allowed is None
        assert mask.keys is not None
        assert torch.equal(mask.keys, given["attention_mask"].bool())
        assert mask.causal == (make in (llama, gpt2) or ("decoder" in name and "self_attn" in name))
    seen.clear()
    run(model, batch("none"))
    assert all(mask.keys is None and mask.allowed is None for _, mask in seen)


def test_a_band_confines_what_a_prediction_depends_on():
    """Two layers that look one token back: the third last token no longer reaches the last prediction."""
    model = llama()
    hasten.convert(model, BandSpec(width=1))
    ids = batch("none")["input_ids"]
    changes = []
    for position in range(ids.shape[1]):
        other = ids.clone()
        other[:, position] = 49 - other[:, position]
        with torch.no_grad():
            changes.append((model(other).logits - model(ids).logits)[:, -1].abs().max() > 1e-5)
    assert torch.stack(changes).tolist() == [False] * 4 + [True] * 3


def test_one_banded_layer_among_full_ones_changes_the_model_and_stays_causal():
    model, original = gpt2(), gpt2()
    hasten.convert(model, BandSpec(width=1), where="*.h.1.attn")
    ids = batch("none")["input_ids"]
    other = ids.clone()
    other[:, 4:] = 5
    with torch.no_grad():
        out = model(ids).logits
        torch.testing.assert_close(model(other).logits[:, :4], out[:, :4])
        torch.testing.assert_close(out[:, :2], original(ids).logits[:, :2], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(out[:, 3:], original(ids).logits[:, 3:], atol=1e-3)


@each_generating
def test_a_banded_model_generates_the_same_with_and_without_a_cache(make: Callable):
    model = make()
    hasten.convert(model, BandSpec(width=2), where=lambda name, module: "encoder_attn" not in name)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached, anew = (model.generate(**batch("left"), **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, anew)


@each_model
def test_attentions_are_returned_where_they_are_asked_for(make: Callable):
    original = make(attn_implementation="eager")
    converted = make()
    hasten.convert(converted, FullSpec())
    given = batch("right")
    if original.config.is_encoder_decoder:
        given["decoder_input_ids"] = given["input_ids"][:, :5]
    with torch.no_grad():
        expected, out = (model(**given, output_attentions=True) for model in (original, converted))
        plain = converted(**given)
    torch.testing.assert_close(out[0], plain[0], rtol=0, atol=0)
    keys = [key for key in expected if "attentions" in key and expected[key]]
    assert keys
    for key in keys:
        torch.testing.assert_close(out[key], expected[key], rtol=1e-4, atol=1e-5)
    assert not any("attentions" in key for key in plain)


def test_attentions_are_returned_where_the_configuration_asks_for_them():
    model = bert(attn_implementation="eager", output_attentions=True)
    hasten.convert(model, FullSpec())
    assert [tuple(a.shape) for a in model(**batch()).attentions] == [(3, 4, 7, 7)] * 2


@each_model
def test_saving_and_loading_know_nothing_of_the_conversion(make: Callable, tmp_path: Path):
    original = make()
    converted = copy.deepcopy(original)
    hasten.convert(converted, BandSpec())
    assert list(converted.state_dict()) == list(original.state_dict())
    converted.save_pretrained(tmp_path)
    assert "hasten" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    loaded = type(original).from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    given = batch()
    with torch.no_grad():
        torch.testing.assert_close(run(loaded, given), run(original, given))
        hasten.convert(loaded, BandSpec())
        torch.testing.assert_close(run(loaded, given), run(converted, given))


def test_a_mechanisms_own_parameters_are_saved_beside_the_others(tmp_path: Path):
    model = bert()
    conversion = hasten.convert(model, BandSpec(parameters=3))
    assert "adds 3 parameters of its own, not trained yet" in str(conversion)
    own = [name for name in model.state_dict() if name.endswith("hasten.own")]
    assert own == [f"encoder.layer.{i}.attention.self.hasten.own" for i in (0, 1)]
    with torch.no_grad():
        model.get_parameter(own[0]).fill_(3.0)
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    loaded = transformers.BertModel.from_pretrained(tmp_path)
    hasten.convert(loaded, BandSpec(parameters=3))
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert loaded.get_parameter(own[0]).tolist() == [3.0] * 3


def test_restoring_leaves_no_trace():
    model = llama(attn_implementation="eager")
    before = dict(vars(model.model.layers[0].self_attn))
    expected = run(model, batch())
    conversion = hasten.convert(model, BandSpec())
    assert model.config._attn_implementation == "hasten_over_eager"
    conversion.restore()
    assert model.config._attn_implementation == "eager"
    assert vars(model.model.layers[0].self_attn).keys() == before.keys()
    assert not any(name.endswith("hasten") for name, _ in model.named_modules())
    torch.testing.assert_close(run(model, batch()), expected)


@pytest.mark.parametrize("first_back", [0, 1])
def test_parts_with_one_configuration_are_restored_in_any_order(first_back: int):
    """Bart's encoder and decoder share theirs."""
    model = bart()
    expected = run(model, batch())
    parts = (model.model.encoder, model.model.decoder)
    conversions = [hasten.convert(part, BandSpec(width=0)) for part in parts]
    both = run(model, batch())
    conversions[first_back].restore()
    one = run(model, batch())
    assert not torch.allclose(one, both, atol=1e-3)
    assert not torch.allclose(one, expected, atol=1e-3)
    conversions[1 - first_back].restore()
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(run(model, batch()), expected)


def test_layers_get_different_mechanisms():
    model = llama()
    hasten.convert(model, BandSpec(), where="*.0.self_attn")
    conversion = hasten.convert(model, FullSpec(), where="*.1.self_attn")
    assert conversion.kept == (("model.layers.0.self_attn", "not chosen by where"),)
    assert [type(layer.self_attn.hasten).__name__ for layer in model.model.layers] == ["Band", "FullAttention"]
    again = hasten.convert(model, FullSpec())
    assert [reason[:21] for _, reason in again.kept] == ["it is Band already; r", "it is FullAttention a"]


def test_a_copy_of_a_converted_model_is_converted():
    model = llama()
    conversion = hasten.convert(model, BandSpec(width=0))
    out, other = run(model, batch()), copy.deepcopy(model)
    conversion.restore()
    torch.testing.assert_close(run(other, batch()), out)
    assert not torch.allclose(run(model, batch()), out, atol=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: llama(attention_dropout=0.25),
        lambda: gpt2(attn_pdrop=0.25),
        lambda: bart(attention_dropout=0.25),
        lambda: bert(attention_probs_dropout_prob=0.25),
    ],
)
def test_dropout_is_the_models(make: Callable):
    model = make()
    hasten.convert(model, FullSpec())
    mechanisms = [module.hasten for module in model.modules() if hasattr(module, "hasten")]
    assert {mechanism.dropout for mechanism in mechanisms} == {0.25}
    assert not any(mechanism.training for mechanism in mechanisms)
    model.train()
    assert all(mechanism.training for mechanism in mechanisms)
    torch.testing.assert_close(run(model.eval(), batch()), run(make(), batch()), rtol=1e-5, atol=1e-5)


def test_dropout_that_was_not_found_is_noted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hasten.conversion.huggingface._dropout", lambda module: None)
    model = bert()
    conversion = hasten.convert(model, FullSpec())
    assert {text for _, text in conversion.notes} == {"its share of dropped weights was not found: the spec's holds"}
    assert model.encoder.layer[0].attention.self.hasten.dropout == 0.0


def test_checkpointed_training_gives_the_same_gradients():
    model = llama()
    hasten.convert(model.train(), FullSpec())
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable()
        loss = run(model, batch(), use_cache=False).square().mean()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_half_precision_and_double_stay_what_they_are():
    for dtype in (torch.bfloat16, torch.float64):
        model = llama().to(dtype)
        hasten.convert(model, BandSpec(parameters=1))
        assert run(model, batch()).dtype == dtype
        assert {p.dtype for p in model.parameters()} == {dtype}


class Tagger(nn.Module):
    """A user's model around a pretrained one."""

    def __init__(self):
        super().__init__()
        self.bert = bert()
        self.mixer = nn.MultiheadAttention(32, 4, batch_first=True).eval()

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        x = self.bert(**given).last_hidden_state
        return self.mixer(x, x, x, key_padding_mask=given["attention_mask"] == 0)[0]


def test_models_within_models_and_torchs_layers_are_converted_together():
    model = Tagger()
    expected = model(batch())
    conversion = hasten.convert(model, FullSpec())
    assert conversion.replaced == ("mixer", *(f"bert.encoder.layer.{i}.attention.self" for i in (0, 1)))
    torch.testing.assert_close(model(batch()), expected, rtol=1e-5, atol=1e-5)
    conversion.restore()
    torch.testing.assert_close(model(batch()), expected)


def test_where_that_matches_nothing_names_what_is_close():
    with pytest.raises(UserError, match=r"close: model.layers.1.self_attn, model.layers.0.self_attn"):
        hasten.convert(llama(), FullSpec(), where="model.layer.*.self_attn")


def test_nothing_changes_where_building_fails():
    class Second:
        built = 0

        def build(self) -> Any:
            self.built += 1
            if self.built == 2:
                raise UserError("no second one")
            return BandSpec().build()

    model = llama()
    with pytest.raises(UserError, match="no second one"):
        hasten.convert(model, Second())
    assert model.config._attn_implementation == "sdpa"
    assert not any(name.endswith("hasten") for name, _ in model.named_modules())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("make", "implementation"), [(bert, "sdpa"), (llama, "eager")])
def test_a_converted_model_compiles_to_one_graph(make: Callable, implementation: str):
    model = make(attn_implementation=implementation)
    hasten.convert(model, BandSpec(width=2), where="*.1.*")
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    with torch.no_grad():
        for length in (7, 9):
            torch.testing.assert_close(run(compiled, batch("left", length)), run(model, batch("left", length)))
