"""Decoding over a pattern: the state keeps the keys that a later query may still read, and drops the others."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hasten.attention.base import State, StepOperator
from hasten.attention.patterns.algebra import Pattern, Scene


@dataclass(frozen=True)
class KeptKeys:
    """Keys (B, H, m, D), their positions (m,), and how many tokens have passed."""

    past: Float[Tensor, "B H m D"]
    positions: Tensor
    now: int

    def select(self, rows: Tensor) -> "KeptKeys":
        """Batch rows by index."""
        return KeptKeys(self.past.index_select(0, rows), self.positions, self.now)


@dataclass(frozen=True)
class KeptValues:
    """Values of the kept keys, (B, H, m, Dv)."""

    past: Float[Tensor, "B H m Dv"]

    def select(self, rows: Tensor) -> "KeptValues":
        """Batch rows by index."""
        return KeptValues(self.past.index_select(0, rows))


def step_over(pattern: Pattern, seed: int, q: Tensor, k: Tensor, keys: KeptKeys | None) -> tuple["KeptStep", KeptKeys]:
    """The map of n new positions over the kept keys and themselves, and the state after them."""
    now = keys.now if keys else 0
    after = now + k.shape[2]
    new = torch.arange(now, after, device=k.device)
    positions = torch.cat((keys.positions, new)) if keys else new
    past = torch.cat((keys.past, k), 2) if keys else k
    # What a causal pattern allows does not depend on the length, so the tokens so far will do.
    scene = Scene(after, q.shape[1], seed)
    allowed = pattern.allows(new[None, None, :, None], positions[None, None, None, :], scene)
    read = allowed.flatten(0, 2).any(0)
    needed = pattern.needed(positions, after)
    step = KeptStep(q, past, allowed, _which(read), _which(needed))
    kept = past if step.needed is None else past.index_select(2, step.needed)
    return step, KeptKeys(kept, positions if step.needed is None else positions[step.needed], after)


def _which(flags: Tensor) -> Tensor | None:
    """Indices of the true ones; None where all are."""
    return None if flags.all() else flags.nonzero()[:, 0]


class KeptStep(StepOperator):
    """The new queries against those kept keys that any of them reads."""

    def __init__(self, q: Tensor, keys: Tensor, allowed: Tensor, read: Tensor | None, needed: Tensor | None):
        self.read, self.needed = read, needed
        if read is not None:
            keys, allowed = keys.index_select(2, read), allowed.index_select(3, read)
        wide = torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            scores = (q.to(wide) / math.sqrt(q.shape[-1])) @ keys.to(wide).transpose(2, 3)
        if allowed.all():
            self.weights = scores.softmax(-1).to(q.dtype)
        else:
            empty = ~allowed.any(-1, keepdim=True)
            weights = scores.masked_fill(~(allowed | empty), -torch.inf).softmax(-1)
            self.weights = weights.masked_fill(~allowed, 0.0).to(q.dtype)

    def apply(self, v: Float[Tensor, "B H n Dv"], values: State | None) -> tuple[Float[Tensor, "B H n Dv"], State]:
        """Read old and new values; keep those that later queries may read."""
        assert values is None or isinstance(values, KeptValues)
        past = v if values is None else torch.cat((values.past, v), 2)
        seen = past if self.read is None else past.index_select(2, self.read)
        kept = past if self.needed is None else past.index_select(2, self.needed)
        return self.weights @ seen, KeptValues(kept)
