"""From a pattern to work: which scores are formed, tile by tile, and which of them count.

A plan is a list of pieces, each a list of tiles (a run of queries against the keys it may read). Most patterns need
one piece. Strides need a piece of their own, in which tokens are sorted by their residue, so that what was scattered
becomes dense blocks; queries marked in the call need one, too. Pieces never share a pair, so their softmaxes merge
exactly by their normalisers. Planning looks at tiles, never at all pairs: its cost is the number of tiles.
"""

from functools import lru_cache, reduce
from itertools import product

import torch

from hasten.attention.patterns.algebra import Pattern, Restriction, Scene, Union, walk
from hasten.attention.patterns.drawing import Drawing
from hasten.attention.patterns.global_shapes import External, Global, Marked, MarkedRows, Shifted
from hasten.attention.patterns.work import Group, Plan, Shape
from hasten.errors import UserError

MOST_TERMS = 256
"""Restrictions that a pattern may be multiplied out to; each needs tiles of its own."""


def terms(pattern: Pattern) -> list[tuple[Pattern, ...]]:
    """A union of restrictions of single shapes, each once: its disjunctive form. `UserError` where it is too long."""
    if isinstance(pattern, Union):
        return list(dict.fromkeys(term for part in pattern.parts for term in terms(part)))
    if isinstance(pattern, Restriction):
        return reduce(_both, map(terms, dict.fromkeys(pattern.parts)))
    if isinstance(pattern, Marked) and pattern.rows:
        return [(MarkedRows(),), (Marked(rows=False),)]
    return [(pattern,)]


def _both(left: list[tuple[Pattern, ...]], right: list[tuple[Pattern, ...]]) -> list[tuple[Pattern, ...]]:
    if len(left) * len(right) > MOST_TERMS:
        raise UserError(
            f"a pattern with more than {MOST_TERMS} restrictions, once its unions are multiplied out; "
            "restrict single shapes by &, and unite the results by |"
        )
    return list(dict.fromkeys(tuple(dict.fromkeys((*a, *b))) for a, b in product(left, right)))


@lru_cache(maxsize=256)
def resolved(pattern: Pattern) -> Pattern:
    """With external tokens as global ones, and shapes that count positions shifted behind them.

    Pairs with an external token are allowed anyway, so that shapes which only ask for distances may stay as they are.
    """
    parts = pattern.parts if isinstance(pattern, Union) else (pattern,)
    external = [part.tokens for part in parts if isinstance(part, External)]
    rest = [part for part in parts if not isinstance(part, External)]
    if any(isinstance(shape, External) for part in rest for shape in walk(part)):
        raise UserError(f"pattern {str(pattern)!r}: External is a part of a union; it cannot be restricted")
    if not external:
        return pattern
    tokens = max(external)
    return reduce(Pattern.__or__, [Global(first=tokens), *(_behind(part, tokens) for part in rest)])


def _behind(pattern: Pattern, tokens: int) -> Pattern:
    if isinstance(pattern, Union | Restriction):
        return type(pattern)(tuple(_behind(part, tokens) for part in pattern.parts))
    return pattern if pattern.relative or isinstance(pattern, Marked) else Shifted(pattern, tokens)


def make_plan(
    pattern: Pattern, shape: Shape, scene: Scene, rows: int, dtype: torch.dtype, device: torch.device
) -> Plan:
    """The plan of a call. Plans that depend on nothing but sizes are kept."""
    if scene.marked is None and len(set(shape.lengths)) == 1:
        return _kept(pattern, shape, scene, rows, dtype, device)
    return _plan(pattern, shape, scene, rows, dtype, device)


def _plan(pattern: Pattern, shape: Shape, scene: Scene, rows: int, dtype: torch.dtype, device: torch.device) -> Plan:
    whole = Group(1, 0, 1, 0, shape.queries, shape.offset, shape.keys)
    by_layout: dict[int, list[Pattern]] = {}
    for term in terms(pattern):
        layout = 0 if any(isinstance(one, MarkedRows) for one in term) else max(one.period for one in term)
        by_layout.setdefault(layout, []).append(term[0] if len(term) == 1 else Restriction(term))
    pieces, earlier = [], ()
    for layout, parts in sorted(by_layout.items()):
        here = parts[0] if len(parts) == 1 else Union(tuple(parts))
        for group in [whole] if layout <= 1 else groups(shape, layout):
            drawing = Drawing(here, earlier, group, shape, scene, dtype, device, rows)
            pieces.append(drawing.marked_piece() if layout == 0 else drawing.piece())
        earlier = (*earlier, here)
    return Plan(shape, tuple(pieces), len(by_layout) > 1)


_kept = lru_cache(maxsize=32)(_plan)


def groups(shape: Shape, step: int) -> list[Group]:
    """Neighbouring residue classes with the same number of queries and keys."""
    found: list[Group] = []
    for residue in range(min(step, max(shape.keys, 1))):
        row = (residue - shape.offset) % step
        queries = max(0, (shape.queries - row + step - 1) // step)
        keys = max(0, (shape.keys - residue + step - 1) // step)
        begin = (shape.offset + row - residue) // step
        last = found[-1] if found else None
        sizes = (queries, begin, keys)
        if last and (last.queries, last.begin, last.keys) == sizes and row == last.row + last.classes:
            found[-1] = Group(step, last.first, last.classes + 1, last.row, *sizes)
        else:
            found.append(Group(step, residue, 1, row, *sizes))
    return [group for group in found if group.queries and group.keys]
