"""Tiles over clusters: whoever asks a cluster reads all of its members, and a token may ask several."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.attention.gathered import Tiles, at

_TILE_BITS = 6  # a tile has 64 queries
_BITS = 31  # of a word; the sign stays free


class Clusters(Tiles):
    """Token i reads itself and the members j of every cluster that it asks; with `causal`, those before it.

    asks and members (B, H, clusters, N); no cluster has more than `most` members. A pair of several clusters counts in
    the first of them. Queries of a cluster, by position, fill tiles of 64; all its members are the keys of each.
    """

    own = 0.0

    def __init__(
        self,
        asks: Bool[Tensor, "B H clusters N"],
        members: Bool[Tensor, "B H clusters N"],
        most: int,
        *,
        causal: bool,
        dtype: torch.dtype,
    ):
        asks, members = asks.flatten(0, 1), members.flatten(0, 1)
        sheets, n_clusters, length = asks.shape
        sheet = torch.arange(sheets, device=asks.device)
        first = (sheet * (length + 1)).repeat_interleave(n_clusters)[:, None]
        flat = members.flatten(0, 1)
        self.n_keys, self._members = most, _compacted(flat, flat.cumsum(-1) - 1, most, length) + first
        queries, owner = _filled(asks, most)
        # A sheet has a query once in a tile: tiles of the same number in all sheets make a turn. All are one if traced.
        shape = (1, -1) if torch.compiler.is_compiling() else (-1, sheets)
        tiles = owner.shape[0]
        self.queries = (queries + sheet.repeat(tiles)[:, None] * (length + 1)).unflatten(0, shape)
        self._owner = (owner + sheet * n_clusters).flatten().unflatten(0, shape)
        self._causal = causal
        self._positions = torch.arange(length + 1, device=asks.device, dtype=dtype).repeat(sheets)
        self._idle = (self._positions == length).to(dtype)
        self._asked, self._joined = _words(asks), _words(members)
        earlier = torch.ones(n_clusters, n_clusters, dtype=torch.bool, device=asks.device).triu(1)
        self._earlier = [word[:-1].repeat(sheets) for word in _words(earlier[None])]

    def keys(self, turn: int, part: slice) -> Int[Tensor, "p J"]:
        """The members of their clusters."""
        return self._members.index_select(0, self._owner[turn, part])

    def forbidden(self, turn: int, part: slice, cols: Int[Tensor, "p J"]) -> Float[Tensor, "p I J"]:
        """The row itself, later ones, idle ones, and pairs of an earlier cluster: arithmetic, as for bands."""
        rows, owner = self.queries[turn, part], self._owner[turn, part]
        distances = at(self._positions, rows)[:, :, None] - at(self._positions, cols)[:, None, :]
        if self._causal:
            out = distances.neg_().add_(1.0).relu_()
        else:
            out = distances.abs_().neg_().add_(1.0).relu_().add_(at(self._idle, cols)[:, None, :])
        for asked, joined, earlier in zip(self._asked, self._joined, self._earlier, strict=True):
            before = at(asked, rows) & at(earlier, owner)[:, None]
            out += (before[:, :, None] & at(joined, cols)[:, None, :]).clamp_(max=1).to(out.dtype)
        return out


def _filled(asks: Bool[Tensor, "S clusters N"], most: int) -> tuple[Int[Tensor, "TS I"], Int[Tensor, "T S"]]:
    """Tiles of queries of one cluster each, and their clusters; tile by tile, and sheet by sheet in each."""
    n_clusters, length = asks.shape[1:]
    traced = torch.compiler.is_compiling()
    bits = _TILE_BITS if traced else min(_TILE_BITS, (length - 1).bit_length())
    size = 1 << bits
    n_tiles = (asks.sum(-1) + size - 1) // size
    ends = n_tiles.cumsum(-1)
    # For all lengths: a query is a member of its clusters or asks only one, and there are at least two tiles.
    total = (n_clusters * most + length) // size + n_clusters + 1 if traced else max(int(ends[:, -1].max()), 1)
    places = asks.cumsum(-1) - 1
    places = (places & (size - 1)) * total + (places >> bits) + (ends - n_tiles)[..., None]
    queries = _compacted(asks.flatten(1), places.flatten(1), size * total, length)
    # Slots before tiles: of this order torch can tell that it fits for all lengths.
    queries = queries.unflatten(1, (size, total)).permute(2, 0, 1).flatten(0, 1)
    owner = (ends <= torch.arange(total, device=asks.device)[:, None, None]).sum(-1)
    return queries, owner.clamp(max=n_clusters - 1)


def _compacted(chosen: Bool[Tensor, "*S M"], places: Int[Tensor, "*S M"], size: int, length: int) -> Tensor:
    """The position (index modulo `length`) of everything chosen, at its place; elsewhere `length`: (*S, size)."""
    positions = torch.arange(chosen.shape[-1], device=chosen.device) % length - length
    out = torch.zeros(*chosen.shape[:-1], size + 1, dtype=torch.long, device=chosen.device)
    # What is not chosen goes to a place of its own, which is cut off.
    return out.scatter(-1, places.masked_fill(~chosen, size), positions.expand(chosen.shape))[..., :-1] + length


def _words(chosen: Bool[Tensor, "S clusters N"]) -> list[Int[Tensor, "R"]]:
    """For every row, the clusters that chose it, as bits. No cluster is earlier than the last: it needs no bit."""
    words = []
    for start in range(0, max(chosen.shape[1] - 1, 1), _BITS):
        some = chosen[:, start : start + _BITS].int()
        bits = torch.tensor([1 << bit for bit in range(some.shape[1])], dtype=torch.int32, device=some.device)
        words.append(F.pad((some * bits[:, None]).sum(1, dtype=torch.int32), (0, 1)).flatten())
    return words
