"""Patterns written as text: `Local(64) | Global(first=2)`. Nothing is evaluated but calls of the known shapes."""

import ast
import difflib
from functools import lru_cache
from typing import Any

from hasten.attention.patterns.algebra import Causal, Everything, Pattern
from hasten.attention.patterns.global_shapes import External, Global, Marked
from hasten.attention.patterns.random_blocks import RandomBlocks
from hasten.attention.patterns.shapes import Blocks, Local, Strided, Summary
from hasten.errors import UserError

SHAPES: tuple[type[Pattern], ...] = (
    Local,
    Blocks,
    Strided,
    Summary,
    Global,
    Marked,
    External,
    RandomBlocks,
    Causal,
    Everything,
)
_NAMES: dict[str, Any] = {shape.__name__: shape for shape in SHAPES}
_LONGEST = 2000


@lru_cache(maxsize=256)
def parse(text: str) -> Pattern:
    """The pattern that `text` describes; `str(pattern)` is such a text. `UserError` says what is wrong and where."""
    if len(text) > _LONGEST:
        raise UserError(f"a pattern of {len(text)} characters; at most {_LONGEST} are read")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"cannot read the pattern {text!r}; write for example Local(64) | Global(first=2)") from error
    return _pattern(tree.body, text)


def _pattern(node: ast.expr, text: str) -> Pattern:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd):
        left, right = _pattern(node.left, text), _pattern(node.right, text)
        return left | right if isinstance(node.op, ast.BitOr) else left & right
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _shape(node, node.func.id, text)
    if isinstance(node, ast.Name) and node.id in _NAMES:
        raise UserError(f"pattern {text!r}: {node.id} needs brackets, {node.id}(...)")
    found = ast.get_source_segment(text.strip(), node) or text
    raise UserError(f"pattern {text!r}: {found!r} is no shape; unite shapes by | and restrict them by &")


def _shape(node: ast.Call, name: str, text: str) -> Pattern:
    if name not in _NAMES:
        close = difflib.get_close_matches(name, list(_NAMES), n=1, cutoff=0.6)
        advice = f"did you mean {close[0]}?" if close else f"known are {', '.join(_NAMES)}"
        raise UserError(f"pattern {text!r}: no shape is called {name}; {advice}")
    keys = [keyword.arg for keyword in node.keywords]
    if None in keys:
        raise UserError(f"pattern {text!r}: {name} takes no **")
    twice = [key for key in keys if keys.count(key) > 1]
    if twice:
        raise UserError(f"pattern {text!r}: {name} is given {twice[0]} twice")
    given = [_value(argument, name, text) for argument in node.args]
    named = {str(keyword.arg): _value(keyword.value, name, text) for keyword in node.keywords}
    fields = list(_NAMES[name].__dataclass_fields__)
    unknown = [key for key in named if key not in fields]
    if unknown or len(given) > len(fields):
        what = f"has no {unknown[0]}" if unknown else f"takes {len(fields)} values, got {len(given)}"
        raise UserError(f"pattern {text!r}: {name} {what}; it has {', '.join(fields) or 'none'}")
    try:
        return _NAMES[name](*given, **named)
    except TypeError as error:
        raise UserError(f"pattern {text!r}: {str(error).replace('__init__()', '').replace('.', '')}") from error
    except UserError as error:
        raise UserError(f"pattern {text!r}: {error}") from error


def _value(node: ast.expr, name: str, text: str) -> int:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise UserError(f"pattern {text!r}: values of {name} are whole numbers, True or False") from error
    if not isinstance(value, int):
        raise UserError(f"pattern {text!r}: {value!r} in {name}; values are whole numbers, True or False")
    return value
