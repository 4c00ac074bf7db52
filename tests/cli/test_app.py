"""The command line as a whole: what it says when asked for nothing in particular."""

import shlex
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from hasten.cli import main
from hasten.cli.progress import readable


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["hasten", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


@pytest.mark.parametrize("group", [(), ("data",), ("bench",)], ids=str)
def test_without_a_verb_the_help_is_shown_as_it_is_laid_out(monkeypatch, capsys, group: tuple[str, ...]):
    code, out, err = call(monkeypatch, capsys, *group)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: ")
    asked, shown, _ = call(monkeypatch, capsys, *group, "--help")
    assert asked == 0
    assert err.split() == shown.split()
    assert "\nCommands:\n" in err


def test_no_verb_is_described_by_half_a_sentence(monkeypatch, capsys):
    for group in ((), ("data",), ("bench",)):
        _, shown, _ = call(monkeypatch, capsys, *group, "--help")
        assert "..." not in shown.partition("Commands:")[2]


def test_the_version_is_told(monkeypatch, capsys):
    assert call(monkeypatch, capsys, "--version") == (0, f"hasten {version('hasten')}\n", "")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(17329.019, "17,329"), (4.65321, "4.653"), (0.0000312, "3.12e-05"), (12, "12"), ("x", "x"), (1e30, "1e+30")],
)
def test_numbers_of_a_run_are_readable(value: object, shown: str):
    assert readable(value) == shown


def closed(redirection: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line with a standard stream closed by the shell."""
    command = " ".join(shlex.quote(str(part)) for part in (sys.executable, "-m", "hasten", *arguments))
    return subprocess.run(f"{command} {redirection}", shell=True, capture_output=True, text=True, check=False)


def test_a_closed_stdout_is_one_line():
    done = closed(">&-", "--help")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: stdout is closed")


def test_a_full_stdout_is_one_line():
    done = closed(">/dev/full", "--help")
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


def test_messages_of_a_closed_stderr_do_not_mix_with_results(tmp_path):
    done = closed("2>&-", "evaluate", "--model", "x", "--src", tmp_path / "none", "--ref", tmp_path / "none")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("translate", "--model", "x", "--output", "y", "--trace", "y"), "--output and --trace both name y"),
        (("translate", "--model", "x", "--input", "s", "--trace", "./s"), "--trace and --input both name s"),
        (("translate", "--model", "x", "--input", "s", "--output", "link"), "--output and --input both name link"),
        (("evaluate", "--model", "x", "--src", "s", "--ref", "r", "--output", "r"), "--output and --ref both name r"),
        (("evaluate", "--model", "x", "--src", "s", "--ref", "r", "--json", "s"), "--json and --src both name s"),
    ],
    ids=str,
)
def test_no_file_is_read_and_written_or_written_twice(monkeypatch, capsys, tmp_path, arguments, said: str):
    monkeypatch.chdir(tmp_path)
    for name in ("s", "r"):
        (tmp_path / name).write_text("kamo\n")
    (tmp_path / "link").symlink_to("s")
    code, out, err = call(monkeypatch, capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert (tmp_path / "s").read_text() == (tmp_path / "r").read_text() == "kamo\n"


@pytest.mark.parametrize("model", ["", "a" * 5000])
def test_an_impossible_name_of_a_model_is_one_line(monkeypatch, capsys, model: str):
    code, _, err = call(monkeypatch, capsys, "export", "--model", model, "--out", "x")
    assert (code, err.count("\n")) == (2, 1)
    assert "no model" in err


@pytest.mark.parametrize("verb", ["train", "translate", "evaluate", "distill"])
def test_more_threads_than_any_machine_has_are_refused(monkeypatch, capsys, verb: str):
    code, _, err = call(monkeypatch, capsys, verb, "--threads", "100000")
    assert (code, err.count("\n")) == (2, 1)
    assert "less than or equal to 1024" in err


@pytest.mark.parametrize("size", [2**50, 2**62], ids=str)
def test_a_tensor_that_does_not_fit_is_one_line_and_any_other_failure_is_not_hidden(monkeypatch, capsys, size: int):
    def allocate(**options: object) -> None:
        torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr("hasten.cli.app", allocate)
    code, _, err = call(monkeypatch, capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: this machine has too little memory for that")

    def fail(**options: object) -> None:
        torch.zeros(2) @ torch.zeros(3)

    monkeypatch.setattr("hasten.cli.app", fail)
    with pytest.raises(RuntimeError, match="size"):
        main()
