"""What is chosen, kept, noted and reported, and what is an error."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import hasten
from conversion_mechanisms import Band, BandSpec
from hasten.attention import FullSpec, Place, SparseTransformerSpec
from hasten.attention.dropin import DropInAttention
from hasten.errors import UserError
from torch_models import D, H, S, T, decoder, encoder, run, states, whole


def without(**claims: Any) -> BandSpec:
    return BandSpec(claims=claims)


def test_cross_attention_is_kept_where_the_mechanism_is_for_one_sequence():
    model = whole()
    conversion = hasten.convert(model, without(cross=False))
    names = [f"decoder.layers.{i}.multihead_attn" for i in (0, 1)]
    assert [name for name, _ in conversion.kept] == names
    assert all("cross-attention, which Band does not do (traits.cross)" in why for _, why in conversion.kept)
    assert len(conversion.replaced) == 4
    run(model, True, causal=True)


def test_causal_attention_is_kept_where_the_mechanism_cannot_be_causal():
    conversion = hasten.convert(whole(), without(causal=None))
    assert [name for name, _ in conversion.kept] == [f"decoder.layers.{i}.self_attn" for i in (0, 1)]
    assert {why for _, why in conversion.kept} == {"it is causal, which Band cannot be (traits.causal)"}


def test_a_causal_mask_reaches_a_mechanism_that_takes_no_patterns():
    """torch hands its causal mask over as a matrix of 0 and -inf."""
    model = whole().eval()
    hasten.convert(model, without(allowed=False))
    run(model, True, causal=True)
    with pytest.raises(UserError, match="Band takes no mask with a pattern"):
        model(states(S), states(), tgt_mask=torch.eye(T, dtype=torch.bool))


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"n_heads": 2}, "Band was made for 2 heads, here are 4"),
        ({"external": 2}, "learnt tokens before the sequence"),
        ({"second_projections": True}, "projections of a second kind"),
        ({"unprojected": True}, "wants a layer without projections"),
    ],
)
def test_what_a_mechanism_needs_beyond_the_model_is_a_reason_to_keep(claims: dict, reason: str):
    model = encoder()
    conversion = hasten.convert(model, without(**claims))
    assert conversion.replaced == ()
    assert len(conversion.kept) == 2
    assert all(reason in why for _, why in conversion.kept)
    assert all(isinstance(layer.self_attn, nn.MultiheadAttention) for layer in model.layers)


def test_modules_that_cannot_be_replaced_are_kept_with_the_reason():
    model = nn.ModuleDict(
        {
            "bias": nn.MultiheadAttention(D, H, add_bias_kv=True),
            "zero": nn.MultiheadAttention(D, H, add_zero_attn=True),
            "wide": nn.MultiheadAttention(D, H, kdim=3),
            "good": nn.MultiheadAttention(D, H),
        }
    )
    conversion = hasten.convert(model, FullSpec())
    assert conversion.replaced == ("good",)
    assert [name for name, _ in conversion.kept] == ["bias", "zero", "wide"]
    assert "kdim 3" in dict(conversion.kept)["wide"]


def test_dropout_is_that_of_the_replaced_module_unless_the_spec_says_otherwise():
    for spec, expected in ((FullSpec(), 0.25), (FullSpec(dropout=0.5), 0.5)):
        model = encoder(dropout=0.25)
        hasten.convert(model, spec)
        assert [layer.self_attn.attention.dropout for layer in model.layers] == [expected] * 2


def test_what_changes_beside_the_mechanism_is_noted():
    conversion = hasten.convert(encoder(dropout=0.25), BandSpec(claims={"dropout": False}, parameters=5))
    texts = [text for _, text in conversion.notes]
    assert texts[0] == "weights are no longer dropped in training (share 0.25 before): Band cannot"
    assert texts[1] == "adds 5 parameters of its own, not trained yet"
    assert len(texts) == 4
    claims = {"needs": frozenset({"key"}), "causal": "value"}
    conversion = hasten.convert(decoder(), BandSpec(claims=claims), where="layers.0.self_attn")
    assert [text for _, text in conversion.notes] == [
        "Band lets later keys move what earlier queries read, though never later values (traits.causal)",
        "Band reads no queries: they are computed in vain",
    ]


def test_queries_serve_as_keys_where_the_mechanism_wants_one_projection():
    model, tied = encoder().eval(), encoder().eval()
    conversion = hasten.convert(model, BandSpec(width=99, claims={"shared_qk": True}))
    assert "takes the queries as keys" in str(conversion)
    with torch.no_grad():
        for layer in tied.layers:
            layer.self_attn.in_proj_weight[D : 2 * D] = layer.self_attn.in_proj_weight[:D]
            layer.self_attn.in_proj_bias[D : 2 * D] = layer.self_attn.in_proj_bias[:D]
    torch.testing.assert_close(run(model, True), run(tied, True))
    attention, x = model.layers[0].self_attn, states()
    assert attention(x, x, x.clone())[0].shape == x.shape
    with pytest.raises(UserError, match="one tensor as query and key"):
        attention(x, x.clone(), x)


def test_layers_that_take_turns_know_which_they_are():
    model = whole()
    hasten.convert(model, SparseTransformerSpec(stride=3, combine="layers"))
    for stack in (model.encoder, model.decoder):
        first, second = (str(layer.self_attn.attention.pattern) for layer in stack.layers)
        assert (first, second) == tuple(
            str(SparseTransformerSpec(stride=3, combine="layers").at(Place(layer=i)).build().pattern) for i in (0, 1)
        )
        assert first != second


def test_a_mechanisms_parameters_are_the_models_and_of_its_precision():
    model = encoder().double()
    hasten.convert(model, BandSpec(parameters=3))
    own = {name: p for name, p in model.named_parameters() if name.endswith("own")}
    assert list(own) == ["layers.0.self_attn.attention.own", "layers.1.self_attn.attention.own"]
    assert {p.dtype for p in own.values()} == {torch.float64}


class Fails(BandSpec):
    built = 0

    def build(self) -> Band:
        Fails.built += 1
        if Fails.built == 2:
            raise UserError("no second one")
        return super().build()


def test_nothing_changes_where_building_fails():
    model = encoder()
    before = list(model.modules())
    with pytest.raises(UserError, match="no second one"):
        hasten.convert(model, Fails())
    assert list(model.modules()) == before
    assert model.use_nested_tensor


def test_nothing_changes_where_putting_in_fails(monkeypatch: pytest.MonkeyPatch):
    model = encoder()
    before = list(model.modules())
    seen: list[nn.TransformerEncoder] = []

    def fail_the_second_time(encoder: nn.TransformerEncoder) -> None:
        seen.append(encoder)
        assert len(seen) < 2

    monkeypatch.setattr("hasten.conversion.modules._keep_padded", fail_the_second_time)
    with pytest.raises(AssertionError):
        hasten.convert(model, FullSpec())
    assert len(seen) == 2
    assert list(model.modules()) == before


@pytest.mark.parametrize(
    ("where", "replaced"),
    [
        ("encoder.layers.*.self_attn", ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]),
        (["decoder.layers.0.*", "encoder.layers.1.self_attn"], None),
        (lambda name, module: "decoder" in name and "multihead" in name, None),
        ("*", None),
    ],
)
def test_where_says_which(where: Any, replaced: list[str] | None):
    model = whole()
    names = [name for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    conversion = hasten.convert(model, FullSpec(), where=where)
    converted = [name for name, m in model.named_modules() if isinstance(m, DropInAttention)]
    assert sorted(conversion.replaced) == sorted(converted)
    assert sorted([*conversion.replaced, *(name for name, _ in conversion.kept)]) == sorted(names)
    if replaced is not None:
        assert converted == replaced
    else:
        assert len(converted) == {list: 3, str: 6}.get(type(where), 2)


def test_where_that_matches_nothing_names_what_is_close():
    model = whole()
    with pytest.raises(
        UserError,
        match=r"'encoder.layers.\*.self_atn' matches no .* close: encoder.layers.1.self_attn, encoder.layers.0",
    ):
        hasten.convert(model, FullSpec(), where=["decoder.*", "encoder.layers.*.self_atn"])
    with pytest.raises(UserError, match="where chose none of the attention modules encoder"):
        hasten.convert(model, FullSpec(), where=lambda name, module: False)
    with pytest.raises(UserError, match="empty list"):
        hasten.convert(model, FullSpec(), where=[])
    with pytest.raises(UserError, match="where is 3"):
        hasten.convert(model, FullSpec(), where=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="where holds 3"):
        hasten.convert(model, FullSpec(), where=[3])
    assert not any(isinstance(module, DropInAttention) for module in model.modules())


class OddAttention(nn.Module):
    pass


def test_a_model_without_attention_is_an_error_that_says_what_was_looked_for():
    with pytest.raises(UserError, match=r"no attention in Sequential; it looks for torch.nn.MultiheadAttention"):
        hasten.convert(nn.Sequential(nn.Linear(2, 2)), FullSpec())
    with pytest.raises(UserError, match="of OddAttention it does not know the inside"):
        hasten.convert(nn.Sequential(OddAttention()), FullSpec())


def test_a_module_that_is_the_model_itself_cannot_be_swapped_in_place():
    conversion = hasten.convert(nn.MultiheadAttention(D, H), FullSpec())
    assert "make a DropInAttention of it" in conversion.kept[0][1]


@pytest.mark.parametrize("spec", [FullSpec, "full", None, FullSpec().build()])
def test_what_is_no_spec_is_an_error(spec: Any):
    with pytest.raises(UserError, match="is no attention spec"):
        hasten.convert(encoder(), spec)


def test_what_is_no_module_is_an_error():
    with pytest.raises(UserError, match=r"got dict; give a torch\.nn\.Module"):
        hasten.convert({}, FullSpec())  # pyright: ignore[reportArgumentType]


def test_the_report_is_readable():
    model = whole()
    conversion = hasten.convert(model, without(cross=False, dropout=False))
    assert str(conversion).splitlines() == [
        "replaced by Band: 4",
        "  encoder.layers.0-1.self_attn",
        "  decoder.layers.0-1.self_attn",
        "kept: 2",
        "  decoder.layers.0-1.multihead_attn: it is cross-attention, which Band does not do (traits.cross)",
        "to know",
        "  encoder.layers.0-1.self_attn: weights are no longer dropped in training (share 0.1 before): Band cannot",
        "  decoder.layers.0-1.self_attn: weights are no longer dropped in training (share 0.1 before): Band cannot",
    ]


def test_ranges_of_layers_leave_out_what_is_not_there():
    from hasten.conversion.report import merge

    assert merge(["a.0.b", "a.1.b", "a.3.b", "c", "a.10.b", "x1.q", "0"]) == ["a.0-1,3,10.b", "c", "x1.q", "0"]


def test_neither_import_nor_conversion_of_torchs_layers_loads_transformers():
    code = (
        "import sys, torch, hasten\nfrom hasten.attention import FullSpec\n"
        "hasten.convert(torch.nn.TransformerEncoderLayer(8, 2), FullSpec())\n"
        "print('transformers' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "False\n"
