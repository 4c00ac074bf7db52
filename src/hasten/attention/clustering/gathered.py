"""Softmax attention over tiles: pieces of the score matrix, each given by the rows that it reads from and to."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from hasten.attention.base import Operator, Weights
from hasten.attention.masks import silence

FORBIDDEN = -1e25  # times a positive number of at most 1e12: finite in float32, and nothing beside any score
_BITS = math.log2(math.e)
_FEW = 2048  # rows
KEPT = 1.0  # weights that are kept for the backward, as a share of the numbers in q, k and v
GROUP = 2**17  # scores computed at a time, so that a few tensors of them stay in the cache of a core


class Tile(NamedTuple):
    """Blocks of scores, of the queries at `rows` with the keys at `cols`.

    forbidden() (p, I, J), a tensor to write on, is positive, from 1/2 to 1e12, where a pair must not be read, else 0.
    """

    rows: Int[Tensor, "p I"]
    cols: Int[Tensor, "p J"]
    forbidden: Callable[[], Float[Tensor, "p I J"]]


class Tiles(ABC):
    """Which rows are multiplied with which.

    Rows are positions of flat tensors (R, D): N of every sheet (a head of a sentence) and at the end an idle row, which
    stands wherever a tile is not full. Beside the tiles every row reads itself, with `own` added to
    that score. A pair that several tiles hold may be read in one of them, a row and itself in one if `own` forbids it.
    """

    own: Float[Tensor, "R"] | float

    @abstractmethod
    def parts(self) -> Iterator[Tile]:
        """All tiles, a few at a time on a CPU: as many as have about `GROUP` scores."""


def split(device: torch.device) -> bool:
    """Tiles come a few at a time: on a CPU, unless code is traced."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def runs(sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, int, int]]:
    """Runs of tiles of about `GROUP` scores, given every tile's queries and keys; with the largest numbers of each."""
    start = 0
    while start < len(sizes):
        n_queries, n_keys, stop = *sizes[start], start + 1
        while stop < len(sizes):
            wider, longer = max(n_queries, sizes[stop][0]), max(n_keys, sizes[stop][1])
            if (stop + 1 - start) * wider * longer > GROUP:
                break
            n_queries, n_keys, stop = wider, longer, stop + 1
        yield slice(start, stop), n_queries, n_keys
        start = stop


class Sums(ABC):
    """Of every row, the sum of 2^score and of 2^score v over what it reads, beginning with itself."""

    @abstractmethod
    def __init__(self, own: Float[Tensor, "R"], v: Float[Tensor, "R V"]): ...

    @abstractmethod
    def add(
        self, rows: Int[Tensor, "p I"], scores: Float[Tensor, "p I J"], v: Float[Tensor, "p J V"]
    ) -> tuple[Float[Tensor, "p I J"], Float[Tensor, "p I"]]:
        """Take in some tiles, writing 2^(score - top) on their scores; these, and top."""

    @abstractmethod
    def mean(self) -> tuple[Float[Tensor, "R V"], Float[Tensor, "R"]]:
        """The mean of v by weight, and the logarithm of the weights' sum."""


class Merged(Sums):
    """Means and logarithms of sums, merged as they come: for scores of any size. A part has every row once."""

    def __init__(self, own: Float[Tensor, "R"], v: Float[Tensor, "R V"]):
        self._out, self._total = v.clone(), own.clone()

    def add(
        self, rows: Int[Tensor, "p I"], scores: Float[Tensor, "p I J"], v: Float[Tensor, "p J V"]
    ) -> tuple[Float[Tensor, "p I J"], Float[Tensor, "p I"]]:
        """Top is the largest score of a row."""
        tops, rows = scores.amax(-1), rows.flatten()
        weights, top = scores.sub_(tops[..., None]).exp2_(), tops.flatten()
        old, new = self._total.index_select(0, rows), weights.sum(-1).log2_().flatten().add_(top)
        both = torch.logaddexp2(old, new)
        mixed = torch.bmm(weights, v).flatten(0, 1).mul_((top - both).exp2_()[:, None])
        mixed.addcmul_(self._out.index_select(0, rows), (old - both).exp2_()[:, None])
        self._out.index_copy_(0, rows, mixed)
        self._total.index_copy_(0, rows, both)
        return weights, tops

    def mean(self) -> tuple[Float[Tensor, "R V"], Float[Tensor, "R"]]:
        """They stand there."""
        return self._out, self._total


class Bounded(Sums):
    """The sums as they are: for scores between vectors on the sphere, which are sqrt(D) at most (D up to 4096)."""

    def __init__(self, own: Float[Tensor, "R"], v: Float[Tensor, "R V"]):
        self._total = own.exp2()
        self._out = v * self._total[:, None]

    def add(
        self, rows: Int[Tensor, "p I"], scores: Float[Tensor, "p I J"], v: Float[Tensor, "p J V"]
    ) -> tuple[Float[Tensor, "p I J"], Float[Tensor, "p I"]]:
        """Top is 0. A row may stand in many tiles."""
        weights, tops, rows = scores.exp2_(), v.new_zeros(()).expand(rows.shape), rows.flatten()
        self._total.index_add_(0, rows, weights.sum(-1).flatten())
        self._out.index_add_(0, rows, torch.bmm(weights, v).flatten(0, 1))
        return weights, tops

    def mean(self) -> tuple[Float[Tensor, "R V"], Float[Tensor, "R"]]:
        """Divided at last."""
        return self._out.div_(self._total[:, None]), self._total.log2_()


def attend(
    q: Float[Tensor, "R D"], k: Float[Tensor, "R D"], v: Float[Tensor, "R V"], tiles: Tiles, sums: type[Sums]
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the union of the tiles and the diagonal, (R, V).

    A CPU does a few tiles at a time. For the gradient it keeps as many weights as the inputs have numbers and computes
    the others again: memory does not grow with the number of tiles. Elsewhere, and while code is traced, the plain
    expression is used.
    """
    if split(q.device):
        return _Blockwise.apply(q, k, v, tiles, sums)  # pyright: ignore[reportReturnType]
    return _plainly(q, k, v, tiles, sums)


def _plainly(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, sums: type[Sums]) -> Tensor:
    """All at once."""
    own, parts = (q * k).sum(-1) / math.sqrt(q.shape[-1]) + tiles.own, []
    top = own.detach()
    for rows, cols, forbidden in tiles.parts():
        scores = _rows(q, rows) @ _rows(k, cols).transpose(1, 2) / math.sqrt(q.shape[-1])
        scores = scores + FORBIDDEN * forbidden()
        top = top.scatter_reduce(0, rows.flatten(), scores.detach().amax(-1).flatten(), "amax")
        parts.append((rows, cols, scores))
    total = (own - top).exp()
    out = total[:, None] * v
    for rows, cols, scores in parts:
        weights = (scores - at(top, rows)[..., None]).exp()
        out = out.index_add(0, rows.flatten(), (weights @ _rows(v, cols)).flatten(0, 1))
        total = total.index_add(0, rows.flatten(), weights.sum(-1).flatten())
    return out / total[:, None]


class _Blockwise(torch.autograd.Function):
    """The same sum, a few tiles at a time. Of the weights no more are kept than q, k and v take; others are made again.

    Scores and the logarithms of sums are in bits: on a CPU torch's exp2 is faster than exp, and much faster where it
    underflows, as it does for every forbidden pair.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, sums: type[Sums]) -> Tensor:
        """Sums of every row, over tiles."""
        with torch.autocast(q.device.type, enabled=False):
            own = _dots(q, k).div_(math.sqrt(q.shape[-1])).add_(tiles.own).mul_(_BITS)
            sum_, kept = sums(own, v), []
            room = KEPT * (q.numel() + k.numel() + v.numel()) if any(ctx.needs_input_grad) else 0
            for rows, cols, forbidden in tiles.parts():
                weights = sum_.add(rows, _scores(_rows(q, rows), _rows(k, cols), forbidden()), _rows(v, cols))
                room -= weights[0].numel()
                if room >= 0:
                    kept += weights
            out, total = sum_.mean()
            # Whatever the idle row gathered means nothing, and weighs nothing in the backward.
            out[-1], total[-1] = 0, math.inf
        ctx.save_for_backward(q, k, v, out, own.sub_(total).exp2_(), total, *kept)
        ctx.tiles = tiles
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """d score = p (dp - sum(p dp)), with p from scores computed again."""
        (q, k, v, out, own, total, *kept), (d_out,) = ctx.saved_tensors, gradients
        scale, tiles = 1 / math.sqrt(q.shape[-1]), ctx.tiles
        with torch.autocast(q.device.type, enabled=False):
            d_out = d_out.contiguous()
            mean = _dots(d_out, out)
            d_score = _dots(d_out, v).sub_(mean).mul_(own)
            d_q, d_k, d_v = d_score[:, None] * k, d_score[:, None] * q, own[:, None] * d_out
            for number, (rows, cols, forbidden) in enumerate(tiles.parts()):
                q_rows, k_rows, d_rows, totals = _rows(q, rows), _rows(k, cols), _rows(d_out, rows), at(total, rows)
                if 2 * number < len(kept):
                    weights, top = kept[2 * number : 2 * number + 2]
                    p = weights * (top - totals).exp2_()[..., None]
                else:
                    p = _scores(q_rows, k_rows, forbidden()).sub_(totals[..., None]).exp2_()
                d_scores = torch.bmm(d_rows, _rows(v, cols).transpose(1, 2))
                d_scores.sub_(at(mean, rows)[..., None]).mul_(p)
                rows, cols = rows.flatten(), cols.flatten()
                d_q.index_add_(0, rows, torch.bmm(d_scores, k_rows).flatten(0, 1))
                d_k.index_add_(0, cols, torch.bmm(d_scores.transpose(1, 2), q_rows).flatten(0, 1))
                d_v.index_add_(0, cols, torch.bmm(p.transpose(1, 2), d_rows).flatten(0, 1))
        return d_q.mul_(scale), d_k.mul_(scale), d_v, None, None


def _dots(x: Float[Tensor, "R D"], y: Float[Tensor, "R D"]) -> Float[Tensor, "R"]:
    """Products of rows, so few at a time that they stay in the cache."""
    parts = zip(x.split(_FEW), y.split(_FEW), strict=True)
    return torch.cat([(one * other).sum(-1) for one, other in parts])


def at(x: Shaped[Tensor, "R"], rows: Int[Tensor, "*n"]) -> Shaped[Tensor, "*n"]:
    """What stands at these rows."""
    return x.take(rows)


def _rows(x: Float[Tensor, "R D"], rows: Int[Tensor, "p n"]) -> Float[Tensor, "p n D"]:
    return F.embedding(rows, x)


def _scores(q: Tensor, k: Tensor, forbidden: Float[Tensor, "p I J"]) -> Float[Tensor, "p I J"]:
    """The scores of some tiles, in bits, in the place of what is forbidden."""
    scale = _BITS / math.sqrt(q.shape[-1])
    return torch.baddbmm(forbidden, q, k.transpose(1, 2), beta=FORBIDDEN, alpha=scale, out=forbidden)


def flat(x: Shaped[Tensor, "B H N *D"], idle: int | float = 0) -> Shaped[Tensor, "R *D"]:
    """The rows of all sheets, and the idle one."""
    return torch.cat((x.flatten(0, 2), x.new_full((1, *x.shape[3:]), idle)))


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
        sums: type[Sums],
    ):
        self.q = flat(q)
        self.k = self.q if k is q else flat(k)
        self.tiles, self.keys, self.dtype, self.sheets, self.sums = tiles, keys, dtype, q.shape[:3], sums

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
            out = attend(self.q, self.k, flat(wide), self.tiles, self.sums)
        return silence(out[:-1].view(batch, heads, length, v.shape[3]), self.keys)
