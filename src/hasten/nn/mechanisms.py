"""The mechanisms of a stack: one spec for each layer, made for its place and fit for its task."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from hasten.attention import ATTENTIONS, Attention, AttentionSpec, MechanismSpec, Place, Traits
from hasten.attention.multihead import cut
from hasten.errors import UserError
from hasten.nn.external import ExternalTokens, NoTokens
from hasten.nn.sharing import SourceMap
from hasten.spec_errors import kind_of

T = TypeVar("T")


def per_layer(specs: Sequence[T], n_layers: int, name: str) -> list[T]:
    """One spec for each layer: a single one stands for all."""
    if len(specs) not in (1, n_layers):
        raise UserError(f"{name} has {len(specs)} entries; give 1 for all layers or {n_layers}, one per layer")
    return list(specs) * (n_layers if len(specs) == 1 else 1)


def build(
    specs: Sequence[AttentionSpec],
    heads: tuple[int, int],
    n_layers: int,
    name: str,
    able: Callable[[Traits], bool],
    need: str,
    *,
    plan: SourceMap,
    external: bool = False,
) -> list[Attention | None]:
    """One mechanism for each layer; `UserError` naming the layer whose mechanism's traits are not `able`.

    heads: d_model and the number of heads. plan: layers that use another's attention get None.
    external: the stack puts learnt tokens before the sequence where mechanisms want them.
    """
    specs = per_layer(specs, n_layers, name)
    attentions = _build(specs, heads, name, plan)
    for i, (spec, attention) in enumerate(zip(specs, attentions, strict=True)):
        if attention is None:
            continue
        cannot = f"{_where(name, i)}: {spec.kind} attention cannot serve here"
        if attention.traits.external and not external:
            raise UserError(
                f"{cannot}: it wants {attention.traits.external} learnt tokens before the sequence (external), which "
                "read all of it; only an encoder has them"
            )
        if not able(attention.traits):
            kinds = ", ".join(sorted({kind_of(one) for one in ATTENTIONS if _is_able(one, heads, able)}))
            # Where it would be able if only it were strictly causal, it can say why it is not.
            causal = able(replace(attention.traits, causal="strict", step=True))
            why = f" ({attention.traits.not_strict})" if causal and attention.traits.not_strict else ""
            raise UserError(f"{cannot}{why}, where {need}; kinds that can: {kinds}")
    return attentions


def _where(name: str, layer: int) -> str:
    return f"{name}, layer {layer + 1}"


def _build(
    specs: Sequence[AttentionSpec], heads: tuple[int, int], name: str, plan: SourceMap
) -> list[Attention | None]:
    """The mechanisms of layers, each made for its place; layers of equal specs are made together."""
    d_model, n_heads = heads
    cut(d_model, n_heads)
    places = [Place(layer=i, n_heads=n_heads, d_head=d_model // n_heads) for i in range(len(specs))]
    placed = [None if plan.follows(i) else spec.at(places[i]) for i, spec in enumerate(specs)]
    together: dict[AttentionSpec, Iterator[Attention]] = {}
    made: list[Attention | None] = []
    for i, spec in enumerate(placed):
        if spec is None:
            made.append(None)
            continue
        try:
            if spec not in together:
                together[spec] = iter(spec.build_layers(placed.count(spec)))
            attention = next(together[spec])
            attention.fits(n_heads, d_model // n_heads)
        except UserError as error:
            raise UserError(f"{_where(name, i)}: {error}") from error
        made.append(attention)
    return made


def _is_able(spec: type[MechanismSpec], heads: tuple[int, int], able: Callable[[Traits], bool]) -> bool:
    """Whether a kind of attention would do as it is by default."""
    try:
        with torch.device("meta"):
            return able(spec().at(Place(n_heads=heads[1], d_head=heads[0] // heads[1])).build().traits)
    except (UserError, TypeError):  # it has settings without a default
        return False


def longest(attentions: Sequence[Attention | None]) -> int | None:
    """The longest sequence that all layers take; None: any."""
    lengths = [a.traits.max_length for a in attentions if a is not None and a.traits.max_length is not None]
    return min(lengths) if lengths else None


def tokens_before(attentions: Sequence[Attention | None], d_model: int, name: str) -> ExternalTokens | NoTokens:
    """The learnt tokens that all layers want before the sequence; `UserError` where they want different numbers."""
    wanted: dict[int, list[int]] = {}
    for i, attention in enumerate(attentions):
        if attention is None:
            continue
        wanted.setdefault(attention.traits.external, []).append(i + 1)
    if len(wanted) > 1:
        parts = [f"{tokens} by layer {', '.join(map(str, layers))}" for tokens, layers in wanted.items()]
        raise UserError(
            f"{name}: the number of learnt tokens before the sequence (external) must be the same in all layers; "
            f"wanted are {'; '.join(parts)}"
        )
    tokens = max(wanted, default=0)
    return ExternalTokens(tokens, d_model) if tokens else NoTokens()
