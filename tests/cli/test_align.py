"""What a user of `hasten align` sees."""

import sys
from pathlib import Path

import pytest
import torch

import hasten
from hasten.cli import main
from hasten.data.alignment import apportion
from hasten.data.batch import pair_batch
from hasten.data.corpus import Corpus, Pair, write_corpus
from hasten.training import checkpoint


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, words: list[str], tokenizer, tiny_spec, tiny_run) -> Path:
    """A folder with a corpus, `data`, distilled targets, and a teacher of two decoder layers."""
    folder = tmp_path_factory.mktemp("align")
    pairs = [Pair(a, b, str(i)) for i, (a, b) in enumerate(zip(words[:30], words[30:60], strict=True))]
    write_corpus(folder / "data", ("en", "de"), {"train": pairs, "valid": pairs[:2]}, {})
    lines = ["" if i == 3 else words[100 + i] for i in range(30)]
    (folder / "distilled").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    spec = tiny_spec("autoregressive", decoder_layers=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = spec.model.build(tokenizer.vocab_size)
    checkpoint.write_run(folder / "teacher", spec, tokenizer)
    checkpoint.save_weights(folder / "teacher" / checkpoint.WEIGHTS, model.state_dict(), tokenizer)
    (folder / "student").symlink_to(tiny_run("ctc"))
    return folder


def align(monkeypatch: pytest.MonkeyPatch, place: Path, *arguments: object) -> int:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["hasten", "align", "--data", "data", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def by_hand(place: Path, layer: int, source: str, target: str) -> list[int]:
    """The label of one pair: what the layer reads where each target piece is predicted, mean over the heads."""
    translator = hasten.load(place / "teacher")
    encode = translator.tokenizer.encode
    batch = pair_batch([(encode(source), encode(target))])
    seen = []

    def observe(name, number, operator, real):
        if (name, number) == ("cross", layer - 1):
            seen.append(operator.dense()[0].mean(0))

    with torch.inference_mode():
        translator.model.attentions(batch, observe)
    received = [sum(float(seen[0][t, s]) for t in range(batch.target.shape[1])) for s in range(batch.source.shape[1])]
    return apportion(received, batch.target.shape[1])


@pytest.mark.parametrize("layer", [None, 1, 2])
def test_labels_are_what_a_layer_reads(place, monkeypatch, capsys, tmp_path, layer):
    options = () if layer is None else ("--layer", layer)
    out = tmp_path / "labels"
    assert align(monkeypatch, place, "--model", "teacher", "--method", "attention", "--out", out, *options) == 0
    found = [list(map(int, line.split())) for line in out.read_text().splitlines()]
    pairs = list(zip(*Corpus.open(place / "data").pairs("train"), strict=True))
    assert len(found) == len(pairs)
    close = 0
    for label, (source, target) in zip(found, pairs, strict=True):
        expected = by_hand(place, layer or 2, source, target)
        assert (len(label), sum(label)) == (len(expected), sum(expected))
        close += label == expected  # a rounding error may decide between equals
    assert close >= len(pairs) - 2
    assert "100.0%  labelled" in capsys.readouterr().out


def test_distilled_targets_take_the_place_of_the_corpus(place, monkeypatch, tmp_path):
    out = tmp_path / "labels"
    options = ("--model", "teacher", "--method", "attention", "--distilled", "distilled", "--out", out)
    assert align(monkeypatch, place, *options) == 0
    tokenizer = hasten.load(place / "teacher").tokenizer
    lines = (place / "distilled").read_text(encoding="utf-8").splitlines()
    for label, target in zip(out.read_text().splitlines(), lines, strict=True):
        assert sum(map(int, label.split())) == len(tokenizer.encode(target))


def test_an_aligner_makes_labels_too(place, monkeypatch, tmp_path):
    pytest.importorskip("eflomal")
    out = tmp_path / "labels"
    assert align(monkeypatch, place, "--model", "teacher", "--out", out, "--threads", 1) == 0
    tokenizer = hasten.load(place / "teacher").tokenizer
    pairs = list(zip(*Corpus.open(place / "data").pairs("train"), strict=True))
    for label, (source, target) in zip(out.read_text().splitlines(), pairs, strict=True):
        numbers = list(map(int, label.split()))
        if numbers:
            assert (len(numbers), sum(numbers)) == (len(tokenizer.encode(source)) + 1, len(tokenizer.encode(target)))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--layer", "3", "--method", "attention"], "teacher has no decoder layer 3; give one from 1 to 2"),
        (["--layer", "1"], "--layer goes with --method attention"),
        (["--batch-tokens", "9"], "--batch-tokens goes with --method attention"),
        (["--device", "cpu"], "--device goes with --method attention"),
        (
            ["--method", "attention", "--model", "student"],
            "student is a CTC model, which does not write piece by piece",
        ),
        (["--method", "attention", "--distilled", "nowhere"], "nowhere"),
        (["--method", "attention", "--model", "no-such-model"], "no model 'no-such-model'"),
        (["--method", "attention", "--data", "nowhere"], "nowhere: no such directory"),
        (["--method", "attention", "--out", "data/train.en"], "data/train.en exists; give another --out, or --force"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(place, monkeypatch, capsys, tmp_path, arguments, problem):
    out = tmp_path / "labels"
    assert align(monkeypatch, place, "--model", "teacher", "--out", out, *arguments) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.splitlines()[-1].startswith("error: ")
    assert not out.exists()


def test_where_no_pair_has_a_label_nothing_is_written(place, monkeypatch, capsys, tmp_path):
    out = tmp_path / "labels"
    options = ("--model", "teacher", "--method", "attention", "--max-tokens", "1", "--out", out)
    assert align(monkeypatch, place, *options) == 2
    shown = capsys.readouterr()
    assert "no pair has a label (30 too long); nothing was written. --max-tokens says what is too long" in shown.err
    assert not list(tmp_path.iterdir())
