"""Swap the attention inside an existing PyTorch model, in place, and report what was replaced and what was not."""

from torch import nn

from hasten.attention.base import Attention
from hasten.conversion import huggingface, modules
from hasten.conversion.report import Conversion
from hasten.conversion.sites import BuildsAttention, Site, Undo, Where, build, misfit, remarks, select
from hasten.errors import UserError

__all__ = ["Conversion", "convert"]


def convert(module: nn.Module, spec: BuildsAttention, where: Where = None) -> Conversion:
    """Replace attention inside `module`, in place, by the mechanism `spec` describes.

    Found are `torch.nn.MultiheadAttention`, also within torch's Transformer layers, and attention modules of Hugging
    Face models that go through transformers' AttentionInterface. Weights are kept, the very same parameters. `where`
    says which: a pattern over module names ("encoder.layers.*.self_attn"; * matches dots too), several of them, or a
    function (name, module) -> bool; default all. Each place gets a mechanism of its own, with the dropout of what it
    replaces where the spec leaves it at its default. What the mechanism cannot serve is kept, and the result says why.
    Raises `UserError` where nothing was found or `where` matches nothing. After an error nothing has changed.
    The outputs of a mechanism other than full attention differ from the original's: train on, or measure.
    """
    if not isinstance(module, nn.Module):
        raise UserError(f"convert: got {type(module).__name__}; give a torch.nn.Module")
    if isinstance(spec, type) or not hasattr(spec, "build"):
        raise UserError(f"convert: {spec!r} is no attention spec; give one, for example hasten.attention.FullSpec()")
    sites = [*modules.find(module), *huggingface.find(module)]
    if not sites:
        raise UserError(_nothing_found(module))
    chosen = {id(site.module) for site in select(sites, where)}
    others = [(site.name, "not chosen by where") for site in sites if id(site.module) not in chosen]
    built = [(site, build(spec, site)) for site in sites if id(site.module) in chosen]
    kept = [(site.name, misfit(attention, site)) for site, attention in built if misfit(attention, site)]
    planned = [(site, attention) for site, attention in built if not misfit(attention, site)]
    notes = [(site.name, text) for site, attention in planned for text in remarks(attention, site)]
    return Conversion(
        replaced=tuple(site.name for site, _ in planned),
        kept=(*kept, *others),
        notes=tuple(notes),
        mechanism=type(built[0][1]).__name__,
        undo=_install(planned),
    )


def _install(planned: list[tuple[Site, Attention]]) -> list[Undo]:
    undo: list[Undo] = []
    try:
        for site, attention in planned:
            undo.append(site.install(attention))
    except BaseException:
        while undo:
            undo.pop()()
        raise
    return undo


def _nothing_found(module: nn.Module) -> str:
    named = sorted({type(m).__name__ for m in module.modules() if "attention" in type(m).__name__.lower()})
    unknown = f"; of {', '.join(named[:4])} it does not know the inside" if named else ""
    return (
        f"convert: found no attention in {type(module).__name__}; it looks for torch.nn.MultiheadAttention and for "
        f"attention modules of Hugging Face models that go through transformers' AttentionInterface{unknown}"
    )
