"""The runtime against the translator it stands in for."""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import hasten
from hasten.cli import main
from hasten.data import shortlist
from hasten.decoding.ctc_beam import collapse_scored
from hasten.errors import UserError
from hasten.export.onnx import export
from hasten.runtime import engine, load, words

pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

LINES = ["kamo ti.", "", "lunsch\fre, \u2028mo!", " \t", "nul \x00 nul", "tire tire 😀 \u2581", "kamo ti.", "ti " * 400]
KINDS = ("ctc", "autoregressive")
LOADED = "print('LOADED', *[name for name in ('torch', 'jaxtyping', 'pydantic') if name in sys.modules])"


@pytest.fixture(scope="module")
def pairs(tiny_run, tmp_path_factory):
    """Of each kind the translator in PyTorch and the directory for ONNX Runtime."""
    found = {}
    for kind in KINDS:
        translator, out = hasten.load(tiny_run(kind)), tmp_path_factory.mktemp(kind) / "x"
        export(translator.model, translator.tokenizer, out, max_source_tokens=translator.max_source_tokens)
        found[kind] = translator, out
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_tokens", [1, 1024])
def test_translations_are_those_of_the_translator(pairs, kind, batch_tokens):
    translator, out = pairs[kind]
    runtime = load(out, threads=1)
    assert runtime.translate(LINES, batch_tokens=batch_tokens) == translator.translate(LINES)
    expected = translator.candidates(LINES)
    for [ours], [theirs] in zip(runtime.candidates(LINES), expected, strict=True):
        assert ours.score == pytest.approx(theirs.score, abs=1e-4)
        assert ours.log_prob == pytest.approx(theirs.log_prob, rel=1e-4, abs=1e-3)
    assert runtime.translate([]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_is_refused_in_the_same_words(pairs, kind):
    translator, out = pairs[kind]
    runtime = load(out, threads=1)
    for lines, options in ((["kamo", "ti " * 400], {"on_long": "error"}), (["x"], {"batch_tokens": 0}), (["x", 3], {})):
        with pytest.raises(UserError) as ours:
            runtime.translate(lines, **options)
        with pytest.raises(UserError) as theirs:
            translator.translate(lines, **options)
        assert str(ours.value) == str(theirs.value)


def test_collapse_is_that_of_the_model():
    generator = np.random.default_rng(1)
    for length in (1, 2, 7, 30):
        tokens, scores = generator.integers(4, 8, length), generator.standard_normal(length).astype(np.float32)
        row = torch.from_numpy(tokens)[None], torch.from_numpy(scores)[None], torch.tensor([length])
        expected = collapse_scored(*row, blank=5, pad=0)
        assert engine.collapse(tokens, scores) == (expected.tokens[0].tolist(), expected.scores[0].tolist())


def test_the_best_token_is_no_banned_one_and_the_lowest_of_equal_ones():
    logits = np.array([[9.0, 1.0, 1.0, 0.0], [0.0, 0.0, 5.0, 0.0]], dtype=np.float32)
    ids, scores = words.best(logits, [0])
    assert ids.tolist() == [1, 2]
    expected = torch.from_numpy(logits).log_softmax(-1)
    assert np.allclose(scores, [expected[0, 1], expected[1, 2]], atol=1e-6)
    with pytest.raises(UserError, match="not numbers"):
        words.best(np.array([[0.0, np.nan]], dtype=np.float32), [0])


def translated(command: list[str], data: bytes) -> bytes:
    return subprocess.run([sys.executable, *command], input=data, capture_output=True, check=True).stdout


@pytest.mark.parametrize("kind", KINDS)
def test_the_module_translates_without_torch(pairs, kind):
    translator, out = pairs[kind]
    code = f"import sys\nfrom hasten.runtime.__main__ import run\nrun([{str(out)!r}, '--threads', '1'])\n{LOADED}"
    data = "".join(line + "\n" for line in LINES).encode()
    *said, loaded = translated(["-c", code], data).decode().split("\n")[:-1]
    assert loaded == "LOADED"
    assert said == translator.translate(LINES)
    assert translated(["-m", "hasten.runtime", str(out)], data).decode().split("\n")[:-1] == said


def test_the_verb_translates_without_torch(pairs):
    translator, out = pairs["ctc"]
    typed = ["hasten", "translate", "--runtime", "onnx", "--model", str(out), "--threads", "1"]
    loaded = "print('LOADED', 'torch' in sys.modules)"
    code = f"import sys\nsys.argv = {typed}\nfrom hasten.cli import main\ntry:\n    main()\nfinally:\n    {loaded}"
    *said, loaded = translated(["-c", code], b"kamo ti.\n\nre mo\n").decode().split("\n")[:-1]
    assert loaded == "LOADED False"
    assert said == translator.translate(["kamo ti.", "", "re mo"])


def test_a_mistake_is_one_line(pairs, tmp_path: Path):
    _, out = pairs["ctc"]
    for arguments, problem in (
        ([str(tmp_path)], "no model for ONNX Runtime"),
        ([str(out), "--threads", "-1"], "threads is -1, allowed 0 to"),
        ([str(out), "--threads", "1" + "0" * 12], "threads is 1000000000000, allowed 0 to"),
    ):
        done = subprocess.run([sys.executable, "-m", "hasten.runtime", *arguments], input=b"x\n", capture_output=True)
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr.decode().startswith("error: ")
        assert problem in done.stderr.decode()
        assert done.stderr.count(b"\n") == 1
    closed = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m hasten.runtime {out} >&-"], input=b"x\n", capture_output=True
    )
    assert (closed.returncode, closed.stderr.count(b"\n")) == (2, 1)
    assert closed.stderr.startswith(b"error: stdout is closed")
    command = [sys.executable, "-m", "hasten.runtime", str(out), "--batch-tokens", "0"]
    done = subprocess.run(command, input=b"", capture_output=True)
    assert (done.returncode, done.stderr) == (2, b"error: batch_tokens is 0, allowed 1 or more\n")
    long = b"kamo\n" + b"ti " * 400 + b"\n"
    command = [sys.executable, "-m", "hasten.runtime", str(out), "--on-long", "error"]
    done = subprocess.run(command, input=long, capture_output=True)
    assert (done.returncode, done.stdout.count(b"\n")) == (2, 1)
    assert done.stderr.startswith(b"error: line 2 has ")


SETTINGS = [
    ("kind", ["ctc"]), ("compute", 3), ("max_source_tokens", "x"), ("max_source_tokens", 0), ("upsample", 0),
    ("upsample", True), ("upsample", 10**9), ("parameters", None), ("tokenizer", 1),
    ("beta", -1.0), ("beta", "1"), ("beta", True), ("beta", float("nan")),
    ("beta", 10**40), ("beta", 1e31),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_settings_that_cannot_be_are_named(pairs, tmp_path: Path, name, value):
    out = shutil.copytree(pairs["ctc"][1], tmp_path / "x")
    found = json.loads((out / "hasten.json").read_text())
    (out / "hasten.json").write_text(json.dumps({**found, name: value}))
    with pytest.raises(UserError, match=rf"hasten\.json is damaged: {name} is "):
        load(out)


def test_files_that_do_not_belong_together_are_told(pairs, tokenizer, words, tmp_path: Path):
    out = shutil.copytree(pairs["ctc"][1], tmp_path / "x")
    tokenizer.train(words, tokenizer.vocab_size - 5, threads=1).save(out / "tokenizer.model")
    with pytest.raises(UserError, match=r"tokenizer\.model is not the tokenizer of this model"):
        load(out)
    for kind, name in (("ctc", "encoder"), ("ctc", "output"), ("autoregressive", "steps")):
        out = shutil.copytree(pairs[kind][1], tmp_path / name)
        other = "autoregressive" if kind == "ctc" else "ctc"
        shutil.copy(pairs[other][1] / "encoder.onnx", out / f"{name}.onnx")
        with pytest.raises(UserError, match=rf"{name}\.onnx is the graph of something else"):
            load(out)
    settings = json.loads((out / "hasten.json").read_text())
    (out / "hasten.json").write_text(json.dumps({**settings, "vocabulary": 2**31}))
    with pytest.raises(UserError, match="says that it has 2147483648 pieces, its tokenizer has 400"):
        load(out)


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_two_exports_are_never_taken_for_one_model(pairs, kind, words, tokenizer, tmp_path: Path):
    translator, out = pairs[kind]
    other, limit = hasten.load(translator.directory), translator.max_source_tokens
    with torch.no_grad():
        other.model.embedding.weight += 1e-3  # what another training of the same configuration gives
    export(other.model, other.tokenizer, tmp_path / "other", max_source_tokens=limit)
    shortlist.everything(tokenizer).save(tmp_path / "all")
    for name in [path.name for path in out.glob("*.onnx")]:
        mixed = shutil.copytree(out, tmp_path / name)
        shutil.copy(tmp_path / "other" / name, mixed)
        table = tmp_path / "all" if name in engine.LISTED else None
        with pytest.raises(
            UserError, match=rf"{name} is of another export than hasten\.json beside it; export .* again"
        ):
            load(mixed, shortlist=table)
    export(translator.model, translator.tokenizer, tmp_path / "same", max_source_tokens=limit)
    assert {p.name: p.read_bytes() for p in (tmp_path / "same").iterdir()} == {
        p.name: p.read_bytes() for p in out.iterdir()
    }


def test_a_damaged_graph_is_told_and_nothing_is_written_where_translations_go(pairs, tmp_path: Path, capfd):
    for place in range(0, 400, 8):
        out = shutil.copytree(pairs["autoregressive"][1], tmp_path / "x", dirs_exist_ok=True)
        data = bytearray((out / "steps.onnx").read_bytes())
        data[place : place + 2] = b"\xff\xfe"
        (out / "steps.onnx").write_bytes(data)
        with suppress(UserError):
            load(out)
    assert capfd.readouterr() == ("", "")


def test_a_directory_of_any_name_is_read(pairs, tmp_path: Path):
    out = shutil.copytree(pairs["ctc"][1], tmp_path / "two words \udcff ü")
    assert load(out).translate(["kamo ti."]) == pairs["ctc"][0].translate(["kamo ti."])


def test_a_graph_that_computes_something_else_is_told_and_nothing_besides(pairs, tmp_path: Path, capfd):
    out = shutil.copytree(pairs["ctc"][1], tmp_path / "x")
    found = json.loads((out / "hasten.json").read_text())
    (out / "hasten.json").write_text(json.dumps({**found, "upsample": found["upsample"] + 1}))
    with pytest.raises(UserError, match=r"encoder\.onnx cannot be computed .* export the model again"):
        load(out).translate(["kamo ti."])
    assert capfd.readouterr().err == ""


def test_options_that_only_pytorch_has_are_refused(pairs, monkeypatch, capsys):
    for option in (["--beam", "4"], ["--trace", "t"], ["--device", "cuda"], ["--decoding", "a=1"]):
        monkeypatch.setattr(
            sys, "argv", ["hasten", "translate", "--runtime", "onnx", "--model", str(pairs["ctc"][1]), *option]
        )
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        said = capsys.readouterr().err
        assert f"leave out {option[0]}" in said
        assert said.count("\n") == 1
