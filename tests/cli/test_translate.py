import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hasten
from hasten.cli import main
from hasten.export.onnx import export

LINES = ["kamo ti.", "", "lunsch\fre, \u2028mo!", " \t", "nul \x00 nul", "tire tire 😀 \u2581", "kamo ti."]


@pytest.fixture
def run(tiny_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]):
    """`hasten translate` in this process: run(data, *options) gives the exit code, stdout and stderr."""

    def call(data: bytes, *options: str, model: str = "ctc") -> tuple[int, bytes, str]:
        (tmp_path / "in").write_bytes(data)
        monkeypatch.setattr(sys, "argv", ["hasten", "translate", "--model", str(tiny_run(model)), *options])
        with (tmp_path / "in").open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            with pytest.raises(SystemExit) as exited:
                main()
        out, err = capfdbinary.readouterr()
        return int(exited.value.code or 0), out, err.decode()

    return call


def encoded(lines: list[str]) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


@pytest.mark.parametrize("model", ["autoregressive", "ctc", "dag", "refinement", "mask_predict"])
@pytest.mark.parametrize("options", [[], ["--beam", "3"], ["--batch-tokens", "1"]], ids=" ".join)
def test_lines_come_out_as_from_python(run, tiny_run, model: str, options: list[str]):
    beam = 3 if "--beam" in options else 1
    expected = hasten.load(tiny_run(model)).translate(LINES, beam=beam)
    assert run(encoded(LINES), *options, model=model) == (0, encoded(expected), "")


def test_there_are_as_many_lines_as_went_in(run):
    for data, n_lines in ((b"", 0), (b"\n", 1), (b"a", 1), (b"a\nb", 2), (b"a\r\nb\r\n", 2), (b"\n\n\n", 3)):
        code, out, _ = run(data)
        assert (code, out.count(b"\n")) == (0, n_lines)
    assert run(b"kamo\r\n") == run(b"kamo\n") == run(b"kamo")


def test_scores_stand_before_the_text(run, tiny_run):
    [[best]] = hasten.load(tiny_run("autoregressive")).candidates(["kamo ti"])
    assert run(b"kamo ti\n", "--scores", model="autoregressive")[1].decode() == f"{best.score:.6f}\t{best.text}\n"
    assert run(b"\n", "--scores")[1] == b"0.000000\t\n"


def test_n_best_lists_number_the_lines(run, tiny_run):
    lines = ["kamo ti", "", "re"]
    found = hasten.load(tiny_run("autoregressive")).candidates(lines, beam=4, n_best=2)
    rows = [f"{number}\t{one.score:.6f}\t{one.text}" for number, line in enumerate(found, 1) for one in line]
    code, out, _ = run(encoded(lines), "--beam", "4", "--nbest", "2", model="autoregressive")
    assert (code, out) == (0, encoded(rows))
    assert run(encoded(lines), "--nbest", "2", model="autoregressive")[0] == 0, "the beam is as wide as needed"


def test_files_stand_in_for_the_streams(run, tmp_path: Path):
    (tmp_path / "source").write_bytes(encoded(LINES))
    code, out, _ = run(b"", "--input", str(tmp_path / "source"), "--output", str(tmp_path / "target"))
    assert (code, out) == (0, b"")
    assert (tmp_path / "target").read_bytes() == run(encoded(LINES))[1]


def test_a_trace_ends_in_the_translation(run, tiny_run, tmp_path: Path):
    code, out, _ = run(encoded(LINES), "--trace", str(tmp_path / "trace"))
    rows = [json.loads(row) for row in (tmp_path / "trace").read_text(encoding="utf-8").split("\n")[:-1]]
    assert code == 0
    assert out == run(encoded(LINES))[1]
    assert set(rows[0]) == {"line", "part", "iteration", "kind", "pieces", "scores", "unsure", "done"}
    assert all(row["unsure"] == [i for i, x in enumerate(row["scores"]) if math.exp(x) < 0.5] for row in rows)
    assert [row["kind"] for row in rows] == ["fill", "collapse"] * 5
    assert sorted({row["line"] for row in rows}) == [1, 3, 5, 6, 7], "lines without text have no frames"
    tokenizer = hasten.load(tiny_run("ctc")).tokenizer
    number = {piece: i for i, piece in enumerate(tokenizer.pieces())}
    last = next(row for row in rows if row["done"])
    assert tokenizer.decode([number[piece] for piece in last["pieces"]]).strip() == out.decode().split("\n")[0]


def test_a_draft_changes_nothing_but_the_number_of_passes(run, tiny_run, tmp_path: Path):
    expected = run(encoded(LINES), model="autoregressive")[1]
    options = ["--draft", str(tiny_run("autoregressive")), "--trace", str(tmp_path / "t")]
    assert run(encoded(LINES), *options, model="autoregressive") == (0, expected, "")
    rows = [json.loads(row) for row in (tmp_path / "t").read_text(encoding="utf-8").split("\n")[:-1]]
    assert {row["kind"] for row in rows} == {"append"}
    assert all(len(row["pieces"]) > 1 for row in rows if row["iteration"] > 0)


def test_a_model_in_onnx_runtime_may_draft(run, tiny_run, tmp_path: Path):
    pytest.importorskip("onnx", reason="the extra onnx is not installed")
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    own = hasten.load(tiny_run("autoregressive"))
    export(own.model, own.tokenizer, tmp_path / "x", max_source_tokens=own.max_source_tokens)
    expected = run(encoded(LINES), model="autoregressive")[1]
    options = ["--draft", str(tmp_path / "x"), "--trace", str(tmp_path / "t")]
    assert run(encoded(LINES), *options, model="autoregressive") == (0, expected, "")
    rows = [json.loads(row) for row in (tmp_path / "t").read_text(encoding="utf-8").split("\n")[:-1]]
    assert all(len(row["pieces"]) > 1 for row in rows if row["iteration"] > 0)


def test_a_trace_to_read_has_what_is_unsure_in_brackets(run, tmp_path: Path):
    for confidence in ("0", "1"):
        run(encoded(LINES), "--trace", str(tmp_path / "t"), "--confidence", confidence)
        run(encoded(LINES), "--trace", str(tmp_path / "t.txt"), "--confidence", confidence)
        rows = [json.loads(row) for row in (tmp_path / "t").read_text(encoding="utf-8").split("\n")[:-1]]
        lines = (tmp_path / "t.txt").read_text(encoding="utf-8").split("\n")[:-1]
        for row, line in zip(rows, lines, strict=True):
            pieces = [f"[{p}]" if i in row["unsure"] else p for i, p in enumerate(row["pieces"])]
            assert line == f"{row['line']}\t{row['iteration']} {row['kind']}\t{' '.join(pieces)}"
        assert any("[" in line for line in lines) is (confidence != "0")


def test_what_is_no_utf8_ends_the_run_after_the_lines_before_it(run):
    code, out, err = run(b"kamo\nti\n\xffre\nmo\n")
    assert (code, out) == (2, run(b"kamo\nti\n")[1])
    assert err.startswith("error: line 3 of stdin is not valid UTF-8")
    assert err.count("\n") == 1


def test_a_long_line_is_split_or_ends_the_run_after_the_lines_before_it(run):
    long = b"kamo ti\nre\n" + b"lunsch " * 5000 + b"\nmo\n"
    code, out, _ = run(long)
    assert (code, out.count(b"\n")) == (0, 4)
    code, out, err = run(long, "--on-long", "error")
    assert (code, out) == (2, run(b"kamo ti\nre\n")[1])
    assert err.startswith("error: line 3 has ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--beam", "2", "--nbest", "3"], "--nbest 3 is more than --beam 2"),
        (["--beam", "2", "--trace", "t"], "--trace"),
        (["--beam", "0"], "--beam"),
        (["--rescorer", "x"], "--rescorer has one output to choose from"),
        (["--beam", "2", "--rescorer", "no-such-model"], "no model 'no-such-model'"),
        (["--draft", "x", "--nbest", "2"], "--draft is for one output without a beam"),
        (["--draft", "no-such-model"], "no model 'no-such-model'"),
        (["--draft", "x" * 5000], "no model 'xxxx"),
        (["--decoding", "iterations=4"], "have no settings of decoding to change"),
        (["--confidence", "2"], "--confidence"),
        (["--batch-tokens", "0"], "--batch-tokens"),
        (["--on-long", "truncate"], "--on-long"),
        (["--device", "toaster"], "device 'toaster'"),
        (["--model", "no-such-model"], "no model 'no-such-model'"),
        (["--input", "/no/such/file"], "cannot open /no/such/file: No such file"),
        (["--output", "/no/such/dir/file"], "cannot open /no/such/dir/file"),
        (["--trace", "/no/such/dir/file"], "cannot open /no/such/dir/file"),
        (["--input", "/"], "cannot open /: Is a directory"),
        (["--output", "/dev/full"], "cannot write /dev/full: No space left"),
        (["--trace", "/dev/full"], "cannot write /dev/full: No space left"),
        (["surplus"], "surplus"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_2(run, options: list[str], what: str):
    code, out, err = run(b"kamo\n", *options)
    assert (code, out) == (2, b"")
    assert what in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_the_file_that_is_read_is_not_overwritten(run, tmp_path: Path):
    path = tmp_path / "text"
    path.write_bytes(b"kamo\n")
    code, _, err = run(b"", "--input", str(path), "--output", str(path))
    assert code == 2
    assert "give two different files" in err
    assert path.read_bytes() == b"kamo\n"


@pytest.mark.parametrize("option", ["--output", "--trace"])
@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--beam", "2", "--rescorer", "CTC"], "models give no probability of a given text"),
        (["--draft", "CTC"], "check no drafts"),
        (["--decoding", "iterations=0"], "decoding"),
        (["--on-long", "error"], "line 1"),
    ],
)
def test_what_is_refused_leaves_the_files_as_they_were(run, tiny_run, tmp_path, option, options, what):
    if option == "--trace" and "--beam" in options:
        pytest.skip("there is no trace of a beam")
    kept = tmp_path / "kept"
    kept.write_text("precious")
    own = [str(tiny_run("ctc")) if word == "CTC" else word for word in options]
    code, _, err = run(b"ka " * 2000, option, str(kept), *own)
    assert code == 2
    assert what in err
    assert kept.read_text() == "precious"
    assert run(b"ka " * 2000, option, str(tmp_path / "new"), *own)[0] == 2
    assert not (tmp_path / "new").exists()


def test_a_file_is_emptied_for_an_empty_text(run, tmp_path):
    (tmp_path / "out").write_text("old")
    assert run(b"", "--output", str(tmp_path / "out"))[0] == 0
    assert (tmp_path / "out").read_bytes() == b""


def start(model: Path, *options: str, **streams: int) -> subprocess.Popen[bytes]:
    code = "from hasten.cli import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, "translate", "--model", str(model), *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **streams)


def test_a_line_is_answered_before_the_next_one_is_asked(tiny_run):
    with start(tiny_run("ctc"), "--threads", "1", stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        answers = []
        for line in ["kamo ti", "", "re mo"]:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            answers.append(process.stdout.readline().decode().removesuffix("\n"))
        process.stdin.close()
        assert process.stdout.read() == b""
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert answers == hasten.load(tiny_run("ctc")).translate(["kamo ti", "", "re mo"])


def test_a_reader_that_leaves_ends_the_run_quietly(tiny_run):
    reading, writing = os.pipe()
    with start(tiny_run("ctc"), "--threads", "1", stdout=writing) as process:
        os.close(writing)
        os.close(reading)
        _, err = process.communicate(b"kamo\n" * 50)
    assert process.returncode != 0
    assert err == b""
