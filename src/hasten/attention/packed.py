"""Packed batches: sequences of different lengths laid end to end, without padding between them."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from hasten.attention.base import Attention
from hasten.attention.masks import Mask
from hasten.errors import UserError

MOST_PADDING = 0.25
"""Share of a group's places that may be padding."""


def pack(
    x: Shaped[Tensor, "B S *rest"], mask: Bool[Tensor, "B S"]
) -> tuple[Shaped[Tensor, "total *rest"], Int[Tensor, " B"]]:
    """The tokens of x where the mask is True, row after row, and how many each row has.

    x (B, S, ...), mask (B, S), True = real token, anywhere in its row: the order is kept, the place is not.
    Errors: `UserError` for a mask of another type or shape, and for a row without a token.
    """
    if mask.dtype != torch.bool or mask.dim() != 2 or mask.shape != x.shape[:2]:
        raise UserError(
            f"pack: mask is {tuple(mask.shape)} of {mask.dtype}; give torch.bool of shape {tuple(x.shape[:2])}, "
            "True = real token"
        )
    lengths = mask.sum(1)
    _counts(lengths, int(lengths.sum()), "pack")
    return x[mask], lengths


def unpack(
    x: Shaped[Tensor, "total *rest"], lengths: Int[Tensor, " B"]
) -> tuple[Shaped[Tensor, "B S *rest"], Bool[Tensor, "B S"]]:
    """The sequences one a row, zeros on the right up to the longest, and the mask that is True on real tokens.

    Errors: `UserError` unless lengths (B,) are integers of at least 1 whose sum is the number of rows of x.
    """
    counts = _counts(lengths, len(x), "unpack")
    mask = torch.arange(max(counts), device=x.device) < torch.tensor(counts, device=x.device)[:, None]
    padded = x.new_zeros(*mask.shape, *x.shape[1:])
    return padded.masked_scatter(mask.view(*mask.shape, *[1] * (x.dim() - 1)), x), mask


def attend_packed(
    attention: Attention,
    q: Float[Tensor, "total H D"],
    k: Float[Tensor, "total H D"],
    v: Float[Tensor, "total H Dv"],
    lengths: Int[Tensor, " B"],
    *,
    causal: bool = False,
) -> Float[Tensor, "total H Dv"]:
    """Self-attention within each of the packed sequences, equal to running the mechanism on each alone.

    Sequences of similar lengths run together, padded on the right and masked by `Mask.keys`; in every such group at
    most a quarter of the places is padding. A mechanism that takes no padded keys runs equal lengths together.
    The lengths are read on the CPU, so this is neither traced nor exported, and a GPU is waited for.
    Errors: `UserError` unless lengths are integers of at least 1 whose sum is the number of rows, of q, k and v.
    """
    counts = _counts(lengths, len(q), "packed attention")
    for name, given in (("k", k), ("v", v)):
        if len(given) != len(q):
            raise UserError(f"packed attention: {name} has {len(given)} rows, q {len(q)}; every row is a token")
    widths = torch.tensor(counts, device=q.device)
    starts = widths.cumsum(0) - widths
    outs, origins = [], []
    for group in groups(counts, MOST_PADDING if attention.traits.key_padding else 0.0):
        chosen = torch.tensor(group, device=q.device)
        offsets, last = torch.arange(counts[group[0]], device=q.device), widths[chosen, None] - 1
        # Padding repeats the last token: it is finite, and masked.
        rows = starts[chosen, None] + torch.minimum(offsets, last)
        real = offsets <= last
        mask = Mask(causal=causal, keys=None if counts[group[-1]] == counts[group[0]] else real)
        q_group, k_group, v_group = (_gather(x, rows) for x in (q, k, v))
        out = attention.operator(q_group, k_group, mask).apply(v_group).transpose(1, 2)
        kept = real.flatten().nonzero()[:, 0]
        outs.append(out.flatten(0, 1).index_select(0, kept))
        origins.append(rows.flatten()[kept])
    return torch.cat(outs).index_select(0, torch.cat(origins).argsort())


def groups(lengths: Sequence[int], most_padding: float) -> list[list[int]]:
    """The sequences by falling length, cut into groups padded to their longest, none with more padding than allowed."""
    found: list[list[int]] = []
    n_tokens = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        n_tokens += lengths[i]
        if found and n_tokens >= (1 - most_padding) * (len(found[-1]) + 1) * lengths[found[-1][0]]:
            found[-1].append(i)
        else:
            found.append([i])
            n_tokens = lengths[i]
    return found


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (B, S) of x (total, H, D) as (B, H, S, D)."""
    return x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:]).transpose(1, 2)


def _counts(lengths: Tensor, total: int, where: str) -> list[int]:
    """The lengths as numbers, once they are known to fit."""
    integer = isinstance(lengths, Tensor) and lengths.dtype in (torch.int64, torch.int32)
    if not integer or lengths.dim() != 1 or not len(lengths):
        got = f"{tuple(lengths.shape)} of {lengths.dtype}" if isinstance(lengths, Tensor) else type(lengths).__name__
        raise UserError(f"{where}: lengths is {got}; give one number a sequence, a tensor (B,) of torch.int64")
    counts = lengths.tolist()
    for i, count in enumerate(counts):
        if count < 1:
            raise UserError(f"{where}: sequence {i} has length {count}; leave empty sequences out")
    if sum(counts) != total:
        raise UserError(f"{where}: lengths sum to {sum(counts)}, but there are {total} rows; every row is a token")
    return counts
