"""Attention modules of Hugging Face models: those that go through transformers' AttentionInterface.

A converted module carries its mechanism as a child, `module.hasten`, and the attention implementation in its
configuration becomes one of `NAMES`. Every attention module with that configuration then calls the function in
`interface`, which asks the child or, where there is none, goes on with what the model used before.
"""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hasten.attention.base import Attention
from hasten.conversion.sites import CROSS_NAMES, Site, Undo, layer_of

CHILD = "hasten"
NAMES = {"sdpa": "hasten", "eager": "hasten_over_eager"}  # by what modules without a mechanism go on with
OLDEST = (5, 18)  # of transformers: before, masks are asked for in another way
_OVER = {name: before for before, name in NAMES.items()}
_BEFORE = "_attention_before_hasten"
_CONVERTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_DROPOUTS = ("attention_dropout", "attn_dropout", "attn_drop", "dropout_prob", "dropout_p", "dropout")
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_WIDTHS = ("head_dim", "attention_head_size", "d_head")


def find(root: nn.Module) -> list[Site]:
    """Every attention module that goes through the interface."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:  # no model of it can be here either
        return []
    modules = dict(root.named_modules())
    models = {name: module for name, module in modules.items() if isinstance(module, transformers.PreTrainedModel)}
    return [
        _site(root, name, module, next((models[at] for at in _upwards(name) if at in models), None))
        for name, module in modules.items()
        if name not in models and _calls_the_interface(type(module))
    ]


def _upwards(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _calls_the_interface(kind: type[nn.Module]) -> bool:
    methods = (inspect.unwrap(method) for base in kind.__mro__ for method in vars(base).values() if callable(method))
    return any(
        "ALL_ATTENTION_FUNCTIONS" in method.__code__.co_names for method in methods if inspect.isfunction(method)
    )


def _site(root: nn.Module, name: str, module: nn.Module, model: Any) -> Site:
    causal = bool(getattr(module, "is_causal", False))
    return Site(
        name=name,
        module=module,
        n_heads=_number(module, _HEADS),
        d_head=_number(module, _WIDTHS),
        dropout=_dropout(module),
        causal=causal,
        cross=_is_cross(name, module, causal),
        layer=layer_of(name),
        cached=True,
        ties=False,
        obstacle=_obstacle(module, model),
        install=_installer(root, module),
    )


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """The first of these attributes that is a whole number."""
    return next((getattr(module, name) for name in names if isinstance(getattr(module, name, None), int)), None)


def _dropout(module: nn.Module) -> float | None:
    for name in _DROPOUTS:
        share = getattr(module, name, None)
        share = share.p if isinstance(share, nn.Dropout) else share
        if isinstance(share, int | float):
            return float(share)
    return None


def _is_cross(name: str, module: nn.Module, causal: bool) -> bool:
    """A decoder's module that is not causal reads the encoder; classes and names say it too."""
    named = "Cross" in type(module).__name__ or any(part in CROSS_NAMES for part in name.split("."))
    flagged = getattr(module, "is_cross_attention", False) or (getattr(module, "is_decoder", False) and not causal)
    return named or bool(flagged)


def _obstacle(module: nn.Module, model: Any) -> str:
    if isinstance(getattr(module, CHILD, None), Attention):
        return f"it is {type(getattr(module, CHILD)).__name__} already; restore() that conversion first"
    if (version := _version()) < OLDEST:
        found, needed = (".".join(map(str, numbers)) for numbers in (version, OLDEST))
        return f"transformers is {found}; {needed} or newer is needed, pip install 'hasten[hub]'"
    if model is None or getattr(module, "config", None) is None:
        return "it stands outside a PreTrainedModel, whose attention implementation could be set"
    if not model._can_set_attn_implementation():
        return f"{type(model).__name__} does not let its attention implementation be set"
    if "position_bias" in inspect.signature(inspect.unwrap(type(module).forward)).parameters:
        return "it adds a bias of relative positions to the scores, which mechanisms do not take"
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return "it caps the scores (softcap), which mechanisms do not"
    if getattr(module, "sinks", None) is not None:
        return "it has attention sinks, which mechanisms do not take"
    # Masks for SDPA leave causality to the module; where there are none, nobody checks what the module says of it.
    if not model._supports_sdpa:
        return f"{type(model).__name__} has eager attention only, and its modules do not say reliably what is causal"
    return _window(module)


def _version() -> tuple[int, int]:
    major, minor = sys.modules["transformers"].__version__.split(".")[:2]
    return int(major), int(minor)


def _window(module: nn.Module) -> str:
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None) or ()
    listed = kinds[index] if index is not None and index < len(kinds) else None
    kind = getattr(module, "layer_type", None) or listed
    if kind is not None:
        return "" if kind == "full_attention" else f"it is a layer of another kind ({kind})"
    if getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None):
        return "it reads a sliding window; mechanisms bring a pattern of their own"
    return "it reads chunks of attention_chunk_size" if getattr(config, "attention_chunk_size", None) else ""


def _installer(root: nn.Module, module: Any) -> Callable[[Attention], Undo]:
    def install(attention: Attention) -> Undo:
        from hasten.conversion.interface import register

        config = module.config
        before = config._attn_implementation
        if before in NAMES.values():
            before = vars(next(iter(_converted(root, config)), module)).get(_BEFORE, _OVER[before])
        register()
        vars(module)[_BEFORE] = before
        module.add_module(CHILD, attention)
        _CONVERTED.add(module)
        # on this configuration only: the public setter reaches into models that have configurations of their own
        config._attn_implementation_internal = NAMES.get(before, NAMES["sdpa"])

        def undo() -> None:
            if getattr(module, CHILD, None) is attention:
                delattr(module, CHILD)
                vars(module).pop(_BEFORE)
            if not _converted(root, config):
                config._attn_implementation_internal = before

        return undo

    return install


def _converted(root: nn.Module, config: Any) -> list[nn.Module]:
    """The modules with a mechanism that share a configuration, and with it the implementation."""
    modules = {id(module): module for module in (*root.modules(), *_CONVERTED)}.values()
    return [m for m in modules if isinstance(getattr(m, CHILD, None), Attention) and m.config is config]
