"""CTC: every output token in one pass over the upsampled source."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hasten.attention import AttentionSpec, FullSpec
from hasten.data.batch import Batch
from hasten.data.tokenizer import BLANK, PAD
from hasten.decoding.beam import Hypothesis
from hasten.decoding.ctc_beam import collapse_scored, prefix_beam_search
from hasten.decoding.ctc_loss import best_alignment, ctc_loss, frames_needed
from hasten.errors import NOT_FINITE, UserError
from hasten.fields import Depth, DepthOrNone, PositiveInt, Share, Spec
from hasten.models.base import Canvas, Edit, Memory, ObserveAttention, reported
from hasten.models.encoder_decoder import fewest, less_one
from hasten.models.tied import Tied
from hasten.nn.glancing import share_at, shown
from hasten.nn.loss import LossTerm
from hasten.nn.stack import Encoder, Observer, unobserved
from hasten.nn.words import EveryFrame, FrameWords, ListedFrames


@dataclass(frozen=True, kw_only=True)
class CTCSpec(Spec):
    """A one-pass model: encode, upsample, refine, collapse."""

    kind: Literal["ctc"] = "ctc"
    """The model's name."""
    d_model: PositiveInt = 256
    """Width of the states."""
    n_heads: PositiveInt = 4
    """Attention heads; divides d_model."""
    d_ff: PositiveInt = 1024
    """Width inside the feed-forward networks."""
    encoder_layers: Depth = 6
    """Layers at the length of the source."""
    refiner_layers: DepthOrNone = 3
    """Layers at the upsampled length."""
    upsample: PositiveInt = 2
    """Frames per source token; a pair can be learnt if frames >= target tokens + adjacent equal target tokens."""
    dropout: Share = 0.1
    """Dropout after every sub-layer and inside the feed-forward networks."""
    label_smoothing: Share = 0.0
    """Weight of the distance between a frame's distribution and the uniform one."""
    glancing_start: Share = 0.5
    """Share of wrongly predicted frames that are shown the right token, at the start of the run; 0 turns it off."""
    glancing_end: Share = 0.3
    """The same share at the end of the run; linear in between, so the schedule fits every run length."""
    encoder_attention: tuple[AttentionSpec, ...] = (FullSpec(),)
    """Self-attention at the length of the source: one spec for all layers, or one per layer."""
    refiner_attention: tuple[AttentionSpec, ...] = (FullSpec(),)
    """Self-attention at the upsampled length: one spec for all layers, or one per layer."""

    encoder_sharing: tuple[PositiveInt, ...] = ()
    """For each layer at the source's length, from 1, the layer whose attention weights it uses; empty: its own."""
    refiner_sharing: tuple[PositiveInt, ...] = ()
    """The same for the layers at the upsampled length."""

    def build(self, vocab_size: int) -> "CTC":
        """A model with fresh weights."""
        return CTC(self, vocab_size)

    def learnable(self, source: Sequence[int], target: Sequence[int]) -> bool:
        """Whether the frames of `source` (its end symbol counts) can carry `target`."""
        return self.upsample * (len(source) + 1) >= frames_needed(target)


class CTC(Tied):
    """p(y | x) = sum over frame sequences that collapse to y of prod over t of p(a_t | x).

    Each of the S source states becomes `upsample` frames; collapse merges equal neighbours, then drops blanks.
    Source: Libovicky and Helcl, 2018 (upsampling by projection); Graves et al., 2006 (CTC). Training shows the model a
    share of the frames it gets wrong (glancing): Qian et al., 2021, combined with CTC in Gu and Kong, 2021.
    """

    def __init__(self, spec: CTCSpec, vocab_size: int):
        super().__init__(spec, vocab_size, says=(BLANK,))
        shape = (spec.d_model, spec.n_heads, spec.d_ff, spec.dropout)
        self.encoder = Encoder(spec.encoder_layers, *shape, spec.encoder_attention, spec.encoder_sharing)
        self.upsample = nn.Linear(spec.d_model, spec.upsample * spec.d_model)
        # Frames begin as slightly different copies of their source state: a given encoder is of use at once.
        copies = torch.eye(spec.d_model).repeat(spec.upsample, 1)
        nn.init.normal_(self.upsample.weight, std=0.02)
        self.upsample.weight.data += copies
        nn.init.zeros_(self.upsample.bias)
        self.refiner = Encoder(
            spec.refiner_layers, *shape, spec.refiner_attention, spec.refiner_sharing, name="refiner"
        )
        frames = None if self.refiner.longest is None else self.refiner.longest // spec.upsample
        self.longest = less_one(fewest(self.encoder.longest, frames))
        self.edits = (Edit("fill", self._fill), Edit("collapse", self._collapse))
        self.glancing = spec.glancing_start

    def encode(self, source: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], observe: Observer = unobserved) -> Memory:
        """The frames: encoder states, each projected to `upsample` vectors (B, upsample * S, D)."""
        states = super().encode(source, mask, observe).states
        frames = self.upsample(states).view(len(source), -1, self.spec.d_model)
        return Memory(frames, mask.repeat_interleave(self.spec.upsample, dim=1))

    def frame_logits(self, frames: Float[Tensor, "B T D"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Scores of every vocabulary entry at every frame, after the refining layers."""
        return self.logits(self._refined(frames, mask))

    def _refined(self, frames: Float[Tensor, "B T D"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        return self.refiner(self.positions(frames), mask)

    def keep_to(self, memory: Memory, lists: Sequence[Int[Tensor, "_"]]) -> Memory:
        """With each row's output limited to its list."""
        return replace(memory, words=ListedFrames.of(self.embedding.weight, self.banned, lists))

    def _words(self, memory: Memory) -> FrameWords:
        return memory.words if isinstance(memory.words, FrameWords) else EveryFrame(self.logits, self.banned)

    def attentions(self, batch: Batch, observe: ObserveAttention) -> None:
        """Of the "encoder" and, over the frames, of the "refiner"; the target is not read."""
        told = reported(observe, {"self": "encoder"}, batch.source_mask)
        memory = self.encode(batch.source, batch.source_mask, told)
        told = reported(observe, {"self": "refiner"}, memory.mask)
        self.refiner(self.positions(memory.states), memory.mask, observe=told)

    def progress(self, fraction: float) -> None:
        """Move the glancing share along its schedule."""
        self.glancing = share_at(fraction, self.spec.glancing_start, self.spec.glancing_end)

    def loss(self, batch: Batch, generator: torch.Generator) -> dict[str, LossTerm]:
        """CTC loss per target token; infeasible rows count nothing and give no gradient."""
        memory = self.encode(batch.source, batch.source_mask)
        frames = self._glance(memory, batch, generator) if self.training and self.glancing > 0 else memory.states
        logits = self.frame_logits(frames, memory.mask)
        lengths = batch.target_mask.sum(1)
        losses = ctc_loss(logits, memory.lengths, batch.target, lengths, blank=BLANK)
        possible = losses.isfinite()
        terms = {"ctc": LossTerm(losses[possible].sum(), lengths[possible].sum(), 1 - self.spec.label_smoothing)}
        if self.spec.label_smoothing:
            real = logits[memory.mask].float()
            distance = real.logsumexp(-1) - real.mean(-1)
            terms["smoothing"] = LossTerm(distance.sum(), memory.mask.sum(), self.spec.label_smoothing)
        return terms

    def _glance(self, memory: Memory, batch: Batch, generator: torch.Generator) -> Float[Tensor, "B T D"]:
        """Frames with some inputs replaced by the token they should say.

        The share `glancing` of the frames that disagree with the best alignment of the target is drawn per row,
        uniformly over all real frames.
        """
        with torch.no_grad():
            guess = self.frame_logits(memory.states, memory.mask)
            path = best_alignment(guess, memory.lengths, batch.target, batch.target_mask.sum(1), blank=BLANK)
            wrong = ((guess + self.banned).argmax(-1) != path) & memory.mask
            draws = torch.rand(path.shape, generator=generator, device=generator.device).to(path.device)
            told = shown(wrong, memory.mask, self.glancing, draws)
        return torch.where(told[..., None], self.look_up(path), memory.states)

    def start(self, memory: Memory) -> Canvas:
        """All frames blank."""
        tokens = torch.full_like(memory.mask, BLANK, dtype=torch.int64).masked_fill(~memory.mask, PAD)
        scores = torch.zeros(tokens.shape, device=tokens.device)
        return Canvas(tokens, scores, torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device))

    def frame_log_probs(self, memory: Memory) -> Float[Tensor, "B T V"]:
        """Log probabilities at every frame, 0 at padding; symbols that are no text have -inf, the blank does not."""
        states = self._refined(memory.states, memory.mask)[memory.mask]
        log_probs = self._words(memory).log_probs(states, memory.lengths.tolist())
        filled = log_probs.new_zeros(*memory.mask.shape, log_probs.shape[1])
        return filled.masked_scatter(memory.mask[..., None], log_probs)

    def _fill(self, canvas: Canvas, memory: Memory, iteration: int) -> Canvas:
        states = self._refined(memory.states, memory.mask)[memory.mask]
        best, tokens = self._words(memory).best(states, memory.lengths.tolist())
        scores = best.new_zeros(memory.mask.shape).masked_scatter(memory.mask, best)
        padding = torch.full_like(canvas.tokens, PAD)
        return Canvas(padding.masked_scatter(memory.mask, tokens), scores, canvas.done)

    def _collapse(self, canvas: Canvas, memory: Memory, iteration: int) -> Canvas:
        collapsed = collapse_scored(canvas.tokens, canvas.scores, memory.lengths, blank=BLANK, pad=PAD)
        return Canvas(collapsed.tokens, collapsed.scores, torch.ones_like(canvas.done))

    def stopped(self, before: Canvas, after: Canvas, memory: Memory, iteration: int) -> Bool[Tensor, "B"]:
        """Every row, after one pass."""
        return after.done

    def candidates(self, memory: Memory, *, beam: int, n_best: int) -> list[list[Hypothesis]]:
        """The `n_best` most probable token sequences of each row by prefix beam search."""
        results = []
        log_probs = self.frame_log_probs(memory)
        if log_probs.isnan().any():
            raise UserError(NOT_FINITE)
        for row, length in zip(log_probs, memory.lengths.tolist(), strict=True):
            found = prefix_beam_search(row[:length], blank=BLANK, beam=beam, n_best=n_best, top_tokens=2 * beam)
            results.append([Hypothesis(list(tokens), log_prob, log_prob) for tokens, log_prob in found])
        return results
