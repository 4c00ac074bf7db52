"""What a user of `hasten evaluate` sees."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from hasten import load
from hasten.cli import main
from hasten.data.corpus import Pair, write_corpus
from hasten.training.metrics import quality


@pytest.fixture
def corpus(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A parallel corpus in the working directory."""
    monkeypatch.chdir(tmp_path)
    pairs = [Pair(a, b, str(i)) for i, (a, b) in enumerate(zip(words[:60], words[60:120], strict=True))]
    splits = {"train": pairs[:40], "valid": pairs[40:44], "test": pairs[44:50], "other": pairs[50:52]}
    return write_corpus(tmp_path / "data", ("en", "de"), splits, {}).directory


def hasten(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """`hasten evaluate` with these arguments; its exit code."""
    monkeypatch.setattr(sys, "argv", ["hasten", "evaluate", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_scores_are_those_of_the_translations_that_are_written(corpus: Path, monkeypatch, capsys, tiny_run):
    model = tiny_run("autoregressive")
    options = ("--json", "scores.json", "--output", "out.de", "--batch-tokens", 64)
    assert hasten(monkeypatch, "--model", model, "--data", corpus, *options) == 0
    source, target = ((corpus / f"test.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de"))
    written = Path("out.de").read_text(encoding="utf-8").split("\n")[:-1]
    assert written == load(model).translate(source)
    scores = json.loads(Path("scores.json").read_text(encoding="utf-8"))
    expected = quality(written, target)
    assert {name: scores[name] for name in expected.as_dict()} == expected.as_dict()
    assert (scores["sentences"], scores["beam"], scores["model"]) == (6, 1, str(model))
    assert scores["seconds"] > 0
    shown = capsys.readouterr()
    assert f"BLEU: {expected.bleu_signature}\nchrF2: {expected.chrf_signature}\n" in shown.out
    assert f"{expected.chrf:.2f}" in shown.out
    assert f"{expected.length_ratio:.3f}" in shown.out
    assert "warning" not in shown.err


def test_a_baseline_is_compared_on_the_same_sentences(corpus: Path, monkeypatch, capsys, tiny_run):
    model, other = tiny_run("autoregressive"), tiny_run("ctc")
    options = ("--baseline", other, "--split", "other", "--beam", 2, "--baseline-beam", 1, "--json", "scores.json")
    assert hasten(monkeypatch, "--model", model, "--data", corpus, *options) == 0
    scores = json.loads(Path("scores.json").read_text(encoding="utf-8"))
    assert scores["sentences"] == 2
    assert (scores["beam"], scores["baseline"]["beam"], scores["baseline"]["model"]) == (2, 1, str(other))
    bleu, chrf = scores["differences"]
    assert chrf["delta"] == pytest.approx(scores["chrf"] - scores["baseline"]["chrf"])
    assert 0 < bleu["p_value"] <= 1
    shown = capsys.readouterr().out
    assert re.search(rf"by chance.*p={bleu['p_value']:.3f}.*p={chrf['p_value']:.3f}", shown)
    assert "|bs:1000|seed:12345|" in shown


def test_files_of_ones_own_and_the_first_sentences(corpus: Path, monkeypatch, capsys, tiny_run):
    options = ("--src", corpus / "valid.en", "--ref", corpus / "valid.de", "--limit", 3, "--json", "scores.json")
    assert hasten(monkeypatch, "--model", tiny_run("autoregressive"), *options) == 0
    assert json.loads(Path("scores.json").read_text(encoding="utf-8"))["sentences"] == 3
    assert "3 sentences" in capsys.readouterr().out


def trained_on(model: Path, data: Path, folder: Path) -> Path:
    """A copy of the model whose configuration names `data`."""
    copy = folder / "copy"
    shutil.copytree(model, copy)
    config = copy / "config.toml"
    config.write_text(config.read_text(encoding="utf-8").replace('"nowhere"', f'"{data}"'), encoding="utf-8")
    return copy


def test_training_text_among_the_test_sentences_is_told(corpus: Path, monkeypatch, capsys, tiny_run, tmp_path: Path):
    model = trained_on(tiny_run("autoregressive"), corpus, tmp_path)
    assert hasten(monkeypatch, "--model", model, "--data", corpus, "--split", "train", "--limit", 5) == 0
    assert f"warning: {model} was trained on 5 of 5 source sentences" in capsys.readouterr().err
    assert hasten(monkeypatch, "--model", model, "--data", corpus) == 0
    assert "warning" not in capsys.readouterr().err


def test_another_language_pair_is_told(corpus: Path, monkeypatch, capsys, tiny_run, tmp_path: Path):
    model = trained_on(tiny_run("autoregressive"), corpus, tmp_path)
    french = write_corpus(tmp_path / "fr", ("en", "fr"), {"test": [Pair("ka mo", "ti", "1")]}, {}).directory
    assert hasten(monkeypatch, "--model", model, "--data", french) == 0
    assert f"warning: {model} was trained on en-de, {french} test is en-fr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a test set: either --data (and --split), or --src and --ref"),
        (["--data", "data", "--src", "data/test.en"], "give a test set: either"),
        (["--src", "data/test.en", "--ref", "data/test.de", "--split", "test"], "give a test set: either"),
        (["--src", "data/test.en"], "give a test set: either"),
        (["--src", "data/test.en", "--ref", "data/valid.de"], "data/test.en has 6 lines, data/valid.de has 4"),
        (["--data", "data", "--split", "exam"], "no split 'exam'; it has train, valid, test, other"),
        (["--data", "nowhere"], "nowhere: no such directory"),
        (["--data", "data", "--baseline-beam", "2"], "--baseline-beam without --baseline"),
        (["--data", "data", "--json", "no/where.json"], "no/where.json: no directory no; create it first"),
        (["--data", "data"], "no model 'no-such-model'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(corpus: Path, monkeypatch, capsys, arguments: list[str], said: str):
    assert hasten(monkeypatch, "--model", "no-such-model", *arguments) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
