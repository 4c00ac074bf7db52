"""The kernel of sparse attention: softmax over the tiles of a plan, forward and backward, on any device.

Scores of one tile at a time are formed in a buffer that stays in the cache, and formed again in the backward pass, so
memory grows with the length, never with its square. Source: Dao et al., 2022 (recomputation, merging by normalisers).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.attention.patterns.cover import Range
from hasten.attention.patterns.work import Piece, Plan, Tile


@dataclass(frozen=True)
class Dropping:
    """Dropout of weights: the same draws in the forward and in the backward pass, from a seed."""

    share: float
    seed: int

    def factors(self, like: Tensor, tile: int) -> Tensor:
        """0 for a dropped weight, else what keeps the mean."""
        generator = torch.Generator(like.device).manual_seed((self.seed + tile * 1_000_003) % 2**63)
        words = torch.empty((like.numel() + 7) // 8, dtype=torch.int64, device=like.device)
        words.random_(-(2**63), None, generator=generator)
        threshold = max(1, min(255, round(256 * self.share)))
        kept = words.view(torch.uint8)[: like.numel()].view(like.shape) >= threshold
        return kept.view(torch.uint8).to(like.dtype).mul_(256 / (256 - threshold))


def attend(plan: Plan, q: Tensor, k: Tensor, v: Tensor, dropping: Dropping | None) -> tuple[Tensor, Tensor | None]:
    """Outputs (sheets, T, Dv) and, where pieces were merged, log normalisers (sheets, T, 1).

    q (sheets, T, D), k (sheets, S, D), v (sheets, S, Dv): contiguous, float32 or float64; a sheet is a head of an
    example.
    """
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    norm = q.new_full((*q.shape[:2], 1), -torch.inf) if plan.merge else None
    for number, piece in enumerate(plan.pieces):
        work = _Work(plan, piece, q, k, v, dropping, number)
        part = out if work.rows is None and norm is None else q.new_zeros(*work.q.shape[:2], v.shape[2])
        part_norm = None if norm is None else q.new_full((*work.q.shape[:2], 1), -torch.inf)
        work.forward(part, part_norm)
        if norm is not None and part_norm is not None:
            work.merge(out, norm, part, part_norm)
        elif part is not out:
            work.put(out, part)
    return out, norm


def attend_backward(
    plan: Plan,
    qkv: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    mean: Tensor,
    norm: Tensor | None,
    dropping: Dropping | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v from those of the outputs, (sheets, T, Dv).

    mean (sheets, T, 1): gradient times output, which is the mean gradient of a row's weights under these weights.
    """
    q, k, v = qkv
    d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for number, piece in enumerate(plan.pieces):
        work = _Work(plan, piece, q, k, v, dropping, number)
        work.backward(grad, mean, norm, d_q, d_k, d_v)
    return d_q, d_k, d_v


class _Work:
    """One piece with its queries, keys and values at hand."""

    def __init__(
        self, plan: Plan, piece: Piece, q: Tensor, k: Tensor, v: Tensor, dropping: Dropping | None, number: int
    ):
        self.plan, self.piece, self.dropping, self.number = plan, piece, dropping, number
        self.scale = 1 / math.sqrt(q.shape[-1])
        self.rows, self.columns = self._rows(q), self._columns(q)
        self.q = self._take(q, self.rows)
        self.k, self.v = self._take(k, self.columns), self._take(v, self.columns)
        self.index = {name: self._index(pick.positions, q) for name, pick in piece.picks.items()}
        self.picked_k = {name: _gather(k, index) for name, index in self.index.items()}
        self.picked_v = {name: _gather(v, index) for name, index in self.index.items()}
        widest = max((tile.width * (tile.rows[1] - tile.rows[0]) for tile in piece.tiles), default=0)
        self.buffers = [q.new_empty(len(self.q) * widest) for _ in range(2)]

    def forward(self, out: Tensor, norm: Tensor | None = None) -> None:
        """Fill outputs (and log normalisers) of the piece's own queries."""
        for number, tile in enumerate(self.piece.tiles):
            if not tile.width:
                continue
            rows = slice(*tile.rows)
            weights = self._scores(tile)
            if norm is None:
                torch.softmax(weights, -1, out=weights)
            else:
                top = weights.amax(-1, keepdim=True)
                total = weights.sub_(top).exp_().sum(-1, keepdim=True)
                norm[:, rows] = total.log().add_(top)
                weights.div_(total)
            if self.dropping:
                weights.mul_(self._factors(weights, number))
            torch.bmm(weights, self._keys(self.v, self.picked_v, tile), out=out[:, rows])
            if tile.alive is not None:
                out[:, rows] *= tile.alive
                if norm is not None:
                    norm[:, rows] += tile.alive.log()

    def merge(self, out: Tensor, norm: Tensor, part: Tensor, part_norm: Tensor) -> None:
        """Add the piece's share to the whole."""
        before, before_norm = self._take(out, self.rows), self._take(norm, self.rows)
        both = torch.logaddexp(before_norm, part_norm)
        floor = both.masked_fill(both == -torch.inf, 0.0)
        merged = before * (before_norm - floor).exp() + part * (part_norm - floor).exp()
        self.put(out, merged)
        self.put(norm, both)

    def put(self, x: Tensor, own: Tensor) -> None:
        """Write the piece's rows into those of the call."""
        places = self.rows
        if places is None:
            x.copy_(own)
        elif places.ndim == 1:
            x.index_copy_(1, places, own.view(len(x), -1, x.shape[2]))
        else:
            assert self.piece.marked is not None
            shape = self.plan.shape
            real = (self.piece.marked.positions >= 0).to(x.device).expand(shape.batch, shape.heads, -1)
            sheet, slot = real.reshape(len(x), -1).nonzero(as_tuple=True)
            x[sheet, places[sheet, slot, 0]] = own[sheet, slot]

    def backward(self, grad: Tensor, mean: Tensor, norm: Tensor | None, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> None:
        """Add the piece's share to the gradients."""
        grad, mean = self._take(grad, self.rows), self._take(mean, self.rows)
        norm = None if norm is None else self._take(norm, self.rows)
        own_q = d_q if self.rows is None else torch.zeros_like(self.q)
        own_k, own_v = (d_k, d_v) if self.columns is None else (torch.zeros_like(self.k), torch.zeros_like(self.v))
        picked_k = {name: torch.zeros_like(x) for name, x in self.picked_k.items()}
        picked_v = {name: torch.zeros_like(x) for name, x in self.picked_v.items()}
        for number, tile in enumerate(self.piece.tiles):
            if not tile.width:
                continue
            rows, out_grad = slice(*tile.rows), grad[:, slice(*tile.rows)]
            weights = self._weights(tile, norm)
            factors = self._factors(weights, number) if self.dropping else None
            self._add(own_v, picked_v, tile, weights if factors is None else weights * factors, out_grad, 1.0)
            d_scores = self._buffer(1, weights.shape)
            values = self._keys(self.v, self.picked_v, tile).transpose(1, 2)
            if factors is None:
                torch.baddbmm(mean[:, rows], out_grad, values, beta=-1, out=d_scores)
            else:
                torch.bmm(out_grad, values, out=d_scores)
                d_scores.mul_(factors).sub_(mean[:, rows])
            d_scores.mul_(weights)
            own_q[:, rows].baddbmm_(d_scores, self._keys(self.k, self.picked_k, tile), alpha=self.scale)
            self._add(own_k, picked_k, tile, d_scores, self.q[:, rows], self.scale)
        _give(d_q, own_q, self.rows)
        _give(d_k, own_k, self.columns)
        _give(d_v, own_v, self.columns)
        for name, index in self.index.items():
            for whole, part in ((d_k, picked_k[name]), (d_v, picked_v[name])):
                whole.scatter_add_(1, index.expand(-1, -1, part.shape[2]), part)

    def _scores(self, tile: Tile) -> Tensor:
        q = self.q[:, slice(*tile.rows)]
        scores = self._buffer(0, (len(q), q.shape[1], tile.width))
        keys = self._keys(self.k, self.picked_k, tile).transpose(1, 2)
        if len(tile.masks) == 1 and tile.masks[0].width == tile.width:
            return torch.baddbmm(tile.masks[0].mask, q, keys, alpha=self.scale, out=scores)
        torch.baddbmm(scores, q, keys, beta=0, alpha=self.scale, out=scores)
        for stretch in tile.masks:
            scores[..., stretch.start : stretch.start + stretch.width] += stretch.mask
        return scores

    def _weights(self, tile: Tile, norm: Tensor | None) -> Tensor:
        weights = self._scores(tile)
        if norm is None:
            torch.softmax(weights, -1, out=weights)
            return weights if tile.alive is None else weights.mul_(tile.alive)
        part = norm[:, slice(*tile.rows)]
        part = part.masked_fill(part == -torch.inf, 0.0)
        # Rows that read nothing here have a normaliser from elsewhere, to which their scores do not belong.
        part = part if tile.alive is None else part.masked_fill(tile.alive == 0, torch.inf)
        return weights.sub_(part).exp_()

    def _buffer(self, number: int, shape: tuple[int, ...]) -> Tensor:
        return self.buffers[number][: math.prod(shape)].view(shape)

    def _factors(self, weights: Tensor, tile: int) -> Tensor:
        assert self.dropping is not None
        return self.dropping.factors(weights, self.number * 1_000_003 + tile)

    def _keys(self, natural: Tensor, picked: dict[str, Tensor], tile: Tile) -> Tensor:
        """The keys (or values) of a tile, (sheets, W, D)."""
        parts = [natural[:, a:b] for a, b in tile.ranges] + [picked[name][:, a:b] for name, (a, b) in tile.picks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _add(
        self, own: Tensor, picked: dict[str, Tensor], tile: Tile, weights: Tensor, rows: Tensor, scale: float
    ) -> None:
        """Add scale * weights^T rows to the gradients of the tile's keys (or values)."""
        parts: list[tuple[Tensor, Range]] = [(own, part) for part in tile.ranges]
        parts += [(picked[name], part) for name, part in tile.picks]
        at = 0
        for whole, (a, b) in parts:
            whole[:, a:b].baddbmm_(weights[..., at : at + b - a].transpose(1, 2), rows, alpha=scale)
            at += b - a

    def _rows(self, like: Tensor) -> Tensor | None:
        """Which rows of the call are this piece's queries; None: all, in order. (w,) or (sheets, w, 1)."""
        group, marked = self.piece.group, self.piece.marked
        if marked is not None:
            return self._index(marked.positions - self.plan.shape.offset, like)
        if group.step == 1:
            return None
        return _places(group.row, group.classes, group.step, group.queries, like.device)

    def _columns(self, like: Tensor) -> Tensor | None:
        group = self.piece.group
        return None if group.step == 1 else _places(group.first, group.classes, group.step, group.keys, like.device)

    def _index(self, positions: Tensor, like: Tensor) -> Tensor:
        """(B or 1, H or 1, w) as (sheets, w, 1); absent ones read the first, and are masked."""
        shape = self.plan.shape
        wide = positions.clamp(min=0).to(like.device).expand(shape.batch, shape.heads, -1)
        return wide.reshape(shape.batch * shape.heads, -1, 1)

    def _take(self, x: Tensor, places: Tensor | None) -> Tensor:
        if places is None:
            return x
        if places.ndim == 3:
            return _gather(x, places)
        classes = self.piece.group.classes
        return x.index_select(1, places).view(len(x) * classes, -1, x.shape[2])


def _give(whole: Tensor, own: Tensor, places: Tensor | None) -> None:
    """Add the gradients of a piece's own rows, where they are not those of the call, to the whole."""
    if places is None:
        return
    if places.ndim == 1:
        whole.index_add_(1, places, own.view(len(whole), -1, whole.shape[2]))
    else:
        whole.scatter_add_(1, places.expand(-1, -1, whole.shape[2]), own)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index.expand(-1, -1, x.shape[2]))


def _places(first: int, classes: int, step: int, count: int, device: torch.device) -> Tensor:
    residues = torch.arange(first, first + classes, device=device)
    return (residues[:, None] + step * torch.arange(count, device=device)).flatten()
