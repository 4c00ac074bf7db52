"""Lines as the parts that a model takes, and translations of parts as those of lines: the same for every engine."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from hasten.data.segment import segment
from hasten.data.tokenizer import Tokenizer
from hasten.errors import UserError

T = TypeVar("T")
OnLong = Literal["split", "error"]
FEWEST_SOURCE_TOKENS = 16
"""So that every single character fits, spelt as bytes."""
_LINE_BREAKS = str.maketrans("\r\n", "  ")


@dataclass(frozen=True)
class Candidate:
    """A possible translation.

    log_prob: log probability of the decisions that made it. For an autoregressive model log p(tokens | source), the end
    symbol included; for CTC and graphs (DAG) by beam search the sum over all its paths, without a beam that of the one
    path taken. score ranks the candidates of a line: the mean of log_prob over the tokens; by beam search for CTC
    log_prob itself, for graphs what their `length_power` makes of it.
    Where a rescorer judged, both are that model's.
    A line that was split has the sum of the log_probs and the mean of the scores of its parts.
    """

    text: str
    score: float
    log_prob: float


class LineTooLong(UserError):
    """A line has more pieces than the model takes; `index` counts the lines given from 0."""

    def __init__(self, index: int, n_tokens: int, allowed: int, *, first_line: int = 1):
        self.index, self.n_tokens, self.allowed = index, n_tokens, allowed
        advice = "shorten it or let it be split (on_long: split)"
        super().__init__(f"line {first_line + index} has {n_tokens} pieces, the model takes {allowed}; {advice}")

    def counted_from(self, first_line: int) -> "LineTooLong":
        """The same error where the first of the lines has this number."""
        return LineTooLong(self.index, self.n_tokens, self.allowed, first_line=first_line)


class Part(NamedTuple):
    """What is decoded at once: a line, or a part of a long one."""

    line: int
    ids: list[int]


def checked(lines: Iterable[str]) -> list[str]:
    """The lines as a list; `UserError` where they are something else."""
    if isinstance(lines, str | bytes | Mapping | Set) or not isinstance(lines, Iterable):
        kind = "one string" if isinstance(lines, str) else f"of type {type(lines).__name__}"
        raise UserError(f"lines is {kind}; give a list of lines: translate([text])")
    checked = list(lines)
    for i, line in enumerate(checked):
        if not isinstance(line, str):
            raise UserError(f"lines[{i}] is {line!r:.60}, of type {type(line).__name__}; every line must be a string")
    return checked


def cut(lines: Sequence[str], tokenizer: Tokenizer, most: int, on_long: OnLong) -> list[Part]:
    """The ids to decode: none for a line without text, several for a line of more than `most` pieces."""
    if on_long not in ("split", "error"):
        raise UserError(f"on_long is {on_long!r}; allowed: split, error")
    parts = []
    for i, line in enumerate(lines):
        ids = tokenizer.encode(line.strip())
        if ids and len(ids) <= most:
            parts.append(Part(i, ids))
        elif ids and on_long == "error":
            raise LineTooLong(i, len(ids), most)
        elif ids:
            pieces = segment(line, lambda text: len(tokenizer.encode(text)) <= most)
            parts += [Part(i, tokenizer.encode(text)) for text in pieces]
    return parts


def text_of(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The text of an output, without line breaks."""
    return tokenizer.decode(ids).translate(_LINE_BREAKS).strip()


def of_lines(
    n_lines: int, parts: Sequence[Part], decoded: Sequence[Sequence[Candidate]], n_best: int
) -> list[list[Candidate]]:
    """The `n_best` translations of every line from those of its parts, best first."""
    results = [[Candidate("", 0.0, 0.0)] for _ in range(n_lines)]
    n_parts = [0] * n_lines
    for part, found in zip(parts, decoded, strict=True):
        results[part.line] = _join(results[part.line], found[:n_best], n_best)
        n_parts[part.line] += 1
    return [
        [Candidate(c.text, c.score / max(1, n), c.log_prob) for c in line]
        for line, n in zip(results, n_parts, strict=True)
    ]


def answered(first: int, lines: Sequence[str], answer: Callable[[Sequence[str]], T]) -> Iterator[T]:
    """The answer to lines of which the first has the number `first`; a long line raises after those before it."""
    try:
        yield answer(lines)
    except LineTooLong as error:
        yield answer(lines[: error.index])
        raise error.counted_from(first) from None


def _join(done: Sequence[Candidate], part: Sequence[Candidate], n_best: int) -> list[Candidate]:
    """The `n_best` combinations of a line so far with its next part, by the sum of the scores."""
    pairs = [
        Candidate(f"{a.text} {b.text}".strip(), a.score + b.score, a.log_prob + b.log_prob) for a in done for b in part
    ]
    return heapq.nlargest(n_best, pairs, key=lambda candidate: candidate.score)
