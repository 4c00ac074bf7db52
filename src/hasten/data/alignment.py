"""Fertilities: how many target pieces come from each source piece. From alignments or weights, and their file."""

import heapq
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from hasten.data.corpus import decode_lines
from hasten.errors import UserError

Link = tuple[int, int]
"""(source position, target position), counted from 0."""

_NEIGHBOURS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))
_MOST_DIGITS = 10  # more than any text has pieces; Python itself reads no more than some thousands
_HEADLINE = "`hasten align` makes it"


def grow_diag_final_and(forward: Collection[Link], backward: Collection[Link]) -> set[Link]:
    """One alignment out of those of the two directions.

    Begin with the links that both have. Grow: from every link in turn, targets in order and sources within, take a
    neighbouring link (diagonals included) of either direction where its source or its target has none yet; links taken
    grow, too. Then take those links of `forward`, and after them of `backward`, whose source and target both have none.

    Source: Och and Ney, 2003; Koehn, Och and Marcu, 2003; "grow-diag-final-and" of Moses.
    """
    union = {*forward, *backward}
    links = set(forward) & set(backward)
    sources, targets = {s for s, _ in links}, {t for _, t in links}
    now, later = [(t, s) for s, t in links], []
    heapq.heapify(now)
    # A link is tried once: sources and targets only ever become taken, so that it never finds more at a second time.
    while now:
        target, source = heapq.heappop(now)
        for down, right in _NEIGHBOURS:
            link = s, t = source + right, target + down
            if link in union and link not in links and (s not in sources or t not in targets):
                links.add(link)
                sources.add(s)
                targets.add(t)
                # The scan meets what lies ahead of it, and what lies behind only when it begins again.
                if (t, s) > (target, source):
                    heapq.heappush(now, (t, s))
                else:
                    heapq.heappush(later, (t, s))
        if not now:
            now, later = later, []
    for direction in (forward, backward):
        for s, t in sorted(direction, key=lambda link: (link[1], link[0])):
            if s not in sources and t not in targets:
                links.add((s, t))
                sources.add(s)
                targets.add(t)
    return links


def fertilities_of_links(
    forward: Collection[Link], backward: Collection[Link], n_sources: int, n_targets: int
) -> list[int]:
    """For each of `n_sources` positions the number of targets that come from it, every target counted exactly once.

    The directions are joined by `grow_diag_final_and`. A target with several sources comes from the one that both
    directions name, else from that of `forward`, else from the leftmost. One without comes from where the nearest
    target with a source comes from, of two equally near ones the left. Empty where there are no links at all.
    """
    found: dict[int, Link] = {}
    both, ahead = set(forward) & set(backward), set(forward)
    links = grow_diag_final_and(forward, backward)
    for link in sorted(links, key=lambda link: (link not in both, link not in ahead, link)):
        found.setdefault(link[1], link)
    if not found:
        return []
    fertilities = [0] * n_sources
    for target in range(n_targets):
        nearest = min(found, key=lambda other: (abs(other - target), other))
        fertilities[found[nearest][0]] += 1
    return fertilities


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to `weights` whose sum is `total`, by highest averages with odd divisors.

    One after the other is given to the largest of weight / (2 * given + 1), the first of several. So every share is
    rounded to the nearest under one common scale, which favours neither large nor small weights (divisors 1, 2, 3, ...
    would favour the large). Weights are not negative; empty where all are zero.

    Source: Sainte-Lague, 1910 (Webster's method).
    """
    if not any(weights):
        return []
    given = [0] * len(weights)
    queue = [(-weight, i) for i, weight in enumerate(weights)]
    heapq.heapify(queue)
    for _ in range(total):
        i = queue[0][1]
        given[i] += 1
        heapq.heapreplace(queue, (-weights[i] / (2 * given[i] + 1), i))
    return given


def read_fertilities(path: str | Path, n_lines: int) -> list[list[int]]:
    """The labels of a file, empty for pairs without; `UserError` names file and line of what is none."""
    try:
        lines = decode_lines(Path(path).read_bytes(), path)
    except OSError as error:
        raise UserError(f"cannot read the fertilities {path}: {error.strerror}; {_HEADLINE}") from error
    if len(lines) != n_lines:
        raise UserError(
            f"{path} has {len(lines)} lines of fertilities, the training split {n_lines} pairs; "
            "line i belongs to pair i: make it with `hasten align` from the same data"
        )
    return [_read_line(line, path, number) for number, line in enumerate(lines, 1)]


def _read_line(line: str, path: str | Path, number: int) -> list[int]:
    fields = line.split(" ") if line else []
    for field in fields:
        if not (field.isascii() and field.isdigit() and len(field) < _MOST_DIGITS):
            raise UserError(
                f"{path}, line {number}: {field[:20]!r} is no fertility; a line has whole numbers from 0, one a source "
                f"piece and one for the end, with single spaces between; {_HEADLINE}"
            )
    return [int(field) for field in fields]


def check_fertilities(fertilities: Sequence[int], n_source: int, n_target: int, place: str) -> None:
    """`UserError` unless the label fits a pair of so many pieces; `place` says whose it is."""
    advice = "make them with `hasten align` from the same data, the same tokenizer and the same distilled targets"
    if len(fertilities) != n_source + 1:
        raise UserError(
            f"{place}: {len(fertilities)} fertilities, the source has {n_source} pieces and its end "
            f"({n_source + 1} are needed); {advice}"
        )
    if sum(fertilities) != n_target:
        raise UserError(
            f"{place}: the fertilities sum to {sum(fertilities)}, the target has {n_target} pieces; {advice}"
        )


def write_fertilities(path: Path, labels: Iterable[Sequence[int]]) -> None:
    """A line a label, blank for those that are empty; the file is there when it is complete, and not before.

    `UserError` where it cannot be; then nothing has been asked of `labels`.
    """
    growing = path.with_name(f"{path.name}.new")
    if path.exists() and not path.is_file():
        raise UserError(f"cannot write {path}: it is no file")
    try:
        file = growing.open("w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"cannot write {growing}: {error.strerror}") from error
    try:
        with file:
            for label in labels:
                file.write(" ".join(map(str, label)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(growing, path)
    finally:
        growing.unlink(missing_ok=True)
