import sys
from pathlib import Path

import pytest
import torch

from hasten.data.tokenizer import EOS, Tokenizer
from hasten.errors import MissingExtra, UserError
from hasten.export import certificate
from hasten.export.ctranslate2 import build_spec, check_exportable, export
from hasten.export.engine import CTranslate2Model
from hasten.models.autoregressive import Autoregressive, AutoregressiveSpec
from hasten.models.ctc import CTCSpec
from hasten.nn.layout import lay_out

LINES = certificate.sentences()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(LINES, 500)


def build(tokenizer: Tokenizer, encoder: int = 2, decoder: int = 2, heads: int = 4) -> Autoregressive:
    """Random weights whose outputs depend on the source: drawn wide, norms and biases too."""
    torch.manual_seed(encoder + 10 * decoder)
    spec = AutoregressiveSpec(
        d_model=32, n_heads=heads, d_ff=48, encoder_layers=encoder, decoder_layers=decoder, dropout=0.0
    )
    model = spec.build(tokenizer.vocab_size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
        model.embedding.weight[EOS] *= 2  # so that outputs end before their limit
    return model


@pytest.mark.parametrize(("encoder", "decoder", "heads"), [(2, 2, 4), (3, 1, 8), (1, 2, 1)])
def test_exported_model_says_the_same_with_the_same_scores(tokenizer, tmp_path, encoder, decoder, heads):
    model = build(tokenizer, encoder, decoder, heads)
    export(model, tokenizer, tmp_path / "ct2")
    found = certificate.certify(model, tokenizer, tmp_path / "ct2", LINES[:25])
    assert found.valid, str(found)
    assert found.sentences == 25
    assert 0 < found.largest_difference < 1e-4


def test_outputs_of_the_compared_model_differ_from_sentence_to_sentence(tokenizer, tmp_path):
    model = build(tokenizer)
    peer = CTranslate2Model(export(model, tokenizer, tmp_path / "ct2"), tokenizer)
    said = {tuple(ids) for ids in peer.decode([tokenizer.encode(line) for line in LINES[:40]], limit=60)}
    assert len(said) > 5
    assert min(len(ids) for ids in said) < 60


def test_memory_layout_does_not_change_the_export(tokenizer, tmp_path):
    export(build(tokenizer), tokenizer, tmp_path / "rows")
    export(lay_out(build(tokenizer)), tokenizer, tmp_path / "columns")
    assert (tmp_path / "rows" / "model.bin").read_bytes() == (tmp_path / "columns" / "model.bin").read_bytes()


def test_a_wrong_normalisation_epsilon_fails_the_certificate(tokenizer, tmp_path):
    model = build(tokenizer)
    spec = build_spec(model, tokenizer.pieces())
    spec.config.layer_norm_epsilon = 1e-2
    spec.validate()
    spec.optimize(quantization="float32")
    spec.save(str(tmp_path))
    found = certificate.certify(model, tokenizer, tmp_path, LINES[:20])
    assert not found.valid
    assert str(found).startswith("NOT certified: sentence 1 ")


def test_a_certificate_over_nothing_is_not_valid(tokenizer, tmp_path):
    model = build(tokenizer)
    found = certificate.certify(model, tokenizer, export(model, tokenizer, tmp_path / "ct2"), ["", "  "])
    assert not found.valid
    assert "nothing to compare" in str(found)


def test_a_batch_says_what_each_sentence_says_alone(tokenizer, tmp_path):
    peer = CTranslate2Model(export(build(tokenizer), tokenizer, tmp_path / "ct2"), tokenizer)
    sources = [tokenizer.encode(line) for line in LINES[:12]]
    assert peer.decode(sources, limit=30) == [peer.decode([source], limit=30)[0] for source in sources]


def test_an_exact_length_is_kept(tokenizer, tmp_path):
    peer = CTranslate2Model(export(build(tokenizer), tokenizer, tmp_path / "ct2"), tokenizer)
    assert [len(ids) for ids in peer.decode([tokenizer.encode(line) for line in LINES[:3]], exactly=9)] == [9, 9, 9]


@pytest.mark.parametrize("layout", [lambda model: model, lay_out])
def test_quantising_leaves_our_own_weights_alone(tokenizer, tmp_path, layout):
    model = layout(build(tokenizer))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export(model, tokenizer, tmp_path / "int8", quantization="int8")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_quantised_weights_are_smaller_and_agreement_is_counted(tokenizer, tmp_path):
    model = build(tokenizer)
    whole = export(model, tokenizer, tmp_path / "float32") / "model.bin"
    small = export(model, tokenizer, tmp_path / "int8", quantization="int8") / "model.bin"
    # The table of positions stays in float32; in so narrow a model it is most of the file.
    positions = 2048 * 32 * 4
    assert small.stat().st_size - positions < 0.5 * (whole.stat().st_size - positions)
    same, total = certificate.agreement(model, tokenizer, tmp_path / "int8", LINES[:10])
    assert total == 10
    assert 0 <= same <= 10


def test_a_one_pass_model_is_refused(tokenizer):
    spec = CTCSpec(d_model=16, n_heads=2, d_ff=16)
    with pytest.raises(UserError, match=r"kind 'ctc'.*holds autoregressive"):
        check_exportable(spec.build(tokenizer.vocab_size))


def test_layers_of_another_mechanism_are_refused(tokenizer):
    model = build(tokenizer)

    class Other:
        kind = "kernel"

    object.__setattr__(model.spec, "decoder_attention", (Other(),))
    with pytest.raises(UserError, match="decoder_attention of kind kernel"):
        check_exportable(model)


def test_layers_that_share_attention_are_refused(tokenizer):
    spec = AutoregressiveSpec(d_model=16, n_heads=2, d_ff=16, encoder_layers=1, decoder_layers=2, cross_sharing=(1, 1))
    with pytest.raises(UserError, match=r"cross_sharing = \[1, 1\]: .* of its own in every layer"):
        check_exportable(spec.build(tokenizer.vocab_size))


def test_a_directory_in_use_is_kept(tokenizer, tmp_path):
    model = build(tokenizer)
    out = export(model, tokenizer, tmp_path / "ct2")
    with pytest.raises(UserError, match="--force"):
        export(model, tokenizer, out)
    export(model, tokenizer, out, force=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not overwritten"):
        export(model, tokenizer, tmp_path / "mine", force=True)
    with pytest.raises(UserError, match="is a file"):
        export(model, tokenizer, tmp_path / "mine" / "thesis.txt", force=True)
    (out / "thesis.txt").write_text("more of it")
    with pytest.raises(UserError, match="not overwritten"):
        export(model, tokenizer, out, force=True)


def test_an_export_that_was_cut_off_can_be_replaced(tokenizer, tmp_path):
    out = export(build(tokenizer), tokenizer, tmp_path / "ct2")
    (out / "model.bin").unlink()
    export(build(tokenizer), tokenizer, out, force=True)
    assert (out / "model.bin").exists()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_an_export_that_fails_half_way_changes_nothing(tokenizer, tmp_path, monkeypatch, kind):
    out = export(build(tokenizer), tokenizer, tmp_path / "ct2")
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(*_):
        raise kind(28, "No space left on device")

    monkeypatch.setattr(Tokenizer, "save", fail)
    for directory, force in ((out, True), (tmp_path / "new" / "y", False)):
        with pytest.raises(UserError if kind is OSError else kind, match="No space left"):
            export(build(tokenizer), tokenizer, directory, force=force)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_an_unknown_quantization_is_named(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"'int3' is unknown.*int8"):
        export(build(tokenizer), tokenizer, tmp_path / "ct2", quantization="int3")
    assert not (tmp_path / "ct2").exists()


def test_a_missing_engine_names_its_extra(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(MissingExtra, match=r"hasten\[export\]"):
        export(build(tokenizer), tokenizer, tmp_path / "ct2")


def test_the_tokenizer_travels_with_the_export(tokenizer, tmp_path):
    out = export(build(tokenizer), tokenizer, tmp_path / "ct2")
    assert Tokenizer.load(out / "tokenizer.model").fingerprint == tokenizer.fingerprint
    assert "suppress_sequences" in Path(out / "README.md").read_text(encoding="utf-8")


def test_there_are_two_hundred_sentences_to_certify_on():
    assert len(set(LINES)) == 200
