"""A CTranslate2 directory teaches what the model it was made of teaches."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import hasten
from hasten.cli import main
from hasten.errors import UserError
from hasten.export.ctranslate2 import export
from hasten.training import checkpoint
from hasten.training.ctranslate2_teacher import CTranslate2Teacher
from hasten.training.teachers import ModelTeacher

pytest.importorskip("ctranslate2")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, tokenizer, tiny_spec) -> Path:
    """A run whose outputs depend on the source, and its export beside it."""
    directory = tmp_path_factory.mktemp("teacher")
    spec = tiny_spec("autoregressive")
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = spec.model.build(tokenizer.vocab_size).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.15 * torch.randn_like(parameter)
    checkpoint.write_run(directory / "run", spec, tokenizer)
    checkpoint.save_weights(directory / "run" / checkpoint.WEIGHTS, model.state_dict(), tokenizer)
    export(hasten.load(directory / "run").model, tokenizer, directory / "ct2")
    return directory


def test_it_says_what_the_model_says_in_torch(teacher: Path, words):
    lines = [*words[:30], "", " ".join(words[:40]), "漢字 ka"]
    own = ModelTeacher(str(teacher / "run"), beam=1).ready()
    engine = CTranslate2Teacher(f"ctranslate2:{teacher / 'ct2'}", beam=1).ready()
    said = own.translate(lines)
    assert engine.translate(lines) == said
    assert len(set(said)) > 10
    assert [engine.length(line) for line in lines] == [own.length(line) for line in lines]


def test_the_verb_distils_by_it(teacher: Path, tmp_path: Path, words, monkeypatch):
    (tmp_path / "source").write_text("".join(line + "\n" for line in words[:5]), encoding="utf-8")
    name = f"ctranslate2:{teacher / 'ct2'}"
    arguments = ["--teacher", name, "--src", tmp_path / "source", "--out", tmp_path / "out", "--workers", 1]
    monkeypatch.setattr(sys, "argv", ["hasten", "distill", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    report = json.loads((tmp_path / "out.report.json").read_text(encoding="utf-8"))
    assert report["teacher"]["name"] == name
    assert sum(report["counts"].values()) == 5


def test_any_batch_gives_the_same(teacher: Path, words):
    one = CTranslate2Teacher(f"ctranslate2:{teacher / 'ct2'}", beam=2)
    few = dataclasses.replace(one, batch_tokens=30)
    assert one.ready().translate(words[:20]) == few.ready().translate(words[:20])
    assert one.identity() != few.identity()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.bin", "is no CTranslate2 model: it has no model.bin"),
        ("tokenizer.model", "has no tokenizer: put tokenizer.model, or source.spm and target.spm, beside model.bin"),
        ("shared_vocabulary.json", "cannot read .*shared_vocabulary.json"),
    ],
)
def test_a_directory_that_lacks_something_is_refused(teacher: Path, tmp_path: Path, name: str, said: str):
    directory = Path(shutil.copytree(teacher / "ct2", tmp_path / "ct2"))
    (directory / name).unlink()
    with pytest.raises(UserError, match=said):
        CTranslate2Teacher(f"ctranslate2:{directory}").identity()


def test_a_damaged_model_is_refused(teacher: Path, tmp_path: Path):
    directory = Path(shutil.copytree(teacher / "ct2", tmp_path / "ct2"))
    (directory / "model.bin").write_bytes(b"nothing")
    with pytest.raises(UserError, match="CTranslate2 cannot load"):
        CTranslate2Teacher(f"ctranslate2:{directory}").ready()
    (directory / "config.json").write_text(json.dumps({})[:1], encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json is no JSON"):
        CTranslate2Teacher(f"ctranslate2:{directory}").ready()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("shared_vocabulary.json", '{"a": 1}', r"shared_vocabulary\.json is no list of pieces"),
        ("shared_vocabulary.json", "[1, [2]]", r"shared_vocabulary\.json is no list of pieces"),
        ("shared_vocabulary.json", '["<unk>", "strange"]', "is not that of the tokenizer: 'strange' is none of its"),
        ("shared_vocabulary.json", "[" * 10**5, r"shared_vocabulary\.json is no JSON"),
        ("config.json", "[]", r"config\.json is no configuration"),
    ],
)
def test_files_that_are_something_else_are_named(teacher: Path, tmp_path: Path, name: str, text: str, said: str):
    directory = Path(shutil.copytree(teacher / "ct2", tmp_path / "ct2"))
    (directory / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        CTranslate2Teacher(f"ctranslate2:{directory}").ready()
