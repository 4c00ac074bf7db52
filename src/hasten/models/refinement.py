"""Iterative refinement: the whole output at once, then again and again with the last one before its eyes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hasten.data.batch import Batch
from hasten.data.tokenizer import PAD, PLACEHOLDER, SPECIAL_IDS
from hasten.errors import UserError
from hasten.fields import Depth, NonNegativeFloat, PositiveInt, Share, Spec
from hasten.models.base import Canvas, Edit, Memory, ObserveAttention, reported
from hasten.models.encoder_decoder import EncoderDecoderSpec, fewest, less_one
from hasten.models.tied import SourceMemory, Tied
from hasten.nn.decoder_inputs import first, uniform_copy
from hasten.nn.draws import row_draws
from hasten.nn.lengths import LengthHead
from hasten.nn.loss import LossTerm, cross_entropy
from hasten.nn.parallel import ParallelDecoder
from hasten.nn.stack import Observer, unobserved

REPEAT, REPLACE, SWAP = range(3)
_DRAWS = 3  # numbers that a corruption needs for each token: is it chosen, what happens to it, which word comes in


@dataclass(frozen=True, kw_only=True)
class RefinementDecoding(Spec):
    """When refinement ends."""

    iterations: Depth = 10
    """The most passes, the first one counted."""
    adaptive: bool = True
    """End a sentence as soon as a pass changes none of its tokens."""
    remove_repeats: bool = False
    """Of equal neighbouring tokens of the final output one stays."""


@dataclass(frozen=True, kw_only=True)
class RefinementSpec(EncoderDecoderSpec):
    """A model that says all tokens at once and then rewrites its own output."""

    kind: Literal["refinement"] = "refinement"
    """The model's name."""
    one_decoder: bool = False
    """The first pass and the refining ones use the same decoder; otherwise the first has one of its own."""
    feedback: Literal["both", "tokens"] = "both"
    """What a pass reads of the last one: its tokens and its states (both), or its tokens."""
    train_iterations: PositiveInt = 4
    """Passes in training, the first one counted; the loss is the mean over all of them."""
    denoise: Share = 0.5
    """Probability that a sentence's next pass reads a corrupted reference instead of the model's own tokens."""
    corruption: Literal["each", "some"] = "each"
    """Each token is corrupted by chance, left to right; or a share of them, one at least, in random order."""
    corruption_rate: tuple[Share, ...] = (0.33,)
    """The probability of a token, or the share of tokens, to be corrupted: for all passes, or one for each refining."""
    length_weight: NonNegativeFloat = 0.1
    """Weight of the loss of the predicted length."""
    length_detach: bool = False
    """The encoder learns nothing from the predicted length."""
    length_most: PositiveInt = 64
    """Outputs have up to so many tokens more or fewer than the source, whose end symbol counts."""

    decoding: RefinementDecoding = field(default_factory=RefinementDecoding)
    """What concerns decoding only: it can be changed after training."""

    def build(self, vocab_size: int) -> "Refinement":
        """A model with fresh weights."""
        return Refinement(self, vocab_size)

    def learnable(self, source: Sequence[int], target: Sequence[int]) -> bool:
        """Every pair of sequences can be learnt; lengths out of reach are learnt as the nearest one."""
        return True


Corrupt = Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]


def corrupt_each(
    tokens: Int[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    draws: Float[Tensor, "B T 3"],
    rate: float,
    words: Int[Tensor, "V"],
) -> Int[Tensor, "B T"]:
    """Every token is corrupted with probability `rate`, from left to right, in what the ones before have left.

    A corruption at t is, with a third each: the token at t is written over that at t + 1 (repeat); one of `words`, all
    equally probable, over that at t (replace); or both change places (swap). The last token has none after it: there
    repeat and swap do nothing. Padding stays. draws: numbers from [0, 1) that decide who, what, and which word.
    Source: Lee et al., 2018, on denoising.
    """
    # A token is carried on while its holders repeat or swap: what stands at t on arrival came from `origin`.
    t = torch.arange(tokens.shape[1], device=tokens.device)
    chosen, what, word = _decided(draws, words)
    partnered = F.pad(mask, (0, 1), value=False)[:, 1:]
    done = (chosen < rate) & mask & (partnered | (what == REPLACE))
    carries = F.pad(done & (what != REPLACE), (1, 0), value=False)[:, :-1]
    origin = t.expand_as(tokens).masked_fill(carries, 0).cummax(1).values
    arrived = tokens.gather(1, origin)
    after = F.pad(tokens, (0, 1), value=PAD)[:, 1:]
    left = torch.where(done & (what == SWAP), after, arrived)
    return torch.where(done & (what == REPLACE), word, left)


def corrupt_some(
    tokens: Int[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    draws: Float[Tensor, "B T 3"],
    rate: float,
    words: Int[Tensor, "V"],
) -> Int[Tensor, "B T"]:
    """max(1, floor(rate n)) of the first n - 1 tokens of a row, without repetition, are corrupted in random order.

    What a corruption is: see `corrupt_each`. Rows of one token stay. This is what the code released with Lee et al.,
    2018, does; which tokens are changed, and how often at once, is distributed differently from the paper's.
    """
    n, (chosen, what, word) = mask.sum(1), _decided(draws, words)
    # 1e-9: 0.29 * 100 is 28.999... in binary.
    count = torch.minimum((rate * n.double() + 1e-9).floor().long().clamp(min=1), n - 1)
    ahead = torch.arange(tokens.shape[1], device=tokens.device) < (n - 1)[:, None]
    order = chosen.masked_fill(~ahead, 2.0).sort(dim=1, stable=True).indices
    for k in range(max(0, int(count.max()))):
        i = order[:, k : k + 1]
        j = (i + 1).clamp(max=tokens.shape[1] - 1)
        here, there, kind = tokens.gather(1, i), tokens.gather(1, j), what.gather(1, i)
        kind = kind.masked_fill((k >= count)[:, None], -1)
        new = torch.where(kind == REPLACE, word.gather(1, i), torch.where(kind == SWAP, there, here))
        next_one = torch.where((kind == REPEAT) | (kind == SWAP), here, there)
        tokens = tokens.scatter(1, i, new).scatter(1, j, torch.where(i == j, new, next_one))
    return tokens


def _decided(
    draws: Float[Tensor, "B T 3"], words: Int[Tensor, "V"]
) -> tuple[Float[Tensor, "B T"], Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Who is corrupted by chance, how, and the word that would come in."""
    chosen, what, which = draws.unbind(-1)
    return chosen, (3 * what).long(), words[(which * len(words)).long().clamp(max=len(words) - 1)]


@dataclass(frozen=True)
class Inputs:
    """What the next pass reads, states (B, T, D): the copied source, or the last pass."""

    states: Float[Tensor, "B T D"]

    def select(self, rows: Tensor) -> "Inputs":
        """Batch rows by index."""
        return Inputs(self.states.index_select(0, rows))


def feed_both(tokens: Float[Tensor, "B T D"], states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """Embedded tokens plus the states that they were read from."""
    return tokens + states


def feed_tokens(tokens: Float[Tensor, "B T D"], states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """Embedded tokens alone."""
    return tokens


class Refinement(Tied):
    """p(y | x) by passes: y_0 from the copied source, y_l = argmax p(y | y_(l-1), h_(l-1), x), tokens independent.

    h are the last layer's states. The length is guessed from the encoder (offset to the source's); the source's words
    are copied uniformly to it. Training unrolls `train_iterations` passes, with cross-entropy to the reference at each
    and, by chance, a corrupted reference as what is to be improved. Nothing is learnt through the choice of a token.
    Source: Lee, Mansimov and Cho, 2018 ("Deterministic Non-Autoregressive Neural Sequence Modeling by Iterative
    Refinement"). Not done: highway layers, positional attention, and learning lengths in a run of their own.
    """

    words: Tensor

    def __init__(self, spec: RefinementSpec, vocab_size: int):
        super().__init__(spec, vocab_size)
        self.encoder = spec.encoder()
        decoders = [spec.decoder(ParallelDecoder) for _ in range(1 if spec.one_decoder else 2)]
        self.decoders = nn.ModuleList(decoders)
        self.lengths = LengthHead(spec.d_model, "offset", spec.length_most)
        self.most_tokens = decoders[0].longest
        self.longest = fewest(less_one(fewest(self.encoder.longest, decoders[0].longest_memory)), self.most_tokens)
        self.edits = (Edit("fill", self._fill),)
        self.feed = {"both": feed_both, "tokens": feed_tokens}[spec.feedback]
        self.corrupt: Corrupt = {"each": corrupt_each, "some": corrupt_some}[spec.corruption]
        self.rates = _rates(spec.corruption_rate, spec.train_iterations - 1)
        words = torch.tensor([i for i in range(vocab_size) if i not in SPECIAL_IDS])
        self.register_buffer("words", words, persistent=False)

    def encode(
        self, source: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], observe: Observer = unobserved
    ) -> SourceMemory:
        """Encoder states of the source, and its ids."""
        return SourceMemory.of(super().encode(source, mask, observe), source)

    def copied(self, memory: Memory, lengths: Int[Tensor, "B"]) -> Float[Tensor, "B T D"]:
        """Embeddings of the source's words at the positions of outputs of these lengths, end to end."""
        assert isinstance(memory, SourceMemory)
        # Outputs have no end symbol, so it is not copied, unless there is nothing else.
        index = uniform_copy((memory.lengths - 1).clamp(min=1), lengths)
        return self.look_up(memory.ids.gather(1, index))

    def decode(
        self,
        iteration: int,
        inputs: Float[Tensor, "B T D"],
        real: Bool[Tensor, "B T"],
        memory: Memory,
        observe: Observer = unobserved,
    ) -> Float[Tensor, "B T D"]:
        """States after pass number `iteration`, counted from 0."""
        decoder = self.decoders[min(iteration, len(self.decoders) - 1)]
        return decoder(self.placed(inputs), real, memory.states, memory.mask, observe)

    def loss(self, batch: Batch, generator: torch.Generator) -> dict[str, LossTerm]:
        """Cross-entropy of every target token, the mean over the passes, and that of the length."""
        memory, lengths = self.encode(batch.source, batch.source_mask), batch.target_mask.sum(1)
        real = first(lengths)
        target = batch.target[:, : real.shape[1]]
        use, draws = self._chances(real, generator)
        states = self.decode(0, self.copied(memory, lengths), real, memory)
        total, own = self._said(states, target, real)
        for iteration, rate in enumerate(self.rates):
            corrupted = self.corrupt(target, real, draws[iteration], rate, self.words)
            read = self.look_up(torch.where(use[iteration], corrupted, own))
            states = self.decode(iteration + 1, self.feed(read, states), real, memory)
            added, own = self._said(states, target, real)
            total = total + added
        guess = self.lengths.loss(
            memory.states, memory.mask, lengths, self.spec.length_weight, detach=self.spec.length_detach
        )
        return {"tokens": LossTerm(total, self.spec.train_iterations * lengths.sum()), "length": guess}

    def _said(
        self, states: Float[Tensor, "B T D"], target: Int[Tensor, "B T"], real: Bool[Tensor, "B T"]
    ) -> tuple[Tensor, Int[Tensor, "B T"]]:
        """The cross-entropy of a pass and its own tokens."""
        logits = self.logits(states[real])
        own = target.masked_scatter(real, (logits.detach() + self.banned).argmax(-1))
        return cross_entropy(logits, target[real], self.spec.label_smoothing), own

    def _chances(
        self, real: Bool[Tensor, "B T"], generator: torch.Generator
    ) -> tuple[Bool[Tensor, "n B 1"], Float[Tensor, "n B T 3"]]:
        """For every refining pass: which rows read a corrupted reference, and the numbers that corrupt it."""
        n = len(self.rates)
        rows, tokens = row_draws(real.repeat_interleave(n * _DRAWS, dim=1), generator, n)
        each = tokens.view(*real.shape, n, _DRAWS)
        return (rows < self.spec.denoise).T[..., None], each.permute(2, 0, 1, 3)

    def attentions(self, batch: Batch, observe: ObserveAttention) -> None:
        """Of the "encoder", and of the pass that first improves an output of the right length: "decoder", "cross"."""
        memory = self.encode(batch.source, batch.source_mask, reported(observe, {"self": "encoder"}, batch.source_mask))
        lengths = batch.target_mask.sum(1)
        canvas = self._fill(self._blank(memory, lengths), memory, 0)
        told = reported(observe, {"self": "decoder", "cross": "cross"}, first(lengths))
        self.decode(1, canvas.cache.states, first(lengths), memory, told)

    def start(self, memory: Memory) -> Canvas:
        """As many placeholders as the most probable length says; the first pass reads the copied source."""
        return self.starts(memory, 1)

    def starts(self, memory: Memory, candidates: int) -> Canvas:
        """The `candidates` most probable lengths of every row, one after the other."""
        lengths, _ = self.lengths.best(memory.states, memory.mask, candidates, self.most_tokens)
        rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(candidates)
        return self._blank(memory.select(rows), lengths.flatten())

    def _blank(self, memory: Memory, lengths: Int[Tensor, "B"]) -> Canvas:
        real = first(lengths)
        tokens = torch.where(real, PLACEHOLDER, PAD)
        none = torch.zeros(len(real), dtype=torch.bool, device=real.device)
        return Canvas(tokens, torch.zeros(real.shape, device=real.device), none, Inputs(self.copied(memory, lengths)))

    def _fill(self, canvas: Canvas, memory: Memory, iteration: int) -> Canvas:
        real = canvas.tokens != PAD
        states = self.decode(iteration, canvas.cache.states, real, memory)
        logits = self.logits(states).float()
        best, tokens = (logits + self.banned).max(-1)
        scores = (best - logits.logsumexp(-1)).masked_fill(~real, 0.0)
        tokens = tokens.masked_fill(~real, PAD)
        return Canvas(tokens, scores, canvas.done, Inputs(self.feed(self.look_up(tokens), states)))

    def stopped(self, before: Canvas, after: Canvas, memory: Memory, iteration: int) -> Bool[Tensor, "B"]:
        """Every row after the last pass; before, rows whose tokens have not changed, where that is asked."""
        unchanged = (before.tokens == after.tokens).all(1)
        return unchanged & self.spec.decoding.adaptive | (iteration + 1 >= self.spec.decoding.iterations)

    def output_ids(self, tokens: list[int]) -> list[int]:
        """The tokens; where repeats are removed, one of equal neighbours."""
        return [token for token, _ in groupby(tokens)] if self.spec.decoding.remove_repeats else tokens


def _rates(rates: Sequence[float], n: int) -> tuple[float, ...]:
    """One rate for each of n refining passes."""
    if len(rates) not in (1, n):
        raise UserError(f"corruption_rate has {len(rates)} entries; give 1, or one for each of {n} refining passes")
    return tuple(rates) * n if len(rates) == 1 else tuple(rates)
