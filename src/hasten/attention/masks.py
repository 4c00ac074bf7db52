"""Which keys a query may read. True means: may attend, as in `scaled_dot_product_attention`."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from hasten.errors import UserError


@dataclass(frozen=True)
class Mask:
    """The conjunction of up to three conditions, and what mechanisms ask for besides; the empty mask lets all through.

    causal: query i reads keys j <= i + S - T (bottom-right aligned: the last query sees every key).
    keys: (B, S), True on real keys. What stands at False keys never reaches an output, NaN included.
    allowed: (B or 1, H or 1, T, S), any pattern.
    marked: (B, S), True on tokens that a pattern with marked global tokens lets read, and be read by, all others.
    silent: a promise that keys and values are zero wherever `keys` is False, so that nobody need make them so.
    """

    causal: bool = False
    keys: Bool[Tensor, "B S"] | None = None
    allowed: Bool[Tensor, "#B #H T S"] | None = None
    silent: bool = False
    marked: Bool[Tensor, "B S"] | None = None

    def __post_init__(self) -> None:
        for name, given in (("keys", self.keys), ("allowed", self.allowed), ("marked", self.marked)):
            if given is not None and given.dtype != torch.bool:
                meaning = "global" if name == "marked" else "may attend"
                raise UserError(f"Mask: {name} is of type {given.dtype}; give torch.bool, True = {meaning}")

    def dense(self, n_queries: int, n_keys: int, device: torch.device) -> Bool[Tensor, "#B #H #T S"] | None:
        """The mask as one boolean tensor that broadcasts to (B, H, T, S); None where everything is allowed."""
        parts = []
        if self.causal:
            parts.append(causal(n_queries, n_keys, device)[None, None])
        if self.keys is not None:
            parts.append(self.keys[:, None, None, :])
        if self.allowed is not None:
            parts.append(self.allowed)
        if not parts:
            return None
        dense = parts[0]
        for part in parts[1:]:
            dense = dense & part
        return dense


def padding(keys: Bool[Tensor, "B S"]) -> Mask:
    """The mask of padded keys; the empty one where nothing is padded, so that no layer spends time on it.

    Only on a CPU, and not while code is traced: elsewhere looking at the values costs more than it saves.
    """
    if keys.device.type != "cpu" or torch.compiler.is_compiling() or not keys.all():
        return Mask(keys=keys)
    return Mask()


def causal(n_queries: int, n_keys: int, device: torch.device) -> Bool[Tensor, "T S"]:
    """Query i may read key j when j <= i + S - T."""
    queries = torch.arange(n_queries, device=device)[:, None]
    return torch.arange(n_keys, device=device)[None, :] <= queries + (n_keys - n_queries)


def silence(x: Tensor, keys: Bool[Tensor, "B S"] | None) -> Tensor:
    """`x` (B, H, S, D) with zeros at keys that are padding, so that 0 * NaN cannot arise there."""
    return x if keys is None else x.masked_fill(~keys[:, None, :, None], 0.0)
