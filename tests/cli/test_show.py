"""`hasten show`: a picture of a pattern, or characters; a mistake is one line."""

import sys
from pathlib import Path

import pytest

from hasten import cli


def call(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["hasten", "show", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    captured = capsys.readouterr()
    code = stopped.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def test_a_pattern_is_drawn_in_characters_and_counted(monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, "Local(1) | Global(first=1)", "--length", "4")
    assert (code, err) == (0, "")
    assert (
        out
        == """\
+--------+
|████████|
|██████  |
|████████|
|██  ████|
+--------+
 0      3
87.5 % of pairs allowed
keys per query: 3 to 4, median 3
rows: queries, columns: keys; █ allowed
"""
    )


def test_causal_patterns_and_fewer_queries_are_drawn(monkeypatch, capsys):
    _, out, _ = call(monkeypatch, capsys, "Local(1)", "--length", "5", "--queries", "2", "--causal")
    assert out.splitlines()[1:3] == ["|    ████  |", "|      ████|"]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "jpg", "webp", "PNG"])
def test_a_picture_is_written_in_the_format_of_its_name(monkeypatch, capsys, tmp_path: Path, suffix: str):
    path = tmp_path / f"p.{suffix}"
    code, out, err = call(monkeypatch, capsys, "Local(2)", "--length", "9", "--out", str(path))
    assert (code, err) == (0, f"wrote {path}\n")
    assert out == "48.1 % of pairs allowed\nkeys per query: 3 to 5, median 5\n9 tokens\n"
    marks = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF", "jpg": b"\xff\xd8", "webp": b"RIFF"}
    assert path.read_bytes().startswith(marks[suffix.lower()])


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("local(left=2)", []),
        ("longformer(window=2, first=1)", []),
        ("full", []),
        ("(Local(2) | Strided(4)) & Causal()", []),
        ("bigbird(block=2, random=1)", ["head 0", "head 1"]),
        ("RandomBlocks(1, 2)", ["head 0", "head 1"]),
        (
            'sparse_transformer(stride=4, combine="heads", n_heads=3)',
            ["heads 0 to 1: Local(4)", "head 2: Strided(stride=4)"],
        ),
        (
            'heads(groups=[{heads=1, attention={kind="full"}}, '
            '{heads=2, attention={kind="pattern", pattern="RandomBlocks(1, 2)"}}])',
            ["head 0: Everything()", *(f"head {h}: RandomBlocks(blocks=1, block=2)" for h in (1, 2))],
        ),
    ],
    ids=str,
)
def test_mechanisms_that_are_patterns_are_drawn_head_by_head(monkeypatch, capsys, text: str, titles: list[str]):
    code, out, err = call(monkeypatch, capsys, text, "--length", "16")
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if line.startswith("head")] == titles
    assert out.count("of pairs allowed") == max(1, len(titles))


def test_what_global_tokens_read_by_second_projections_is_drawn(monkeypatch, capsys):
    _, out, _ = call(monkeypatch, capsys, "longformer(window=1, first=1)", "--length", "4")
    assert out == call(monkeypatch, capsys, "Local(1) | Global(first=1)", "--length", "4")[1]


def test_marked_tokens_and_the_seed_of_the_draw_are_given(monkeypatch, capsys):
    _, out, _ = call(monkeypatch, capsys, "Local(0) | Marked()", "--length", "5", "--marked", "0, 3")
    assert out.splitlines()[1:4] == ["|██████████|", "|████  ██  |", "|██  ████  |"]
    drawn = [call(monkeypatch, capsys, "bigbird(block=2)", "--length", "32", "--seed", seed)[1] for seed in "001"]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[2] == call(monkeypatch, capsys, "bigbird(block=2, seed=1)", "--length", "32")[1]


def test_a_terminal_without_these_characters_gets_others(monkeypatch, capsys):
    class Ascii:
        encoding = "ascii"

    from hasten.cli import show

    monkeypatch.setattr(show.sys, "stdout", Ascii())
    shades = show._shades()
    monkeypatch.undo()
    assert shades.isascii()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("Lcal(3)",), "no shape is called Lcal; did you mean Local?"),
        (("Local(3",), "cannot read the pattern"),
        (("Local(3) + Causal()",), "unite shapes by | and restrict them by &"),
        (("Local(left=1.5)",), "whole numbers"),
        (("bigbrid",), "did you mean bigbird?"),
        (("bigbird(blok=3)",), "no setting 'blok'"),
        (("",), "is no mechanism"),
        (("Local(3)", "--length", "0"), "greater than or equal to 1"),
        (("Local(3)", "--length", "100001"), "less than or equal to 100000"),
        (("Local(3)", "--queries", "0"), "greater than or equal to 1"),
        (("Local(3)", "--heads", "17"), "less than or equal to 16"),
        (("Local(3)", "--out", "p.gif"), "p.gif ends in no format of a picture; choose .png"),
        (("Local(3)", "--out", "p"), "choose .png"),
        (("Local(3)", "--out", "nowhere/p.png"), "cannot write nowhere/p.png: No such file or directory"),
        (("Local(3)", "--out", "."), "choose .png"),
        (("Local(3)", "--seed", "3"), "nothing in Local(3) is drawn at random"),
        (("Local(3)", "--marked", "3"), "unite it with Marked()"),
        (("Marked()",), "--marked 0,17"),
        (("Marked()", "--marked", "x"), "'x' is no position"),
        (("Marked()", "--marked", "9", "--length", "9"), "positions are 0 to 8"),
        (("bigbird", "--causal"), "leave out last"),
        (('sparse_transformer(combine="heads", n_heads=4)', "--heads", "3"), "has 4 heads"),
        (('sparse_transformer(combine="heads", n_heads=40)',), "at most 16 are drawn"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(arguments, problem: str, monkeypatch, capsys, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(monkeypatch, capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert problem in err
    assert list(tmp_path.iterdir()) == []


def test_what_reads_by_content_is_no_pattern(monkeypatch, capsys):
    from hasten.attention.clustering.lsh import LSHSpec
    from hasten.bench import mechanism

    monkeypatch.setattr(mechanism, "mechanism", lambda text: LSHSpec())
    code, out, err = call(monkeypatch, capsys, "lsh")
    assert (code, out) == (2, "")
    assert err == "error: 'lsh' is no pattern: what a position reads depends on more than positions\n"
