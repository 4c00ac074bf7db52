"""What a user of `hasten share retrofit`, `train` and `sweep` sees."""

import json
import sys
from pathlib import Path

import pytest
import torch

import hasten
from hasten.cli import main
from hasten.data.corpus import Pair, write_corpus
from hasten.training import checkpoint


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, words: list[str], tokenizer, tiny_spec) -> Path:
    """A folder with a corpus, `data`, and two models with random weights, `teacher` and `student`."""
    folder = tmp_path_factory.mktemp("sharing")
    pairs = [Pair(a, b, str(i)) for i, (a, b) in enumerate(zip(words[:60], words[60:120], strict=True))]
    write_corpus(folder / "data", ("en", "de"), {"train": pairs[:40], "valid": pairs[40:50]}, {})
    for name, kind, layers in (("teacher", "autoregressive", "decoder_layers"), ("student", "ctc", "refiner_layers")):
        described = tiny_spec(kind, encoder_layers=2, **{layers: 3})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = described.model.build(tokenizer.vocab_size)
        checkpoint.write_run(folder / name, described, tokenizer)
        checkpoint.save_weights(folder / name / checkpoint.WEIGHTS, model.state_dict(), tokenizer)
    return folder


def share(monkeypatch: pytest.MonkeyPatch, place: Path, *arguments: object) -> int:
    """`hasten share` with these arguments in that folder; its exit code."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["hasten", "share", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_a_retrofitted_model_shares_and_translates(place, monkeypatch, capsys, tmp_path):
    out = tmp_path / "shared"
    options = ("--model", "teacher", "--data", "data", "--theta", "-1", "--theta-cross", "-1", "--out", out)
    assert share(monkeypatch, place, "retrofit", *options) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(out)
    assert "decoder: [1, 1, 1]" in said.err
    translator = hasten.load(out)
    assert translator.model.spec.decoder_sharing == translator.model.spec.cross_sharing == (1, 1, 1)
    assert translator.model.spec.encoder_sharing == ()
    assert len(translator.translate(["ka mo", "ti"])) == 2


def test_a_one_pass_model_shares_too(place, monkeypatch, tmp_path):
    out = tmp_path / "shared"
    options = ("--model", "student", "--data", "data", "--theta", "-1", "--theta-encoder", "-1", "--out", out)
    assert share(monkeypatch, place, "retrofit", *options) == 0
    model = hasten.load(out).model
    assert (model.spec.encoder_sharing, model.spec.refiner_sharing) == ((1, 1), (1, 1, 1))


def test_training_leaves_rounds_and_a_model(place, monkeypatch, capsys, tmp_path):
    out = tmp_path / "learnt"
    options = ("--model", "teacher", "--data", "data", "--theta", "-1", "--out", out, "--round-steps", "2")
    settings = ("training.steps=3", "training.batch_tokens=200", "training.validate_sentences=2", "training.warmup=1")
    assert share(monkeypatch, place, "train", *options, *settings) == 0
    assert capsys.readouterr().out.strip() == str(out / "model")
    first, second = map(json.loads, (out / "rounds.jsonl").read_text().splitlines())
    assert first["maps"]["decoder"] == [1, 1, 1]
    assert second["settled"]
    assert hasten.load(out / "model").spec.training.steps == 3
    assert (out / "model" / "README.md").exists()


def test_a_sweep_times_each_policy_and_names_the_front(place, monkeypatch, capsys, tmp_path):
    out = tmp_path / "sweep"
    options = ("--model", "teacher", "--data", "data", "--thetas", "2,-1", "--sentences", "3", "--repeats", "1")
    assert share(monkeypatch, place, "sweep", *options, "--out", out) == 0
    rows = [json.loads(line) for line in (out / "sweep.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == ["original", "theta -1"]
    assert any(row["front"] for row in rows)
    assert all(row["milliseconds"] > 0 for row in rows)
    assert "theta -1" in capsys.readouterr().out
    assert (out / "sweep.png").stat().st_size > 5000
    assert hasten.load(out / "theta--1").model.spec.cross_sharing == (1, 1, 1)


@pytest.mark.parametrize(
    ("verb", "arguments", "problem"),
    [
        ("retrofit", [], "no threshold: give --theta, --theta-cross or --theta-encoder"),
        ("train", [], "no threshold"),
        (
            "retrofit",
            ["--model", "student", "--theta-cross", "0.5"],
            "a threshold for 'cross'",
        ),
        ("train", ["--theta", "0.5", "model.d_model=8"], "here only training and data can be changed"),
        (
            "train",
            ["--theta", "0.5", "training.stepz=8"],
            "error: the model's settings with these overrides: unknown key training.stepz",
        ),
        ("sweep", ["--thetas", "high"], "--thetas: 'high'; write numbers"),
        ("sweep", ["--thetas", "-1,nan"], "--thetas: '-1,nan'; write numbers"),
        ("sweep", ["--kinds", ","], "--kinds: ','; name one or more"),
        ("sweep", ["--kinds", "sideways"], "a threshold for 'sideways'"),
        ("sweep", ["--thetas", "2"], "no threshold makes any layers share"),
        ("train", ["--theta", "0.5", "--data", "nowhere"], "nowhere"),
        ("train", ["--theta", "nan"], "theta is nan"),
    ],
)
def test_a_mistake_is_one_line(place, monkeypatch, capsys, tmp_path, verb, arguments, problem):
    given = {"--model": "teacher", "--data": "data", "--out": str(tmp_path / "out")}
    pairs = [text for name, value in given.items() if name not in arguments for text in (name, value)]
    assert share(monkeypatch, place, verb, *pairs, *arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert problem in error


@pytest.mark.parametrize("verb", ["retrofit", "train", "sweep"])
def test_what_is_there_is_not_written_over(place, monkeypatch, capsys, tmp_path, verb):
    (tmp_path / "precious").write_text("mine")
    options = ("--model", "teacher", "--data", "data", "--out", tmp_path)
    theta = ("--theta", "0.5") if verb != "sweep" else ()
    assert share(monkeypatch, place, verb, *options, *theta) == 2
    assert "choose another --out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_an_interruption_saves_and_says_how_to_go_on(place, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("hasten.cli.progress.TrainingProgress.stop_requested", lambda self: True)
    out = tmp_path / "out"
    options = ("--model", "teacher", "--data", "data", "--theta", "-1", "--out", out)
    assert share(monkeypatch, place, "train", *options, "--round-steps", "9", "training.validate_sentences=0") == 130
    run = out / "round-1" / "model"
    said = capsys.readouterr().err
    assert "stopped and saved at step 1" in said
    assert f"hasten train {run / 'config.toml'} --out {run} --resume" in said
    monkeypatch.undo()
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["hasten", "train", f"{run}/config.toml", "--out", str(run), "--resume"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert hasten.load(run).model.spec.decoder_sharing == (1, 1, 1)
