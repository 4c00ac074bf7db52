"""Reformer: tokens read those that fall into the same bucket of a locality-sensitive hash."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hasten.attention.adapting import Drawn, numbers
from hasten.attention.base import Attention, Operator, State, StepOperator, Traits
from hasten.attention.clustering.bands import PENALTY, Bands, Chunks, Recent, Rule, limit
from hasten.attention.clustering.definition import defined
from hasten.attention.clustering.gathered import Merged, TileOperator, widened
from hasten.attention.clustering.rings import Members, RingStep
from hasten.attention.masks import Mask, silence
from hasten.attention.mechanism import MechanismSpec
from hasten.errors import UserError
from hasten.fields import NonNegativeInt, PositiveInt, Seed

_SHORTEST = 1e-3  # what is shorter is divided by this instead of its length: gradients stay finite at zero
_MOST = 64  # buckets of one hash; more are the product of two


@dataclass(frozen=True, kw_only=True)
class LSHSpec(MechanismSpec):
    """Locality-sensitive hashing (Reformer): a token reads others of its own buckets; keys are the queries."""

    kind: Literal["lsh"] = "lsh"
    """The mechanism's name."""
    chunk: PositiveInt = 64
    """Sorted tokens of a chunk: a token reads its own chunk and the one before. With `strict`: how many it reads."""
    rounds: PositiveInt = 4
    """Independent hashes; a token reads what any of them shows it."""
    buckets: PositiveInt = 64
    """Most buckets of a round, 1 or even; a sentence has no more of them than chunks, except with `strict`."""
    attend_across_buckets: bool = False
    """Read the other buckets of a chunk too."""
    strict: bool = False
    """Read the last `chunk` tokens of the bucket up to itself: causal in every sense, decoded step by step."""
    d_head: PositiveInt | None = None
    """Width of the heads; a model sets it."""
    redraw_every: NonNegativeInt = 0
    """Draw new rotations after every so many updates in training; 0: never."""
    seed: Seed = 0
    """Draws the rotations; each layer of a model has draws of its own."""

    def build(self) -> "LSHAttention | StrictLSHAttention":
        """The mechanism this spec describes."""
        if self.strict:
            limit(f"lsh: chunk {self.chunk} and {self.buckets} buckets", self.chunk, self.buckets)
        else:
            limit(f"lsh: {self.buckets} buckets, of which a chunk and the one before are read", 2, self.buckets)
        hashing = Hash(self.buckets, self.rounds, self.size("d_head"), seed=self.seed, redraw_every=self.redraw_every)
        if not self.strict:
            return LSHAttention(hashing, self.chunk, across=self.attend_across_buckets)
        if self.attend_across_buckets:
            raise UserError("lsh: with strict=true a token reads its own bucket; leave attend_across_buckets out")
        return StrictLSHAttention(hashing, self.chunk)


class Hash(Drawn):
    """h(x) = argmax [x R; -x R] with random R (D, buckets / 2), for each of several rounds.

    Near vectors collide more often than far ones. More than 64 buckets are the product of two such hashes where their
    number is divisible by 4. A zero vector falls into bucket 0.
    Source: Andoni et al., 2015; Kitaev et al., 2020, section 2.
    """

    rotations: Tensor

    def __init__(self, buckets: int, rounds: int, width: int, *, seed: int, redraw_every: int = 0):
        super().__init__(seed, redraw_every)
        if buckets > 1 and buckets % 2:
            raise UserError(f"lsh: got {buckets} buckets; give 1 or an even number")
        self.buckets, self.rounds = buckets, rounds
        self.factors = _factors(buckets)
        self.register_buffer("rotations", torch.empty(width, rounds, sum(self.factors) // 2))
        self.draw(numbers(seed, 0))

    def draw(self, generator: torch.Generator) -> None:
        """Gaussian rotations."""
        self.rotations.copy_(torch.randn(self.rotations.shape, generator=generator, device="cpu"))

    @torch.no_grad()
    def forward(self, x: Float[Tensor, "B H N D"], most: Int[Tensor, "B"]) -> Int[Tensor, "rounds B H N"]:
        """Buckets below `self.buckets`, of which a row of the batch uses no more than `most`, 1 or an even number."""
        with torch.autocast(x.device.type, enabled=False):
            products = x @ self.rotations.to(x.dtype).flatten(1)
        products = products.unflatten(3, (self.rounds, self.rotations.shape[2]))
        bucket = torch.zeros(products.shape[:4], dtype=torch.long, device=x.device)
        for size, part in zip(self.factors, products.split([n // 2 for n in self.factors], -1), strict=True):
            used = (most // 2 * 2).clamp(1, size)
            most = most // used
            half = (used // 2)[:, None, None, None]
            idle = torch.arange(size // 2, device=x.device) >= half[..., None]
            high, low = part.masked_fill(idle, -math.inf).max(-1), part.masked_fill(idle, math.inf).min(-1)
            bucket = bucket * size + torch.where(high.values >= -low.values, high.indices, low.indices + half)
        return bucket.movedim(3, 0)

    def one(self, x: Float[Tensor, "D"], r: int, most: int) -> int:
        """The definition: the bucket of one vector in one round."""
        bucket, start = 0, 0
        for size in self.factors:
            used = min(max(most // 2 * 2, 1), size)
            rotation = self.rotations[:, r, start : start + used // 2].to(x)
            found = 0 if used == 1 else int(torch.cat((x @ rotation, -(x @ rotation))).argmax())
            bucket, start, most = bucket * size + found, start + size // 2, most // used
        return bucket


def _factors(buckets: int) -> tuple[int, ...]:
    """Even numbers of buckets whose product is `buckets`: one, or two that are as equal as can be."""
    if buckets == 1:
        return ()
    smaller = [n for n in range(2, math.isqrt(buckets) + 1, 2) if buckets % (2 * n) == 0]
    return (buckets,) if buckets <= _MOST or not smaller else (smaller[-1], buckets // smaller[-1])


def unit(x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
    """x / max(|x|, 1e-3)."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(_SHORTEST)


class LSHAttention(Attention):
    """softmax(q_i k_j / sqrt(D)), k = q / |q|, over tokens j that some round of hashing shows to i.

    A round sorts the tokens by (bucket, position) and cuts them into chunks; i sees the tokens of its bucket (with
    `across`: all) in its own chunk and the one before. The union over rounds stands under one softmax. A token reads
    itself only where it may read nothing else. Buckets are as many as the chunks that the sentence fills, rounded down
    to an even number, at most `hashing.buckets`: a sentence of one chunk is read by all of it.
    q (B, H, N, D); k is not read. Scores in float32 or wider. Padding takes no part, wherever it stands.
    Causal only in the values: a later token can move who shares a chunk. It does not decode; `StrictLSHAttention` does.
    Source: Kitaev et al., 2020, section 2. Time O(rounds N chunk D), memory O(rounds N).
    """

    def __init__(self, hashing: Hash, chunk: int, *, across: bool = False):
        super().__init__()
        self.traits = _traits(hashing, "value", step=False)
        self.hashing, self.chunk, self.across = hashing, chunk, across

    def redraw(self) -> None:
        """New random rotations. Nothing else ever changes them."""
        self.hashing.redraw()

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Operator:
        """Sorted by bucket, chunk by chunk."""
        self.check(q, k, mask)
        x = silence(widened(q), mask.keys)
        lengths = torch.full(x.shape[:1], x.shape[2], device=x.device) if mask.keys is None else mask.keys.sum(-1)
        buckets = self.hashing(x, lengths // self.chunk)
        return _banded(x, buckets, self.hashing.buckets, Chunks(self.chunk, self.across), mask, q.dtype)

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition, one sheet, round and pair at a time."""
        return _defined(q, mask, self._seen)

    def _seen(self, x: Float[Tensor, "n D"], causal: bool) -> list[set[int]]:
        """Whom each of the tokens of a sheet may read."""
        seen: list[set[int]] = [set() for _ in x]
        for r in range(self.hashing.rounds):
            bucket = [self.hashing.one(token, r, len(x) // self.chunk) for token in x]
            order = sorted(range(len(x)), key=lambda i, bucket=bucket: (bucket[i], i))
            chunk = {token: rank // self.chunk for rank, token in enumerate(order)}
            for i in range(len(x)):
                for j in range(i + 1 if causal else len(x)):
                    if chunk[i] - chunk[j] in (0, 1) and (self.across or bucket[i] == bucket[j]):
                        seen[i].add(j)
        return seen


class StrictLSHAttention(Attention):
    """Like `LSHAttention`, but a token reads the last `window` members of its bucket up to itself: strictly causal.

    So it reads whether the mask asks for causality or not. Every round has all buckets of the hash. Decoding keeps, for
    each round and bucket, a ring of window - 1 keys and values: rounds * buckets * window vectors a head, whatever the
    length, and a step costs O(rounds window D).
    """

    def __init__(self, hashing: Hash, window: int):
        super().__init__()
        self.traits = _traits(hashing, "strict", step=True)
        self.hashing, self.window = hashing, window

    def redraw(self) -> None:
        """New random rotations. Nothing else ever changes them."""
        self.hashing.redraw()

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Operator:
        """Sorted by bucket, a band in each."""
        self.check(q, k, mask)
        x = silence(widened(q), mask.keys)
        return _banded(x, self._buckets(x), self.hashing.buckets, Recent(self.window), mask, q.dtype)

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition, one sheet, round and token at a time."""
        return _defined(q, mask, self._seen)

    def _seen(self, x: Float[Tensor, "n D"], causal: bool) -> list[set[int]]:
        seen: list[set[int]] = [set() for _ in x]
        for r in range(self.hashing.rounds):
            bucket = [self.hashing.one(token, r, self.hashing.buckets) for token in x]
            for i in range(len(x)):
                seen[i].update([j for j in range(i + 1) if bucket[j] == bucket[i]][-self.window :])
        return seen

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple[StepOperator, State]:
        """New tokens join their buckets; rings forget the oldest."""
        assert keys is None or isinstance(keys, Members)
        x = widened(q)
        keys = keys or Members.empty(x, self.hashing.rounds, self.hashing.buckets, self.window)
        bucket = self._buckets(x).movedim(0, 2)
        return RingStep.reading(x, unit(x), bucket, keys, window=self.window, own=PENALTY)

    def _buckets(self, x: Float[Tensor, "B H N D"]) -> Int[Tensor, "rounds B H N"]:
        return self.hashing(x, torch.full(x.shape[:1], self.hashing.buckets, device=x.device))


def _traits(hashing: Hash, causal: Literal["strict", "value"], *, step: bool) -> Traits:
    return Traits(
        causal=causal,
        not_strict="" if step else "who shares a chunk depends on later tokens; with strict = true it can",
        cross=False,
        step=step,
        normalised=True,
        key_padding=True,
        dropout=False,
        needs=frozenset({"query"}),
        shared_qk=True,
        d_head=hashing.rotations.shape[0],
        memory=1.0,
    )


def _banded(
    x: Float[Tensor, "B H N D"],
    buckets: Int[Tensor, "rounds B H N"],
    n_buckets: int,
    rule: Rule,
    mask: Mask,
    dtype: torch.dtype,
) -> TileOperator:
    tiles = Bands(buckets, n_buckets, mask.keys, rule=rule, causal=mask.causal, own=PENALTY, dtype=x.dtype)
    return TileOperator(x, unit(x), tiles, mask.keys, dtype, Merged)


def _defined(
    q: Float[Tensor, "B H N D"], mask: Mask, seen: Callable[[Tensor, bool], list[set[int]]]
) -> Float[Tensor, "B H N N"]:
    """Keys are unit vectors; a token reads itself only as a last resort."""
    x = widened(q)

    def read(tokens: Float[Tensor, "n D"], keys: Float[Tensor, "n D"], head: int) -> list[set[int]]:
        return [others - {i} or {i} for i, others in enumerate(seen(tokens, mask.causal))]

    return defined(x, x / torch.clamp(x.norm(dim=-1, keepdim=True), min=_SHORTEST), mask, read)
