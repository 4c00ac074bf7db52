"""The autoregressive Transformer: one token after the other, keys and values kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.data.batch import Batch
from hasten.models.encoder_decoder import EncoderDecoderSpec, fewest, less_one
from hasten.models.left_to_right import LeftToRight
from hasten.models.word_distillation import WordDistillation, WordDistillationSpec
from hasten.nn.loss import LossTerm
from hasten.nn.stack import Decoder


@dataclass(frozen=True, kw_only=True)
class AutoregressiveSpec(EncoderDecoderSpec):
    """An autoregressive Transformer of any depth split (6-6, 12-1, ...)."""

    kind: Literal["autoregressive"] = "autoregressive"
    """The model's name."""

    distillation: WordDistillationSpec | None = None
    """Learn from the distributions of another autoregressive model, too: that of a shared model before it shared."""

    @property
    def learns_from(self) -> tuple[str, str] | None:
        """The setting that names a teacher, and its name."""
        return None if self.distillation is None else ("model.distillation.teacher", self.distillation.teacher)

    def build(self, vocab_size: int) -> "Autoregressive":
        """A model with fresh weights."""
        return Autoregressive(self, vocab_size)

    def learnable(self, source: Sequence[int], target: Sequence[int]) -> bool:
        """Every pair of sequences can be learnt."""
        return True


class Autoregressive(LeftToRight):
    """p(y | x) = product over t of p(y_t | y_<t, x), trained by label-smoothed cross-entropy.

    Source: Vaswani et al., 2017; deep encoders with shallow decoders: Kasai et al., 2021.
    """

    def __init__(self, spec: AutoregressiveSpec, vocab_size: int):
        super().__init__(spec, vocab_size)
        self.encoder = spec.encoder()
        self.decoder = spec.decoder(Decoder)
        self.longest = less_one(fewest(self.encoder.longest, self.decoder.longest_memory, self.decoder.longest))
        self.most_steps = self.decoder.longest or 2**31
        self.distillation = None if spec.distillation is None else WordDistillation(spec.distillation)
        self._objective = _ordinary if self.distillation is None else self.distillation.terms

    def learn_from(self, teacher: "Autoregressive") -> None:
        """Take the teacher that the spec's `distillation` names, and freeze it."""
        assert self.distillation is not None
        self.distillation.learn_from(teacher)

    def most_tokens_for(self, max_tokens: int) -> int:
        """The most tokens of a target that a teacher is shown where training pairs have at most `max_tokens`."""
        return max_tokens

    def _terms(
        self, logits: Float[Tensor, "N V"], outputs: Int[Tensor, "N"], real: Bool[Tensor, "B T"], batch: Batch
    ) -> dict[str, LossTerm]:
        return self._objective(super()._terms(logits, outputs, real, batch), logits, batch)


def _ordinary(terms: dict[str, LossTerm], logits: Float[Tensor, "N V"], batch: Batch) -> dict[str, LossTerm]:
    """The objective of a model without a teacher."""
    return terms
