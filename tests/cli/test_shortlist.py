"""What a user of `hasten shortlist` sees, and of the verbs that take its table."""

import json
import sys
from pathlib import Path

import pytest

import hasten
from hasten.cli import main
from hasten.data import shortlist
from hasten.data.corpus import Corpus, Pair, write_corpus
from hasten.data.shortlist import Shortlist
from hasten.training.metrics import quality


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, words: list[str], tiny_run) -> Path:
    folder = tmp_path_factory.mktemp("shortlist")
    pairs = [Pair(a, b, str(i)) for i, (a, b) in enumerate(zip(words[:60], words[60:120], strict=True))]
    write_corpus(folder / "data", ("en", "de"), {"train": pairs, "valid": pairs[:5]}, {})
    (folder / "distilled").write_text("".join(line + "\n" for line in words[200:260]), encoding="utf-8")
    (folder / "model").symlink_to(tiny_run("ctc"))
    return folder


def verb(monkeypatch: pytest.MonkeyPatch, place: Path, *arguments: object) -> int:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["hasten", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


COMMAND = ("shortlist", "--model", "model", "--data", "data")


@pytest.mark.parametrize("distilled", [None, "distilled"])
def test_the_table_is_that_of_the_training_pairs(place, monkeypatch, capsys, tmp_path, distilled):
    options = ("--translations", 6, "--frequent", 5, "--rounds", 3) + (("--distilled", distilled) if distilled else ())
    assert verb(monkeypatch, place, *COMMAND, "--out", tmp_path / "x", *options) == 0
    tokenizer = hasten.load(place / "model").tokenizer
    source, target = Corpus.open(place / "data").pairs("train")
    if distilled:
        target = (place / distilled).read_text(encoding="utf-8").splitlines()
    pairs = [(tokenizer.encode(a), tokenizer.encode(b)) for a, b in zip(source, target, strict=True)]
    expected = shortlist.build(pairs, tokenizer, translations=6, frequent=5, rounds=3)
    expected.save(tmp_path / "y")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    said = capsys.readouterr().out
    assert f"{len(expected.targets):,} entries" in said
    assert "valid: " in said
    assert "(400 in all)" in said


def test_some_pairs_are_spread_over_all(place, monkeypatch, tmp_path):
    assert verb(monkeypatch, place, *COMMAND, "--out", tmp_path / "x", "--pairs", 7) == 0
    tokenizer = hasten.load(place / "model").tokenizer
    source, target = Corpus.open(place / "data").pairs("train")
    chosen = [i * 60 // 7 for i in range(7)]
    pairs = [(tokenizer.encode(source[i]), tokenizer.encode(target[i])) for i in chosen]
    shortlist.build(pairs, tokenizer).save(tmp_path / "y")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--distilled", "nowhere"], "nowhere"),
        (["--model", "no-such-model"], "no model 'no-such-model'"),
        (["--data", "nowhere"], "nowhere: no such directory"),
        (["--out", "data/train.en"], "data/train.en exists; give another --out, or --force"),
        (["--out", "nowhere/x"], "cannot open nowhere/x: No such file or directory"),
        (["--max-tokens", "1"], "data has no pair with text on both sides and at most 1 pieces a side"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(place, monkeypatch, capsys, tmp_path, arguments, problem):
    assert verb(monkeypatch, place, *COMMAND, "--out", tmp_path / "x", *arguments) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def translated(monkeypatch, place: Path, tmp_path: Path, *options: object) -> tuple[int, str]:
    (tmp_path / "in").write_text("kamo ti.\nlunsch re, mo!\n", encoding="utf-8")
    code = verb(monkeypatch, place, "translate", "--input", tmp_path / "in", "--output", tmp_path / "out", *options)
    return code, (tmp_path / "out").read_text(encoding="utf-8") if (tmp_path / "out").exists() else ""


def test_lines_are_said_in_their_lists(place, monkeypatch, tmp_path):
    assert verb(monkeypatch, place, *COMMAND, "--out", tmp_path / "x", "--translations", 2, "--frequent", 1) == 0
    expected = hasten.load(place / "model", shortlist=tmp_path / "x").translate(["kamo ti.", "lunsch re, mo!"])
    found = translated(monkeypatch, place, tmp_path, "--model", "model", "--shortlist", tmp_path / "x")
    assert found == (0, "".join(line + "\n" for line in expected))


def test_an_evaluation_scores_what_is_said_in_lists_beside_what_is_said_in_all(place, monkeypatch, capsys, tmp_path):
    assert verb(monkeypatch, place, *COMMAND, "--out", tmp_path / "x", "--translations", 2, "--frequent", 1) == 0
    files = ("--json", tmp_path / "scores", "--output", tmp_path / "said")
    options = ("--model", "model", "--baseline", "model", "--shortlist", tmp_path / "x")
    assert verb(monkeypatch, place, "evaluate", "--data", "data", "--split", "valid", *options, *files) == 0
    source, target = Corpus.open(place / "data").pairs("valid")
    listed = hasten.load(place / "model", shortlist=tmp_path / "x").translate(source)
    free = hasten.load(place / "model").translate(source)
    assert (tmp_path / "said").read_text(encoding="utf-8").splitlines() == listed != free
    scores = json.loads((tmp_path / "scores").read_text(encoding="utf-8"))
    assert (scores["shortlist"], scores["chrf"]) == (str(tmp_path / "x"), quality(listed, target).chrf)
    assert "shortlist" not in scores["baseline"]
    assert scores["baseline"]["chrf"] == quality(free, target).chrf
    assert f"model shortlist={tmp_path / 'x'}: translating 5 sentences\n" in capsys.readouterr().err  # tables fold


def test_a_draft_is_of_a_model_that_says_all(place, monkeypatch, capsys, tmp_path):
    options = ("--model", "model", "--shortlist", tmp_path / "x", "--draft", "model")
    assert translated(monkeypatch, place, tmp_path, *options)[0] == 2
    assert "--draft keeps what --model says by itself, which --shortlist would change" in capsys.readouterr().err


def test_a_table_of_another_tokenizer_is_refused(place, monkeypatch, capsys, tmp_path):
    assert verb(monkeypatch, place, *COMMAND, "--out", tmp_path / "x") == 0
    capsys.readouterr()
    assert translated(monkeypatch, place, tmp_path, "--model", "en-de-ctc", "--shortlist", tmp_path / "x")[0] == 2
    error = capsys.readouterr().err
    assert "is for another tokenizer than the model's: make one for this model with `hasten shortlist`" in error
    assert error.count("\n") == 1


def test_the_bench_takes_a_table(place, monkeypatch, tmp_path):
    from hasten.bench import worker
    from hasten.bench.contestant import parse

    assert verb(monkeypatch, place, *COMMAND, "--out", "table") == 0
    contestant = parse("model:shortlist=table")
    assert contestant.label == "model:shortlist=table"
    decoder = worker.HastenDecoder(contestant, 1)
    lines = ["kamo ti.", "lunsch re, mo!"]
    assert decoder.translate(lines) == hasten.load("model", shortlist="table").translate(lines)
    allowed = Shortlist.load("table")
    encode = hasten.load("model").tokenizer.encode
    for line, (ids, passes) in zip(lines, decoder.outputs(lines), strict=True):
        assert {*ids} <= {*allowed.ids(encode(line)).tolist()}
        assert passes == 1
