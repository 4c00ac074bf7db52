"""What the page about patterns shows is run, and prints what it says; its pictures exist and are small.

A block of `python` or `console` is followed by what it prints: a block of `text`, or the lines after the command.
"""

import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from hasten import cli, spec

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "patterns.md"
TEXT = PAGE.read_text(encoding="utf-8")
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<printed>.*?)^```$)?", re.M | re.S)
DRAW = ROOT / "scripts" / "draw_patterns"


class Block(NamedTuple):
    line: int
    language: str
    code: str
    printed: str


BLOCKS = [
    Block(TEXT.count("\n", 0, match.start("code")), match["language"], match["code"], match["printed"] or "")
    for match in FENCE.finditer(TEXT)
]


def of(language: str) -> pytest.MarkDecorator:
    chosen = [block for block in BLOCKS if block.language == language]
    assert chosen
    return pytest.mark.parametrize("block", chosen, ids=lambda block: f"{language}:{block.line}")


@of("python")
def test_python_prints_what_the_page_says(block: Block, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block.code, f"{PAGE.name}:{block.line}", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == block.printed


@of("console")
def test_commands_print_what_the_page_says(block: Block, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command, _, printed = block.code.partition("\n")
    assert command.startswith("$ hasten ")
    monkeypatch.setattr(sys, "argv", shlex.split(command.removeprefix("$ ")))
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out == printed


@of("toml")
def test_configurations_build_their_models(block: Block, tmp_path: Path):
    (tmp_path / "run.toml").write_text(f'data.path = "nowhere"\n{block.code}', encoding="utf-8")
    run = spec.load(tmp_path / "run.toml")
    assert run.model.build(vocab_size=300) is not None


def test_every_block_is_run():
    assert {block.language for block in BLOCKS} == {"python", "console", "toml"}
    assert TEXT.count("```") == 2 * len(BLOCKS) + 2 * sum(bool(block.printed) for block in BLOCKS)


def test_pictures_are_there_and_small_and_drawn_by_the_script():
    shown = {ROOT / "docs" / path for path in re.findall(r"\]\((img/[^)]+)\)", TEXT)}
    assert len(shown) > 10
    assert shown == set((ROOT / "docs" / "img").glob("patterns-*.png"))
    assert {path.name: path.stat().st_size for path in shown if path.stat().st_size > 60_000} == {}
    drawn = {f"patterns-{name}.png" for name in re.findall(r"^draw (\S+)", DRAW.read_text(), re.M)}
    assert drawn == {path.name for path in shown}


@pytest.mark.parametrize("line", re.findall(r"^draw .+", DRAW.read_text(), re.M), ids=lambda line: line.split()[1])
def test_the_script_draws_what_can_be_drawn(line: str, tmp_path: Path, monkeypatch, capsys):
    _, name, *arguments = shlex.split(line)
    out = tmp_path / f"{name}.png"
    monkeypatch.setattr(sys, "argv", ["hasten", "show", *arguments, "--out", str(out)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert out.stat().st_size < 60_000


def test_links_lead_somewhere():
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", TEXT)
    assert [target for target in targets if not (PAGE.parent / target).exists()] == []
