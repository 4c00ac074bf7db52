"""What is wrong with the description of a run, in one line that says what to write instead."""

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

_UNKNOWN = "unexpected_keyword_argument"


def explain(error: ValidationError, table: Any, root: type) -> str:
    """The first problem of `table`, which should describe a `root`: where, what was found, what is allowed."""
    problems = error.errors(include_url=False)
    # A misspelt key is also a missing one: the spelling comes first.
    problem: Any = next((p for p in problems if p["type"] == _UNKNOWN), problems[0])
    where, found = _locate(problem["loc"], table)
    if problem["type"] == _UNKNOWN:
        return f"unknown key {where}{_advice(problem['loc'], root)}"
    if problem["type"].startswith("union_tag"):
        kinds = re.findall(r"'(\w+)'", problem["ctx"].get("expected_tags", ""))
        kinds = kinds or [kind_of(spec) for spec in _reached(problem["loc"], root)]
        got = found.get("kind") if isinstance(found, dict) else found
        return f"{where}.kind: choose one of {', '.join(kinds)}; got {got!r}{_closest(str(got), kinds)}"
    if problem["type"] in ("tuple_type", "list_type"):
        return f"{where}: expected a list such as {_example(problem['loc'], root)}, got {problem['input']!r}"
    if problem["type"] == "value_error":
        return f"{where}: {problem['ctx']['error']}"
    message = problem["msg"].replace("an object", "a table").replace("Field required", "this is required")
    return f"{where}: {message}" + ("" if problem["type"] == "missing" else f", got {problem['input']!r}")


def kind_of(spec: type) -> str:
    """The name by which a spec is chosen among the members of a union."""
    return next((str(field.default) for field in dataclasses.fields(spec) if field.name == "kind"), "")


def _locate(location: Sequence[str | int], found: Any) -> tuple[str, Any]:
    """A place as the user writes it, and what stands there: pydantic also names the members of unions."""
    where, told = "", False
    for i, part in enumerate(location):
        # A table that chooses among several kinds is named by its kind once, before what stands in it.
        if not told and isinstance(found, dict) and part == found.get("kind"):
            told = True
            continue
        told = False
        inner: list[Any] = []
        if isinstance(found, dict):
            inner = [found[part]] if part in found else []
        elif isinstance(found, list) and isinstance(part, int):
            inner = found[part : part + 1]
        if inner or i == len(location) - 1:
            where += f"[{part}]" if isinstance(part, int) else f".{part}"
        found = inner[0] if inner else found
    return where.removeprefix("."), found


def _advice(location: Sequence[str | int], root: type) -> str:
    key = str(location[-1])
    specs = _reached(location[:-1], root)
    siblings = _reached(location[:-2], root) if len(location) > 2 else []
    others = [kind_of(s) for s in siblings if any(field.name == key for field in dataclasses.fields(s))]
    if others:
        return f": it is a setting of kind {' and '.join(others)}"
    allowed = sorted({field.name for spec in specs for field in dataclasses.fields(spec)})
    if close := _closest(key, allowed):
        return close
    for section in dataclasses.fields(root):  # type: ignore[arg-type]
        if any(field.name == key for spec in _reached([section.name], root) for field in dataclasses.fields(spec)):
            return f"; did you mean {section.name}.{key}?"
    return "; allowed: " + ", ".join(allowed)


def _example(location: Sequence[str | int], root: type) -> str:
    """A list that may stand at a place: of tables, of words as by default, or of numbers."""
    tables = _reached(location, root)
    if tables:
        table = '{ kind = "full" }'
        return f"[{table}]" if kind_of(tables[0]) else f"[{{ heads = 2, attention = {table} }}]"
    for spec in _reached(location[:-1], root):
        for field in dataclasses.fields(spec):
            if field.name == location[-1] and field.default:
                return str(list(field.default)).replace("'", '"')  # type: ignore[call-overload]
    return "[1, 1, 3]"


def _closest(got: str, allowed: Iterable[str]) -> str:
    close = difflib.get_close_matches(got, list(allowed), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _reached(location: Sequence[str | int], root: type) -> list[Any]:
    """The specs that may stand at a place."""
    specs: list[Any] = [root]
    for part in location:
        if isinstance(part, int):
            continue
        chosen = [spec for spec in specs if kind_of(spec) == part]
        if len(specs) > 1 and chosen:
            specs = chosen
            continue
        having = [spec for spec in specs if any(field.name == part for field in dataclasses.fields(spec))]
        if having:
            specs = [inner for spec in having for inner in _specs_in(typing.get_type_hints(spec)[part])]
        else:
            specs = [spec for spec in specs if kind_of(spec) == part]
    return specs


def _specs_in(hint: Any) -> list[Any]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return [hint]
    return [spec for inner in typing.get_args(hint) for spec in _specs_in(inner)]
