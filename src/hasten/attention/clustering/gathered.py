"""Softmax attention over tiles: pieces of the score matrix, each given by the rows that it reads from and to."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from hasten.attention.base import Operator, Weights
from hasten.attention.masks import silence

FORBIDDEN = -1e25  # times a positive number of at most 1e12: finite in float32, and nothing beside any score
_BITS = math.log2(math.e)
_ALL = slice(None)
_GROUP = 2**18  # scores computed at a time, so that a few tensors of them stay in the cache of a core


class Tiles(ABC):
    """Which rows are multiplied with which.

    Rows are positions of flat tensors (R, D), R = sheets * (N + 1): every sheet (a head of a sentence) ends with an
    idle row, which stands wherever a tile is not full. queries (turns, P, I) holds rows: tile (t, p) is a block of
    scores of I of them with `n_keys` others. Of `disjoint` tiles in a row, from the first of a turn on, none has a
    query of another, but for idle ones. Beside the tiles every row reads itself, with `own` added to that score.
    """

    queries: Int[Tensor, "turns P I"]
    n_keys: int
    disjoint: int
    own: Float[Tensor, "R"] | float

    @abstractmethod
    def keys(self, turn: int, part: slice) -> Int[Tensor, "p J"]:
        """The key rows of some tiles of a turn."""

    @abstractmethod
    def forbidden(self, turn: int, part: slice, cols: Int[Tensor, "p J"]) -> Float[Tensor, "p I J"]:
        """Positive, from 1/2 to 1e12, where a pair of these tiles, with keys `cols`, must not be read, else 0.

        A pair that several tiles hold may be read in one of them, a row and itself in one if `own` forbids it.
        """

    def parts(self) -> Iterator[tuple[int, slice]]:
        """All tiles, a few at a time: some of one disjoint run, or several runs."""
        turns, n_tiles, size = self.queries.shape
        if n_tiles == 0:
            return
        few = max(1, _GROUP // (size * self.n_keys))
        run = self.disjoint * max(1, few // self.disjoint)
        for turn in range(turns):
            for start in range(0, n_tiles, run):
                stop = min(start + run, n_tiles)
                for first in range(start, stop, min(few, run)):
                    yield turn, slice(first, min(first + few, stop))


def attend(q: Float[Tensor, "R D"], k: Float[Tensor, "R D"], v: Float[Tensor, "R V"], tiles: Tiles) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the union of the tiles and the diagonal, (R, V).

    A CPU does a few tiles at a time and computes their scores again for the gradient: memory beyond the inputs does not
    grow with the number of tiles. Elsewhere, and while code is traced, the plain expression is used.
    """
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        return _Blockwise.apply(q, k, v, tiles)  # pyright: ignore[reportReturnType]
    return _plainly(q, k, v, tiles)


def _own(q: Tensor, k: Tensor, tiles: Tiles) -> Float[Tensor, "R"]:
    return (q * k).sum(-1) / math.sqrt(q.shape[-1]) + tiles.own


def _plainly(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> Tensor:
    """All tiles of a turn at once."""
    own, turns = _own(q, k, tiles), []
    top = own.detach()
    for turn, rows in enumerate(tiles.queries.unbind()):
        cols = tiles.keys(turn, _ALL)
        scores = _rows(q, rows) @ _rows(k, cols).transpose(1, 2) / math.sqrt(q.shape[-1])
        scores = scores + FORBIDDEN * tiles.forbidden(turn, _ALL, cols)
        top = top.scatter_reduce(0, rows.flatten(), scores.detach().amax(-1).flatten(), "amax")
        turns.append((rows, cols, scores))
    total = (own - top).exp()
    out = total[:, None] * v
    for rows, cols, scores in turns:
        weights = (scores - at(top, rows)[..., None]).exp()
        out = out.index_add(0, rows.flatten(), (weights @ _rows(v, cols)).flatten(0, 1))
        total = total.index_add(0, rows.flatten(), weights.sum(-1).flatten())
    return out / total[:, None]


class _Blockwise(torch.autograd.Function):
    """The same sum, a few tiles at a time, merged by their log-sum-exp; the backward computes scores again.

    Scores and their log-sum-exp are in bits: on a CPU torch's exp2 is faster than exp, and much faster where it
    underflows, as it does for every forbidden pair.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> Tensor:
        """Sums and log-sum-exp of every row, over tiles."""
        with torch.autocast(q.device.type, enabled=False):
            own = _own(q, k, tiles).mul_(_BITS)
            out, total = v.clone(), own.clone()
            for turn, part in tiles.parts():
                rows, cols = tiles.queries[turn, part], tiles.keys(turn, part)
                weights = _scores(_rows(q, rows), _rows(k, cols), tiles.forbidden(turn, part, cols))
                top = weights.amax(-1)
                weights.sub_(top[..., None]).exp2_()
                new = top + weights.sum(-1).log2_()
                mixed = torch.bmm(weights, _rows(v, cols))
                for one in zip(*(x.split(tiles.disjoint) for x in (rows, mixed, top, new)), strict=True):
                    _merge(out, total, *(x.flatten(0, 1) for x in one))
        ctx.save_for_backward(q, k, v, out, own.sub_(total).exp2_(), total)
        ctx.tiles = tiles
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """d score = p (dp - sum(p dp)), with p from scores computed again."""
        (q, k, v, out, own, total), (d_out,) = ctx.saved_tensors, gradients
        scale, tiles = 1 / math.sqrt(q.shape[-1]), ctx.tiles
        with torch.autocast(q.device.type, enabled=False):
            d_out = d_out.contiguous()
            mean = (d_out * out).sum(-1)
            d_score = ((d_out * v).sum(-1) - mean) * own
            d_q, d_k, d_v = d_score[:, None] * k, d_score[:, None] * q, own[:, None] * d_out
            for turn, part in tiles.parts():
                rows, cols = tiles.queries[turn, part], tiles.keys(turn, part)
                q_rows, k_rows, d_rows = _rows(q, rows), _rows(k, cols), _rows(d_out, rows)
                p = _scores(q_rows, k_rows, tiles.forbidden(turn, part, cols))
                p.sub_(at(total, rows)[..., None]).exp2_()
                d_scores = torch.bmm(d_rows, _rows(v, cols).transpose(1, 2))
                d_scores.sub_(at(mean, rows)[..., None]).mul_(p)
                rows, cols = rows.flatten(), cols.flatten()
                d_q.index_add_(0, rows, torch.bmm(d_scores, k_rows).flatten(0, 1))
                d_k.index_add_(0, cols, torch.bmm(d_scores.transpose(1, 2), q_rows).flatten(0, 1))
                d_v.index_add_(0, cols, torch.bmm(p.transpose(1, 2), d_rows).flatten(0, 1))
        return d_q.mul_(scale), d_k.mul_(scale), d_v, None


def _merge(out: Tensor, total: Tensor, rows: Tensor, mixed: Tensor, top: Tensor, new: Tensor) -> None:
    """Take in sums of exp(score - top) v of different rows, and their log-sum-exp."""
    old = total.index_select(0, rows)
    both = torch.logaddexp2(old, new)
    mixed.mul_((top - both).exp2_()[:, None])
    mixed.addcmul_(out.index_select(0, rows), (old - both).exp2_()[:, None])
    out.index_copy_(0, rows, mixed)
    total.index_copy_(0, rows, both)


def at(x: Shaped[Tensor, "R"], rows: Int[Tensor, "*n"]) -> Shaped[Tensor, "*n"]:
    """What stands at these rows."""
    return x.take(rows)


def _rows(x: Float[Tensor, "R D"], rows: Int[Tensor, "p n"]) -> Float[Tensor, "p n D"]:
    return F.embedding(rows, x)


def _scores(q: Tensor, k: Tensor, forbidden: Float[Tensor, "p I J"]) -> Float[Tensor, "p I J"]:
    """The scores of some tiles, in bits, in the place of what is forbidden."""
    scale = _BITS / math.sqrt(q.shape[-1])
    return torch.baddbmm(forbidden, q, k.transpose(1, 2), beta=FORBIDDEN, alpha=scale, out=forbidden)


def flat(x: Float[Tensor, "B H N D"]) -> Float[Tensor, "R D"]:
    """The rows of all sheets, each followed by an idle row of zeros."""
    return F.pad(x, (0, 0, 0, 1)).flatten(0, 2)


def widened(x: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D"]:
    """In float32 or wider."""
    return x if x.dtype.itemsize >= 4 else x.float()


class TileOperator(Operator):
    """Attention over tiles, from queries and keys in float32 or wider. Padded positions read nothing: exactly 0."""

    def __init__(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B H N D"],
        tiles: Tiles,
        keys: Bool[Tensor, "B N"] | None,
        dtype: torch.dtype,
    ):
        self.q = flat(q)
        self.k = self.q if k is q else flat(k)
        self.tiles, self.keys, self.dtype, self.sheets = tiles, keys, dtype, q.shape[:3]

    def apply(self, v: Float[Tensor, "B H N V"]) -> Float[Tensor, "B H N V"]:
        """Mixed values, in their own type."""
        return self._mixed(v).to(v.dtype)

    def dense(self) -> Float[Tensor, "B H N N"]:
        """What becomes of the identity."""
        batch, heads, length = self.sheets
        identity = torch.eye(length, dtype=self.q.dtype, device=self.q.device)
        return self._mixed(identity.expand(batch, heads, length, length)).to(self.dtype)

    def materialised(self) -> Weights:
        """The weights, formed; padded values stay unread."""
        return Weights(self.dense(), self.keys)

    def _mixed(self, v: Tensor) -> Tensor:
        batch, heads, length = self.sheets
        wide = silence(v, self.keys).to(self.q.dtype)
        with torch.autocast(v.device.type, enabled=False):
            out = attend(self.q, self.k, flat(wide), self.tiles)
        return silence(out.view(batch, heads, length + 1, v.shape[3])[:, :, :length], self.keys)
