"""A mechanism as it is written on the command line."""

import difflib
import json
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hasten.attention import ATTENTIONS, AttentionSpec
from hasten.errors import UserError
from hasten.fields import Spec
from hasten.spec_errors import explain, kind_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True, kw_only=True)
class _Named(Spec):
    """What a text describes; the field's name is how errors call the place."""

    mechanism: AttentionSpec


_ADAPTER = TypeAdapter(_Named)
_PATTERN = "pattern"


def mechanism(text: str) -> AttentionSpec:
    """The spec of `kind`, of `kind(setting=value, ...)` with values in TOML notation, or of a pattern, `Local(8)`.

    A text that begins with a capital is a pattern: what the kind `pattern` has as its setting of that name.
    Raises `UserError` with the text, what is wrong and what is allowed.
    """
    kind, given = (_PATTERN, {_PATTERN: text}) if text[:1].isupper() else _kind_and_settings(text)
    kinds: dict[str, Any] = {kind_of(spec): spec for spec in ATTENTIONS}
    if kind not in kinds:
        close = difflib.get_close_matches(kind, kinds, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"{text!r} is no mechanism; known: {', '.join(kinds)}{hint}")
    allowed = [field.name for field in fields(kinds[kind]) if field.name != "kind"]
    for name in given:
        if name not in allowed:
            raise UserError(f"{text!r}: {kind} has no setting {name!r}; it has {', '.join(allowed)}")
    table = {"mechanism": {"kind": kind, **given}}
    try:
        return _ADAPTER.validate_json(json.dumps(table, default=str), strict=True).mechanism
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error")
        if isinstance(cause, UserError):  # raised by the spec itself
            raise UserError(str(cause)) from error
        raise UserError(f"{text!r}: {explain(error, table, _Named).removeprefix('mechanism.')}") from error


def _kind_and_settings(text: str) -> tuple[str, dict[str, Any]]:
    kind, opened, rest = text.partition("(")
    if not opened:
        return text, {}
    if not rest.endswith(")"):
        raise UserError(f"{text!r} lacks its last bracket; write kind(setting=value, ...)")
    try:
        settings = tomllib.loads(f"settings = {{ {rest[:-1]} }}")["settings"]
    except (ValueError, RecursionError) as error:
        raise UserError(f'{text!r}: settings are written as in TOML, kind(k=256, mode="mean"); {error}') from error
    return kind.strip(), settings


def settings(spec: AttentionSpec) -> dict[str, Any]:
    """Every setting of a mechanism but its kind, for a row of results."""
    return {name: value for name, value in asdict(spec).items() if name != "kind"}


def split(text: str) -> list[str]:
    """The parts between the commas that stand in no bracket and no quotes; `UserError` where brackets do not match."""
    parts, part, depth, quote = [], "", 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            parts.append(part)
            part = ""
            continue
        part += letter
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            break
    if depth or quote:
        raise UserError(f"{text!r}: brackets or quotes do not match")
    return [part.strip() for part in [*parts, part] if part.strip()]
