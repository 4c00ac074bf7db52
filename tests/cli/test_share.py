"""What a user of `hasten share` sees."""

import json
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hasten import load, spec
from hasten.cli import main
from hasten.data.batch import pair_batch
from hasten.data.corpus import Pair, write_corpus
from hasten.sharing import Record, Similarity, measure, read, write
from hasten.sharing.record import TITLES
from hasten.training import checkpoint


@pytest.fixture
def corpus(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A parallel corpus in the working directory; some pairs of "odd" cannot be read."""
    monkeypatch.chdir(tmp_path)
    pairs = [Pair(a, b, str(i)) for i, (a, b) in enumerate(zip(words[:60], words[60:120], strict=True))]
    odd = [Pair("", "ka", "1"), Pair("ka mo", "ti " * 300, "2"), Pair("ka mo", "ti", "3")]
    splits = {"valid": pairs[:12], "odd": odd, "long": odd[1:2]}
    return write_corpus(tmp_path / "data", ("en", "de"), splits, {}).directory


def hasten(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """`hasten share` with these arguments; its exit code."""
    monkeypatch.setattr(sys, "argv", ["hasten", "share", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.fixture(scope="session")
def deep_run(tmp_path_factory: pytest.TempPathFactory, tokenizer, tiny_spec):
    """The run directory of a small model of two layers a stack, with random weights; not to be changed."""

    def make(kind: str) -> Path:
        layers = {"autoregressive": {"decoder_layers": 2}, "ctc": {"refiner_layers": 2}}[kind]
        described, directory = tiny_spec(kind, encoder_layers=2, **layers), tmp_path_factory.mktemp(kind)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = described.model.build(tokenizer.vocab_size)
        checkpoint.write_run(directory, described, tokenizer)
        checkpoint.save_weights(directory / checkpoint.WEIGHTS, model.state_dict(), tokenizer)
        return directory

    return make


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A measurement made by hand: three layers in two kinds of attention."""
    monkeypatch.chdir(tmp_path)
    counts = ((8,) * 3,) * 3
    encoder = Similarity(((1.0, 0.3, 0.9), (0.3, 1.0, 0.2), (0.9, 0.2, 1.0)), counts)
    cross = Similarity(((1.0, 0.8, 0.7), (0.8, 1.0, 0.75), (0.7, 0.75, 1.0)), counts)
    Path("similarity").mkdir()
    write(Record({"encoder": encoder, "cross": cross}, "m", "d", "valid", 4), Path("similarity"))
    return Path("similarity")


# analyse


@pytest.mark.parametrize(
    ("kind", "names"), [("autoregressive", ["encoder", "decoder", "cross"]), ("ctc", ["encoder", "refiner"])]
)
def test_analyse_writes_what_is_measured_and_a_picture(corpus, monkeypatch, capsys, deep_run, kind, names):
    model = deep_run(kind)
    assert hasten(monkeypatch, "analyse", "--model", model, "--data", corpus, "--out", "found/here") == 0
    shown = capsys.readouterr()
    table = json.loads(Path("found/here/similarity.json").read_text(encoding="utf-8"))
    assert list(table["kinds"]) == names
    assert (table["model"], table["data"], table["split"], table["sentences"]) == (str(model), str(corpus), "valid", 12)
    assert set(table["versions"]) == {"hasten", "torch"}
    translator = load(model)
    sides = ((corpus / f"valid.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de"))
    encoded = ([translator.tokenizer.encode(line) for line in lines] for lines in sides)
    expected = measure(translator.model, [pair_batch([pair]) for pair in zip(*encoded, strict=True)])
    for name, own in read(Path("found/here")).kinds.items():
        np.testing.assert_allclose(own.mu, expected[name].mu, atol=1e-5)
        assert own.counts == expected[name].counts
        assert own.mu[0][1] < 0.9999
        row = f"1  1.00{own.mu[0][1]:6.2f}\n2{own.mu[0][1]:6.2f}  1.00\n"
        assert f"{TITLES[name]}: similarity of layers\n      1     2\n{row}" in shown.out
    assert Path("found/here/similarity.png").read_bytes().startswith(b"\x89PNG")
    assert shown.err.endswith("wrote found/here/similarity.json and similarity.png\n")


def test_sentences_are_spread_and_those_that_cannot_be_read_are_told(corpus, monkeypatch, capsys, tiny_run):
    options = ("--model", tiny_run("autoregressive"), "--data", corpus, "--out", "out")
    assert hasten(monkeypatch, "analyse", *options, "--sentences", 3, "--batch-tokens", 1) == 0
    assert read(Path("out")).sentences == 3
    capsys.readouterr()
    assert hasten(monkeypatch, "analyse", *options, "--split", "odd") == 0
    assert "left out 1 with more than 200 pieces on a side" in capsys.readouterr().err
    assert read(Path("out")).sentences == 1


@pytest.mark.parametrize("n_layers", [1, 6, 30])
def test_pictures_of_any_depth_are_drawn(tmp_path: Path, n_layers: int):
    from hasten.sharing.picture import picture

    mu = np.random.default_rng(0).random((n_layers, n_layers))
    mu = np.where(np.eye(n_layers), 1, (mu + mu.T) / 2)
    own = Similarity(tuple(map(tuple, mu.tolist())), ((5,) * n_layers,) * n_layers)
    picture(Record({"encoder": own, "decoder": own}, "m", "d", "valid", 4), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# policy


def test_policy_prints_the_blocks_their_similarity_and_settings(measured, monkeypatch, capsys):
    assert hasten(monkeypatch, "policy", measured, "--theta-encoder", 0.74, "--theta-cross", 0.74) == 0
    assert (
        capsys.readouterr().out
        == """\
encoder self-attention, theta 0.74: [1,2,3], blocks {1,1,1}
  layer 1: alone
  layer 2: alone
  layer 3: alone
encoder-decoder attention, theta 0.74: [1,1,1], blocks {3}
  layers 1-3: similarity 0.750
settings: 'model.encoder_sharing=[1,2,3]' 'model.cross_sharing=[1,1,1]'
"""
    )


def test_kinds_may_have_thresholds_of_their_own_and_maps_point_over_layers(measured, monkeypatch, capsys):
    options = ("--theta-encoder", 0.85, "--theta-cross", 0.79, "--form", "map")
    assert hasten(monkeypatch, "policy", measured, *options) == 0
    out = capsys.readouterr().out
    assert "encoder self-attention, theta 0.85: [1,2,1]\n  layers 1, 3: similarity 0.900\n  layer 2: alone\n" in out
    assert "encoder-decoder attention, theta 0.79: [1,1,3], blocks {2,1}\n" in out
    assert hasten(monkeypatch, "policy", measured, "--theta-cross", 0.1, "--largest", 2) == 0
    assert "'model.cross_sharing=[1,1,3]'" in capsys.readouterr().out


def test_a_threshold_of_zero_is_one_and_what_has_none_stays_as_it_is(measured, monkeypatch, capsys):
    assert hasten(monkeypatch, "policy", measured, "--theta-cross", 0) == 0
    out = capsys.readouterr().out
    assert "encoder-decoder attention, theta 0: [1,1,1]" in out
    assert "encoder self" not in out
    assert "encoder_sharing" not in out


def test_settings_are_those_of_a_configuration(measured, monkeypatch, capsys, tmp_path: Path):
    assert hasten(monkeypatch, "policy", measured, "--theta-encoder", 0.74, "--theta-cross", 0.74) == 0
    settings = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("settings: "))
    config = tmp_path / "config.toml"
    config.write_text('[data]\npath = "x"\n[model]\nkind = "autoregressive"\nencoder_layers = 3\ndecoder_layers = 3\n')
    model = spec.load(config, settings).model
    assert model.encoder_sharing == (1, 2, 3)
    assert model.cross_sharing == (1, 1, 1)


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "nowhere"], "nowhere: no such directory"),
        (["--data", "data", "--split", "exam"], "no split 'exam'; it has valid, odd, long"),
        (["--data", "data"], "no model 'no-such-model'"),
        (["--data", "data", "--sentences", "0"], "Input should be greater than or equal to 1"),
        (["--data", "data", "--model", "en-de-ctc", "--out", "data/valid.en/x"], "--out: cannot create"),
        (
            ["--data", "data", "--model", "en-de-ctc", "--split", "long"],
            "data long has no sentences of 1 to 200 pieces",
        ),
    ],
)
def test_a_mistake_in_analyse_is_one_line(corpus, monkeypatch, capsys, arguments: list[str], said: str):
    assert hasten(monkeypatch, "analyse", "--model", "no-such-model", "--out", "out", *arguments) == 2
    check_one_line(capsys, said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--theta", "0.5"], "hasten share analyse --out nowhere writes it"),
        (["similarity"], "no threshold: give --theta, --theta-cross or --theta-encoder"),
        (["similarity", "--theta", "0.5"], "--theta: similarity has encoder, cross; leave the option out"),
        (["similarity", "--theta", "nan"], "--theta: the theta is nan; give a number"),
        (["similarity", "--theta", "0.5", "--theta-cross", "nan"], "--theta-cross: the theta is nan; give a number"),
        (["similarity", "--theta", "high"], "should be a valid number"),
        (["similarity", "--theta", "0.5", "--largest", "0"], "Input should be greater than or equal to 1"),
        (["similarity", "--theta", "0.5", "--form", "tree"], "'tree' is not one of"),
    ],
)
def test_a_mistake_in_policy_is_one_line(measured, monkeypatch, capsys, arguments: list[str], said: str):
    assert hasten(monkeypatch, "policy", *arguments) == 2
    check_one_line(capsys, said)


def test_a_threshold_for_a_kind_that_is_not_there_is_refused(measured, monkeypatch, capsys):
    record = read(measured)
    write(Record({"encoder": record.kinds["encoder"]}, "m", "d", "valid", 4), measured)
    assert hasten(monkeypatch, "policy", measured, "--theta", 0.5, "--theta-cross", 0.5) == 2
    check_one_line(capsys, "--theta-cross: similarity has encoder; leave the option out")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[:-9], "not valid JSON"),
        (lambda text: "[]", "measure again"),
        (lambda text: text.replace('"kinds"', '"sorts"'), "no entry 'kinds'"),
        (lambda text: text.replace('"similarity"', '"mu"'), "no entry 'similarity'"),
        (lambda text: text.replace("0.3", "0.35", 1), "differs the other way round"),
        (lambda text: text.replace("0.3", "1.3"), "similarity 1.3 of two layers is not in 0 to 1"),
        (lambda text: text.replace("0.3", "NaN"), "similarity nan of two layers"),
        (lambda text: text.replace("1.0", "0.9"), "a layer has similarity 0.9 with itself"),
        (lambda text: json.dumps({**json.loads(text), "kinds": {}}), "it has no kinds of attention"),
        (lambda text: text.replace("0.3", "1" + "0" * 400), "int too large to convert to float"),
        (lambda text: text.replace('"sentences": 4', '"sentences": Infinity'), "cannot convert float infinity"),
        (lambda text: text.replace(" 8", " Infinity"), "cannot convert float infinity"),
        (lambda text: text.replace('"cross"', '"a b; c"'), "'a b; c' is no kind of attention"),
    ],
)
def test_a_damaged_measurement_is_one_line(measured, monkeypatch, capsys, change, said: str):
    file = measured / "similarity.json"
    file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")
    assert hasten(monkeypatch, "policy", measured, "--theta", 0.5) == 2
    check_one_line(capsys, said)


def test_a_pipe_is_no_measurement_and_nobody_waits_for_it(monkeypatch, capsys, tmp_path: Path):
    os.mkfifo(tmp_path / "similarity.json")
    assert hasten(monkeypatch, "policy", tmp_path, "--theta", 0.5) == 2
    check_one_line(capsys, "it is no regular file")


def test_what_cannot_be_measured_leaves_no_directory(corpus, monkeypatch, capsys):
    options = ("--model", "en-de-ctc", "--data", corpus, "--split", "long", "--out", "out")
    assert hasten(monkeypatch, "analyse", *options) == 2
    assert not Path("out").exists()


def test_scores_that_are_no_numbers_leave_no_directory(corpus, deep_run, tokenizer, monkeypatch, capsys):
    weights = checkpoint.read_weights(deep_run("ctc") / checkpoint.WEIGHTS)
    spoilt = deep_run("ctc")
    checkpoint.save_weights(spoilt / checkpoint.WEIGHTS, {k: x * 1e30 for k, x in weights.items()}, tokenizer)
    assert hasten(monkeypatch, "analyse", "--model", spoilt, "--data", corpus, "--out", "new/out") == 2
    assert "not" in capsys.readouterr().err
    assert not Path("new").exists()


def check_one_line(capsys, said: str) -> None:
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_without_a_verb_the_help_is_shown(monkeypatch, capsys):
    assert hasten(monkeypatch) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("Usage: ")
    assert "..." not in shown.err.partition("Commands:")[2]
