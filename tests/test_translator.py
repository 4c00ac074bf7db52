import dataclasses
import io
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hasten
from hasten import UserError
from hasten.data.tokenizer import Tokenizer
from hasten.training import checkpoint
from hasten.translator import LineTooLong, Translator, load

KINDS = ["autoregressive", "ctc", "dag", "refinement", "mask_predict", "nat"]
LINES = [
    "kamo ti.",
    "",
    "lunsch re, mo!",
    "   ",
    "ö",
    "tire tire tire tire tire tire",
    "\u2581 \x00 😀\ue000",
    "kamo ti.",
]


@pytest.fixture(scope="module", params=KINDS)
def translator(request: pytest.FixtureRequest, tiny_run) -> Translator:
    return load(tiny_run(request.param))


@pytest.fixture
def run(tiny_run, tmp_path: Path) -> Path:
    """A run directory to damage."""
    return Path(shutil.copytree(tiny_run("autoregressive"), tmp_path / "run"))


def refuse(run: Path, what: str) -> None:
    with pytest.raises(UserError, match=what) as raised:
        load(run)
    assert "\n" not in str(raised.value)


# Lines


def test_a_line_translates_alone_as_in_any_batch_and_order(translator: Translator):
    alone = [translator.translate([line])[0] for line in LINES]
    assert any(alone)
    for batch_tokens in (1, 30, 4096):
        assert translator.translate(LINES, batch_tokens=batch_tokens) == alone
    assert translator.translate(LINES[::-1]) == alone[::-1]


def test_a_line_has_the_same_candidates_in_any_batch(translator: Translator):
    alone = [translator.candidates([line], beam=3, n_best=3)[0] for line in LINES]
    for together, expected in zip(translator.candidates(LINES, beam=3, n_best=3), alone, strict=True):
        assert [one.text for one in together] == [one.text for one in expected]
        assert [one.score for one in together] == pytest.approx([one.score for one in expected], abs=1e-4)


def test_lines_without_text_stay_empty(translator: Translator):
    assert translator.translate(["", "  ", "\t", "\u2003"]) == [""] * 4
    assert translator.translate([]) == []
    [[candidate]] = translator.candidates([" "], beam=2, n_best=2)
    assert (candidate.text, candidate.score, candidate.log_prob) == ("", 0.0, 0.0)


def test_white_space_around_a_line_does_not_count(translator: Translator):
    assert translator.translate(["  kamo ti \r"]) == translator.translate(["kamo ti"])


def test_a_translation_is_one_line(translator: Translator, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: " a\nb\r\nc ")
    assert translator.translate(["kamo"]) == ["a b  c"]


def test_one_string_in_place_of_lines_is_refused(translator: Translator):
    with pytest.raises(UserError, match="list of lines"):
        translator.translate("kamo")


@pytest.mark.parametrize(
    "lines", [b"kamo", None, 5, {"kamo"}, {"kamo": 1}, ["kamo", None], [b"kamo"], ["kamo", 3], [["kamo"]]], ids=str
)
def test_what_is_no_list_of_strings_is_refused(translator: Translator, lines):
    with pytest.raises(UserError, match="lines"):
        translator.translate(lines)


def test_lines_may_come_from_anything_that_has_an_order(translator: Translator):
    expected = translator.translate(LINES)
    assert translator.translate(iter(LINES)) == translator.translate(tuple(LINES)) == expected
    assert translator.translate(np.array(["kamo ti"])) == translator.translate(["kamo ti"])


def test_a_model_in_training_is_refused(tiny_run):
    translator = load(tiny_run("ctc"))
    translator.model.train()
    with pytest.raises(UserError, match="eval"):
        translator.translate(["kamo"])


# Candidates


def test_the_first_candidate_is_the_translation(translator: Translator):
    for beam in (1, 3):
        first = [found[0].text for found in translator.candidates(LINES, beam=beam)]
        assert first == translator.translate(LINES, beam=beam)


def test_candidates_differ_and_come_best_first(translator: Translator):
    for found in translator.candidates(LINES, beam=5, n_best=5):
        assert 1 <= len(found) <= 5
        assert len({one.text for one in found}) == len(found)
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
        assert all(one.log_prob <= 0 for one in found)


def test_a_score_is_the_mean_over_what_was_said(translator: Translator):
    [[candidate]] = translator.candidates(["kamo ti"])
    said = translator.trace("kamo ti")[-1].scores[0]
    assert candidate.log_prob == pytest.approx(float(said.sum()), abs=1e-4)
    assert candidate.score == pytest.approx(float(said.mean()), abs=1e-4)
    assert candidate.score < 0


def test_a_wider_beam_finds_nothing_less_probable_than_greedy_here(tiny_run):
    translator = load(tiny_run("autoregressive"))
    [[greedy]], [[wide]] = translator.candidates(["kamo ti"]), translator.candidates(["kamo ti"], beam=8)
    assert wide.score >= greedy.score - 1e-6


def test_a_model_without_a_beam_search_says_so(tiny_run):
    translator = load(tiny_run("ctc"))
    translator.model.__class__ = type("Plain", (type(translator.model),), {"candidates": None})
    assert translator.translate(["kamo"])
    with pytest.raises(UserError, match="no beam search"):
        translator.translate(["kamo"], beam=2)


@pytest.mark.parametrize(
    "options", [{"beam": 0}, {"n_best": 2}, {"beam": 2, "n_best": 3}, {"batch_tokens": 0}, {"on_long": "cut"}], ids=str
)
def test_options_out_of_range_are_refused(translator: Translator, options: dict):
    with pytest.raises(UserError):
        translator.candidates(["kamo"], **options)


# Long lines


@pytest.fixture
def narrow(translator: Translator) -> Translator:
    return dataclasses.replace(translator, max_source_tokens=16)


def test_a_long_line_is_the_translations_of_its_parts(narrow: Translator):
    sentences = ["kamo ti re mo.", "lunsch do fi!", "pe zu tire?"]
    parts = narrow.translate(sentences)
    assert narrow.translate([" ".join(sentences)]) == [" ".join(parts)]


def test_no_part_is_longer_than_the_model_takes(narrow: Translator, monkeypatch: pytest.MonkeyPatch):
    widths = []
    encode = type(narrow.model).encode
    monkeypatch.setattr(
        type(narrow.model), "encode", lambda self, ids, mask: widths.append(ids.shape[1]) or encode(self, ids, mask)
    )
    assert narrow.translate(["kamo " * 300, "x" * 200, "😀" * 30 + "\ue000" * 30])
    assert max(widths) <= 16 + 1


def test_a_line_of_five_thousand_words_comes_out_whole(tiny_run):
    translator = load(tiny_run("ctc"))
    line = "kamo ti re " * 1666
    n_parts = {int(row) for frame in translator.trace(line) for row in frame.rows}
    assert len(n_parts) * translator.max_source_tokens >= len(translator.tokenizer.encode(line.strip()))
    assert len(translator.translate([line])[0]) > 1000


def test_the_longest_line_learnt_from_is_the_longest_translated_whole(tiny_run):
    translator = load(tiny_run("ctc"))
    assert translator.spec is not None
    assert translator.max_source_tokens == translator.spec.data.max_tokens == 200


def test_a_long_line_can_be_refused_with_its_number(narrow: Translator):
    with pytest.raises(LineTooLong, match="line 3 has") as raised:
        narrow.translate(["kamo", "ti", "kamo " * 300], on_long="error")
    assert raised.value.index == 2
    assert "line 12 has" in str(raised.value.counted_from(10))


def test_candidates_of_a_long_line_combine_those_of_its_parts(narrow: Translator):
    sentences = ["kamo ti re mo lunsch.", "lunsch do fi kamo!"]
    n_tokens = [len(narrow.tokenizer.encode(text)) for text in (*sentences, " ".join(sentences))]
    assert max(n_tokens[:2]) <= narrow.max_source_tokens < n_tokens[2]
    first, second = narrow.candidates(sentences, beam=3, n_best=3)
    [joined] = narrow.candidates([" ".join(sentences)], beam=3, n_best=3)
    pairs = sorted(((a.score + b.score) / 2 for a in first for b in second), reverse=True)
    assert [one.score for one in joined] == pytest.approx(pairs[:3], abs=1e-4)
    assert joined[0].text == f"{first[0].text} {second[0].text}".strip()
    assert joined[0].log_prob == pytest.approx(first[0].log_prob + second[0].log_prob, abs=1e-3)


def test_a_limit_below_one_character_is_refused(translator: Translator):
    with pytest.raises(UserError, match="max_source_tokens"):
        dataclasses.replace(translator, max_source_tokens=4)


# Frames


@pytest.mark.parametrize("line", ["kamo ti re.", "kamo ti re mo. lunsch do fi! pe zu tire?", "", " "])
def test_the_last_frame_reads_as_the_translation(narrow: Translator, line: str):
    assert narrow.read(narrow.trace(line)) == narrow.translate([line])[0]


# Loading


def test_a_model_loads_by_directory_path_or_text(tiny_run):
    directory = tiny_run("ctc")
    assert hasten.load(str(directory)).translate(LINES) == hasten.load(directory).translate(LINES)
    assert hasten.load(directory).directory == directory


@pytest.mark.parametrize(
    ("file", "said"),
    [("hasten.json", "for ONNX Runtime: translate with it by --runtime onnx"), ("model.bin", "for CTranslate2")],
)
def test_an_export_is_told_from_a_run(tmp_path: Path, file: str, said: str):
    (tmp_path / file).touch()
    with pytest.raises(UserError, match=f"is no run directory but an export {said}"):
        hasten.load(tmp_path)


def test_a_model_loads_from_the_hub(tiny_run, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    asked = []

    def snapshot_download(repo: str, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(tiny_run("ctc"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hasten.load("someone/en-de").translate(["kamo"]) == hasten.load(tiny_run("ctc")).translate(["kamo"])
    assert [repo for repo, _ in asked] == ["someone/en-de"]
    assert not any("*" in pattern or "bin" in pattern or "py" in pattern.split(".") for pattern in asked[0][1])


def test_loading_leaves_the_random_numbers_alone(tiny_run):
    before = torch.get_rng_state()
    load(tiny_run("ctc"))
    assert torch.equal(torch.get_rng_state(), before)


def test_half_precision_weights_are_computed_with_in_single(run: Path, tokenizer: Tokenizer):
    weights = load_file(run / "model.safetensors")
    checkpoint.save_weights(run / "model.safetensors", {n: t.half() for n, t in weights.items()}, tokenizer)
    translator = load(run)
    assert {parameter.dtype for parameter in translator.model.parameters()} == {torch.float32}
    assert translator.translate(["kamo"])


def test_importing_hasten_imports_nothing_heavy():
    code = "import sys, hasten; assert 'torch' not in sys.modules; print(hasten.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hasten.__version__


def test_public_names_exist_and_others_do_not():
    assert {"load", "Translator", "Candidate", "UserError", "__version__"} <= set(dir(hasten))
    assert all(getattr(hasten, name) for name in hasten.__all__)
    with pytest.raises(AttributeError):
        _ = hasten.nonsense  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["nowhere", "./no/such/dir", "/no/such"])
def test_a_name_that_leads_nowhere_is_one_line(name: str):
    with pytest.raises(UserError, match="no model"):
        load(name)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:x", "meta", ""])
def test_a_device_that_is_not_there_is_one_line(run: Path, device: str):
    with pytest.raises(UserError, match="device") as raised:
        load(run, device)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["config.toml", "tokenizer.model", "model.safetensors"])
def test_a_missing_file_is_named(run: Path, name: str):
    (run / name).unlink()
    refuse(run, f"{name}.*[nN]o such file")


@pytest.mark.parametrize("name", ["config.toml", "tokenizer.model", "model.safetensors"])
def test_a_directory_in_place_of_a_file_is_one_line(run: Path, name: str):
    (run / name).unlink()
    (run / name).mkdir()
    refuse(run, name)


@pytest.mark.parametrize("name", ["config.toml", "tokenizer.model", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(run: Path, name: str):
    (run / name).unlink()
    os.mkfifo(run / name)
    refuse(run, f"{name}: it is no regular file")


@pytest.mark.parametrize("name", [None, 5, b"x", "", "a" * 5000])
def test_a_name_that_can_be_none_is_one_line(name):
    with pytest.raises(UserError, match="no model"):
        load(name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beam", [1, 3])
def test_weights_that_overflow_say_so_instead_of_nothing(tiny_run, tokenizer, tmp_path: Path, kind: str, beam: int):
    run = Path(shutil.copytree(tiny_run(kind), tmp_path / "run"))
    change_weights(run, tokenizer, "encoder.norm.weight", torch.full((32,), 3e38))
    with pytest.raises(UserError, match="not numbers"):
        load(run).translate(["kamo ti", "re"], beam=beam)


@pytest.mark.parametrize("name", ["tokenizer.model", "model.safetensors"])
@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, 0.5, 0.999])
def test_a_cut_file_is_one_line(run: Path, name: str, keep: float):
    whole = (run / name).read_bytes()
    (run / name).write_bytes(whole[: keep if isinstance(keep, int) else int(len(whole) * keep)])
    refuse(run, "tokenizer" if name.startswith("tokenizer") else "damaged")


@pytest.mark.parametrize("name", ["tokenizer.model", "model.safetensors", "config.toml"])
def test_a_file_of_noise_is_one_line(run: Path, name: str):
    (run / name).write_bytes(bytes(range(255, -1, -1)) * 40)
    refuse(run, "tokenizer|damaged|TOML")


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("protocol", ["torch", "legacy torch", "pickle"])
def test_a_pickle_is_refused_and_not_executed(run: Path, tmp_path: Path, protocol: str):
    bomb, data = Bomb(str(tmp_path / "exploded")), io.BytesIO()
    if protocol == "pickle":
        pickle.dump(bomb, data)
    else:
        torch.save(bomb, data, _use_new_zipfile_serialization=protocol == "torch")
    for name in ("model.safetensors", "tokenizer.model"):
        before = (run / name).read_bytes()
        (run / name).write_bytes(data.getvalue())
        refuse(run, "damaged|tokenizer")
        (run / name).write_bytes(before)
    assert not (tmp_path / "exploded").exists()


def test_pickles_beside_the_model_are_not_looked_at(run: Path, tmp_path: Path):
    for name in ("pytorch_model.bin", "model.pt", "optimizer.pkl"):
        torch.save(Bomb(str(tmp_path / "exploded")), run / name)
    assert load(run).translate(["kamo"])
    assert not (tmp_path / "exploded").exists()


def test_weights_of_another_tokenizer_are_refused(run: Path, words: list[str]):
    Tokenizer.train(words[:200], 400).save(run / "tokenizer.model")
    refuse(run, "another tokenizer")


def test_weights_of_another_program_are_refused(run: Path):
    save_file(load_file(run / "model.safetensors"), run / "model.safetensors", metadata={"format": "pt"})
    refuse(run, "not written by this version of hasten")


def change_weights(run: Path, tokenizer: Tokenizer, name: str, tensor: torch.Tensor | None) -> None:
    weights = load_file(run / "model.safetensors")
    weights.pop(name, None)
    if tensor is not None:
        weights[name] = tensor
    checkpoint.save_weights(run / "model.safetensors", weights, tokenizer)


@pytest.mark.parametrize(
    ("name", "tensor", "what"),
    [
        ("embedding.weight", torch.zeros(400, 16), r"embedding.weight has shape \(400, 16\)"),
        ("embedding.weight", torch.tensor(1.0), "embedding.weight has shape"),
        ("embedding.weight", None, "embedding.weight is missing"),
        ("surplus", torch.zeros(1), "surplus is unknown"),
        ("embedding.weight", torch.zeros(400, 32, dtype=torch.int8), "embedding.weight is of type int8"),
        ("encoder.norm.weight", torch.ones(32).to(torch.float8_e4m3fn), "encoder.norm.weight is of type float8"),
        ("encoder.norm.weight", torch.full((32,), 1e300, dtype=torch.float64), "not finite"),
        ("embedding.weight", torch.full((400, 32), torch.nan), "embedding.weight holds numbers that are not finite"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    run: Path, tokenizer: Tokenizer, name: str, tensor: torch.Tensor | None, what: str
):
    change_weights(run, tokenizer, name, tensor)
    refuse(run, what)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("d_model = 32", "d_model = 64", "has shape"),
        ("d_model = 32", "d_model = 0", "d_model"),
        ("d_model = 32", "d_model = -32", "d_model"),
        ("d_model = 32", "d_model = 31", "d_model 31"),
        ("d_model = 32", 'd_model = "wide"', "d_model"),
        ("d_model = 32", "d_model = nan", "d_model"),
        ("d_model = 32", "d_model = 4000000000", "has shape|cannot be built"),
        ("d_model = 32", "d_model = 4000000000000000000000", "d_model: Input should be less"),
        ("d_ff = 64", "d_ff = 4000000000", "has shape"),
        ("n_heads = 4", "n_heads = 4000000000", "d_model 32"),
        ("encoder_layers = 1", "encoder_layers = 2", "missing"),
        ("encoder_layers = 1", "encoder_layers = 4000000000", "encoder_layers"),
        ("encoder_layers = 1", "encoder_layers = 1\nx = " + "9" * 5000, "not valid TOML"),
        ("[model]", "x = " + "{a = " * 2000 + "\n[model]", "not valid TOML"),
        ("[model]", ".".join("x" * 2000) + " = 1\n[model]", "nested too deeply"),
        ("dropout = 0.1", "dropout = 1.5", "dropout"),
        ("d_ff = 64", "d_fff = 64", "unknown key.*d_fff"),
        ("d_ff = 64", "d_ff = 64\nsurplus = 1", "unknown key.*surplus"),
        ('kind = "autoregressive"', 'kind = "oracle"', "oracle"),
        ('kind = "autoregressive"', "", "model"),
        ("[model]", "[model", "not valid TOML"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_one_line(run: Path, old: str, new: str, what: str):
    config = (run / "config.toml").read_text(encoding="utf-8")
    assert old in config
    (run / "config.toml").write_text(config.replace(old, new, 1), encoding="utf-8")
    refuse(run, what)


def test_as_many_refining_layers_as_no_machine_holds_are_one_line(tiny_run, tmp_path: Path):
    run = Path(shutil.copytree(tiny_run("ctc"), tmp_path / "run"))
    config = (run / "config.toml").read_text(encoding="utf-8")
    (run / "config.toml").write_text(config.replace("refiner_layers = 1", "refiner_layers = 1000000000"))
    refuse(run, "refiner_layers")
