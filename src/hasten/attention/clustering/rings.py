"""Decoding where every token joins a bucket and reads its last members: a ring of recent members for each bucket."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hasten.attention.base import State, StepOperator

_PENDING = 32  # tokens that wait before they are written to the rings, so that few steps copy them


@dataclass(frozen=True)
class Ring:
    """Vectors of the last members of every bucket, and of the tokens that wait to be written there.

    held (B, H, rounds, buckets, C, D): member number a of its bucket stands at a mod C. pending (B, H, t, D).
    """

    held: Float[Tensor, "B H rounds buckets C D"]
    pending: Float[Tensor, "B H t D"]

    @staticmethod
    def empty(like: Float[Tensor, "B H n D"], shape: tuple[int, int, int]) -> "Ring":
        """Of (rounds, buckets, C), for vectors such as these."""
        batch, heads, _, width = like.shape
        return Ring(like.new_zeros(batch, heads, *shape, width), like[:, :, :0])

    def read(self, bucket: Int[Tensor, "B H rounds n"]) -> Float[Tensor, "B H rounds n C D"]:
        """The members of the buckets of n tokens."""
        n_buckets, size, width = self.held.shape[3:]
        first = torch.arange(bucket.shape[:3].numel(), device=bucket.device).view(*bucket.shape[:3], 1) * n_buckets
        found = self.held.view(-1, size * width).index_select(0, (first + bucket).flatten())
        return found.view(*bucket.shape, size, width)

    def after(self, new: Float[Tensor, "B H n D"], slots: Int[Tensor, "B H rounds m"] | None) -> "Ring":
        """With n more tokens: pending, or written with all that were to their slots (the last one is the bin)."""
        recent = torch.cat((self.pending, new), 2)
        if slots is None:
            return Ring(self.held, recent)
        return Ring(_written(self.held, recent, slots), recent[:, :, :0])

    def select(self, rows: Tensor) -> "Ring":
        """Batch rows by index."""
        return Ring(self.held.index_select(0, rows), self.pending.index_select(0, rows))


@dataclass(frozen=True)
class Members:
    """The key state: last keys of every bucket with their positions, and how many members each ever had.

    written (B) tokens are in the rings and counted; `bucket` is that of the tokens after them, which are pending.
    """

    keys: Ring
    positions: Int[Tensor, "B H rounds buckets C"]
    count: Int[Tensor, "B H rounds buckets"]
    bucket: Int[Tensor, "B H rounds t"]
    written: Int[Tensor, "B"]

    @staticmethod
    def empty(k: Float[Tensor, "B H n D"], rounds: int, n_buckets: int, window: int) -> "Members":
        """Nobody yet; each token will read `window` members, itself among them."""
        shape = (rounds, n_buckets, max(window - 1, 1))
        count = torch.zeros(*k.shape[:2], rounds, n_buckets, dtype=torch.long, device=k.device)
        positions = count[..., None].expand(*count.shape, shape[2])
        return Members(Ring.empty(k, shape), positions, count, count[..., :0], count.new_zeros(k.shape[0]))

    def select(self, rows: Tensor) -> "Members":
        """Batch rows by index."""
        tensors = (self.positions, self.count, self.bucket, self.written)
        return Members(self.keys.select(rows), *(x.index_select(0, rows) for x in tensors))


@dataclass(frozen=True)
class Piece:
    """The map of a few new tokens.

    bucket (B, H, rounds, n) is where they read; held (B, H, rounds, n, C) and recent (B, H, n, t + n) are weights of
    members in rings, and of pending and new tokens; slots: where these are then written, if they are.
    """

    bucket: Int[Tensor, "B H rounds n"]
    held: Float[Tensor, "B H rounds n C"]
    recent: Float[Tensor, "B H n m"]
    slots: Int[Tensor, "B H rounds m"] | None


def _read(q: Tensor, k: Tensor, bucket: Tensor, members: Members, window: int, own: float) -> tuple[Piece, Members]:
    n, size, (rounds, n_buckets) = q.shape[2], members.keys.held.shape[4], members.count.shape[2:]
    recent = torch.cat((members.bucket, bucket), 3)
    before = torch.ones(recent.shape[3], recent.shape[3], dtype=torch.bool, device=q.device).tril(-1)
    same = (recent[..., :, None] == recent[..., None, :]) & before
    number = members.count.gather(3, recent) + same.sum(-1)
    ages = number[..., -n:, None] - number[..., None, :]
    of_recent = (same[..., -n:, :] & (ages < window)).any(2)

    last = members.count.gather(3, bucket)[..., None] - 1
    held_number = last - (last - torch.arange(size, device=q.device)) % size
    of_held = (held_number >= 0) & (number[..., -n:, None] - held_number < window)
    index = bucket[..., None].expand(*bucket.shape, size)
    of_held = _once(of_held, members.positions.gather(3, index))

    scale = 1 / math.sqrt(q.shape[3])
    scores = torch.einsum("bhnd,bhrncd->bhnrc", q, members.keys.read(bucket)) * scale
    scores = scores.masked_fill(~of_held.transpose(2, 3), -torch.inf).flatten(3)
    with_recent = q @ torch.cat((members.keys.pending, k), 2).transpose(2, 3) * scale
    itself = torch.zeros_like(before).fill_diagonal_(True)[-n:]
    with_recent = (with_recent + own * itself).masked_fill(~(of_recent | itself), -torch.inf)
    weights = torch.cat((scores, with_recent), 3).softmax(-1)
    held, new = weights.split((rounds * size, recent.shape[3]), 3)

    slots = None
    if recent.shape[3] >= _PENDING:
        count = members.count.scatter_add(3, recent, torch.ones_like(recent))
        stays = number >= count.gather(3, recent) - size
        slots = torch.where(stays, recent * size + number % size, n_buckets * size)
    piece = Piece(bucket, held.unflatten(3, (rounds, size)).transpose(2, 3), new, slots)
    return piece, _after(members, k, recent, slots)


def _after(members: Members, k: Tensor, recent: Tensor, slots: Tensor | None) -> Members:
    """With n more keys; `recent` are the buckets of all tokens that were not written before."""
    keys = members.keys.after(k, slots)
    if slots is None:
        return Members(keys, members.positions, members.count, recent, members.written)
    positions = members.written[:, None] + torch.arange(recent.shape[3], device=k.device)
    positions = positions[:, None, :, None].expand(-1, k.shape[1], -1, 1)
    return Members(
        keys,
        _written(members.positions[..., None], positions, slots)[..., 0],
        members.count.scatter_add(3, recent, torch.ones_like(recent)),
        recent[..., :0],
        members.written + recent.shape[3],
    )


def _written(held: Tensor, recent: Tensor, slots: Tensor) -> Tensor:
    """`held` (B, H, rounds, buckets, C, D) with the vectors of recent tokens (B, H, m, D) in their slots."""
    index = slots[..., None].expand(*slots.shape, recent.shape[3])
    source = recent[:, :, None].expand(*slots.shape, recent.shape[3])
    flat = F.pad(held.flatten(3, 4), (0, 0, 0, 1)).scatter(3, index, source)
    # Contiguous, or every read would copy all of it.
    return flat[:, :, :, :-1].contiguous().view(held.shape)


def _once(readable: Tensor, positions: Tensor) -> Tensor:
    """Of members (B, H, rounds, n, C) that a token may read in several rounds, only the first."""
    kept = [readable[:, :, 0]]
    seen = positions[:, :, 0].masked_fill(~kept[0], -1)
    for r in range(1, readable.shape[2]):
        now = positions[:, :, r]
        kept.append(readable[:, :, r] & (now[..., None] != seen[..., None, :]).all(-1))
        seen = torch.cat((seen, now.masked_fill(~kept[r], -1)), -1)
    return torch.stack(kept, 2)


class RingStep(StepOperator):
    """The map of new tokens, piece by piece; its value state is a `Ring`."""

    def __init__(self, pieces: Sequence[Piece], shape: tuple[int, int, int]):
        self.pieces, self.shape = pieces, shape

    @staticmethod
    def reading(
        q: Float[Tensor, "B H n D"],
        k: Float[Tensor, "B H n D"],
        bucket: Int[Tensor, "B H rounds n"],
        members: Members,
        *,
        window: int,
        own: float,
    ) -> tuple["RingStep", Members]:
        """What n new tokens read: the last `window` members of their buckets, their own scores raised by `own`."""
        pieces = []
        with torch.autocast(q.device.type, enabled=False):
            for start in range(0, q.shape[2], _PENDING):
                part = slice(start, start + _PENDING)
                piece, members = _read(q[:, :, part], k[:, :, part], bucket[..., part], members, window, own)
                pieces.append(piece)
        rounds, n_buckets, size = members.positions.shape[2:]
        return RingStep(pieces, (rounds, n_buckets, size)), members

    def apply(self, v: Float[Tensor, "B H n V"], values: State | None) -> tuple[Float[Tensor, "B H n V"], State]:
        """Read the rings and what waits beside them, then let the new values wait or be written."""
        assert values is None or isinstance(values, Ring)
        ring, outs, start = values or Ring.empty(v, self.shape), [], 0
        for piece in self.pieces:
            stop = start + piece.recent.shape[2]
            new, wide = v[:, :, start:stop], piece.recent.dtype
            with torch.autocast(v.device.type, enabled=False):
                out = torch.einsum("bhrnc,bhrncd->bhnd", piece.held, ring.read(piece.bucket).to(wide))
                outs.append(out + piece.recent @ torch.cat((ring.pending, new), 2).to(wide))
            ring, start = ring.after(new, piece.slots), stop
        return torch.cat(outs, 2).to(v.dtype), ring
