"""Marian checkpoints against `transformers`, which made them."""

import io
import json
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import hasten
from hasten.cli import main
from hasten.data.batch import pair_batch, source_batch
from hasten.data.marian_tokenizer import MarianTokenizer
from hasten.data.tokenizer import BOS, EOS, PAD, SPECIAL_IDS, UNK, Tokenizer
from hasten.errors import UserError
from hasten.importing.marian import import_marian
from hasten.training import checkpoint
from hasten.training.ctranslate2_teacher import CTranslate2Teacher
from hasten.training.teachers import ModelTeacher

transformers = pytest.importorskip("transformers")
FIRST = "model.encoder.layers.0.self_attn"
SMALL = {"d_model": 32, "ffn": 48, "layers": 2, "heads": 4}
ODD = [
    "", " ", "a", "  two  spaces ", "tab\there", "漢字 and ka", "e\u0301", "ﬁne", "\u00a0", "<s>", "▁ka mo", "😀",
    "\u200b", ">>deu<< ka mo ti", ">>xyz<< ka", ">>deu<<", ">>ka mo", "ka >>deu<< mo", "ka\u2028mo", "%&$§", "01 4.6",
]  # fmt: skip


def sentencepiece_model(lines: list[str], size: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=size, minloglevel=2, bos_id=-1, pad_id=-1
    )
    return model.getvalue()


def make(directory: Path, words: list[str], **changes: object) -> Path:
    """A checkpoint directory as OPUS-MT has them: two tokenizers, one vocabulary, random weights."""
    directory.mkdir()
    sides = {"source.spm": words, "target.spm": [line[::-1] for line in words]}
    pieces: list[str] = ["</s>", "<unk>"]
    for i, (name, lines) in enumerate(sides.items()):
        (directory / name).write_bytes(sentencepiece_model(lines, 150 + 30 * i))
        processor = sentencepiece.SentencePieceProcessor(model_file=str(directory / name))
        pieces += [processor.id_to_piece(j) for j in range(processor.get_piece_size())]
    pieces = [*dict.fromkeys(pieces), ">>deu<<"]
    pieces.remove("▁mo") if "▁mo" in pieces else None  # one that only the SentencePiece model knows
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "<pad>"])}
    (directory / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    sizes = {**SMALL, **changes}
    pad = vocabulary["<pad>"]
    config = transformers.MarianConfig(
        vocab_size=len(vocabulary), d_model=sizes["d_model"],
        encoder_layers=sizes["layers"], decoder_layers=sizes["layers"],
        encoder_ffn_dim=sizes["ffn"], decoder_ffn_dim=sizes["ffn"],
        encoder_attention_heads=sizes["heads"], decoder_attention_heads=sizes["heads"],
        activation_function=sizes.get("activation", "swish"), scale_embedding=sizes.get("scale", True),
        pad_token_id=pad, eos_token_id=0, decoder_start_token_id=pad, forced_eos_token_id=None,
        max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" not in name and "shared" not in name:
                parameter += 0.1 * torch.randn_like(parameter)
        model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
        model.final_logits_bias[0, 0] += 3  # so that outputs end
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> Path:
    return make(tmp_path_factory.mktemp("marian") / "opus", words)


@pytest.fixture(scope="module")
def run(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_marian(original, tmp_path_factory.mktemp("imported") / "run")


def their_order(directory: Path, tokenizer: Tokenizer) -> Tensor:
    """Marian's id for every id of ours."""
    vocabulary = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    special = {PAD: vocabulary["<pad>"], BOS: vocabulary["<pad>"], EOS: vocabulary["</s>"], UNK: vocabulary["<unk>"]}
    return torch.tensor([special.get(i, vocabulary.get(piece, 0)) for i, piece in enumerate(tokenizer.pieces())])


def their_tokenizer(directory: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends a package that it never calls
        return transformers.MarianTokenizer.from_pretrained(directory)


@pytest.mark.parametrize(
    "changes",
    [{"d_model": 512, "ffn": 2048, "layers": 6, "heads": 8}, {"activation": "relu", "scale": False}],
    ids=["real shape", "relu without scaling"],
)
def test_logits_and_greedy_outputs_are_those_of_transformers(words, tmp_path, changes):
    directory = make(tmp_path / "opus", words, **changes)
    theirs = transformers.MarianMTModel.from_pretrained(directory).eval()
    translator = hasten.load(import_marian(directory, tmp_path / "run"))
    order, model = their_order(directory, translator.tokenizer), translator.model
    sources = [translator.tokenizer.encode(line) for line in words[:5]]
    pairs = [
        (source, translator.tokenizer.encode_target(line)) for source, line in zip(sources, words[5:], strict=False)
    ]
    batch = pair_batch(pairs)
    ordinary = [i for i in range(len(order)) if i in (UNK, EOS, PAD) or i not in SPECIAL_IDS]
    with torch.inference_mode():
        states, _, real = model._forced(batch)
        inputs = torch.nn.functional.pad(batch.target, (1, 0), value=BOS)
        expected = theirs(
            input_ids=order[batch.source], attention_mask=batch.source_mask.long(), decoder_input_ids=order[inputs]
        ).logits
        own = model.logits(states)[real]
        torch.testing.assert_close(own[:, ordinary], expected[real][:, order[ordinary]], atol=1e-4, rtol=0)
        torch.testing.assert_close(
            own.log_softmax(-1)[:, ordinary], expected[real].log_softmax(-1)[:, order[ordinary]], atol=1e-4, rtol=0
        )
        said = set()
        for source, line in zip(sources, words, strict=False):
            ids, mask = source_batch([source])
            generated = theirs.generate(
                order[ids], attention_mask=mask.long(), num_beams=1, do_sample=False, max_length=None,
                max_new_tokens=2 * ids.shape[1] + 20, suppress_tokens=[int(order[PAD]), int(order[UNK])],
            )  # fmt: skip
            [own_ids] = translator.trace(line)[-1].tokens.tolist()
            assert order[own_ids].tolist() == generated[0, 1:].tolist()
            said.add(tuple(own_ids))
    assert len(said) > 1


def test_text_becomes_the_ids_that_their_tokenizer_gives(original: Path, run: Path, words: list[str]):
    theirs, own = their_tokenizer(original), Tokenizer.load(run / checkpoint.TOKENIZER)
    order = their_order(original, own)
    assert isinstance(own, MarianTokenizer)
    for line in [*words[:100], *ODD]:
        if line == "<s>":  # control symbols in a text are text to us
            continue
        assert [*order[own.encode(line)].tolist(), 0] == theirs(line).input_ids, line
        assert [*order[own.encode_target(line)].tolist(), 0] == theirs(text_target=line).input_ids, line
        ids = own.encode_target(line)
        assert own.decode(ids) == theirs.decode(order[ids].tolist(), skip_special_tokens=True), line
    assert any(UNK in own.encode(line) for line in ODD)


def test_no_text_becomes_a_special_id_but_the_unknown(run: Path):
    own = Tokenizer.load(run / checkpoint.TOKENIZER)
    for line in ["<pad>", "</s>", "a</s>b <unk> <mask> <s>", "<blank>"]:
        assert not set(own.encode(line)) & set(SPECIAL_IDS) - {UNK}


def test_a_lone_surrogate_is_refused(run: Path):
    with pytest.raises(UserError, match="lone surrogate"):
        Tokenizer.load(run / checkpoint.TOKENIZER).encode("a\ud800")


def test_translations_are_text_greedily_and_by_beam(run: Path, words: list[str]):
    translator = hasten.load(run)
    greedy, beam = (translator.translate(words[:20], beam=width) for width in (1, 3))
    for lines in (greedy, beam):
        assert len(set(lines)) > 3
        assert not any(special in line for line in lines for special in ("<pad>", "<unk>", "</s>", "<s>", "⁇"))
    for found in translator.candidates(words[:5], beam=3, n_best=3):
        assert len({candidate.text for candidate in found}) > 1
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)


def test_drafts_change_no_translation(run: Path, words: list[str]):
    translator = hasten.load(run)
    assert translator.translate(words[:10], draft=translator) == translator.translate(words[:10])


def hasten_says(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["hasten", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_an_imported_model_translates_and_distils(original: Path, tmp_path, words, monkeypatch):
    run, source = tmp_path / "run", tmp_path / "source"
    source.write_text("".join(line + "\n" for line in words[:6]), encoding="utf-8")
    assert hasten_says(monkeypatch, "import", "marian", original, "--out", run) == 0
    translate = ("translate", "--model", run, "--beam", 2, "--input", source, "--output", tmp_path / "translated")
    assert hasten_says(monkeypatch, *translate) == 0
    distil = ("distill", "--teacher", run, "--src", source, "--out", tmp_path / "distilled", "--beam", 2)
    assert hasten_says(monkeypatch, *distil, "--workers", 1) == 0
    translated = (tmp_path / "translated").read_text(encoding="utf-8").splitlines()
    assert ModelTeacher(str(run), beam=2).ready().translate(words[:6]) == translated
    distilled = (tmp_path / "distilled").read_text(encoding="utf-8").splitlines()
    assert all(line in ("", one) for line, one in zip(distilled, translated, strict=True))
    assert hasten_says(monkeypatch, "import", "marian", original, "--out", run) == 2
    assert hasten_says(monkeypatch, "import", "marian", original, "--out", run, "--force") == 0


def without(name: str):
    return lambda directory: (directory / name).unlink()


def config(**changes: object):
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")

    return change


def weights(change):
    def changed(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return changed


def pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def text(name: str, content: str):
    return lambda directory: (directory / name).write_text(content, encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shutil.rmtree, "is no directory; give that of a Marian checkpoint"),
        (without("config.json"), "cannot read .*config.json: No such file"),
        (without("source.spm"), "cannot read .*source.spm: No such file"),
        (without("target.spm"), "cannot read .*target.spm: No such file"),
        (without("vocab.json"), "cannot read .*vocab.json: No such file"),
        (without("model.safetensors"), "cannot read .*model.safetensors: No such file"),
        (pickled, r"pytorch_model.bin is a pickle, .* convert it: from transformers import .*save_pretrained"),
        (text("config.json", "{"), "config.json is no JSON"),
        (text("source.spm", "nothing"), "source.spm is damaged: it is not a SentencePiece model"),
        (text("model.safetensors", "nothing"), "model.safetensors is damaged or not a safetensors file"),
        (text("vocab.json", '{"a": 0, "b": 2}'), "vocab.json does not number .* pieces from 0"),
        (config(model_type="bart"), "is no Marian checkpoint: model_type .* is 'bart'"),
        (config(activation_function="gelu"), "activation_function is 'gelu'; supported is swish or relu"),
        (config(share_encoder_decoder_embeddings=False), "_decoder_embeddings is False; supported is True"),
        (config(tie_word_embeddings=False), "tie_word_embeddings is False; supported is True"),
        (config(decoder_ffn_dim=96), "decoder_ffn_dim is 96; supported is 48"),
        (config(decoder_attention_heads=8), "decoder_attention_heads is 8; supported is 4"),
        (config(encoder_attention_heads=5, decoder_attention_heads=5), "d_model 32 cannot be cut into 5 heads"),
        (config(normalize_before=True), "normalize_before is True; supported is False"),
        (config(d_model="wide"), "d_model is 'wide', needed a whole number"),
        (config(pad_token_id=10**6), "pad_token_id is 1000000, beyond"),
        (config(d_model=10**6), "has shape .* needs"),
        (config(encoder_layers=10**9), "encoder_layers is 1000000000, needed a whole number, 1 to 1000"),
        (config(vocab_size=10**9, decoder_vocab_size=None), "does not number 1000000000 pieces from 0"),
        (text("config.json", "[" * 10**5), "config.json is no JSON"),
        (text("source.spm", ""), "source.spm is empty"),
        (text("target.spm", ""), "target.spm is empty"),
        (
            weights(lambda tensors: tensors["model.encoder.layers.0.fc1.bias"].fill_(torch.nan)),
            "fc1.bias holds numbers that are not finite",
        ),
        (
            weights(lambda tensors: tensors.update({"model.shared.weight": torch.ones(9, 32, dtype=torch.int8)})),
            "model.shared.weight is of type int8; supported are weights in floating point",
        ),
        (config(activation_function=["relu"]), r"activation_function is \['relu'\]; supported is swish or relu"),
        (
            weights(lambda tensors: tensors.update({f"{FIRST}.q_proj.weight": torch.ones(9, 9)})),
            f"the projections of {FIRST} differ in their weight's shape",
        ),
        (config(eos_token_id=1), "must differ"),
        (config(encoder_layers=1), "is unknown to a Marian model of the layers"),
        (config(decoder_layers=3), "model.decoder.layers.2.* is missing"),
        (weights(lambda tensors: tensors.pop("model.encoder.layers.0.fc1.bias")), "fc1.bias is missing"),
        (
            weights(lambda tensors: tensors.update({"model.encoder.embed_positions.weight": torch.ones(9, 32)})),
            "embed_positions.weight is no table of sinusoids",
        ),
        (
            weights(lambda tensors: tensors.update({"lm_head.weight": torch.ones(9, 32)})),
            "different embeddings; supported is one table",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_said_in_one_line(original: Path, tmp_path: Path, damage, said: str):
    directory = Path(shutil.copytree(original, tmp_path / "opus"))
    damage(directory)
    with pytest.raises(UserError, match=said) as refused:
        import_marian(directory, tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_damaged_tokenizer_file_is_refused(run: Path, tmp_path: Path):
    whole = (run / checkpoint.TOKENIZER).read_bytes()
    for damaged in (whole[:500], b"PK", whole.replace(b"target.spm", b"tirget.spm")):
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(UserError, match="damaged"):
            Tokenizer.load(tmp_path / "tokenizer.model")


def test_a_conversion_for_ctranslate2_teaches_the_same(original: Path, run: Path, tmp_path: Path, words: list[str]):
    converters = pytest.importorskip("ctranslate2").converters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converters.TransformersConverter(str(original), copy_files=["source.spm", "target.spm"]).convert(
            str(tmp_path / "ct2")
        )
    teacher = CTranslate2Teacher(f"ctranslate2:{tmp_path / 'ct2'}", beam=1).ready()
    lines = [*words[:10], "漢字", ""]
    said = ModelTeacher(str(run), beam=1).ready().translate(lines)
    assert teacher.translate(lines) == said
    assert len(set(said)) > 3


def test_a_checkpoint_is_not_written_over(original: Path, tmp_path: Path):
    directory = Path(shutil.copytree(original, tmp_path / "opus"))
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    (tmp_path / "link").symlink_to(directory)
    for out in (directory, tmp_path / "link"):
        with pytest.raises(UserError, match="is the checkpoint itself; choose another --out"):
            import_marian(directory, out, force=True)
    other = Path(shutil.copytree(original, tmp_path / "other"))
    with pytest.raises(UserError, match="holds something other than a run; choose another --out"):
        import_marian(directory, other, force=True)
    for place in (directory, other):
        assert {path.name: path.read_bytes() for path in place.iterdir()} == before
