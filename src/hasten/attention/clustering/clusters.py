"""Tiles over clusters: whoever asks a cluster reads all of its members, and a token may ask several."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.attention.clustering.gathered import FORBIDDEN, Tiles, at

_TILE_BITS = 6  # a tile has 64 queries
_BITS = 31  # of a word for clusters
_IDLE = -(1 << 31)  # and the sign, which idle rows have joined and everybody asked before


class Clusters(Tiles):
    """Token i reads itself and the members j of every cluster that it asks; with `causal`, those up to itself.

    asks and members (B, H, clusters, N); no cluster has more than `most` members. A pair of several clusters counts in
    the first of them. Queries of a cluster, by position, fill tiles of 64; all its members are the keys of each.
    """

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
        # A tile has a query once: tiles of the same number, one of each sheet, are disjoint.
        self.disjoint, n_tiles = sheets, owner.shape[0]
        self.queries = (queries + sheet.repeat(n_tiles)[:, None] * (length + 1))[None]
        self._owner = (owner + sheet * n_clusters).flatten()
        self._dtype, self.own = dtype, FORBIDDEN * F.pad((asks & members).any(1), (0, 1)).flatten().to(dtype)
        self._ages = -torch.arange(length + 1, device=asks.device, dtype=dtype).repeat(sheets) if causal else None
        earlier = torch.ones(n_clusters, n_clusters, dtype=torch.bool, device=asks.device).triu(1)
        self._asked, self._joined = _words(asks, 0), _words(members, _IDLE)
        self._earlier = [word[:-1].repeat(sheets) for word in _words(earlier[None], 0)]

    def keys(self, turn: int, part: slice) -> Int[Tensor, "p J"]:
        """The members of their clusters."""
        return self._members.index_select(0, self._owner[part])

    def forbidden(self, turn: int, part: slice, cols: Int[Tensor, "p J"]) -> Float[Tensor, "p I J"]:
        """Idle and later rows, and pairs that have an earlier cluster in common."""
        rows, owner, out = self.queries[turn, part], self._owner[part], None
        for asked, joined, earlier in zip(self._asked, self._joined, self._earlier, strict=True):
            before = at(asked, rows) & at(earlier, owner)[:, None] | _IDLE
            common = (before[:, :, None] & at(joined, cols)[:, None, :]).to(self._dtype).abs_()
            out = common if out is None else out.add_(common)
        assert out is not None
        if self._ages is not None:
            out += (at(self._ages, rows)[:, :, None] - at(self._ages, cols)[:, None, :]).relu_()
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
    total = (n_clusters * most + length) // size + n_clusters + 1 if traced else max(ends[:, -1].tolist(), default=0)
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


def _words(chosen: Bool[Tensor, "S clusters N"], idle: int) -> list[Int[Tensor, "R"]]:
    """For every row, the clusters that chose it, as bits; idle rows are given. The last is earlier than none."""
    words = []
    for start in range(0, max(chosen.shape[1] - 1, 1), _BITS):
        some = chosen[:, start : start + _BITS].int()
        bits = torch.tensor([1 << bit for bit in range(some.shape[1])], dtype=torch.int32, device=some.device)
        words.append(F.pad((some * bits[:, None]).sum(1, dtype=torch.int32), (0, 1), value=idle).flatten())
    return words
