"""What transformers calls: one attention function and the masks that go with it.

The plain masks, causal or not, reach attention as padding alone: (B, S), True = may attend, or None without padding;
whether it is causal the module says. Every other pattern (windows, packed sequences, unions, a static cache) arrives
as transformers makes it, (B, 1, T, S).
"""

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface
from transformers.utils import output_capturing

from hasten.attention.base import Attention
from hasten.attention.masks import Mask, padding
from hasten.conversion.huggingface import CHILD, NAMES
from hasten.errors import UserError

# What some modules hand over that changes the scores or which keys are read.
_CHANGING = ("position_bias", "softcap", "s_aux", "sinks", "sliding_window", "indices", "block_indices")


def register() -> None:
    """Make both implementations known to transformers; a second time changes nothing."""
    for before, name in NAMES.items():
        AttentionInterface.register(name, partial(_attend, before))
        masking_utils.AttentionMaskInterface.register(name, _make_mask)


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **rest: Any,
) -> Tensor | None:
    causal = mask_function is masking_utils.causal_mask_function and allow_is_causal_skip
    # In a static cache the queries do not stand at the end of the keys.
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    both_ways = mask_function is masking_utils.bidirectional_mask_function and allow_is_bidirectional_skip
    if not (both_ways or (causal and aligned)):
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
        offsets = {"q_offset": q_offset, "kv_offset": kv_offset}
        pattern = {"mask_function": mask_function, "attention_mask": attention_mask}
        return masking_utils.sdpa_mask(**sizes, **offsets, **pattern, **skips, **rest)
    if attention_mask is None:
        return None
    keys = attention_mask[:, kv_offset : kv_offset + kv_length]
    return padding(F.pad(keys, (0, kv_length - keys.shape[1]))).keys


def _attend(
    before: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **given: Any,
) -> tuple[Tensor, Tensor | None]:
    """Queries (B, H, T, D), keys and values (B, H or fewer, S, D) to (B, T, H, D), and the weights if asked for."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    mechanism = getattr(module, CHILD, None)
    if not isinstance(mechanism, Attention):
        go_on = _go_on_eagerly if before == "eager" else _go_on
        return go_on(module, query, key, value, attention_mask, causal, dropout=dropout, scaling=scaling, **given)
    name = type(mechanism).__name__
    for what in _CHANGING:
        if given.get(what) is not None:
            raise UserError(f"{type(module).__name__} uses {what}, which {name} does not take; keep it by `where`")
    _check_lengths(mechanism, query, key, causal)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    rescaled = 1.0 if scaling is None else scaling * query.shape[-1] ** 0.5  # mechanisms divide by the root themselves
    if abs(rescaled - 1.0) > 1e-6:
        query = query * rescaled
    operator = mechanism.operator(query, key, _mask(attention_mask, causal, query, key))
    out = operator.apply(value).transpose(1, 2).contiguous()
    return out, operator.dense() if _wants_weights(given) else None


def _check_lengths(mechanism: Attention, query: Tensor, key: Tensor, causal: bool) -> None:
    (n_queries, n_keys), name, traits = (query.shape[2], key.shape[2]), type(mechanism).__name__, mechanism.traits
    if n_queries == n_keys:
        return
    if causal and not traits.suffix:
        raise UserError(
            f"{name} reads no cache of earlier keys (traits.suffix): got {n_queries} queries and {n_keys} keys; "
            "call generate with use_cache=False"
        )
    if not causal and not traits.cross:
        raise UserError(
            f"this is cross-attention ({n_queries} queries, {n_keys} keys), which {name} does not do (traits.cross); "
            "restore() and leave it out by `where`"
        )


def _mask(attention_mask: Tensor | None, causal: bool, query: Tensor, key: Tensor) -> Mask:
    if attention_mask is None:
        return Mask(causal=causal)
    if attention_mask.dim() == 2:
        return Mask(causal=causal, keys=attention_mask)
    if causal and query.shape[2] != key.shape[2]:
        raise UserError(
            f"a mask {tuple(attention_mask.shape)} beside a cache of keys leaves open where the {query.shape[2]} "
            "queries stand; use a dynamic cache, not a static one, and no ready-made mask with it"
        )
    allowed = _may_attend(attention_mask)[..., : key.shape[2]]
    if allowed.shape[1:3] == (1, 1):  # the same for every head and query: padding, as older models hand it over
        return padding(allowed[:, 0, 0])
    return Mask(allowed=allowed)


def _may_attend(mask: Tensor) -> Tensor:
    """True = may attend, from what is added to the scores: 0, or the lowest number."""
    if mask.dtype == torch.bool:
        return mask
    allowed = mask == 0
    if not torch.compiler.is_compiling() and not (allowed | (mask <= torch.finfo(mask.dtype).min)).all():
        raise UserError("the mask adds a bias to the scores, which mechanisms do not take")
    return allowed


def _wants_weights(given: dict[str, Any]) -> bool:
    """Whether the call asks for attentions; some modules do not hand that on, but transformers collects."""
    collected = None if torch.compiler.is_compiling() else output_capturing._active_collector.get()
    return bool(given.get("output_attentions")) or any("attentions" in key for key in collected or {})


def _dense(mask: Tensor | None, causal: bool, query: Tensor, key: Tensor) -> Tensor | None:
    """What `_make_mask` left out put back: (B or 1, 1, T or 1, S), True = may attend."""
    if mask is not None and mask.dim() == 4:
        return mask
    return Mask(causal=causal and query.shape[2] > 1, keys=mask).dense(query.shape[2], key.shape[2], query.device)


def _go_on(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, **given: Any
) -> tuple[Tensor, Tensor | None]:
    # Without a mask the fused kernel does equal lengths best; for others its own causal flag is aligned otherwise.
    if mask is not None or query.shape[2] != key.shape[2]:
        mask = _dense(mask, causal, query, key)
    return sdpa_attention_forward(module, query, key, value, mask, is_causal=causal, **given)


def _go_on_eagerly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, **given: Any
) -> tuple[Tensor, Tensor | None]:
    mask = _dense(mask, causal, query, key)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    eager = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
    return eager(module, query, key, value, mask, **given)
