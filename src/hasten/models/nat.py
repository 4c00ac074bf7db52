"""NAT: the non-autoregressive Transformer, whose source tokens are copied as often as their fertilities say."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.data.batch import Batch
from hasten.data.tokenizer import PAD, PLACEHOLDER
from hasten.errors import NOT_FINITE, UserError
from hasten.fields import NonNegativeFloat, PositiveFactor, PositiveInt, Seed, Spec
from hasten.models.autoregressive import Autoregressive
from hasten.models.base import Canvas, Edit, Memory, ObserveAttention, reported
from hasten.models.encoder_decoder import EncoderDecoderSpec, fewest, less_one
from hasten.models.nat_finetune import FineTuneSpec, FineTuning
from hasten.models.tied import SourceMemory, Tied
from hasten.nn.decoder_inputs import first
from hasten.nn.fertility import FertilityHead, average, copied, drawn, feasible, most_probable, noise
from hasten.nn.loss import LossTerm, cross_entropy
from hasten.nn.positional import PositionalDecoder
from hasten.nn.stack import Observer, unobserved


@dataclass(frozen=True, kw_only=True)
class NATDecoding(Spec):
    """How fertilities are chosen. None of it touches the weights."""

    method: Literal["argmax", "average"] = "argmax"
    """Each position's most probable fertility, or its expected one, rounded."""
    temperature: PositiveFactor = 1.0
    """Candidates after the first draw fertilities from p^(1 / temperature): above 1 they differ more."""
    seed: Seed = 0
    """Of the noise that candidates draw by, besides their number and the source position."""


@dataclass(frozen=True, kw_only=True)
class NATSpec(EncoderDecoderSpec):
    """A one-pass model: encode, copy each source token as often as its fertility says, decode."""

    needs_fertilities: ClassVar[bool] = True
    """Its runs have labels (`data.fertilities`)."""

    kind: Literal["nat"] = "nat"
    """The model's name."""
    most_fertility: PositiveInt = 49
    """The largest fertility that the model tells; labels above it are learnt as it."""
    fertility_weight: NonNegativeFloat = 1.0
    """Weight of the fertilities' cross-entropy beside that of the tokens."""

    positional_sharing: tuple[PositiveInt, ...] = ()
    """For each decoder layer, from 1, the layer whose weights its attention by position uses; empty: its own."""

    decoding: NATDecoding = field(default_factory=NATDecoding)
    """How fertilities are chosen."""
    finetune: FineTuneSpec | None = None
    """Learn from an autoregressive teacher's judgement, too; start such a run from a trained model (init_from)."""

    @property
    def learns_from(self) -> tuple[str, str] | None:
        """The setting that names a teacher, and its name."""
        return None if self.finetune is None else ("model.finetune.teacher", self.finetune.teacher)

    def build(self, vocab_size: int) -> "NAT":
        """A model with fresh weights."""
        return NAT(self, vocab_size)

    def learnable(self, source: Sequence[int], target: Sequence[int]) -> bool:
        """Whether the largest fertilities of `source` (its end symbol counts) suffice for `target`."""
        return len(target) <= self.most_fertility * (len(source) + 1)


@dataclass(frozen=True)
class Copies:
    """For every position of a canvas the source position (B, T) that it copies."""

    index: Int[Tensor, "B T"]

    def select(self, rows: Tensor) -> "Copies":
        """Batch rows by index."""
        return Copies(self.index.index_select(0, rows))


class NAT(Tied):
    """p(y | x) = sum over fertilities f of prod_i p(f_i | x) prod_t p(y_t | x copied by f, x); |y| = sum f.

    Trained by the cross-entropy of the tokens given the fertilities of the batch (`hasten align` makes them), plus that
    of the fertilities: a bound of -log p(y | x). All tokens of an output are said in one pass, independently of each
    other given f. The end of the source is copied like any other token. An output has at most 2 S + 20 tokens, S source
    tokens with the end symbol, and at least one.
    Source: Gu et al., 2018, "Non-autoregressive neural machine translation". Pre-norm layers, where the paper's are
    post-norm.
    """

    def __init__(self, spec: NATSpec, vocab_size: int):
        super().__init__(spec, vocab_size)
        self.encoder = spec.encoder()
        self.fertility = FertilityHead(spec.d_model, spec.most_fertility)
        self.decoder = spec.decoder(partial(PositionalDecoder, positional_sharing=spec.positional_sharing))
        source = less_one(fewest(self.encoder.longest, self.decoder.longest_memory))
        self.longest = fewest(source, self.decoder.longest)
        self.most_tokens = self.decoder.longest or 2**31
        self.edits = (Edit("fill", self.fill),)
        methods: dict[str, Callable[[Tensor], Tensor]] = {"argmax": most_probable, "average": average}
        self._chosen = methods[spec.decoding.method]
        self.fine_tuning = None if spec.finetune is None else FineTuning(spec.finetune)
        self._objective = _as_they_are if self.fine_tuning is None else self.fine_tuning.terms

    def learn_from(self, teacher: Autoregressive) -> None:
        """Take the teacher that the spec's `finetune` names, and freeze it."""
        assert self.fine_tuning is not None
        self.fine_tuning.learn_from(teacher)

    def encode(
        self, source: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], observe: Observer = unobserved
    ) -> SourceMemory:
        """Encoder states of the source, and the source itself."""
        return SourceMemory.of(super().encode(source, mask, observe), source)

    def states(
        self,
        memory: SourceMemory,
        index: Int[Tensor, "B T"],
        real: Bool[Tensor, "B T"],
        observe: Observer = unobserved,
    ) -> Float[Tensor, "B T D"]:
        """Decoder states where position t copies source position `index` t; `real` is True on real positions."""
        copies = self.embed(memory.ids.gather(1, index))
        return self.decoder(copies, real, memory.states, memory.mask, observe)

    def attentions(self, batch: Batch, observe: ObserveAttention) -> None:
        """Of the "encoder", of the "decoder" over its own positions, by place ("positional"), and "cross".

        The source is copied as often as the model itself would; the target is not read.
        """
        told = reported(observe, {"self": "encoder"}, batch.source_mask)
        memory = self.encode(batch.source, batch.source_mask, told)
        canvas = self.start(memory)
        real = canvas.tokens != PAD
        names = {"self": "decoder", "positional": "positional", "cross": "cross"}
        self.states(memory, canvas.cache.index, real, reported(observe, names, real))

    def loss(self, batch: Batch, generator: torch.Generator) -> dict[str, LossTerm]:
        """Cross-entropy of every target token given the true fertilities, and of the fertilities.

        Errors: `UserError` for a batch without fertilities, or with such whose sum is not the target's length.
        """
        fertilities, lengths = _labels(batch), batch.target_mask.sum(1)
        memory, index = self.encode(batch.source, batch.source_mask), copied(fertilities)
        real = first(lengths, index.shape[1])
        logits, target = self.logits(self.states(memory, index, real)[real]), batch.target[batch.target_mask]
        told = cross_entropy(logits, target, self.spec.label_smoothing)
        weight = self.spec.fertility_weight
        terms = {
            "tokens": LossTerm(told, lengths.sum()),
            "fertilities": self.fertility.loss(memory.states, memory.mask, fertilities, weight),
        }
        return self._objective(terms, self, memory, logits, batch, generator)

    def limit(self, memory: Memory) -> Int[Tensor, "B"]:
        """The most tokens of each row's output; it depends on the row's source alone."""
        return _most(memory.lengths).clamp(max=self.most_tokens)

    def most_tokens_for(self, n_tokens: int) -> int:
        """The most tokens of an output whose source has so many, its end symbol not counted."""
        return min(_most(n_tokens + 1), self.most_tokens)

    def start(self, memory: Memory) -> Canvas:
        """As many placeholders as the chosen fertilities sum to."""
        log_probs = self._told(memory)
        return canvas_of(self.usable(self._chosen(log_probs), log_probs, memory))

    def starts(self, memory: Memory, candidates: int) -> Canvas:
        """Besides the canvas of `start`, those of drawn fertilities: noisy parallel decoding (section 4.2 there)."""
        log_probs, decoding = self._told(memory), self.spec.decoding
        found = [self._chosen(log_probs)]
        for number in range(1, candidates):
            uniform = noise(decoding.seed, number, log_probs.shape[1]).to(log_probs.device)
            found.append(drawn(log_probs, uniform.expand(len(log_probs), -1), decoding.temperature))
        usable = [self.usable(fertilities, log_probs, memory) for fertilities in found]
        return canvas_of(torch.stack(usable, 1).flatten(0, 1))

    def _told(self, memory: Memory) -> Float[Tensor, "B S C"]:
        """Log probabilities of the fertilities; `UserError` where they are not numbers."""
        log_probs = self.fertility.log_probs(memory.states)
        if log_probs[memory.mask].isnan().any():
            raise UserError(NOT_FINITE)
        return log_probs

    def usable(
        self, fertilities: Int[Tensor, "B S"], log_probs: Float[Tensor, "B S C"], memory: Memory
    ) -> Int[Tensor, "B S"]:
        """Fertilities whose sum is at least 1 and at most the row's limit (`feasible`)."""
        return feasible(fertilities, log_probs, memory.mask, self.limit(memory))

    def fill(self, canvas: Canvas, memory: Memory, iteration: int = 0) -> Canvas:
        """The most probable token at every position."""
        assert isinstance(memory, SourceMemory)
        real = canvas.tokens != PAD
        logits = self.logits(self.states(memory, canvas.cache.index, real)).float()
        best, tokens = (logits + self.banned).max(-1)
        scores = (best - logits.logsumexp(-1)).masked_fill(~real, 0.0)
        return Canvas(tokens.masked_fill(~real, PAD), scores, torch.ones_like(canvas.done))

    def said(
        self, memory: SourceMemory, fertilities: Int[Tensor, "B S"], log_probs: Float[Tensor, "B S C"]
    ) -> Int[Tensor, "B T"]:
        """The output under given fertilities, as far as they are usable; padded with PAD."""
        return self.fill(canvas_of(self.usable(fertilities, log_probs, memory)), memory).tokens

    def stopped(self, before: Canvas, after: Canvas, memory: Memory, iteration: int) -> Bool[Tensor, "B"]:
        """Every row, after one pass."""
        return after.done


def canvas_of(fertilities: Int[Tensor, "B S"]) -> Canvas:
    """Placeholders where source tokens are copied to."""
    index = copied(fertilities)
    real = first(fertilities.sum(1), index.shape[1])
    tokens = torch.full_like(index, PLACEHOLDER).masked_fill(~real, PAD)
    done = torch.zeros(len(index), dtype=torch.bool, device=index.device)
    return Canvas(tokens, torch.zeros(index.shape, device=index.device), done, Copies(index))


def _labels(batch: Batch) -> Int[Tensor, "B S"]:
    if batch.fertilities is None:
        raise UserError(
            "nat learns from fertilities, the batch has none; make them by `hasten align`, name their file "
            "in data.fertilities"
        )
    if not torch.equal(batch.fertilities.sum(1), batch.target_mask.sum(1)):
        raise UserError("the fertilities of a row do not sum to the number of its target tokens")
    return batch.fertilities


def _most(source_length: Any) -> Any:
    return 2 * source_length + 20


def _as_they_are(terms: dict[str, LossTerm], *learnt_from: object) -> dict[str, LossTerm]:
    return terms
