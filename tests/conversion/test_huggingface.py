"""Conversion of Hugging Face models, on small ones with random weights."""

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
from hasten.conversion import huggingface
from hasten.errors import UserError

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 50}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 50,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "dropout": 0.0,
}


def bert(**options: Any) -> Any:
    return seeded(transformers.BertModel, transformers.BertConfig(**SIZES, **options))


def llama(**options: Any) -> Any:
    options = {"num_key_value_heads": 2, "pad_token_id": 0, **options}
    return seeded(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, **options))


def gpt2(**options: Any) -> Any:
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(**sizes, scale_attn_by_inverse_layer_idx=True, **options)
    return seeded(transformers.GPT2LMHeadModel, config)


def bart(**options: Any) -> Any:
    return seeded(transformers.BartForConditionalGeneration, transformers.BartConfig(**SEQ2SEQ, **options))


def marian(**options: Any) -> Any:
    config = transformers.MarianConfig(**SEQ2SEQ, max_position_embeddings=64, **options)
    return seeded(transformers.MarianMTModel, config)


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 64, "vocab_size": 50}
    return seeded(transformers.T5ForConditionalGeneration, transformers.T5Config(**sizes, decoder_start_token_id=0))


def seeded(kind: Any, config: Any) -> Any:
    """With weights large enough for attention to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                nn.init.normal_(parameter, std=0.2)
    model.tie_weights()
    return model


MODELS: dict[str, Callable] = {"bert": bert, "llama": llama, "gpt2": gpt2, "bart": bart, "marian": marian}
GENERATING = {name: make for name, make in MODELS.items() if name != "bert"}
TWO_SIDED = {name: make for name, make in MODELS.items() if name in ("bart", "marian")}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
each_generating = pytest.mark.parametrize("make", GENERATING.values(), ids=GENERATING)
each_side = pytest.mark.parametrize("side", ["left", "right", "none"])
each_implementation = pytest.mark.parametrize("implementation", ["sdpa", "eager"])


def batch(side: str = "left", length: int = 7) -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (3, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if side != "none":
        mask[0, :3] = mask[1, :1] = 0
        mask = mask if side == "left" else mask.flip(1)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def run(model: Any, given: dict[str, Tensor], **options: Any) -> Tensor:
    """Scores or states at real tokens; two-sided models decode what they read."""
    real = given["attention_mask"].bool()
    if model.config.is_encoder_decoder:
        target = {"decoder_input_ids": given["input_ids"], "decoder_attention_mask": given["attention_mask"]}
        return model(**given, **target, **options)[0][real]
    return model(**given, **options)[0][real]


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


@pytest.mark.parametrize("make", TWO_SIDED.values(), ids=TWO_SIDED)
def test_cross_attention_is_kept_where_the_mechanism_is_for_one_sequence(make: Callable):
    model, original = make(), make()
    conversion = hasten.convert(model, BandSpec(width=99, claims={"cross": False}))
    assert [name for name, _ in conversion.kept] == [f"model.decoder.layers.{i}.encoder_attn" for i in (0, 1)]
    assert all("cross-attention" in reason for _, reason in conversion.kept)
    torch.testing.assert_close(run(model, batch()), run(original, batch()), rtol=1e-5, atol=1e-5)


def test_cross_attention_within_gpt2_and_bert_is_known():
    names = []
    for model in (gpt2(add_cross_attention=True), bert(is_decoder=True, add_cross_attention=True)):
        names += [name for name, why in hasten.convert(model, BandSpec(claims={"cross": False})).kept if "cross" in why]
    assert names == [
        *(f"transformer.h.{i}.crossattention" for i in (0, 1)),
        *(f"encoder.layer.{i}.crossattention.self" for i in (0, 1)),
    ]


def test_cross_attention_that_was_not_known_as_such_is_refused_when_it_shows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hasten.conversion.huggingface._is_cross", lambda *_: False)
    model = bart()
    hasten.convert(model, BandSpec(claims={"cross": False}))
    given = batch("none")
    with pytest.raises(UserError, match=r"this is cross-attention \(4 queries, 7 keys\)"):
        model(**given, decoder_input_ids=given["input_ids"][:, :4])


class SomeCrossAttention(nn.Module):
    pass


class Other(nn.Module):
    def __init__(self, **facts: bool):
        super().__init__()
        vars(self).update(facts)


@pytest.mark.parametrize(
    ("name", "module", "causal", "expected"),
    [
        ("layers.0.attn2", SomeCrossAttention(), False, True),
        ("decoder.block.0.layer.1.EncDecAttention", Other(), False, True),
        ("layers.0.attn", Other(is_cross_attention=True), False, True),
        ("layers.0.attn", Other(is_decoder=True), False, True),
        ("layers.0.attn", Other(is_decoder=True), True, False),
        ("layers.0.attn", Other(is_decoder=False), False, False),
        ("layers.0.attn", Other(), False, False),
    ],
)
def test_cross_attention_is_told_by_class_name_and_role(name: str, module: nn.Module, causal: bool, expected: bool):
    assert huggingface._is_cross(name, module, causal) == expected


def test_padding_spread_over_queries_by_older_models_reaches_the_mechanism_as_keys():
    sizes = {**SIZES, "max_2d_position_embeddings": 8, "pad_token_id": 0}
    original = seeded(transformers.LayoutLMModel, transformers.LayoutLMConfig(**sizes))
    model = copy.deepcopy(original)
    hasten.convert(model, BandSpec(width=99, claims={"allowed": False}))
    for side in ("left", "right", "none"):
        torch.testing.assert_close(run(model, batch(side)), run(original, batch(side)), rtol=1e-5, atol=1e-5)


def test_what_changes_the_scores_in_a_call_is_refused():
    model = llama()
    hasten.convert(model, FullSpec())
    with pytest.raises(UserError, match="LlamaAttention uses softcap, which FullAttention does not take"):
        model(**batch(), softcap=30.0)


def test_causal_attention_is_kept_where_the_mechanism_cannot_be_causal():
    conversion = hasten.convert(llama(), BandSpec(claims={"causal": None}))
    assert conversion.replaced == ()
    assert {reason for _, reason in conversion.kept} == {"it is causal, which Band cannot be (traits.causal)"}
    assert len(hasten.convert(bert(), BandSpec(claims={"causal": None})).replaced) == 2


def test_a_mechanism_that_wants_queries_for_keys_is_kept_out_of_a_cache_of_keys():
    conversion = hasten.convert(llama(), BandSpec(claims={"shared_qk": True}))
    assert {reason for _, reason in conversion.kept} == {
        "Band wants one projection for queries and keys (traits.shared_qk)"
    }


def test_a_mechanism_without_a_place_in_a_cache_generates_without_one():
    model = llama()
    conversion = hasten.convert(model, BandSpec(claims={"suffix": False, "cross": False}))
    assert "generate with use_cache=False: Band reads no cache of earlier keys" in str(conversion)
    options = {"max_new_tokens": 3, "pad_token_id": 0, "do_sample": False}
    assert model.generate(**batch(), **options, use_cache=False).shape == (3, 10)
    with pytest.raises(UserError, match=r"Band reads no cache of earlier keys .* 1 queries and 8 keys"):
        model.generate(**batch(), **options)


@pytest.mark.parametrize("where", ["*", "*.1.*"])
def test_a_static_cache_is_refused(where: str):
    model = llama()
    hasten.convert(model, FullSpec(), where=where)
    with pytest.raises(UserError, match="use a dynamic cache"):
        model.generate(**batch(), max_new_tokens=3, pad_token_id=0, cache_implementation="static")


def test_queries_in_the_middle_of_a_static_cache_are_refused():
    model = llama()
    hasten.convert(model, FullSpec())
    with pytest.raises(UserError, match="use a dynamic cache"):
        model(batch("none")["input_ids"], cache=transformers.StaticCache(config=model.config, max_cache_len=12))


@pytest.mark.parametrize("given", [batch("left"), batch("none")], ids=["padded", "whole"])
def test_a_static_cache_of_a_decoder_that_is_not_converted_works(given: dict[str, Tensor]):
    model, original = bart(), bart()
    hasten.convert(model, FullSpec(), where="*encoder.layers.*.self_attn")
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    options["decoder_input_ids"] = torch.tensor([[2, 7, 9, 11]] * 3)
    assert torch.equal(model.generate(**given, **options), original.generate(**given, **options))


def test_a_transformers_too_old_is_a_reason_to_keep(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    conversion = hasten.convert(bert(), FullSpec())
    assert {reason for _, reason in conversion.kept} == {
        "transformers is 4.57; 5.18 or newer is needed, pip install 'hasten[hub]'"
    }


def test_relative_position_biases_are_a_reason_to_keep():
    model = t5()
    conversion = hasten.convert(model, FullSpec())
    assert conversion.replaced == ()
    assert len(conversion.kept) == 6
    assert all("bias of relative positions" in reason for _, reason in conversion.kept)
    assert {part.config._attn_implementation for part in (model, model.encoder, model.decoder)} == {"sdpa"}


def test_models_that_leave_causality_to_their_masks_are_kept():
    """NLLB's decoder says of its self-attention that it is not causal."""
    config = transformers.NllbMoeConfig(**SEQ2SEQ, num_experts=2)
    conversion = hasten.convert(seeded(transformers.NllbMoeForConditionalGeneration, config), FullSpec())
    assert conversion.replaced == ()
    assert all("has eager attention only" in reason for _, reason in conversion.kept)


def test_sliding_windows_are_kept():
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=3)
    conversion = hasten.convert(seeded(transformers.MistralForCausalLM, config), FullSpec())
    assert conversion.replaced == ()
    assert all("it reads a sliding window" in reason for _, reason in conversion.kept)


@each_side
@each_implementation
def test_only_the_full_layers_of_a_mixed_model_are_converted(side: str, implementation: str):
    options = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 2}
    config = transformers.Qwen2Config(**SIZES, use_sliding_window=True, **options, attn_implementation=implementation)
    original = seeded(transformers.Qwen2ForCausalLM, config)
    model = copy.deepcopy(original)
    conversion = hasten.convert(model, FullSpec())
    assert conversion.replaced == ("model.layers.1.self_attn",)
    assert conversion.kept == (("model.layers.0.self_attn", "it is a layer of another kind (sliding_attention)"),)
    torch.testing.assert_close(run(model, batch(side)), run(original, batch(side)), rtol=1e-5, atol=1e-5)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**batch(), **options), original.generate(**batch(), **options))


@each_side
def test_windows_on_both_sides_are_kept_beside_converted_layers(side: str):
    options = {"local_attention": 2, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0}
    original = seeded(transformers.ModernBertModel, transformers.ModernBertConfig(**SIZES, **options))
    model = copy.deepcopy(original)
    assert hasten.convert(model, FullSpec()).replaced == ("layers.1.attn",)
    torch.testing.assert_close(run(model, batch(side)), run(original, batch(side)), rtol=1e-5, atol=1e-5)


def test_capped_scores_and_sinks_are_kept():
    gemma = transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, attn_logit_softcapping=50.0)
    model = seeded(transformers.Gemma2ForCausalLM, gemma)
    assert all("softcap" in reason for _, reason in hasten.convert(model, FullSpec()).kept)
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = seeded(transformers.GptOssForCausalLM, transformers.GptOssConfig(**sizes))
    assert all("sinks" in reason for _, reason in hasten.convert(model, FullSpec()).kept)


def test_packed_sequences_stay_apart_or_are_refused():
    """Positions that start anew say that several texts stand in one row."""
    model, original = llama(), llama()
    conversion = hasten.convert(model, FullSpec())
    ids = batch("none")["input_ids"]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(3, 7)
    out = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(out, original(ids, position_ids=positions, use_cache=False).logits)
    assert not torch.allclose(out[:, 3:], model(ids).logits[:, 3:], atol=1e-3)
    conversion.restore()
    hasten.convert(model, BandSpec(claims={"allowed": False}))
    with pytest.raises(UserError, match="Band takes no mask with a pattern"):
        model(ids, position_ids=positions, use_cache=False)


def test_ready_made_masks_are_read_and_biases_refused():
    model, original = llama(), llama()
    hasten.convert(model, FullSpec())
    ids = batch("none")["input_ids"]
    allowed = torch.ones(3, 1, 7, 7, dtype=torch.bool).tril()
    allowed[:, :, 5:, 2] = False
    added = torch.zeros(3, 1, 7, 7).masked_fill(~allowed, torch.finfo(torch.float32).min)
    expected = original(ids, attention_mask=added).logits
    for mask in (allowed, added):
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="adds a bias to the scores"):
        model(ids, attention_mask=torch.full((3, 1, 7, 7), -0.5))


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
