"""Where attention stands in a model, which places are meant, and whether a mechanism suits them."""

import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from hasten.attention.base import Attention
from hasten.attention.mechanism import MechanismSpec, Place
from hasten.errors import UserError

Undo = Callable[[], None]
Where = str | Sequence[str] | Callable[[str, nn.Module], bool] | None

CROSS_NAMES = ("cross_attn", "cross_attention", "crossattention", "encoder_attn", "EncDecAttention")


class BuildsAttention(Protocol):
    """Any spec of a mechanism."""

    def build(self) -> Attention:
        """A new mechanism."""
        ...


@dataclass(frozen=True)
class Site:
    """A place in a model where attention is computed.

    causal, cross: what is known of its use when the model is at rest. dropout: the share of weights it drops in
    training, None where that was not found. layer: its place in a stack, from 0. cached: generation keeps its keys.
    ties: queries can serve as keys. obstacle: why nothing can be put here, or empty. install: puts a
    mechanism here and returns what undoes it.
    """

    name: str
    module: nn.Module
    n_heads: int | None
    d_head: int | None
    dropout: float | None
    causal: bool
    cross: bool
    layer: int
    cached: bool
    ties: bool
    obstacle: str
    install: Callable[[Attention], Undo]


def select(sites: Sequence[Site], where: Where) -> list[Site]:
    """The sites that `where` means; `UserError` where it, or one of its patterns, means none."""
    if where is None:
        return list(sites)
    if callable(where):
        chosen = [site for site in sites if where(site.name, site.module)]
        if not chosen:
            raise UserError(f"convert: where chose none of the attention modules {_some([s.name for s in sites])}")
        return chosen
    if not isinstance(where, str | Iterable):
        raise UserError(f"convert: where is {where!r}; give a pattern, several of them, or a function")
    patterns = [where] if isinstance(where, str) else list(where)
    names = [site.name for site in sites]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise UserError(f"convert: where holds {pattern!r}; give patterns such as 'encoder.*', or one function")
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names
            raise UserError(f"convert: where={pattern!r} matches no attention module; close: {_some(close)}")
    if not patterns:
        raise UserError("convert: where is an empty list; leave it out to convert everything")
    return [site for site in sites if any(fnmatch.fnmatchcase(site.name, pattern) for pattern in patterns)]


def layer_of(name: str) -> int:
    """The place in its stack that a module's name tells: its first number."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), 0)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def build(spec: BuildsAttention, site: Site) -> Attention:
    """The mechanism for one site and its layer, on its device, of its precision, dropping what was dropped before.

    A share of dropped weights other than the spec's default is taken from the spec instead.
    """
    if isinstance(spec, MechanismSpec):
        spec = spec.at(Place(layer=site.layer, n_heads=site.n_heads, d_head=site.d_head))
    if site.dropout and _leaves_dropout_open(spec):
        spec = dataclasses.replace(spec, dropout=site.dropout)  # pyright: ignore[reportArgumentType]
    attention = spec.build()
    if not isinstance(attention, Attention):
        raise UserError(f"convert: {type(spec).__name__}.build() gave {type(attention).__name__}, not a mechanism")
    weight = next((p for p in site.module.parameters() if p.is_floating_point()), None)
    if weight is not None:
        attention.to(device=weight.device, dtype=weight.dtype)
    return attention.train(site.module.training)


def _leaves_dropout_open(spec: BuildsAttention) -> bool:
    fields = {field.name: field for field in dataclasses.fields(spec)} if dataclasses.is_dataclass(spec) else {}
    return "dropout" in fields and vars(spec)["dropout"] == fields["dropout"].default


def misfit(attention: Attention, site: Site) -> str:
    """Why this mechanism cannot serve this site; empty where it can."""
    traits, name = attention.traits, type(attention).__name__
    heads = traits.n_heads is not None and site.n_heads is not None and traits.n_heads != site.n_heads
    width = traits.d_head is not None and site.d_head is not None and traits.d_head != site.d_head
    reasons = {
        site.obstacle: bool(site.obstacle),
        f"it is cross-attention, which {name} does not do (traits.cross)": site.cross and not traits.cross,
        f"it is causal, which {name} cannot be (traits.causal)": site.causal and traits.causal is None,
        f"{name} wants one projection for queries and keys (traits.shared_qk)": traits.shared_qk and not site.ties,
        f"{name} was made for {traits.n_heads} heads, here are {site.n_heads}": heads,
        f"{name} was made for heads of width {traits.d_head}, here they are {site.d_head} wide": width,
        f"{name} wants learnt tokens before the sequence (traits.external)": traits.external > 0,
        f"{name} wants projections of a second kind (traits.second_projections)": traits.second_projections,
        f"{name} wants a layer without projections (traits.unprojected)": traits.unprojected,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def remarks(attention: Attention, site: Site) -> list[str]:
    """What to know about this mechanism at this site."""
    traits, name = attention.traits, type(attention).__name__
    n_own = sum(p.numel() for p in attention.parameters())
    unread = [plural for one, plural in (("query", "queries"), ("key", "keys")) if one not in traits.needs]
    dropped = f"(share {site.dropout} before)"
    pairs = [
        (site.dropout and not traits.dropout, f"weights are no longer dropped in training {dropped}: {name} cannot"),
        (site.dropout is None and traits.dropout, "its share of dropped weights was not found: the spec's holds"),
        (
            site.cached and site.causal and not traits.suffix,
            f"generate with use_cache=False: {name} reads no cache of earlier keys (traits.suffix)",
        ),
        (
            site.causal and traits.causal == "value",
            f"{name} lets later keys move what earlier queries read, though never later values (traits.causal)",
        ),
        (n_own > 0, f"adds {n_own} parameters of its own, not trained yet"),
        (traits.shared_qk, f"{name} takes the queries as keys: the projection of keys is computed in vain"),
        (unread and not traits.shared_qk, f"{name} reads no {' and no '.join(unread)}: they are computed in vain"),
    ]
    return [text for applies, text in pairs if applies]
