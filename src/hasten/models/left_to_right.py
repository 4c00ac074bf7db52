"""What models that say one token after the other have in common, keys and values kept."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.data.batch import Batch
from hasten.data.tokenizer import BOS, EOS, PAD
from hasten.decoding.canvas import select
from hasten.models.base import Canvas, Edit, Memory, ObserveAttention, reported
from hasten.models.tied import Tied
from hasten.nn.layers import DecoderLayerState
from hasten.nn.loss import LossTerm, cross_entropy
from hasten.nn.words import EveryNext, ListedNext, NextWords

DecoderState = tuple[DecoderLayerState, ...]


@dataclass(frozen=True)
class Saying:
    """Decoding under way: what the layers keep of the source and of the tokens said, and what may be said next."""

    layers: DecoderState
    words: NextWords

    def select(self, rows: Tensor) -> "Saying":
        """Batch rows by index."""
        return Saying(select(self.layers, rows), self.words.select(rows))


class LeftToRight(Tied):
    """p(y | x) = product over t of p(y_t | y_<t, x), trained by label-smoothed cross-entropy.

    A subclass makes its `encoder` and its `decoder`, with the calls of `hasten.nn.stack`.
    """

    decoder: Any
    most_steps: int = 2**31

    def __init__(self, spec: Any, vocab_size: int):
        super().__init__(spec, vocab_size, says=(EOS,))
        self.edits = (Edit("append", self._append),)

    def projection(self) -> tuple[Float[Tensor, "V D"], Float[Tensor, "V"] | None]:
        """The matrix that makes scores of states, and what is added to them."""
        return self.embedding.weight, None

    def loss(self, batch: Batch, generator: torch.Generator) -> dict[str, LossTerm]:
        """Cross-entropy of every target token and of the end symbol."""
        states, outputs, real = self._forced(batch)
        return self._terms(self.logits(states[real]), outputs[real], real, batch)

    def _terms(
        self, logits: Float[Tensor, "N V"], outputs: Int[Tensor, "N"], real: Bool[Tensor, "B T"], batch: Batch
    ) -> dict[str, LossTerm]:
        return {"tokens": LossTerm(cross_entropy(logits, outputs, self.spec.label_smoothing), real.sum())}

    def log_probs(self, batch: Batch) -> tuple[Float[Tensor, "B"], Int[Tensor, "B"]]:
        """log p(y | x) of every row, in float32, and the number of its decisions: all tokens and the end symbol."""
        states, outputs, real = self._forced(batch)
        own = -F.cross_entropy(self.logits(states[real]).float(), outputs[real], reduction="none")
        return torch.zeros_like(real, dtype=own.dtype).masked_scatter(real, own).sum(1), real.sum(1)

    def forced_log_probs(self, batch: Batch) -> Float[Tensor, "N V"]:
        """Log probabilities, in float32, of what could stand at every target token and at the end, row after row."""
        states, _, real = self._forced(batch)
        return self.logits(states[real]).float().log_softmax(-1)

    def _forced(self, batch: Batch) -> tuple[Float[Tensor, "B T D"], Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """States under teacher forcing, what each is to say (y_1 .. y_U EOS), and which of them are real."""
        inputs, real = self._inputs(batch)
        ends = batch.target_mask.sum(1, keepdim=True)
        outputs = F.pad(batch.target, (0, 1), value=PAD).scatter(1, ends, EOS)
        memory = self.encode(batch.source, batch.source_mask)
        return self.decoder(self.embed(inputs), memory.states, memory.mask), outputs, real

    def attentions(self, batch: Batch, observe: ObserveAttention) -> None:
        """Of the "encoder", of the "decoder" over its own positions, and its "cross" attention over the source."""
        memory = self.encode(batch.source, batch.source_mask, reported(observe, {"self": "encoder"}, batch.source_mask))
        inputs, real = self._inputs(batch)
        names = {"self": "decoder", "cross": "cross"}
        told = reported(observe, names, real)
        self.decoder(self.embed(inputs), memory.states, memory.mask, observe=told)

    def start(self, memory: Memory) -> Canvas:
        """Nothing said yet."""
        batch, device = len(memory.mask), memory.mask.device
        return Canvas(
            torch.empty(batch, 0, dtype=torch.int64, device=device),
            torch.empty(batch, 0, device=device),
            torch.zeros(batch, dtype=torch.bool, device=device),
            self.begin(memory),
        )

    def keep_to(self, memory: Memory, lists: Sequence[Int[Tensor, "_"]]) -> Memory:
        """With each row's output limited to its list."""
        weight, bias = self.projection()
        return replace(memory, words=ListedNext.of(weight, bias, self.banned, lists))

    def begin(self, memory: Memory) -> Saying:
        """Decoding state before the first token."""
        words = memory.words if isinstance(memory.words, NextWords) else EveryNext(self.logits, self.banned)
        return Saying(self.decoder.begin(memory.states, memory.mask), words)

    def next_log_probs(
        self, last: Int[Tensor, "B"], position: int, state: Saying
    ) -> tuple[Float[Tensor, "B V"], Saying]:
        """Log probabilities of the token after `last`, which stands at `position` (BOS at 0), and the new state.

        Symbols that are no text have -inf; the end symbol does not.
        """
        states, after = self._step(last, position, state)
        return after.words.log_probs(states), after

    def _step(self, last: Int[Tensor, "B"], position: int, state: Saying) -> tuple[Float[Tensor, "B D"], Saying]:
        x = self.positions(self.look_up(last[:, None]), position)
        x, layers = self.decoder.step(x, state.layers)
        return x[:, 0], Saying(layers, state.words)

    def chunk_log_probs(
        self, tokens: Int[Tensor, "B n"], places: Int[Tensor, "B"], state: Saying
    ) -> tuple[Float[Tensor, "B n V"], Saying]:
        """Log probabilities after each of n new tokens, the first of each row standing at `places`, and the new state.

        Equal to `next_log_probs` token by token, but for rounding; a list of words is not heeded.
        """
        x, layers = self.decoder.step(self.positions.each(self.look_up(tokens), places), state.layers)
        return self.logits(x).float().log_softmax(-1) + self.banned, Saying(layers, state.words)

    def check_rewinds(self) -> None:
        """`UserError` where decoding cannot take back tokens."""
        self.decoder.check_rewinds()

    def rewind(self, state: Saying, dropped: Int[Tensor, "B"]) -> Saying:
        """The state without the last tokens, so many of each row."""
        return Saying(self.decoder.rewind(state.layers, dropped), state.words)

    def limit(self, memory: Memory) -> Int[Tensor, "B"]:
        """Longest output of each row in tokens, the end symbol included; it depends on the row's source alone."""
        return (2 * memory.lengths + 20).clamp(max=self.most_steps)

    def _append(self, canvas: Canvas, memory: Memory, iteration: int) -> Canvas:
        last = canvas.tokens[:, -1] if iteration else torch.full_like(canvas.done, BOS, dtype=torch.int64)
        states, cache = self._step(last, iteration, canvas.cache)
        score, token = cache.words.best(states)
        return Canvas(
            torch.cat((canvas.tokens, token[:, None]), 1),
            torch.cat((canvas.scores, score[:, None]), 1),
            canvas.done | (token == EOS),
            cache,
        )

    def stopped(self, before: Canvas, after: Canvas, memory: Memory, iteration: int) -> Bool[Tensor, "B"]:
        """Rows that said the end symbol or reached their limit."""
        return after.done | (iteration + 1 >= self.limit(memory))

    def output_ids(self, tokens: list[int]) -> list[int]:
        """Without the end symbol."""
        return tokens[: tokens.index(EOS)] if EOS in tokens else tokens

    def _inputs(self, batch: Batch) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Inputs under teacher forcing, BOS y_1 .. y_U, and which of them are real."""
        return F.pad(batch.target, (1, 0), value=BOS), F.pad(batch.target_mask, (1, 0), value=True)
