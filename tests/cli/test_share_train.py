"""What a user of `hasten share retrofit`, `train` and `sweep` sees."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch

import hasten
from hasten import spec as specs
from hasten.cli import main
from hasten.data.corpus import Pair, write_corpus
from hasten.sharing import learn
from hasten.sharing.sweep import Point
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


def test_training_learns_from_what_the_model_said_before_it_shared(place, monkeypatch, capsys, tmp_path):
    out = tmp_path / "learnt"
    options = ("--model", "teacher", "--data", "data", "--theta", "-1", "--out", out, "--round-steps", "2")
    settings = ("training.steps=3", "training.batch_tokens=200", "training.validate_sentences=0", "training.warmup=1")
    assert share(monkeypatch, place, "train", *options, "--distillation", "0.75", *settings) == 0
    rows = [json.loads(row) for row in (out / "model" / "metrics.jsonl").read_text().splitlines()]
    assert any("teacher" in row for row in rows)
    model = hasten.load(out / "model").model
    assert (model.spec.distillation.teacher, model.spec.distillation.share) == (str(place / "teacher"), 0.75)


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
        ("train", ["--theta", "nan"], "--theta: the theta is nan"),
        ("train", ["--theta-cross", "inf"], "--theta-cross: the theta is inf"),
        ("retrofit", ["--theta-encoder", "-inf"], "--theta-encoder: the theta is -inf"),
        ("sweep", ["--thetas", "0.5,-inf"], "--thetas: '0.5,-inf'; write numbers"),
        ("train", ["--theta", "0.5", "--distillation", "2"], "--distillation"),
        (
            "train",
            ["--model", "student", "--theta", "0.5", "--distillation", "0.5"],
            "--distillation: ctc models have no words to learn one by one",
        ),
    ],
)
def test_a_mistake_is_one_line(place, monkeypatch, capsys, tmp_path, verb, arguments, problem):
    given = {"--model": "teacher", "--data": "data", "--out": str(tmp_path / "out")}
    pairs = [text for name, value in given.items() if name not in arguments for text in (name, value)]
    assert share(monkeypatch, place, verb, *pairs, *arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert problem in error


@pytest.mark.parametrize(
    ("verb", "options"), [("train", ("--theta", "-1")), ("sweep", ("--thetas", "-1", "--steps", "1"))]
)
@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (("--data", "untaught"), "no split 'train'"),
        (("--data", "nothing"), "no training pairs are left after filtering"),
        (("data.max_tokens=1",), "no training pairs are left after filtering"),
        (("data.fertilities=gone",), "has no use for data.fertilities"),
        (("data.distilled=gone",), "cannot read data.distilled gone"),
        (("--model", "orphan"), "no model 'no/teacher here'"),
        (("--model", "small", "data.max_tokens=500"), "takes at most 299 tokens of a sentence"),
    ],
)
def test_what_keeps_a_run_from_beginning_is_told_before_anything_is_written(
    place, unfit, monkeypatch, capsys, tmp_path, verb, options, more, problem
):
    out = tmp_path / "out"
    given = [text for pair in (("--model", "teacher"), ("--data", "data")) if pair[0] not in more for text in pair]
    assert share(monkeypatch, place, verb, *given, *options, "--out", out, *more) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert problem in error
    assert not out.exists()


@pytest.fixture(scope="module")
def unfit(place: Path, words: list[str], tokenizer, tiny_spec) -> None:
    """Corpora and models that `hasten share train` can do nothing with."""
    pairs = [Pair(a, b, str(i)) for i, (a, b) in enumerate(zip(words[:9], words[9:18], strict=True))]
    write_corpus(place / "untaught", ("en", "de"), {"valid": pairs}, {})
    write_corpus(place / "nothing", ("en", "de"), {"train": [], "valid": pairs}, {})
    taught = {"teacher": "no/teacher here", "share": 0.5}
    few = [{"kind": "synthesizer", "max_length": 300}]
    for name, options in (("orphan", {"distillation": taught}), ("small", {"decoder_attention": few})):
        described = tiny_spec("autoregressive", decoder_layers=2, **options)
        model = described.model.build(tokenizer.vocab_size)
        checkpoint.write_run(place / name, described, tokenizer)
        checkpoint.save_weights(place / name / checkpoint.WEIGHTS, model.state_dict(), tokenizer)


def test_a_run_is_trained_on_wherever_its_tokenizer_and_first_weights_were_from(place, monkeypatch, capsys, tmp_path):
    spec, tokenizer, model = checkpoint.read_run(place / "teacher")
    found = specs.changed(spec, ["tokenizer.from_model=gone", "training.init_from=gone"], "test")
    checkpoint.write_run(tmp_path / "moved", found, tokenizer)
    checkpoint.save_weights(tmp_path / "moved" / checkpoint.WEIGHTS, model.state_dict(), tokenizer)
    options = ("--model", tmp_path / "moved", "--data", "data", "--theta", "2", "--out", tmp_path / "out")
    assert share(monkeypatch, place, "train", *options, "--round-steps", "1", *SETTINGS) == 0


def test_a_sweep_is_written_wherever_it_is_to_be(place, monkeypatch, capsys, tmp_path):
    out = tmp_path / "a, b:beam=4"
    options = ("--model", "teacher", "--data", "data", "--thetas", "-1", "--sentences", "2", "--repeats", "1")
    assert share(monkeypatch, place, "sweep", *options, "--out", out) == 0
    assert len((out / "sweep.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("verb", ["retrofit", "train", "sweep"])
def test_a_file_is_no_place_for_models(place, monkeypatch, capsys, verb):
    theta = ("--theta", "0.5") if verb != "sweep" else ()
    options = ("--model", "teacher", "--data", "data", "--out", "data/valid.en")
    assert share(monkeypatch, place, verb, *options, *theta) == 2
    assert capsys.readouterr().err.strip() == "error: data/valid.en is no directory; choose another --out"


@pytest.mark.parametrize("verb", ["retrofit", "train", "sweep"])
def test_what_is_there_is_not_written_over(place, monkeypatch, capsys, tmp_path, verb):
    (tmp_path / "precious").write_text("mine")
    options = ("--model", "teacher", "--data", "data", "--out", tmp_path)
    theta = ("--theta", "0.5") if verb != "sweep" else ()
    assert share(monkeypatch, place, verb, *options, *theta) == 2
    assert "choose another --out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


SETTINGS = ("training.steps=3", "training.batch_tokens=200", "training.validate_sentences=0", "training.warmup=1")


def learning(out: Path, *more: object) -> tuple[object, ...]:
    options = ("--model", "teacher", "--data", "data", "--theta", "-1", "--round-steps", "3", "--sentences", "4")
    return ("train", *options, "--out", out, *SETTINGS, *more)


def weights(out: Path) -> dict[str, dict[str, torch.Tensor]]:
    paths = out.rglob(checkpoint.WEIGHTS)
    return {str(path.relative_to(out)): checkpoint.read_weights(path) for path in paths}


def test_an_interruption_saves_and_says_the_command_that_goes_on(place, monkeypatch, capsys, tmp_path):
    out, plain = tmp_path / "out of here", tmp_path / "plain"
    assert share(monkeypatch, place, *learning(plain)) == 0
    code, words = 0, list(learning(out))
    for number in range(3):  # in the round, in the last training, not at all
        with monkeypatch.context() as patch:
            if number < 2:
                patch.setattr("hasten.cli.progress.TrainingProgress.stop_requested", lambda self: True)
            code = share(patch, place, *words)
        said = capsys.readouterr().err.strip().splitlines()
        if number < 2:
            assert code == 130
            assert said[-1].startswith("stopped and saved at step ")
            assert "; go on by hasten share train --model teacher" in said[-1]
            words = shlex.split(said[-1].partition(" go on by hasten share ")[2])
            assert words == [*map(str, learning(out)), "--resume"]
            assert not (out / "model" / "model.safetensors").exists()
    assert code == 0
    found, expected = weights(out), weights(plain)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[run][name], own) for run in expected for name, own in expected[run].items())
    assert (out / learn.ROUNDS).read_bytes() == (plain / learn.ROUNDS).read_bytes()
    assert (out / "model" / "README.md").exists()


def test_a_stop_in_the_last_step_of_a_round_stops_too(place, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("hasten.cli.progress.TrainingProgress.stop_requested", lambda self: True)
    assert share(monkeypatch, place, *learning(tmp_path / "out", "--round-steps", "1")) == 130
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"stopped when {tmp_path}/out/round-1/model was trained; go on by hasten share train")
    assert not (tmp_path / "out" / "start").exists()


def test_a_stop_while_measuring_leaves_nothing_and_goes_on_too(place, monkeypatch, capsys, tmp_path):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("hasten.sharing.learn.measure", stop)
        assert share(patch, place, *learning(out, "--", "training.seed=2")) == 130
    assert capsys.readouterr().err.strip().endswith("--resume -- training.seed=2")
    assert not out.exists()
    out.mkdir()
    (out / learn.HALF_BEGUN).write_text("{")  # killed a moment later
    assert share(monkeypatch, place, *learning(out, "--resume", "--", "training.seed=2")) == 0
    assert hasten.load(out / "model").spec.training.seed == 2
    capsys.readouterr()
    assert share(monkeypatch, place, *learning(out, "--resume", "--", "training.seed=2")) == 0, "nothing is left to do"
    assert capsys.readouterr().out.strip() == str(out / "model")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ((), "is not empty; give --resume to go on with what was begun there, or choose another --out"),
        (("--resume", "--theta-cross", "0.25"), "began with other settings: theta.cross not given (now 0.25); restore"),
        (("--resume", "--theta", "-2"), "began with other settings: theta.decoder -1.0 (now -2.0); restore"),
        (("--resume", "--round-steps", "4", "--form", "map"), "round_steps 3 (now 4), form blocks (now map); restore"),
        (("--resume", "--distillation", "0.5"), "began with other settings: model.distillation "),
        (("--resume", "training.steps=4"), "began with other settings: training.steps 3 (now 4); restore"),
        (("--resume", "--sentences", "3"), "began with other settings: sentences measured on (changed); restore"),
        (("--resume", "--model", "other"), "began with other settings: weights of the model (changed); restore"),
    ],
)
def test_a_run_that_is_there_is_gone_on_with_only_as_it_began(place, begun, monkeypatch, capsys, more, problem):
    before = sorted(begun.rglob("*"))
    assert share(monkeypatch, place, *learning(begun, *more)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: {begun} ")
    assert problem in error
    assert sorted(begun.rglob("*")) == before


@pytest.fixture(scope="module")
def begun(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in its first round, and beside its model another one of the same shape."""
    out = tmp_path_factory.mktemp("begun") / "out"
    spec, tokenizer, model = checkpoint.read_run(place / "teacher")
    checkpoint.write_run(place / "other", spec, tokenizer)
    changed = {
        name: tensor + 0.5 if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()
    }
    checkpoint.save_weights(place / "other" / checkpoint.WEIGHTS, changed, tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hasten.cli.progress.TrainingProgress.stop_requested", lambda self: True)
        assert share(patch, place, *learning(out)) == 130
    return out


def test_what_is_no_run_is_not_gone_on_with(place, monkeypatch, capsys, tmp_path):
    (tmp_path / "precious").write_text("mine")
    assert share(monkeypatch, place, *learning(tmp_path, "--resume")) == 2
    assert "holds nothing that --resume could go on with; choose another --out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_two_do_not_work_in_one_directory(place, begun, monkeypatch, capsys):
    with checkpoint.held(begun):
        assert share(monkeypatch, place, *learning(begun, "--resume")) == 2
    assert f"another process trains in {begun}" in capsys.readouterr().err


def test_a_sweep_goes_on_too(place, monkeypatch, capsys, tmp_path):
    out = tmp_path / "sweep"
    options = ("--model", "teacher", "--data", "data", "--thetas", "-1", "--sentences", "3", "--repeats", "1")
    arguments = ("sweep", *options, "--out", out, "--steps", "3", *SETTINGS[1:])
    with monkeypatch.context() as patch:
        patch.setattr("hasten.cli.progress.TrainingProgress.stop_requested", lambda self: True)
        assert share(patch, place, *arguments) == 130
    assert "go on by hasten share sweep --model teacher" in capsys.readouterr().err
    monkeypatch.setattr("hasten.sharing.sweep.timed", lambda *_: [Point("original", None, {}, 1.0, 1.0, 1.0, 1.0)])
    assert share(monkeypatch, place, *arguments, "--resume") == 0
    assert "resumed_at 1" in capsys.readouterr().err
    assert (out / "sweep.jsonl").exists()
