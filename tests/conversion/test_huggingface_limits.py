"""What is kept or refused of Hugging Face models, and which masks reach a mechanism."""

import copy
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hasten
from conversion_mechanisms import BandSpec
from hasten.attention import FullSpec
from hasten.conversion import huggingface
from hasten.errors import UserError
from huggingface_models import (
    SEQ2SEQ,
    SIZES,
    TWO_SIDED,
    bart,
    batch,
    bert,
    each_implementation,
    each_side,
    gpt2,
    llama,
    run,
    seeded,
    t5,
    transformers,
)


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
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
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
