"""Tiles over clusters: whoever asks a cluster reads all of its members, and a token may ask several."""

from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.attention.clustering import gathered
from hasten.attention.clustering.gathered import FORBIDDEN, Tile, Tiles, at, flat

_TILE_BITS = 6  # a traced tile has 64 queries
_MOST = 128  # queries of a piece
_BITS = 31  # of a word for clusters
_IDLE = -(1 << 31)  # and the sign, which idle rows have joined and everybody asked before


class Clusters(Tiles):
    """Token i reads itself and the members j of every cluster that it asks; with `causal`, those up to itself.

    asks and members (B, H, clusters, N); no cluster has more than `most` members. A pair of several clusters counts in
    the first of them. A tile is a piece of the queries of a cluster, by position, with all its members as keys, or, if
    `causal`, with those up to the last query.
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
        batch, heads, n_clusters, length = asks.shape
        sheets = batch * heads
        self._dtype, self.own = dtype, FORBIDDEN * flat(any_cluster(asks & members)).to(dtype)
        ages = -torch.arange(length, device=asks.device, dtype=dtype)
        self._ages = flat(ages.expand(batch, heads, length)) if causal else None
        earlier = torch.ones(n_clusters, n_clusters, dtype=torch.bool, device=asks.device).triu(1)
        self._asked, self._joined = _words(asks, 0), _words(members, _IDLE)
        self._earlier = [word[:-1].repeat(sheets) for word in _words(earlier[None, None], 0)]
        asks, members = asks.flatten(0, 1), members.flatten(0, 1)
        self._cut(asks, members, most) if gathered.split(asks.device) else self._fill(asks, members, most)

    def _cut(self, asks: Bool[Tensor, "S clusters N"], members: Bool[Tensor, "S clusters N"], most: int) -> None:
        """Cut the queries of every cluster into even pieces; those of like size stand together."""
        queries, n_queries = _listed(asks)
        keys, n_keys = _listed(members)
        idle = len(asks) * asks.shape[2]
        self._members = _table(keys, n_keys, idle, most)
        n_pieces = (n_queries + _MOST - 1) // _MOST
        owner = torch.arange(len(n_keys)).repeat_interleave(n_pieces)
        number = torch.arange(len(owner)) - (n_pieces.cumsum(0) - n_pieces)[owner]
        first, end = ((number + i) * n_queries[owner] // n_pieces[owner] for i in (0, 1))
        size, n_read = end - first, n_keys[owner]
        if self._ages is not None:
            last = queries[(n_queries.cumsum(0) - n_queries)[owner] + end - 1]
            n_read = (self._members[owner] <= last[:, None]).sum(1).clamp_min(1)
        self._queries = _table(queries, size, idle, _MOST)
        # Sheet by sheet, so that their rows stay in the caches.
        order = ((owner // asks.shape[1] * most + (n_read + 31) // 32) * (_MOST + 1) + size).argsort()
        self._owner, self._queries = owner[order], self._queries[order]
        self._sizes = list(zip(size[order].tolist(), n_read[order].tolist(), strict=True))

    def _fill(self, asks: Bool[Tensor, "S clusters N"], members: Bool[Tensor, "S clusters N"], most: int) -> None:
        """Tiles of 64 queries of one cluster, so many that they suffice whatever the clusters are."""
        sheets, n_clusters, length = asks.shape
        size, idle = 1 << _TILE_BITS, sheets * length
        sheet = torch.arange(sheets, device=asks.device)
        rows = torch.arange(idle, device=asks.device).view(sheets, 1, length) - idle
        flattened = members.flatten(0, 1)
        rows = rows.expand(asks.shape)
        self._members = _compacted(flattened, flattened.cumsum(-1) - 1, rows.flatten(0, 1), most) + idle
        n_tiles = (asks.sum(-1) + size - 1) // size
        ends = n_tiles.cumsum(-1)
        # For all lengths: a query is a member of its clusters or asks only one, and there are at least two tiles.
        total = (n_clusters * most + length) // size + n_clusters + 1
        places = asks.cumsum(-1) - 1
        places = (places & (size - 1)) * total + (places >> _TILE_BITS) + (ends - n_tiles)[..., None]
        queries = _compacted(asks.flatten(1), places.flatten(1), rows.flatten(1), size * total) + idle
        # Slots before tiles: of this order torch can tell that it fits for all lengths.
        self._queries = queries.unflatten(1, (size, total)).permute(2, 0, 1).flatten(0, 1)
        owner = (ends <= torch.arange(total, device=asks.device)[:, None, None]).sum(-1).clamp(max=n_clusters - 1)
        self._owner, self._sizes = (owner + sheet * n_clusters).flatten(), None

    def parts(self) -> Iterator[Tile]:
        """Cluster by cluster where all come at once, else by size."""
        if self._sizes is None:
            yield self._tile(slice(None), None, None)
        else:
            yield from (self._tile(*run) for run in gathered.runs(self._sizes))

    def _tile(self, part: slice, n_queries: int | None, n_keys: int | None) -> Tile:
        owner, rows = self._owner[part], self._queries[part, :n_queries]
        cols = self._members.index_select(0, owner)[:, :n_keys]
        return Tile(rows, cols, partial(self._forbidden, rows, cols, owner))

    def _forbidden(
        self, rows: Int[Tensor, "p I"], cols: Int[Tensor, "p J"], owner: Int[Tensor, "p"]
    ) -> Float[Tensor, "p I J"]:
        """Idle and later rows, and pairs that have an earlier cluster in common."""
        out = None
        for asked, joined, earlier in zip(self._asked, self._joined, self._earlier, strict=True):
            before = at(asked, rows) & at(earlier, owner)[:, None] | _IDLE
            common = (before[:, :, None] & at(joined, cols)[:, None, :]).to(self._dtype).abs_()
            out = common if out is None else out.add_(common)
        assert out is not None
        if self._ages is not None:
            out += (at(self._ages, rows)[:, :, None] - at(self._ages, cols)[:, None, :]).relu_()
        return out


def _listed(chosen: Bool[Tensor, "S clusters N"]) -> tuple[Int[Tensor, "n"], Int[Tensor, "Sc"]]:
    """The rows chosen by every cluster, one after another, and how many each has."""
    sheet, _, position = chosen.nonzero().unbind(1)
    return sheet * chosen.shape[2] + position, chosen.sum(-1).flatten()


def _table(listed: Int[Tensor, "n"], sizes: Int[Tensor, "p"], idle: int, width: int) -> Int[Tensor, "p width"]:
    """A list cut into lines of these sizes, filled up with idle rows."""
    slots = torch.arange(width) < sizes[:, None]
    return torch.full(slots.shape, idle).masked_scatter_(slots, listed)


def _compacted(
    chosen: Bool[Tensor, "*S M"], places: Int[Tensor, "*S M"], rows: Int[Tensor, "*S M"], size: int
) -> Tensor:
    """The rows of everything chosen, at its place; elsewhere 0: (*S, size)."""
    out = torch.zeros(*chosen.shape[:-1], size + 1, dtype=torch.long, device=chosen.device)
    # What is not chosen goes to a place of its own, which is cut off.
    return out.scatter(-1, places.masked_fill(~chosen, size), rows)[..., :-1]


def any_cluster(chosen: Bool[Tensor, "B H clusters N"]) -> Bool[Tensor, "B H N"]:
    """Whether any cluster did. As bytes: over truth values torch does not vectorise."""
    return chosen.view(torch.uint8).amax(2).bool()


def _words(chosen: Bool[Tensor, "B H clusters N"], idle: int) -> list[Int[Tensor, "R"]]:
    """For every row, the clusters that chose it, as bits; idle rows are given. The last is earlier than none."""
    words = []
    for start in range(0, max(chosen.shape[2] - 1, 1), _BITS):
        some = chosen[:, :, start : start + _BITS].int()
        bits = torch.tensor([1 << bit for bit in range(some.shape[2])], dtype=torch.int32, device=some.device)
        words.append(flat((some * bits[:, None]).sum(2, dtype=torch.int32), idle))
    return words
