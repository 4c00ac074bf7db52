"""A sequence classifier: an encoder with any attention, pooled to one vector."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hasten.attention import AttentionSpec, FullSpec
from hasten.fields import Depth, PositiveInt, Share, Spec
from hasten.nn.dropout import Dropout
from hasten.nn.loss import LossTerm, cross_entropy
from hasten.nn.positions import Sinusoids
from hasten.nn.stack import Encoder


@dataclass(frozen=True, kw_only=True)
class ClassifierSpec(Spec):
    """An encoder whose pooled states say the class of a sequence."""

    d_model: PositiveInt = 256
    """Width of the states."""
    n_heads: PositiveInt = 4
    """Attention heads; divides d_model."""
    d_ff: PositiveInt = 1024
    """Width inside the feed-forward networks."""
    n_layers: Depth = 4
    """Layers of the encoder."""
    dropout: Share = 0.1
    """Dropout after every sub-layer and inside the feed-forward networks."""
    label_smoothing: Share = 0.0
    """Share of the target probability that is spread over the classes."""
    pooling: Literal["mean", "first"] = "mean"
    """What is read of the states: the mean of the real tokens, or the first real token, which should then be global."""
    attention: tuple[AttentionSpec, ...] = (FullSpec(),)
    """The encoder's self-attention: one spec for all layers, or one per layer."""

    def build(self, vocab_size: int, n_classes: int) -> "Classifier":
        """A model with fresh weights."""
        return Classifier(self, vocab_size, n_classes)


class Classifier(nn.Module):
    """p(class | tokens) = softmax(W pool(encoder(embedding + positions)) + b).

    tokens (B, S), mask (B, S) True on real tokens, labels (B,). `marked` (B, S) names tokens that are global, for
    mechanisms that take marks (`Mask.marked`). Positions count places of the tensor, so padding belongs on the right.
    Source: the encoder of Vaswani et al., 2017, pre-norm.
    """

    def __init__(self, spec: ClassifierSpec, vocab_size: int, n_classes: int):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(vocab_size, spec.d_model)
        nn.init.normal_(self.embedding.weight, std=spec.d_model**-0.5)
        self.positions = Sinusoids(spec.d_model)
        self.dropout = Dropout(spec.dropout)
        self.encoder = Encoder(spec.n_layers, spec.d_model, spec.n_heads, spec.d_ff, spec.dropout, spec.attention)
        self.pool = {"mean": mean_of_real, "first": first_real}[spec.pooling]
        self.output = nn.Linear(spec.d_model, n_classes)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(
        self, tokens: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], marked: Bool[Tensor, "B S"] | None = None
    ) -> Float[Tensor, "B C"]:
        """Scores of every class."""
        x = self.dropout(self.positions(self.embedding(tokens) * self.spec.d_model**0.5))
        return self.output(self.pool(self.encoder(x, mask, marked), mask))

    def loss(
        self,
        tokens: Int[Tensor, "B S"],
        mask: Bool[Tensor, "B S"],
        labels: Int[Tensor, "B"],
        marked: Bool[Tensor, "B S"] | None = None,
    ) -> LossTerm:
        """Cross-entropy of the labels, summed over the batch."""
        total = cross_entropy(self.forward(tokens, mask, marked), labels, self.spec.label_smoothing)
        return LossTerm(total, torch.tensor(len(labels), device=labels.device))


def mean_of_real(x: Float[Tensor, "B S D"], mask: Bool[Tensor, "B S"]) -> Float[Tensor, "B D"]:
    """The mean over real positions; 0 where there is none."""
    return x.masked_fill(~mask[..., None], 0.0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def first_real(x: Float[Tensor, "B S D"], mask: Bool[Tensor, "B S"]) -> Float[Tensor, "B D"]:
    """The state at the first real position; that of the first position where there is none."""
    return x[torch.arange(len(x), device=x.device), mask.long().argmax(1)]
