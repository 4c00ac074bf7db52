"""What a conversion did, and how to undo it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Conversion:
    """What `convert` replaced, what it kept and why, and what to know about what it replaced; names are the model's.

    `str()` is a readable report. Layers that differ only in a number share a line.
    """

    replaced: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    notes: tuple[tuple[str, str], ...] = ()
    mechanism: str = ""
    undo: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)

    def restore(self) -> None:
        """Put the original attention back; weights trained meanwhile stay, a mechanism's own parameters are lost.

        A second call does nothing. Conversions of other parts of the model stay as they are.
        """
        while self.undo:
            self.undo.pop()()

    def __str__(self) -> str:
        lines = [f"replaced by {self.mechanism}: {len(self.replaced)}", *(f"  {name}" for name in merge(self.replaced))]
        for title, pairs in ((f"kept: {len(self.kept)}", self.kept), ("to know", self.notes)):
            lines += [title] if pairs else []
            for text in dict.fromkeys(text for _, text in pairs):
                lines += [f"  {name}: {text}" for name in merge([name for name, about in pairs if about == text])]
        return "\n".join(lines)


def merge(names: Sequence[str]) -> list[str]:
    """Names that differ only in their first number as one, with the range of that number."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, number, after = re.fullmatch(r"(.*?)(?<![^.])(\d+)(?![^.])(.*)|.*", name, re.S).groups()  # pyright: ignore[reportOptionalMemberAccess]
        if number is None:
            groups[name, ""] = []
        else:
            groups.setdefault((before, after), []).append(int(number))
    return [name for (before, after), numbers in groups.items() for name in _ranges(before, after, numbers)]


def _ranges(before: str, after: str, numbers: list[int]) -> list[str]:
    if not numbers:
        return [before]
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(sorted(starts), sorted(ends), strict=True)]
    return [f"{before}{','.join(shown)}{after}"]
