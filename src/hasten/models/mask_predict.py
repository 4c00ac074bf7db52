"""Mask-Predict: a conditional masked language model, whose output is masks at first and is said in a few passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.data.batch import Batch
from hasten.data.tokenizer import MASK, PAD
from hasten.decoding.masked import MaskedSampler, MaskedSpec
from hasten.fields import NonNegativeFloat, PositiveInt
from hasten.models.base import Canvas, Edit, Memory, ObserveAttention, reported
from hasten.models.encoder_decoder import EncoderDecoderSpec, fewest, less_one
from hasten.models.tied import Tied
from hasten.nn.decoder_inputs import soft_copy, uniform_copy
from hasten.nn.draws import row_draws
from hasten.nn.lengths import LengthForm, LengthHead
from hasten.nn.loss import LossTerm, cross_entropy
from hasten.nn.parallel import ParallelDecoder
from hasten.nn.stack import Observer, unobserved


@dataclass(frozen=True, kw_only=True)
class MaskPredictSpec(EncoderDecoderSpec):
    """A model that predicts masked tokens from the source and the tokens that are not masked."""

    kind: Literal["mask_predict"] = "mask_predict"
    """The model's name."""
    decoder_input: Literal["mask", "uniform_copy", "soft_copy"] = "mask"
    """What masked positions read: the mask's embedding, or states of the source, copied evenly or mixed by distance."""
    length_form: LengthForm = "offset"
    """Output lengths are told as differences to the source's, or as they are."""
    length_most: PositiveInt = 64
    """The largest difference, or the largest length; lengths beyond are learnt as the nearest."""
    length_weight: NonNegativeFloat = 0.1
    """Weight of the lengths' cross-entropy beside that of the tokens."""

    decoding: MaskedSpec = field(default_factory=MaskedSpec)
    """What is masked again after each pass. None of it touches the weights."""

    def build(self, vocab_size: int) -> "MaskPredict":
        """A model with fresh weights."""
        return MaskPredict(self, vocab_size)

    def learnable(self, source: Sequence[int], target: Sequence[int]) -> bool:
        """Every pair of sequences can be learnt."""
        return True


def hidden(mask: Bool[Tensor, "B U"], generator: torch.Generator) -> Bool[Tensor, "B U"]:
    """Which tokens of every row a training step masks: n of its N, n uniform on 1 .. N, all sets of n equally probable.

    Rows without tokens have none masked. `mask` is True on real tokens.
    """
    own, each = row_draws(mask, generator)
    total = mask.sum(1)
    # The product may round up to N.
    n = (1 + (own[:, 0] * total).long()).minimum(total)
    return (each.argsort(1).argsort(1) < n[:, None]) & mask


LookUp = Callable[[Tensor], Tensor]
Unsaid = Callable[[LookUp, Memory, Int[Tensor, "B"], int], Tensor]
"""What stands for masked tokens, (B, T, D) or (1, 1, D) for all of them: from the table, the source, lengths and T."""


def _mask_embedding(look_up: LookUp, memory: Memory, lengths: Tensor, width: int) -> Tensor:
    return look_up(torch.tensor([[MASK]], device=lengths.device))


def _uniform_copy(look_up: LookUp, memory: Memory, lengths: Tensor, width: int) -> Tensor:
    index = uniform_copy(memory.lengths, lengths)
    rows = torch.arange(len(index), device=index.device)[:, None]
    return _widened(memory.states[rows, index], width)


def _soft_copy(look_up: LookUp, memory: Memory, lengths: Tensor, width: int) -> Tensor:
    return _widened(soft_copy(memory.states, memory.mask, lengths), width)


def _widened(x: Float[Tensor, "B n D"], width: int) -> Float[Tensor, "B T D"]:
    return F.pad(x, (0, 0, 0, width - x.shape[1]))


UNSAID: dict[str, Unsaid] = {"mask": _mask_embedding, "uniform_copy": _uniform_copy, "soft_copy": _soft_copy}


class MaskPredict(Tied):
    """p(y_S | y without S, x) = prod over i in S of p(y_i | y without S, x), for any set S of masked positions.

    Trained by the cross-entropy of masked tokens (`hidden` draws them) and of the length, which the encoder's states
    tell. It decodes from masks alone, in passes that `decoding` describes; several lengths are tried side by side where
    several candidates are wanted. Outputs have one token at least.
    Source: Ghazvininejad et al., 2019, "Mask-Predict: parallel decoding of conditional masked language models". Layers
    are pre-norm and the length is read from the mean of the source's states, where the paper's layers are post-norm and
    its length has an encoder position of its own.
    """

    def __init__(self, spec: MaskPredictSpec, vocab_size: int):
        super().__init__(spec, vocab_size)
        self.encoder = spec.encoder()
        self.decoder = spec.decoder(ParallelDecoder)
        self.lengths = LengthHead(spec.d_model, spec.length_form, spec.length_most)
        source = less_one(fewest(self.encoder.longest, self.decoder.longest_memory))
        self.longest = fewest(source, self.decoder.longest)
        self.sampler = MaskedSampler(spec.decoding)
        self.edits = (Edit("fill", self._fill), Edit("mask", self._mask))
        self._unsaid = UNSAID[spec.decoder_input]

    def states(
        self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"], memory: Memory, observe: Observer = unobserved
    ) -> Float[Tensor, "B T D"]:
        """Decoder states of an output some of whose tokens are masked; `mask` is True on real positions."""
        unsaid = self._unsaid(self.look_up, memory, mask.sum(1), mask.shape[1])
        inputs = torch.where((tokens == MASK)[..., None], unsaid, self.look_up(tokens))
        return self.decoder(self.placed(inputs), mask, memory.states, memory.mask, observe)

    def loss(self, batch: Batch, generator: torch.Generator) -> dict[str, LossTerm]:
        """Cross-entropy of the masked tokens, and of the lengths."""
        memory = self.encode(batch.source, batch.source_mask)
        where = hidden(batch.target_mask, generator)
        states = self.states(batch.target.masked_fill(where, MASK), batch.target_mask, memory)
        tokens = cross_entropy(self.logits(states[where]), batch.target[where], self.spec.label_smoothing)
        lengths = batch.target_mask.sum(1)
        return {
            "tokens": LossTerm(tokens, where.sum()),
            "length": self.lengths.loss(memory.states, memory.mask, lengths, self.spec.length_weight),
        }

    def attentions(self, batch: Batch, observe: ObserveAttention) -> None:
        """Of the "encoder", of the "decoder" over the target, nothing of it masked, and its "cross" attention."""
        memory = self.encode(batch.source, batch.source_mask, reported(observe, {"self": "encoder"}, batch.source_mask))
        told = reported(observe, {"self": "decoder", "cross": "cross"}, batch.target_mask)
        self.states(batch.target, batch.target_mask, memory, told)

    def start(self, memory: Memory) -> Canvas:
        """Masks, as many as the most probable length."""
        return self.starts(memory, 1)

    def starts(self, memory: Memory, candidates: int) -> Canvas:
        """Masks for the most probable lengths of every row, all different, the most probable first."""
        lengths, _ = self.lengths.best(memory.states, memory.mask, candidates, self.decoder.longest)
        return self.sampler.start(lengths.flatten())

    def _fill(self, canvas: Canvas, memory: Memory, iteration: int) -> Canvas:
        where = self.sampler.open(canvas)
        logits = self.logits(self.states(canvas.tokens, canvas.tokens != PAD, memory)[where]).float()
        best, tokens = (logits + self.banned).max(-1)
        return self.sampler.fill(canvas, tokens, best - logits.logsumexp(-1))

    def _mask(self, canvas: Canvas, memory: Memory, iteration: int) -> Canvas:
        return self.sampler.mask(canvas)

    def stopped(self, before: Canvas, after: Canvas, memory: Memory, iteration: int) -> Bool[Tensor, "B"]:
        """Rows in which nothing is masked any more."""
        return self.sampler.finished(after)
