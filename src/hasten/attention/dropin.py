"""A stand-in for `torch.nn.MultiheadAttention`: its parameters, its call, its masks; any mechanism inside."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.attention.base import Attention
from hasten.attention.masks import Mask, causal, padding
from hasten.errors import UserError


def obstacle(module: nn.MultiheadAttention) -> str:
    """Why `DropInAttention` cannot stand in for this module; empty where it can."""
    if type(module).forward is not nn.MultiheadAttention.forward or "forward" in vars(module):
        return f"{type(module).__name__} computes in a forward of its own"
    if nn.utils.parametrize.is_parametrized(module):
        return "its weights are parametrised, and would no longer be"
    if any(vars(module).get(kind) for kind in _HOOKS):
        return "hooks are attached to it, and would be lost"
    if module.bias_k is not None:
        return "add_bias_kv appends a learnt key, which mechanisms do not take"
    if module.add_zero_attn:
        return "add_zero_attn appends a key of zeros, which mechanisms do not take"
    if module.in_proj_weight is None:
        return f"its keys and values have widths of their own (kdim {module.kdim}, vdim {module.vdim})"
    return ""


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class DropInAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with another mechanism: out = W_o concat_h(operator(q_h, k_h) v_h).

    It takes over the parameters of `module`, the very same objects, so optimisers and state dicts stay valid. The call
    is that module's: masks say True = ignore, float masks hold 0 or -inf; (B, L, E) with batch_first, (L, B, E)
    without, (L, E) for one sequence. Three things differ. A row that may read nothing gets 0, never NaN. The weights
    returned are those before dropout. Asking for them leaves the output as it is.
    For a mechanism that wants one projection for both (`traits.shared_qk`) the queries are the keys.
    Raises `UserError` for a module it cannot replace, and in the call for what the mechanism does not take, for float
    masks that are biases (unchecked while traced) and for nested tensors.
    """

    # torch's encoder layer would otherwise hand the weights to a fused kernel in eval() and never call this module.
    _qkv_same_embed_dim = False
    bias_k = bias_v = q_proj_weight = k_proj_weight = v_proj_weight = None
    add_zero_attn = False

    def __init__(self, module: nn.MultiheadAttention, attention: Attention):
        super().__init__()
        if reason := obstacle(module):
            raise UserError(f"DropInAttention cannot stand in for this module: {reason}")
        self.embed_dim = self.kdim = self.vdim = module.embed_dim
        self.num_heads, self.head_dim = module.num_heads, module.head_dim
        self.dropout, self.batch_first = module.dropout, module.batch_first
        self.in_proj_weight, self.in_proj_bias = module.in_proj_weight, module.in_proj_bias
        self.out_proj = module.out_proj
        self.attention = attention
        self._roles = (0, 0, 2) if attention.traits.shared_qk else (0, 1, 2)
        self._axes = (0, 1, 2) if module.batch_first else (1, 0, 2)
        self.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention from `query` over `key` and `value`, and the weights ((B, T, S) or (B, H, T, S)) if needed.

        key_padding_mask (B, S), attn_mask (T, S) or (B * H, T, S). is_causal says that attn_mask, if given, is the
        causal one.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            raise UserError("DropInAttention takes no nested tensors; give padded ones and a key_padding_mask")
        if batched := query.dim() == 3:
            q, k, v = self._project(query, key, value, self._axes)
        else:
            q, k, v = self._project(query, key, value, None)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        mask = _mask(key_padding_mask, attn_mask, is_causal, q, k)
        operator = self.attention.operator(q, k, mask)
        out = self.out_proj(operator.apply(v).transpose(1, 2).flatten(2))
        out = out.permute(self._axes) if batched else out[0]
        if not need_weights:
            return out, None
        weights = operator.dense()
        weights = weights.mean(1) if average_attn_weights else weights
        return out, weights if batched else weights[0]

    def _project(self, query: Tensor, key: Tensor, value: Tensor, axes: tuple[int, ...] | None) -> tuple[Tensor, ...]:
        """Queries, keys and values, (B, H, length, D) each."""
        if query is key and key is value:
            y = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            if self._roles[1] == 0 and query is not key:
                raise UserError(f"{type(self.attention).__name__} wants one tensor as query and key (traits.shared_qk)")
            weights = self.in_proj_weight.chunk(3)
            biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            y = tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        batch_first = (y[role][None] if axes is None else y[role].permute(axes) for role in self._roles)
        return tuple(x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in batch_first)


def _mask(key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> Mask:
    """torch's masks, True = ignore, as one of ours, True = may attend."""
    (batch, heads, n_queries, _), n_keys = q.shape, k.shape[2]
    keys = None
    if key_padding_mask is not None:
        if tuple(key_padding_mask.shape) != (batch, n_keys):
            raise UserError(f"key_padding_mask is {tuple(key_padding_mask.shape)}, expected {(batch, n_keys)}")
        keys = padding(_may_attend("key_padding_mask", key_padding_mask)).keys
    if is_causal and n_queries == n_keys:
        return Mask(causal=True, keys=keys)
    if attn_mask is None:
        if is_causal:
            raise UserError(f"is_causal is unclear for {n_queries} queries and {n_keys} keys; give attn_mask")
        return Mask(keys=keys)
    if tuple(attn_mask.shape) not in ((n_queries, n_keys), (batch * heads, n_queries, n_keys)):
        allowed = f"{(n_queries, n_keys)} or {(batch * heads, n_queries, n_keys)}"
        raise UserError(f"attn_mask is {tuple(attn_mask.shape)}, expected {allowed}")
    allowed = _may_attend("attn_mask", attn_mask)
    if not torch.compiler.is_compiling():
        if allowed.all():
            return Mask(keys=keys)
        if allowed.dim() == 2 and torch.equal(allowed, causal(n_queries, n_keys, allowed.device)):
            return Mask(causal=True, keys=keys)
    lead = (batch, heads) if allowed.dim() == 3 else (1, 1)
    return Mask(keys=keys, allowed=allowed.reshape(*lead, n_queries, n_keys))


def _may_attend(name: str, mask: Tensor) -> Tensor:
    """True = may attend, from True = ignore or from what is added to the scores, 0 or -inf."""
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        raise UserError(f"{name} is of type {mask.dtype}; give torch.bool, True = ignore")
    allowed = mask == 0
    if not torch.compiler.is_compiling() and not (allowed | (mask == -torch.inf)).all():
        raise UserError(f"{name} adds a bias to the scores, which mechanisms do not take; its values must be 0 or -inf")
    return allowed
