"""From the weights of a model to those of the same model with other layers sharing attention."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hasten.errors import UserError
from hasten.models import CTC, DAG, NAT, Autoregressive, GenerationModel, MaskPredict, Refinement
from hasten.nn.sharing import Shared, SourceMap
from hasten.spec import RunSpec

Weights = dict[str, Tensor]
Matching = Mapping[tuple[str, int, int], Sequence[int]]
"""For (kind, leader, follower), counted from 0: which head of the follower takes the place of each of the leader's."""


@dataclass(frozen=True)
class Site:
    """One kind of attention of a model: where its layers' weights are, who shares with whom, and what."""

    kind: str
    prefix: str
    attention: str
    norm: str
    plan: SourceMap
    shared: Shared

    def name(self, layer: int) -> str:
        """The prefix of a layer's attention."""
        return f"{self.prefix}.layers.{layer}.{self.attention}."

    def norm_name(self, layer: int) -> str:
        """The prefix of the normalisation before it."""
        return f"{self.prefix}.layers.{layer}.{self.norm}."


def sites(model: GenerationModel) -> list[Site]:
    """The kinds of attention of a model; `UserError` for a model of another kind."""
    own = ("self_attention", "self_norm")
    if isinstance(model, CTC):
        refiner = Site("refiner", "refiner", *own, model.refiner.plan, "weights")
        return [Site("encoder", "encoder", *own, model.encoder.plan, "weights"), refiner]
    if isinstance(model, Refinement):
        names = [f"decoders.{number}" for number in range(len(model.decoders))]
        decoders: list[tuple[str, Any]] = list(zip(names, model.decoders, strict=True))
    elif isinstance(model, Autoregressive | DAG | MaskPredict | NAT):
        decoders = [("decoder", model.decoder)]
    else:
        raise UserError(f"{type(model).__name__} has no layers that could share attention")
    found = [Site("encoder", "encoder", *own, model.encoder.plan, "weights")]
    for prefix, decoder in decoders:
        found.append(Site("decoder", prefix, *own, decoder.plan, "weights"))
        if isinstance(model, NAT):
            names = ("positional_attention", "positional_norm")
            found.append(Site("positional", prefix, *names, model.decoder.positional_plan, "weights"))
        names = ("cross_attention", "cross_norm")
        found.append(Site("cross", prefix, *names, decoder.cross_plan, model.spec.shared_of_cross))
    return found


def with_maps(spec: RunSpec, maps: Mapping[str, SourceMap], shared_of_cross: Shared = "output") -> RunSpec:
    """The run whose model shares so; maps where every layer computes its own are left out.

    A layer that no longer follows has the mechanism of the one that it followed, whose weights it takes.
    """
    changes: dict[str, Any] = {}
    for kind, plan in maps.items():
        alone = all(plan.leads(layer) is plan.follows(layer) for layer in range(len(plan.sources)))
        changes[f"{kind}_sharing"] = () if alone else plan.numbers
        changes |= _mechanisms(spec.model, kind, plan)
    if "cross" in maps:
        changes["shared_of_cross"] = shared_of_cross
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, **changes))


def _mechanisms(model: Any, kind: str, plan: SourceMap) -> dict[str, Any]:
    """The specs of layers that have one each."""
    name = f"{kind}_attention"
    own = getattr(model, name, ())
    if len(own) < 2:
        return {}
    before = SourceMap.of(getattr(model, f"{kind}_sharing"), len(own), kind).sources
    return {name: tuple(own[i if plan.follows(i) else before[i]] for i in range(len(own)))}


def retrofit(old: GenerationModel, new: GenerationModel, matching: Matching | None = None) -> None:
    """Give `new`, which differs from `old` in nothing but who shares attention, the weights of `old`.

    A layer that computes its own again after having shared takes what it used. With `matching` the heads of followers
    are put in the order of their leader's, by permuting their values' rows and their output projection's columns. Where
    two decoders share alike (refinement), both are put in the order that was found in the second.
    """
    weights = dict(old.state_dict())
    assert isinstance(old, Autoregressive | CTC | DAG | MaskPredict | NAT | Refinement)
    n_heads, d_model = old.spec.n_heads, old.spec.d_model
    for before, after in zip(sites(old), sites(new), strict=True):
        layers = range(len(before.plan.sources))
        whole = [_taken(weights, before, layer, d_model) for layer in layers]
        for layer in layers:
            _drop(weights, before, layer)
        for layer, full in zip(layers, whole, strict=True):
            own = full
            if after.plan.follows(layer):
                if "out_proj.weight" not in full:
                    raise UserError(
                        f"{after.kind}, layer {layer + 1} cannot follow: its attention has no values that another "
                        "layer's weights could read"
                    )
                order = (matching or {}).get((after.kind, after.plan.sources[layer], layer))
                own = _REDUCED[after.shared](full if order is None else reordered(full, order, n_heads))
            elif "out_proj.weight" in full and "out_proj.weight" not in whole[before.plan.sources[layer]]:
                raise UserError(
                    f"{after.kind}, layer {layer + 1} must go on to follow: the attention of layer "
                    f"{before.plan.sources[layer] + 1}, which it uses, has no place for values, and it has some"
                )
            _put(weights, after, layer, own)
    new.load_state_dict(weights)


def _taken(weights: Weights, site: Site, layer: int, d_model: int) -> Weights:
    """The weights that a layer's attention uses, its own and its leader's: as if it shared nothing."""
    source, own, leader = site.plan.sources[layer], site.name(layer), site.name(site.plan.sources[layer])
    found = {name.removeprefix(leader): x for name, x in weights.items() if name.startswith(leader)}
    norm = site.norm_name(source if site.attention == "cross_attention" else layer)
    found |= {f"norm.{name.removeprefix(norm)}": x for name, x in weights.items() if name.startswith(norm)}
    if source != layer:
        mine = {name.removeprefix(own): x for name, x in weights.items() if name.startswith(own)}
        found |= {name: x for name, x in mine.items() if name.startswith("out_proj")}
        for name in ("in_proj_weight", "in_proj_bias"):
            if name in mine:  # the values' rows
                before = [found[name][:-d_model]] if name in found else []  # some mechanisms have no projections
                found[name] = torch.cat((*before, mine[name]))
    return found


def _drop(weights: Weights, site: Site, layer: int) -> None:
    for prefix in (site.name(layer), site.norm_name(layer)):
        for name in [name for name in weights if name.startswith(prefix)]:
            del weights[name]


def _put(weights: Weights, site: Site, layer: int, own: Weights) -> None:
    reads = site.attention != "cross_attention" or not site.plan.follows(layer)
    for name, x in own.items():
        if not name.startswith("norm."):
            weights[site.name(layer) + name] = x
        elif reads:
            weights[site.norm_name(layer) + name.removeprefix("norm.")] = x


def _values_and_output(full: Weights) -> Weights:
    d_model = full["out_proj.weight"].shape[1]
    rows = {name: full[name][-d_model:] for name in ("in_proj_weight", "in_proj_bias") if name in full}
    return {**rows, **_output(full)}


def _output(full: Weights) -> Weights:
    return {name: x for name, x in full.items() if name.startswith(("out_proj", "norm."))}


def _nothing(full: Weights) -> Weights:
    return {}


_REDUCED: dict[str, Callable[[Weights], Weights]] = {
    "weights": _values_and_output,
    "context": _output,
    "output": _nothing,
}


def reordered(full: Weights, order: Sequence[int], n_heads: int) -> Weights:
    """A layer's weights with the values and the output columns of head order[h] in the place of head h."""
    d_model = full["out_proj.weight"].shape[1]

    def rows(x: Tensor) -> Tensor:
        values = x[-d_model:].unflatten(0, (n_heads, -1))[list(order)].flatten(0, 1)
        return torch.cat((x[:-d_model], values))

    moved = {name: rows(full[name]) for name in ("in_proj_weight", "in_proj_bias") if name in full}
    columns = full["out_proj.weight"].unflatten(1, (n_heads, -1))[:, list(order)].flatten(1, 2)
    return {**full, **moved, "out_proj.weight": columns}


def best_order(costs: Float[Tensor, "H H"]) -> list[int]:
    """The permutation p with the least sum over h of costs[h, p(h)]: which head stands for each of the leader's.

    Exact (the assignment problem), by dynamic programming over sets of heads, in 2^H H steps: up to 16 heads.
    """
    table, n = costs.tolist(), len(costs)
    if n > 16:
        raise UserError(f"matching heads is offered for 16 a layer at most, here are {n}; give --no-match-heads")

    @cache
    def best(taken: int) -> tuple[float, tuple[int, ...]]:
        head = taken.bit_count()
        if head == n:
            return 0.0, ()
        options = []
        for other in range(n):
            if not taken >> other & 1:
                cost, rest = best(taken | 1 << other)
                options.append((table[head][other] + cost, (other, *rest)))
        return min(options)

    return list(best(0)[1])
