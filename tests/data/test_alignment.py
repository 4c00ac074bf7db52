"""Fertilities against the definitions: the textbook's alignment by plain loops, apportionment by trying all."""

import itertools
import os
import random
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hasten
from hasten.data import eflomal
from hasten.data.alignment import (
    apportion,
    check_fertilities,
    fertilities_of_links,
    grow_diag_final_and,
    read_fertilities,
    write_fertilities,
)
from hasten.errors import MissingExtra, UserError

N_SOURCES, N_TARGETS = 5, 6
link_sets = st.sets(st.tuples(st.integers(0, N_SOURCES - 1), st.integers(0, N_TARGETS - 1)), max_size=14)


def textbook(forward: set, backward: set) -> set:
    """grow-diag-final-and as it is printed, over the whole matrix again and again."""
    links = forward & backward

    def source_taken(s: int) -> bool:
        return any((s, t) in links for t in range(N_TARGETS))

    def target_taken(t: int) -> bool:
        return any((s, t) in links for s in range(N_SOURCES))

    before = -1
    while before != len(links):
        before = len(links)
        for t, s in itertools.product(range(N_TARGETS), range(N_SOURCES)):
            if (s, t) not in links:
                continue
            for down, right in [(-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)]:
                new = (s + right, t + down)
                if new in forward | backward and (not source_taken(new[0]) or not target_taken(new[1])):
                    links = links | {new}
    for direction in (forward, backward):
        for t, s in itertools.product(range(N_TARGETS), range(N_SOURCES)):
            if (s, t) in direction and not source_taken(s) and not target_taken(t):
                links = links | {(s, t)}
    return links


@given(link_sets, link_sets)
def test_links_grow_as_in_the_textbook(forward: set, backward: set):
    assert grow_diag_final_and(forward, backward) == textbook(forward, backward)


def test_links_grow_as_in_the_textbook_where_directions_mostly_agree():
    draw = random.Random(1)
    cells = list(itertools.product(range(N_SOURCES), range(N_TARGETS)))
    for _ in range(2000):
        common = set(draw.sample(cells, draw.randint(0, 4)))
        forward, backward = (common | set(draw.sample(cells, draw.randint(0, 10))) for _ in range(2))
        assert grow_diag_final_and(forward, backward) == textbook(forward, backward)


def test_a_link_without_neighbours_enters_only_where_both_its_ends_are_free():
    both, lonely, half_free = {(0, 0)}, (3, 4), (0, 4)
    assert grow_diag_final_and(both | {lonely}, both) == both | {lonely}
    assert grow_diag_final_and(both | {half_free}, both) == both
    assert grow_diag_final_and({(2, 3)}, {(2, 5), (4, 5)}) == {(2, 3), (4, 5)}, "forward comes first"


@given(link_sets, link_sets)
def test_every_target_is_counted_once(forward: set, backward: set):
    fertilities = fertilities_of_links(forward, backward, N_SOURCES + 1, N_TARGETS)
    if not forward and not backward:
        assert fertilities == []
        return
    assert len(fertilities) == N_SOURCES + 1
    assert sum(fertilities) == N_TARGETS
    assert fertilities[-1] == 0, "the end of the source has no links"
    assert {s for s, n in enumerate(fertilities) if n} <= {s for s, _ in forward | backward}


def test_a_target_of_several_sources_comes_from_the_one_that_both_directions_name():
    assert fertilities_of_links({(2, 0)}, {(0, 0), (1, 0), (2, 0)}, 4, 1) == [0, 0, 1, 0]
    # (1, 1) is what both name; (0, 0) and (2, 0) grow from it: the forward direction decides
    assert fertilities_of_links({(1, 1), (2, 0)}, {(1, 1), (0, 0)}, 4, 2) == [0, 1, 1, 0]
    assert fertilities_of_links({(1, 1)}, {(1, 1), (0, 0), (2, 0)}, 4, 2) == [1, 1, 0, 0], "the leftmost"


def test_a_target_without_source_goes_with_its_nearest_neighbour_and_left_first():
    links = {(0, 1), (2, 3), (1, 6)}
    assert fertilities_of_links(links, links, 4, 8) == [3, 3, 2, 0]  # 0 and 2 to 1; 4 to 3; 5 and 7 to 6


def divided(weights: list[int], total: int) -> list[tuple[int, ...]]:
    """All divisions of `total` that are best by Sainte-Lague's own measure: sum of (share - quota)^2 / weight."""
    scale, real = Fraction(total, sum(weights)), [i for i, weight in enumerate(weights) if weight]
    best, found = None, []
    for shares in itertools.product(range(total + 1), repeat=len(real)):
        if sum(shares) != total:
            continue
        error = sum((n - weights[i] * scale) ** 2 / weights[i] for n, i in zip(shares, real, strict=True))
        if best is None or error < best:
            best, found = error, []
        if error == best:
            parts = [0] * len(weights)
            for n, i in zip(shares, real, strict=True):
                parts[i] = n
            found.append(tuple(parts))
    return found


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4), st.integers(0, 5))
def test_apportionment_is_the_best_of_all_divisions(weights: list[int], total: int):
    if not any(weights):
        assert apportion(weights, total) == []
        return
    parts = apportion(weights, total)
    assert tuple(parts) in divided(weights, total)
    assert sum(parts) == total


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.integers(0, 60))
def test_apportionment_always_gives_exactly_the_total_and_nothing_to_nothing(weights: list[float], total: int):
    parts = apportion(weights, total)
    if any(weights):
        assert sum(parts) == total
        assert not any(n for n, weight in zip(parts, weights, strict=True) if not weight)


def test_whole_numbers_are_their_own_apportionment_and_the_first_of_equals_gets_the_odd_one():
    assert apportion([3.0, 0.0, 2.0, 1.0], 6) == [3, 0, 2, 1]
    assert apportion([1.0, 1.0, 1.0], 2) == [1, 1, 0]
    assert apportion([5.0, 3.0, 1.0], 3) == [2, 1, 0], "divisors 1, 2, 3 would give the same here"
    assert apportion([5.1, 1.2, 1.2, 1.2], 6) == [3, 1, 1, 1], "where they would give 4 to the largest"


def test_a_file_of_labels_reads_back(tmp_path: Path):
    labels = [[1, 0, 2], [], [0], [12, 0]]
    write_fertilities(tmp_path / "f", labels)
    assert (tmp_path / "f").read_bytes() == b"1 0 2\n\n0\n12 0\n"
    assert read_fertilities(tmp_path / "f", 4) == labels
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_file_that_cannot_be_finished_is_not_there(tmp_path: Path):
    def broken():
        yield [1]
        raise UserError("in the middle")

    (tmp_path / "f").write_text("before")
    with pytest.raises(UserError, match="in the middle"):
        write_fertilities(tmp_path / "f", broken())
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
    with pytest.raises(UserError, match=r"cannot write .*nowhere/f\.new: No such file"):
        write_fertilities(tmp_path / "nowhere" / "f", iter(()))
    with pytest.raises(UserError, match="it is no file"):
        write_fertilities(Path(os.devnull), iter(()))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"1 0\n", r"f has 1 lines of fertilities, the training split 2 pairs; line i belongs to pair i"),
        (b"1 0\n1 -1\n", r"f, line 2: '-1' is no fertility"),
        (b"1 0\n1.0\n", r"f, line 2: '1.0' is no fertility"),
        (b"1 0\n" + b"9" * 5000 + b"\n", r"f, line 2: '99999999999999999999' is no fertility"),
        (b"1  0\n1\n", r"f, line 1: '' is no fertility"),
        ("²\n1\n".encode(), r"f, line 1: '²' is no fertility"),
        (b"\xff\n1\n", r"f, line 1: invalid UTF-8"),
        (None, r"cannot read the fertilities .*f: No such file or directory; `hasten align` makes it"),
    ],
)
def test_a_file_of_something_else_is_refused(content: bytes | None, said: str, tmp_path: Path):
    if content is not None:
        (tmp_path / "f").write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_fertilities(tmp_path / "f", 2)


def test_a_label_must_fit_its_pair():
    check_fertilities([1, 0, 2], 2, 3, "f, line 7")
    with pytest.raises(UserError, match=r"^f, line 7: 3 fertilities, the source has 3 pieces and its end \(4 are"):
        check_fertilities([1, 0, 2], 3, 3, "f, line 7")
    with pytest.raises(UserError, match=r"^f, line 7: the fertilities sum to 3, the target has 4 pieces; make them"):
        check_fertilities([1, 0, 2], 2, 4, "f, line 7")


def reversals(n: int) -> list[tuple[list[int], list[int]]]:
    """Pairs whose target is the source backwards in other ids."""
    draw = random.Random(0)
    sources = [[draw.randint(100, 115) for _ in range(draw.randint(1, 6))] for _ in range(n)]
    return [(source, [i + 100 for i in reversed(source)]) for source in sources]


def test_eflomal_finds_what_is_backwards():
    pytest.importorskip("eflomal")
    pairs = [*reversals(300), ([], []), ([100], []), ([100] * 1100, [200]), ([101], [201])]
    found = list(eflomal.align(pairs))
    assert len(found) == len(pairs)
    assert found[300:303] == [([], [])] * 3, "nothing to align, or too long for eflomal"
    right = total = 0
    for (source, _), (forward, backward) in zip(pairs[:300], found, strict=False):
        truth = {(i, len(source) - 1 - i) for i in range(len(source))}
        total += 2 * len(truth)
        right += len(truth & set(forward)) + len(truth & set(backward))
        assert len({t for _, t in forward}) == len(forward), "forward: a target has one source at most"
        assert len({s for s, _ in backward}) == len(backward), "backward: a source has one target at most"
    assert right > 0.9 * total


def test_eflomal_gets_its_threads_and_nobody_else(monkeypatch: pytest.MonkeyPatch):
    module = pytest.importorskip("eflomal")
    seen = []
    monkeypatch.setattr(module.Aligner, "align", lambda *_, **__: seen.append(os.environ["OMP_THREAD_LIMIT"]))
    monkeypatch.delenv("OMP_THREAD_LIMIT", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with pytest.raises(FileNotFoundError):
        next(eflomal.align([([8], [9])], threads=3))
    assert seen == ["3"]
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "OMP_THREAD_LIMIT" not in os.environ


def test_what_goes_wrong_in_eflomal_is_a_line(monkeypatch: pytest.MonkeyPatch):
    module = pytest.importorskip("eflomal")
    with pytest.raises(UserError, match="no pair has text on both sides"):
        next(eflomal.align([([8], []), ([], [9])]))

    def writing(lines: str):
        def align(*_, links_filename_fwd: str, links_filename_rev: str):
            Path(links_filename_fwd).write_text(lines)
            Path(links_filename_rev).write_text(lines)

        return align

    def failing(*_, **__):
        raise subprocess.CalledProcessError(-9, "eflomal")

    monkeypatch.setattr(module.Aligner, "align", staticmethod(failing))
    with pytest.raises(UserError, match="eflomal ended with code -9"):
        next(eflomal.align([([8], [9])]))
    monkeypatch.setattr(module.Aligner, "align", staticmethod(writing("0-0\n")))
    with pytest.raises(UserError, match="the links of 1 pairs, it was given 2"):
        list(eflomal.align([([8], [9])] * 2))


def test_without_eflomal_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "eflomal", None)
    with pytest.raises(MissingExtra, match=r"eflomal is not installed; run: pip install 'hasten\[align\]'"):
        next(eflomal.align([([8], [9])]))


def test_only_one_module_imports_eflomal():
    modules = (Path(hasten.__file__).parent).rglob("*.py")
    found = [path.stem for path in modules if re.search(r"^ *(import|from) eflomal", path.read_text("utf-8"), re.M)]
    assert found == ["eflomal"]
