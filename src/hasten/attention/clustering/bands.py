"""Tiles over tokens sorted by bucket: whole chunks, or a band of the last few members of a bucket."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.attention.clustering import gathered
from hasten.attention.clustering.gathered import Tile, Tiles, at, flat
from hasten.errors import UserError

PENALTY = -1e9  # of a token's score with itself where it is a last resort: beyond any score, within the forbidden
_TILE = 64  # rows of a tile where the definition leaves them open
_NOBODY = -(2.0**24)
_MOST = 2**23  # float32 counts to twice as far: the rest is for ranks


def limit(what: str, span: int, n_buckets: int) -> None:
    """`UserError` about `what` where so wide buckets, or so many, have codes that float32 does not hold exactly."""
    if span * n_buckets > _MOST:
        raise UserError(f"{what}: their product is {span * n_buckets:,}; give smaller ones, of at most {_MOST:,}")


class Rule(ABC):
    """Who reads whom among tokens sorted by (bucket, position): token i those j with 0 <= code_i - code_j < span.

    Codes do not fall with the rank; a tile of `tile` consecutive ranks reads none but these and the `back` before it.
    """

    span: int
    tile: int
    back: int

    @abstractmethod
    def codes(self, rank: Int[Tensor, "*n"], bucket: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The codes of tokens by rank and bucket."""


class Chunks(Rule):
    """Chunks of `size` ranks: a token reads its own chunk and the one before, within its bucket unless `across`."""

    def __init__(self, size: int, across: bool):
        self.span, self.tile, self.back = 2, size, size
        self._apart = 0 if across else 2

    def codes(self, rank: Int[Tensor, "*n"], bucket: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The number of the chunk, two further for every bucket."""
        return rank // self.tile + self._apart * bucket


class Recent(Rule):
    """A token reads the last `window` members of its bucket up to itself."""

    def __init__(self, window: int):
        self.span, self.tile, self.back = window, _TILE, window

    def codes(self, rank: Int[Tensor, "*n"], bucket: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """The rank, a window further for every bucket."""
        return rank + self.span * bucket


class Bands(Tiles):
    """The tokens of a sheet sorted by bucket, stably, in several rounds; who reads whom says the rule.

    A pair of several rounds counts in the first. Padding has a bucket of its own at the end and takes no part.
    buckets (rounds, B, H, N) in 0..n_buckets-1; real (B, N) is True on tokens, None where all are.
    """

    def __init__(
        self,
        buckets: Int[Tensor, "rounds B H N"],
        n_buckets: int,
        real: Bool[Tensor, "B N"] | None,
        *,
        rule: Rule,
        causal: bool,
        own: float,
        dtype: torch.dtype,
    ):
        length = buckets.shape[3]
        if real is not None:
            buckets = buckets.masked_fill(~real[:, None], n_buckets)
        order = buckets.argsort(dim=-1, stable=True)
        every = torch.arange(length, device=order.device)
        rank = torch.empty_like(order).scatter_(3, order, every.expand_as(order))
        in_order = rule.codes(every.expand_as(order), buckets.gather(3, order))
        codes = rule.codes(rank, buckets).to(dtype)
        if real is not None:
            codes = codes.masked_fill(buckets == n_buckets, _NOBODY)
        self._codes = [flat(code, _NOBODY) for code in codes]
        self._span, self._causal, self.own = rule.span, causal, own
        self._ages = flat(-every.to(dtype).expand(order.shape[1:]))
        self._tile(order.flatten(1, 2), in_order.flatten(1, 2), rule.tile, rule.back)

    def _tile(self, order: Int[Tensor, "rounds S N"], codes: Int[Tensor, "rounds S N"], tile: int, back: int) -> None:
        """Cut the sorted tokens into tiles; beyond both ends stands the idle row."""
        sheets, length = order.shape[1:]
        traced = torch.compiler.is_compiling()
        if not traced and length <= tile:
            tile, back = length, 0
        self._back = back
        # A traced program is for all lengths only where there are two tiles or more: the last may be idle.
        n_tiles = (length + tile - 1) // tile + int(traced)
        idle = sheets * length
        rows = order + torch.arange(sheets, device=order.device)[:, None] * length
        # A value of padding that depends on the length would be baked into an exported program: it is zero here.
        padded = F.pad(rows - idle, (back, n_tiles * tile - length)) + idle
        window = torch.arange(n_tiles, device=order.device)[:, None] * tile
        window = window + torch.arange(back + tile, device=order.device)
        self._cols = padded[:, :, window].flatten(1, 2)
        self._sizes = self._narrow(codes, tile) if gathered.split(order.device) else None

    def _narrow(self, codes: Int[Tensor, "rounds S N"], tile: int) -> list[list[tuple[int, int]]]:
        """Sort the tiles of a round by how many tokens before them they read, and say how large they are."""
        starts = torch.arange(0, codes.shape[2], tile)
        first = torch.searchsorted(codes, codes[:, :, starts] - self._span, right=True)
        reads = (starts - first).clamp(0, self._back).flatten(1)
        order = reads.argsort(dim=-1, stable=True)
        self._cols = self._cols.gather(1, order[..., None].expand_as(self._cols))
        return [[(tile, n + tile) for n in reads_of_round] for reads_of_round in reads.gather(1, order).tolist()]

    def parts(self) -> Iterator[Tile]:
        """Round by round; the keys of a tile are the tokens before its queries in order, and these."""
        for turn, cols in enumerate(self._cols):
            if self._sizes is None:
                yield self._part(turn, cols, self._back)
            else:
                for part, n_queries, n_keys in gathered.runs(self._sizes[turn]):
                    yield self._part(turn, cols[part, -n_keys:], n_keys - n_queries)

    def _part(self, turn: int, cols: Int[Tensor, "p J"], back: int) -> Tile:
        rows = cols[:, back:]
        return Tile(rows, cols, partial(self._forbidden, turn, rows, cols, back))

    def _forbidden(
        self, turn: int, rows: Int[Tensor, "p I"], cols: Int[Tensor, "p J"], back: int
    ) -> Float[Tensor, "p I J"]:
        """Outside of the span, in an earlier round's span, later, or the token itself.

        Codes and ages are whole numbers, so what is to be positive is at least 1/2. Arithmetic on them is several
        times faster on a CPU than comparisons and truth values.
        """
        middle = (self._span - 1) / 2
        out = self._distances(turn, rows, cols, middle).sub_(middle).relu_()
        for earlier in range(turn):
            out += self._distances(earlier, rows, cols, middle).neg_().add_(middle + 0.5).relu_()
        if self._causal:
            out += _differences(self._ages, rows, cols).relu_()
        out.diagonal(back, 1, 2).add_(1.0)
        return out

    def _distances(self, turn: int, rows: Tensor, cols: Tensor, middle: float) -> Tensor:
        return _differences(self._codes[turn], rows, cols, middle).abs_()


def _differences(x: Float[Tensor, "R"], rows: Tensor, cols: Tensor, less: float = 0.0) -> Float[Tensor, "p I J"]:
    return at(x, rows)[:, :, None].sub(less) - at(x, cols)[:, None, :]
