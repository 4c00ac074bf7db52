"""Fertilities from an autoregressive teacher: what a layer reads of the source while it writes the target."""

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hasten.attention.base import Operator
from hasten.data.alignment import apportion
from hasten.data.batch import Batch, Pair, pair_batch
from hasten.data.grouping import group_by_tokens
from hasten.errors import UserError
from hasten.models import Autoregressive, GenerationModel


def attention_fertilities(
    model: GenerationModel, pairs: Sequence[Pair], batch_tokens: int = 4096, layer: int | None = None
) -> list[list[int]]:
    """For each pair a fertility a source piece, and one for the source's end symbol; their sum is len(target).

    What position s receives, the sum over the target pieces of the weight that the layer's attention over the source
    gives it where that piece is predicted, mean over the heads, is made whole by `apportion`. Reading where the end of
    the target is predicted does not count: it makes no piece. Layers count from 1; None is the last. `batch_tokens`
    bounds the padded pieces, of the longer side, that are computed at once; it changes speed and memory, and no label
    but for rounding errors.

    Errors: `UserError` for a model that is not autoregressive, lacks the layer or is in training mode, and for weights
    that are negative or not finite. Gu et al., 2018, let an aligner decide; reading the teacher needs none, and is no
    alignment: what a layer reads need not be what it translates.
    """
    model = check_teacher(model, "the teacher", layer)
    if model.training:
        raise UserError("the teacher is in training mode, where dropout is at work; call model.eval() first")
    labels: list[list[int]] = [[] for _ in pairs]
    for group in group_by_tokens([max(map(len, pair)) + 1 for pair in pairs], batch_tokens):
        received = source_weights(model, pair_batch([pairs[i] for i in group]), layer).tolist()
        for i, weights in zip(group, received, strict=True):
            source, target = pairs[i]
            labels[i] = apportion(weights[: len(source) + 1], len(target))
    return labels


def check_teacher(model: GenerationModel, name: str, layer: int | None = None) -> Autoregressive:
    """The model, where it is autoregressive and has the layer; otherwise a `UserError` that names it."""
    if not isinstance(model, Autoregressive):
        raise UserError(
            f"{name} is a {type(model).__name__} model, which does not write piece by piece; give an autoregressive one"
        )
    if layer is not None and not 1 <= layer <= model.spec.decoder_layers:
        raise UserError(f"{name} has no decoder layer {layer}; give one from 1 to {model.spec.decoder_layers}")
    return model


def source_weights(model: Autoregressive, batch: Batch, layer: int | None = None) -> Float[Tensor, "B S"]:
    """What each source position receives from the target pieces, in float32; a row's sum is its number of pieces."""
    batch, reader = batch.to(model.embedding.weight.device), _Cross((layer or model.spec.decoder_layers) - 1)
    with torch.inference_mode():
        model.attentions(batch, reader.observe)
        assert reader.operator is not None
        weights = reader.operator.dense().float().mean(1)
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise UserError("the teacher's attention over the source has weights that are negative or not finite")
    # Row t reads y_t (BOS at 0) and predicts y_{t+1}; the row of the last piece predicts the end.
    predicts_a_piece = F.pad(batch.target_mask, (0, 1), value=False)
    assert weights.shape[1:] == (predicts_a_piece.shape[1], batch.source.shape[1])
    return weights.where(predicts_a_piece[:, :, None], 0).sum(1).where(batch.source_mask, 0).cpu()


@final
class _Cross:
    """Keeps one layer's attention over the source, so that of the others no weights are ever formed."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self.operator: Operator | None = None

    def observe(self, name: str, layer: int, operator: Operator, real: Tensor) -> None:
        """One layer of one kind."""
        if (name, layer) == ("cross", self._layer):
            self.operator = operator
