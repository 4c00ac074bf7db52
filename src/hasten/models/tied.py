"""What models have in common that read ids and say ids by one table of embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hasten.data.tokenizer import SPECIAL_IDS
from hasten.models.base import GenerationModel, Memory
from hasten.nn.dropout import Dropout
from hasten.nn.positions import Sinusoids
from hasten.nn.stack import Observer, unobserved


@dataclass(frozen=True)
class SourceMemory(Memory):
    """An encoded batch with the ids it was made from, ids (B, S)."""

    ids: Int[Tensor, "B S"]

    @staticmethod
    def of(memory: Memory, ids: Int[Tensor, "B S"]) -> "SourceMemory":
        """A memory, and its ids."""
        return SourceMemory(memory.states, memory.mask, ids)

    def select(self, rows: Tensor) -> "SourceMemory":
        """Batch rows by index."""
        return SourceMemory(*(part.index_select(0, rows) for part in (self.states, self.mask, self.ids)))


class Tied(GenerationModel):
    """A table whose rows, scaled and with positions added, are what the model reads, and score what it says.

    A subclass makes its `encoder`, with the calls of `hasten.nn.stack.Encoder`.
    says: the special symbols that it may say; -inf in `banned` keeps the others out of outputs.
    """

    banned: Tensor
    encoder: Any

    def __init__(self, spec: Any, vocab_size: int, *, says: Sequence[int] = ()):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(vocab_size, spec.d_model)
        nn.init.normal_(self.embedding.weight, std=spec.d_model**-0.5)
        self.scale = spec.d_model**0.5
        self.positions = Sinusoids(spec.d_model)
        self.dropout = Dropout(spec.dropout)
        banned = torch.zeros(vocab_size)
        banned[[i for i in SPECIAL_IDS if i not in says]] = -torch.inf
        self.register_buffer("banned", banned, persistent=False)

    def look_up(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows D"]:
        """Rows of the table, scaled so that they serve as input and as output."""
        return self.embedding(ids) * self.scale

    def placed(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Positions added, and dropout."""
        return self.dropout(self.positions(x))

    def embed(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """What a stack reads of ids."""
        return self.placed(self.look_up(ids))

    def encode(self, source: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], observe: Observer = unobserved) -> Memory:
        """Encoder states of the source."""
        return Memory(self.encoder(self.embed(source), mask, observe=observe), mask)

    def logits(self, states: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V"]:
        """Scores of every vocabulary entry, from the last states."""
        return F.linear(states, self.embedding.weight)
