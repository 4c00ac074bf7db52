"""Cuts a line that is too long for a model where it hurts least."""

import re
from collections.abc import Callable, Iterator

_CLOSERS = r"[\"'”’»)\]]*"
# Where a text may be cut, best places first: after sentences, after clauses, between words, anywhere.
_CUTS = (
    re.compile(rf"[.!?…]+{_CLOSERS}\s+|[。！？]{_CLOSERS}\s*|[\r\n\v\f\x85\u2028\u2029]+"),
    re.compile(rf"[,;:–—]{_CLOSERS}\s+|\s[-–—]\s|[，；：、]\s*"),
    re.compile(r"\s+"),
    re.compile(r"", re.DOTALL),
)


def segment(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Parts of `text` that all fit, in order; only white space between the parts is dropped.

    A text that fits stays whole. Otherwise it is cut after every sentence, as models learn from single sentences; a
    sentence that does not fit is cut after clauses, or between words, or anywhere, into parts as long as will fit.
    `fits` must hold for every single character.
    """
    return [part for part in _split(text.strip(), 0, fits) if part]


def _split(text: str, level: int, fits: Callable[[str], bool]) -> Iterator[str]:
    if fits(text):
        yield text
        return
    ends = [found.end() for found in _CUTS[level].finditer(text) if 0 < found.end() < len(text)] + [len(text)]
    start, first = 0, 0
    while first < len(ends):
        # Sentences stay apart; smaller units are joined as far as they fit.
        last = first if level == 0 else _furthest(text, start, ends, first, fits)
        part = text[start : ends[last]].strip()
        if len(ends) == 1 or not fits(part):
            yield from _split(part, level + 1, fits)
        else:
            yield part
        start, first = ends[last], last + 1


def _furthest(text: str, start: int, ends: list[int], first: int, fits: Callable[[str], bool]) -> int:
    """The last of `ends[first:]` up to which the text from `start` fits; `first` if none: gallop, then bisect."""
    low, step = first, 1
    while low + step < len(ends) and fits(text[start : ends[low + step]].strip()):
        low, step = low + step, 2 * step
    high = min(low + step, len(ends))
    while high - low > 1:
        middle = (low + high) // 2
        if fits(text[start : ends[middle]].strip()):
            low = middle
        else:
            high = middle
    return low
