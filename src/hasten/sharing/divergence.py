"""How alike layers attend: one minus the Jensen-Shannon divergence between what their heads read."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hasten.attention.base import Operator
from hasten.data.batch import Batch
from hasten.errors import UserError
from hasten.models.base import GenerationModel

CAUSAL = frozenset({"decoder"})
"""Kinds of attention whose first position reads nothing but itself: it is alike in all layers and tells nothing."""


@dataclass(frozen=True)
class Similarity:
    """How alike the layers of a stack attend: `mu[i][j]` in [0, 1], layers from 0; symmetric, 1 on the diagonal.

    counts[i][j]: the pairs of rows, one of each layer, over which the mean was taken.
    """

    mu: tuple[tuple[float, ...], ...]
    counts: tuple[tuple[int, ...], ...]


def js_divergence(p: Float[Tensor, "*rows S"], q: Float[Tensor, "*rows S"]) -> Float[Tensor, "*rows"]:
    """JSD(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2 in bits, H the entropy; rows sum to 1. From 0 to 1.

    Computed in float32 or wider. Source: Lin, 1991.
    """
    p, q = _wide(p), _wide(q)
    return _divergence(p, q, _entropy(p), _entropy(q))


def measure(model: GenerationModel, batches: Iterable[Batch]) -> dict[str, Similarity]:
    """For each kind of attention of the model ("encoder", "decoder", ...), how alike its layers attend.

    mu(i, j) is the mean, over all heads, query positions and sentences, of 1 - JSD between row and row: head h of
    layer i with head h of layer j, since that is the head whose weights would be used. Left out are padded queries, the
    first position of causal self-attention, and rows where either layer reads nothing. Every row counts the same.
    Weights that do not sum to 1 are divided by the sum of their magnitudes; positive and negative ones count as
    readings of different keys. So a layer's overall scale tells nothing here. Of layers with second projections, the
    rows of global tokens are those of the mechanism.
    Only sums are kept from batch to batch. Within one, the weights of all layers are in memory at once.
    Errors: `UserError` for a model in training mode or without reports, for weights that are not finite, and where
    there is nothing to compare.
    Source: Xiao et al., 2019, with the similarity taken as 1 - JSD in bits.
    """
    sums: dict[str, _LayerSums] = {}
    for layers_of in _readings(model, batches):
        for name, layers in layers_of.items():
            sums.setdefault(name, _LayerSums(len(layers))).add(layers)
    if not sums:
        raise UserError("no sentences to measure the similarity of layers on")
    return {name: own.similarity(name) for name, own in sums.items()}


def head_divergences(
    model: GenerationModel, batches: Iterable[Batch], name: str, layers: tuple[int, int]
) -> Float[Tensor, "H H"]:
    """Mean JSD between every head of one layer (rows) and every head of another (columns); layers from 0.

    `name` is that of a kind of attention of the model. What is left out, and errors: as in `measure`.
    """
    divergence, counts = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for layers_of in _readings(model, batches):
        if name not in layers_of:
            raise UserError(f"the model has no attention {name!r}; it has {', '.join(layers_of)}")
        n_layers = len(layers_of[name])
        if not all(0 <= layer < n_layers for layer in layers):
            raise UserError(f"layers {layers} of {name!r}: give two from 0 to {n_layers - 1}")
        one, other = _shares([layers_of[name][layer] for layer in layers])
        entropies, reads = (_entropy(one), _entropy(other)), (_reads(one), _reads(other))
        found = []
        for h in range(one.shape[1]):  # a head with all at once: memory stays that of a layer's weights
            both = reads[0][:, h, None] & reads[1]
            apart = _divergence(one[:, h, None], other, entropies[0][:, h, None], entropies[1])
            found.append((_total(apart, both), both.sum(0).cpu()))
        divergence = divergence + torch.stack([total for total, _ in found])
        counts = counts + torch.stack([count for _, count in found])
    if not counts.dim() or not counts.all():
        raise UserError(f"{name}: there are no query positions where both layers read something")
    return divergence / counts


@final
class _LayerSums:
    """Sums over rows, for all pairs of layers."""

    def __init__(self, n_layers: int):
        self.divergence = torch.zeros(n_layers, n_layers, dtype=torch.float64)
        self.counts = torch.zeros(n_layers, n_layers, dtype=torch.int64)

    def add(self, layers: Sequence[Float[Tensor, "N H S"]]) -> None:
        """The rows of one batch."""
        layers = _shares(layers)
        entropies, reads = [_entropy(own) for own in layers], [_reads(own) for own in layers]
        for i, one in enumerate(layers):
            self.counts[i, i] += int(reads[i].sum())
            for j in range(i):
                both = reads[i] & reads[j]
                if one is not layers[j]:  # layers that share are not compared: they are the same
                    apart = _divergence(one, layers[j], entropies[i], entropies[j])
                    self.divergence[i, j] += float(_total(apart, both).sum())
                self.counts[i, j] += int(both.sum())

    def similarity(self, name: str) -> Similarity:
        """The means, mirrored."""
        divergence = self.divergence + self.divergence.T
        counts = self.counts.tril() + self.counts.tril(-1).T
        if not counts.all():
            i, j = (counts == 0).nonzero()[0].tolist()
            raise UserError(
                f"{name}: there are no query positions where both layer {i + 1} and layer {j + 1} read something"
            )
        mu = (1 - divergence / counts).clamp(0, 1)
        return Similarity(tuple(map(tuple, mu.tolist())), tuple(map(tuple, counts.tolist())))


def _readings(model: GenerationModel, batches: Iterable[Batch]) -> Iterator[dict[str, list[Tensor]]]:
    """For each batch and kind of attention the weights of each layer at real queries, (N, H, S)."""
    if model.training:
        raise UserError("the model is in training mode, where dropout is at work; call model.eval() first")
    device = model.embedding.weight.device
    for batch in batches:
        reader = _Reader()
        with torch.inference_mode():
            model.attentions(batch.to(device), reader.observe)
        yield reader.found


@final
class _Reader:
    """The rows of one batch, of each kind of attention layer by layer; those of layers that share are one tensor."""

    def __init__(self) -> None:
        self.found: dict[str, list[Tensor]] = {}
        self._formed: dict[int, tuple[Operator, Tensor]] = {}  # an operator lives here, so its id stays its own

    def observe(self, name: str, layer: int, operator: Operator, real: Tensor) -> None:
        """One layer."""
        layers = self.found.setdefault(name, [])
        assert layer == len(layers), "layers are reported in order"
        if id(operator) not in self._formed:
            self._formed[id(operator)] = operator, _rows(operator, _telling(name, real), f"{name}, layer {layer + 1}")
        layers.append(self._formed[id(operator)][1])


def _telling(name: str, real: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """The query positions that tell something."""
    if name not in CAUSAL:
        return real
    return real & (torch.arange(real.shape[1], device=real.device) > 0)


def _rows(operator: Operator, queries: Bool[Tensor, "B T"], where: str) -> Float[Tensor, "N H S"]:
    """The weights at these queries; learnt tokens before the sequence are keys, and no queries."""
    weights = operator.dense()
    rows = _wide(weights[:, :, weights.shape[2] - queries.shape[1] :].transpose(1, 2)[queries])
    if not rows.isfinite().all():
        raise UserError(f"{where}: attention weights are not finite; the model's weights are damaged")
    return rows


def _shares(layers: Sequence[Float[Tensor, "N H S"]]) -> list[Float[Tensor, "N H K"]]:
    """Rows as distributions over the keys, or over keys and signs where any layer has negative weights."""
    signed = any(bool((own < 0).any()) for own in layers)
    made: dict[int, Tensor] = {}
    for own in layers:
        if id(own) not in made:
            parts = torch.cat((own.clamp(min=0), (-own).clamp(min=0)), -1) if signed else own
            total = parts.sum(-1, keepdim=True)
            made[id(own)] = parts / total.where(total > 0, 1)
    return [made[id(own)] for own in layers]


def _reads(rows: Float[Tensor, "N H K"]) -> Bool[Tensor, "N H"]:
    return (rows > 0).any(-1)


def _total(values: Float[Tensor, "N H"], chosen: Bool[Tensor, "N H"]) -> Float[Tensor, "H"]:
    """Sums over rows, in float64, which some devices lack: a corpus has millions."""
    return values.where(chosen, 0).cpu().sum(0, dtype=torch.float64)


def _divergence(p: Tensor, q: Tensor, entropy_p: Tensor, entropy_q: Tensor) -> Tensor:
    # Rounding may leave the range by an ulp.
    return (_entropy((p + q) / 2) - (entropy_p + entropy_q) / 2).clamp(0, 1)


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1) / math.log(2)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize >= 4 else x.float()
