"""The command line as a whole: what it says when asked for nothing in particular."""

import sys
from importlib.metadata import version

import pytest

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
