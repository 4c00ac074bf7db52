"""What a user of `hasten distill` sees."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hasten.cli import main

LINES = ["ka mo ti", "re lun", "schö kaing", "", "do fi pe zu"]
RUN = [sys.executable, "-m", "hasten", "distill"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a source to distil."""
    (tmp_path / "train.en").write_text("".join(line + "\n" for line in LINES), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hasten(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """`hasten distill` with these arguments; its exit code."""
    monkeypatch.setattr(sys, "argv", ["hasten", "distill", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_summary_counts_what_was_kept_and_why_not(folder: Path, monkeypatch, capsys):
    assert hasten(monkeypatch, "--teacher-command", "tr k q", "--src", "train.en", "--out", "out") == 0
    shown = capsys.readouterr()
    assert [line.split() for line in shown.out.splitlines()[1:]] == [
        ["2", "40.0%", "kept"],
        ["2", "40.0%", "copy"],
        ["1", "20.0%", "empty", "source"],
    ]
    assert shown.out.startswith("out: 5 lines in ")
    assert "warning: the filters left only 2 of 5 translations" in shown.err
    assert (folder / "out").read_text(encoding="utf-8") == "qa mo ti\n\nschö qaing\n\n\n"


def test_copies_are_kept_where_the_user_wants_them(folder: Path, monkeypatch, capsys):
    code = hasten(monkeypatch, "--teacher-command", "cat", "--src", "train.en", "--out", "out", "--keep-copies")
    assert code == 0
    assert (folder / "out").read_text(encoding="utf-8").split("\n") == [*LINES, ""]
    assert "warning" not in capsys.readouterr().err


def test_only_the_first_lines_by_limit(folder: Path, monkeypatch):
    assert (
        hasten(monkeypatch, "--teacher-command", "tr a-z A-Z", "--src", "train.en", "--out", "out", "--limit", 2) == 0
    )
    assert (folder / "out").read_text(encoding="utf-8") == "KA MO TI\nRE LUN\n"


def test_a_model_distils_by_beam_and_the_report_names_it(folder: Path, monkeypatch, tiny_run):
    teacher = tiny_run("autoregressive")
    assert hasten(monkeypatch, "--teacher", teacher, "--src", "train.en", "--out", "out", "--beam", 2) == 0
    report = json.loads((folder / "out.report.json").read_text(encoding="utf-8"))
    assert report["teacher"]["name"] == str(teacher)
    assert report["teacher"]["beam"] == 2
    assert report["settings"] == {
        "max_ratio": 3.0, "max_tokens": 250, "keep_copies": False, "limit": None, "shard_lines": 1000, "unit": "pieces"
    }  # fmt: skip
    assert sum(report["counts"].values()) == report["source"]["lines"] == len(LINES)
    assert (folder / "out").read_text(encoding="utf-8").count("\n") == len(LINES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one teacher: either --teacher or --teacher-command"),
        (["--teacher", "a", "--teacher-command", "b"], "give one teacher: either --teacher or --teacher-command"),
        (["--teacher", "no-such-model"], "no model 'no-such-model'"),
        (["--teacher", "x", "--tokenizer", "y"], "--tokenizer goes with --teacher-command"),
        (["--teacher-command", "cat", "--beam", "4"], "--beam goes with --teacher"),
        (["--teacher-command", "cat", "--threads", "4"], "--threads goes with --teacher"),
        (["--teacher-command", "false"], "ended with code 1"),
        (["--teacher-command", "cat", "--max-ratio", "0.1"], "max_ratio is 0.1; it must be at least 1"),
        (["--teacher-command", "cat", "--max-ratio", "nan"], "max_ratio is nan; it must be at least 1"),
        (["--teacher-command", "cat", "--src", "out.report.json"], "would write over it (out.report.json)"),
        (["--teacher-command", "cat", "--src", "nowhere.en"], "nowhere.en"),
        (["--teacher-command", "cat", "--src", "bad.en"], "bad.en, line 2: invalid UTF-8 at byte 2"),
        (["--teacher-command", "cat", "--src", "empty.en"], "empty.en has no lines"),
        (["--teacher-command", "cat", "--out", "no/where"], "cannot write no/where.partial: No such file or directory"),
        (["--teacher-command", "cat", "--out", "."], "is a directory"),
        (["--teacher-command", "cat", "--out", "bad.en"], "bad.en exists; give another --out, or --force"),
        (["--teacher-command", "cat", "--out", "train.en", "--force"], "--out is the source itself"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(folder: Path, monkeypatch, capsys, arguments: list[str], said: str):
    (folder / "bad.en").write_bytes(b"fine\nx\xff\n")
    (folder / "empty.en").touch()
    (folder / "out.report.json").write_text("a line to translate\n")
    source = [] if "--src" in arguments else ["--src", "train.en"]
    out = [] if "--out" in arguments else ["--out", "out"]
    assert hasten(monkeypatch, *arguments, *source, *out) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert (folder / "train.en").read_text(encoding="utf-8").split("\n")[:-1] == LINES
    assert not (folder / "out").exists()


def test_ctrl_c_says_how_to_go_on(folder: Path):
    command = [*RUN, "--teacher-command", "touch begun; sleep 20; cat", "--src", "train.en", "--out", "out"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 30
    while not (folder / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    shown = process.communicate(timeout=10)[1]
    assert process.returncode == 130
    assert shown == "stopped after 0 lines; the same command (without --force) goes on\n"
