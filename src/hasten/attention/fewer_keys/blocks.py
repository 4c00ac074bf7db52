"""Real tokens first, cut into blocks: how positions are counted here, whatever stands between them."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.attention.masks import silence


class Packing:
    """Real tokens first, in their order, padding after them: what counts positions over real tokens only.

    order (B or 1, S): where the token of each rank stands. count (B or 1): how many are real.
    """

    def __init__(self, keys: Bool[Tensor, "B S"] | None, length: int, device: torch.device):
        self.keys = keys
        if keys is None:
            self.order = torch.arange(length, device=device)[None]
            self.count = torch.full((1,), length, device=device)
        else:
            self.order = (~keys).to(torch.uint8).argsort(dim=1, stable=True)
            self.count = keys.sum(1)

    def pack(self, x: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H S D"]:
        """`x` by rank, zero from rank `count` on."""
        return self.rank(silence(x, self.keys))

    def rank(self, x: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H S D"]:
        """`x` by rank, that of padding too."""
        return self._take(x, self.order)

    def unpack(self, x: Float[Tensor, "B H S D"]) -> Float[Tensor, "B H S D"]:
        """`x`, given by rank, where its tokens stand."""
        return x if self.keys is None else self._take(x, self.order.argsort(1))

    def _take(self, x: Tensor, places: Int[Tensor, "B S"]) -> Tensor:
        if self.keys is None:
            return x
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        return x.transpose(1, 2)[rows, places].transpose(1, 2)


def wide(x: Tensor) -> Tensor:
    """Half precision as float32; anything wider as it is."""
    return x.float() if x.dtype.itemsize < 4 else x


def n_blocks(length: int, size: int) -> int:
    """Blocks that hold so many tokens; while code is traced an even number, so that empty ones must be masked.

    A tracer takes a number that can be 1 for a constant, and sees without proof that twice a number never is 1.
    """
    if torch.compiler.is_compiling():
        return (length + 2 * size - 1) // (2 * size) * 2
    return (length + size - 1) // size


def blocks(x: Float[Tensor, "B H S D"], size: int) -> Float[Tensor, "B H n size D"]:
    """Cut along time into blocks, with zeros after the end."""
    n = n_blocks(x.shape[2], size)
    if torch.compiler.is_compiling() or n * size != x.shape[2]:
        x = F.pad(x, (0, 0, 0, n * size - x.shape[2]))
    return x.contiguous().unflatten(2, (n, size))


def unblocked(x: Float[Tensor, "B H n size D"], length: int) -> Float[Tensor, "B H S D"]:
    """The first `length` tokens of blocks."""
    if not torch.compiler.is_compiling() and length == x.shape[2] * x.shape[3]:
        return x.flatten(2, 3)  # padding by nothing copies
    return F.pad(x.flatten(2, 3), (0, 0, 0, length - x.shape[2] * x.shape[3]))  # a slice would not be traced


def alone(x: Float[Tensor, "B H S D"]) -> Float[Tensor, "BH 1 S D"]:
    """Heads as sequences of their own: of these, torch's fused kernel on a CPU gives gradients that need no copying."""
    return x.flatten(0, 1)[:, None]


def of_heads(keys: Bool[Tensor, "#B S"], shape: torch.Size) -> Bool[Tensor, "BH S"]:
    """A mask of keys for such heads, of queries or keys of this shape."""
    return keys[:, None].expand(*shape[:2], -1).flatten(0, 1)


def weigh(scores: Float[Tensor, "*rows keys"], allowed: Bool[Tensor, "*#rows #keys"]) -> Float[Tensor, "*rows keys"]:
    """Softmax over the allowed keys; zeros, and gradients of zero, where none is."""
    empty = ~allowed.any(-1, keepdim=True)
    return scores.masked_fill(~(allowed | empty), -torch.inf).softmax(-1).masked_fill(~allowed, 0.0)


def identity(like: Float[Tensor, "B H T D"], length: int) -> Float[Tensor, "B H S S"]:
    """Values that show an operator's matrix."""
    return torch.eye(length, dtype=like.dtype, device=like.device).expand(*like.shape[:2], -1, -1)
