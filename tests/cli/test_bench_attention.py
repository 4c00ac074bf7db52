import json
import shutil
import sys
from pathlib import Path

import pytest

from hasten import cli

PEERS = Path(__file__).parents[1] / "bench" / "peers_of_tests.py"


@pytest.fixture
def call(monkeypatch, capsys):
    def called(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hasten", "bench", "attention", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        code = stopped.value.code
        return (code if isinstance(code, int) else 0), captured.out, captured.err

    return called


@pytest.fixture
def peers(tmp_path) -> Path:
    """A directory of peers, with this very interpreter as its environment."""
    python = tmp_path / "peers" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    shutil.copy(PEERS, tmp_path / "peers" / "peers.py")
    return tmp_path / "peers"


def test_bench_writes_rows_tables_and_picture_and_says_what_was_red(call, peers, tmp_path):
    code, out, err = call(
        *("--mechanisms", "full,Local(2) | Global(first=1),peer:wrong", "--lengths", "32,16", "--repeats", "1"),
        *("--heads", "2", "--width", "4", "--causal", "--peers", str(peers), "--out", str(tmp_path / "bench")),
    )
    assert code == 1, err
    assert "peer:wrong: not timed: the check failed: it is off" in err
    names = ["full", "Local(2) | Global(first=1)", "peer:wrong"]
    assert [line.split("\t")[:2] for line in out.splitlines()[1:]] == [
        [name, n] for n in ("16", "32") for name in names
    ]
    rows = [json.loads(line) for line in (tmp_path / "bench" / "attention.jsonl").read_text().splitlines()]
    assert [(row["label"], row["length"]) for row in rows] == [(name, n) for n in (16, 32) for name in names]
    assert all(row["causal"] for row in rows)
    assert rows[1]["training_ms"]["median"] > 0
    assert "| full |" in (tmp_path / "bench" / "attention.md").read_text()
    assert (tmp_path / "bench" / "attention.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--mechanisms", "locl"), "'locl' is no mechanism"),
        (("--mechanisms", ""), "--mechanisms is empty"),
        (("--mechanisms", "full", "--lengths", "256,0"), "--lengths: '0' is not in 1 to"),
        (("--mechanisms", "full", "--lengths", ""), "--lengths: '' is not in 1 to"),
        (("--mechanisms", "full", "--lengths", "²"), "--lengths: '²' is not in 1 to"),
        (("--mechanisms", "full", "--lengths", "9" * 5000), "is not in 1 to"),
        (("--mechanisms", "full", "--heads", "0"), "--heads"),
        (("--mechanisms", "full", "--level", "layer"), "layer"),
        (("--mechanisms", "full", "--peers", "nowhere"), "there is no environment of peers at nowhere"),
        (("--mechanisms", "peer:linformer"), "peer:linformer needs an environment of peers"),
    ],
)
def test_mistakes_are_one_line(arguments, problem, call):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert problem in err.splitlines()[-1]
