"""Attention over a pattern: each query reads the keys the pattern allows, in time and memory of what is allowed."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from hasten.attention.base import Attention, Operator, State, StepOperator, Traits, Weights
from hasten.attention.masks import Mask, silence
from hasten.attention.patterns.algebra import Pattern, Scene, walk
from hasten.attention.patterns.decoding import KeptKeys, step_over
from hasten.attention.patterns.global_shapes import External, Marked
from hasten.attention.patterns.plan import resolved, terms
from hasten.attention.patterns.random_blocks import RandomBlocks
from hasten.attention.patterns.run import Call, attention_op, run
from hasten.errors import UserError


class PatternAttention(Attention):
    """softmax(q k^T / sqrt(D)) over the keys that the pattern and the mask allow; a query without any gets exactly 0.

    q (B, H, T, D), k (B, H, S, D). Positions count the real tokens of each example from 0, wherever its padding
    stands; padded ones come after them. Query i is token i + S - T of the same sequence: of a longer sequence the last
    T tokens ask. Scores and softmax are computed in float32 or wider. Time and memory are those of the tiles that the
    pattern touches. Sources: those of the shapes.
    """

    seed: Tensor

    def __init__(self, pattern: Pattern, *, dropout: float = 0.0, seed: int = 0, rows: int | None = None):
        super().__init__()
        if not isinstance(pattern, Pattern):
            raise TypeError(f"pattern is {pattern!r}; give a Pattern, for example Local(64) or parse('Local(64)')")
        if not 0 <= dropout < 1:
            raise UserError(f"dropout is {dropout}; give a share of weights, at least 0 and less than 1")
        self.pattern, self.dropout, self.rows = pattern, dropout, rows
        terms(resolved(pattern))  # refuses what means nothing or is too much
        self.ahead = _causal(pattern)
        # Written once: code that is traced cannot write it.
        self.texts = (str(pattern), str(self.ahead))
        shapes = list(walk(pattern))
        # The draw travels with the weights: a model restored with another seed keeps the pattern it was trained with.
        self.register_buffer("seed", torch.tensor(seed), persistent=any(isinstance(s, RandomBlocks) for s in shapes))
        marked = any(isinstance(shape, Marked) for shape in shapes)
        self.traits = Traits(
            causal=None if self.ahead is None else "strict",
            cross=not pattern.of_query,
            suffix=True,
            step=self.ahead is not None and not marked,
            normalised=True,
            key_padding=True,
            empty=True,
            dropout=True,
            marked=marked,
            external=max((shape.tokens for shape in shapes if isinstance(shape, External)), default=0),
            memory=1.0,
        )

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> "PatternOperator":
        """The softmax map over the pattern's tiles; weights are never formed unless asked for."""
        self.check(q, k, mask)
        if self.traits.marked and mask.marked is None:
            mask = replace(mask, marked=torch.zeros(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device))
        k = silence(k, None if mask.silent else mask.keys)
        share = self.dropout if self.training else 0.0
        pattern, text = self._pattern(mask.causal), self.texts[mask.causal]
        return PatternOperator(q, k, mask, pattern, text, self.seed, self.rows or 0, share)

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition: the pattern's dense mask, then one query at a time."""
        weights = q.new_zeros(*q.shape[:3], k.shape[2])
        for b in range(len(q)):
            keys = torch.ones(k.shape[2], dtype=torch.bool) if mask.keys is None else mask.keys[b].cpu()
            marked = torch.zeros_like(keys) if mask.marked is None else mask.marked[b].cpu() & keys
            allowed = self._dense(self._pattern(mask.causal), keys, marked, *q.shape[1:3])
            for h in range(q.shape[1]):
                for i in range(q.shape[2]):
                    readable = allowed[h, i].nonzero()[:, 0]
                    if len(readable):
                        weights[b, h, i, readable] = (k[b, h, readable] @ q[b, h, i] / q.shape[3] ** 0.5).softmax(-1)
        return weights

    def _dense(self, pattern: Pattern, keys: Tensor, marked: Tensor, n_heads: int, n_queries: int) -> Tensor:
        """(H, T, S) for one example."""
        order = torch.cat((keys.nonzero()[:, 0], (~keys).nonzero()[:, 0]))
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order))
        token = torch.arange(n_queries) + len(keys) - n_queries
        i = torch.where(token < 0, token, position[token.clamp(min=0)])
        scene = Scene(int(keys.sum()), n_heads, int(self.seed), marked[order][None], len(keys))
        allowed = resolved(pattern).allows(i[None, None, :, None], position[None, None, None, :], scene)
        return (allowed & keys)[0].expand(n_heads, -1, -1)

    def _pattern(self, causal: bool) -> Pattern:
        if not causal:
            return self.pattern
        assert self.ahead is not None
        return self.ahead

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple[StepOperator, State]:
        """Keys that later queries may still read are kept: of a window, only the window."""
        if not self.traits.step:
            return super().step(q, k, keys)
        assert keys is None or isinstance(keys, KeptKeys)
        assert self.ahead is not None
        return step_over(resolved(self.ahead), int(self.seed), q, k, keys)

    def extra_repr(self) -> str:
        """Shown in the module's print-out."""
        return f"{self.pattern}" + (f", dropout={self.dropout}" if self.dropout else "")


def _causal(pattern: Pattern) -> Pattern | None:
    try:
        return pattern.causal()
    except UserError:
        return None


class PatternOperator(Operator):
    """Softmax attention over a pattern, computed tile by tile in `apply`."""

    def __init__(
        self, q: Tensor, k: Tensor, mask: Mask, pattern: Pattern, text: str, seed: Tensor, rows: int, share: float
    ):
        self.q, self.k, self.mask, self.pattern, self.text = q, k, mask, pattern, text
        self.seed, self.rows, self.share = seed, rows, share

    def apply(self, v: Float[Tensor, "B H S Dv"]) -> Float[Tensor, "B H T Dv"]:
        """softmax over the pattern, times v."""
        if v.dim() != 4 or v.shape[:3] != self.k.shape[:3]:
            raise UserError(f"values are {tuple(v.shape)}, keys {tuple(self.k.shape)}; all but the width must be equal")
        return self._apply(silence(v, None if self.mask.silent else self.mask.keys), self.share)

    def _apply(self, v: Tensor, share: float) -> Tensor:
        mask = self.mask
        drawn = torch.randint(2**62, (), device="cpu") if share else torch.zeros((), dtype=torch.int64, device="cpu")
        if torch.compiler.is_compiling():
            settings = (self.text, self.rows, share)
            return attention_op(self.q, self.k, v, mask.keys, mask.marked, self.seed, drawn, *settings)[0]
        call = Call(resolved(self.pattern), mask.keys, mask.marked, int(self.seed), self.rows, share, int(drawn))
        return run(self.q, self.k, v, call)

    def dense(self) -> Float[Tensor, "B H T S"]:
        """The weights, as what the map makes of the identity; without dropout."""
        identity = torch.eye(self.k.shape[2], dtype=self.k.dtype, device=self.k.device)
        return self._apply(identity.expand(*self.k.shape[:2], -1, -1), 0.0)

    def materialised(self) -> Weights:
        """The weights as one matrix, T x S; padded values stay unread."""
        return Weights(self.dense(), None if self.mask.silent else self.mask.keys)
