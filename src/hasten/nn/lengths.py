"""How long the output will be, read from the encoder's states."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hasten.errors import NOT_FINITE, UserError
from hasten.nn.loss import LossTerm

LengthForm = Literal["offset", "absolute"]


class LengthHead(nn.Module):
    """p(T | source) = softmax(W mean of the source's states): 1 to `most` tokens, or up to `most` more or fewer.

    form "absolute": classes are the lengths 1 .. most. "offset": they are the differences -most .. most to the number
    of source positions. Lengths that no class stands for are learnt as the nearest one; `clipped` counts them.
    Source: Ghazvininejad et al., 2019, section 3 (absolute); Gu et al., 2019 (offset).
    """

    def __init__(self, d_model: int, form: LengthForm = "offset", most: int = 128):
        super().__init__()
        self.form, self.most = form, most
        self.classes = nn.Linear(d_model, most if form == "absolute" else 2 * most + 1)

    def log_probs(
        self, states: Float[Tensor, "B S D"], mask: Bool[Tensor, "B S"]
    ) -> Float[Tensor, "B C"]:  # fmt: skip
        """Log probabilities of the classes, in float32; those that stand for no length of 1 or more have -inf."""
        n = mask.sum(1, keepdim=True)
        mean = states.masked_fill(~mask[..., None], 0.0).sum(1) / n
        scores = self.classes(mean).float()
        return scores.masked_fill(self._lengths(n) < 1, -torch.inf).log_softmax(-1)

    def loss(
        self,
        states: Float[Tensor, "B S D"],
        mask: Bool[Tensor, "B S"],
        lengths: Int[Tensor, "B"],
        weight: float = 1.0,
        *,
        detach: bool = False,
    ) -> LossTerm:
        """-log p(length) summed over the rows; 0 is learnt as 1. `detach`: the states get no gradient from it."""
        log_probs = self.log_probs(states.detach() if detach else states, mask)
        count = torch.tensor(len(mask), device=mask.device)
        return LossTerm(-log_probs.gather(1, self._class(lengths, mask)).sum(), count, weight)

    def clipped(self, mask: Bool[Tensor, "B S"], lengths: Int[Tensor, "B"]) -> int:
        """How many lengths no class stands for."""
        real = self._lengths(mask.sum(1, keepdim=True)).gather(1, self._class(lengths, mask))[:, 0]
        return int((real != lengths).sum())

    def best(
        self,
        states: Float[Tensor, "B S D"],
        mask: Bool[Tensor, "B S"],
        candidates: int = 1,
        longest: int | None = None,
    ) -> tuple[Int[Tensor, "B k"], Float[Tensor, "B k"]]:
        """The most probable lengths, all different, and their log probabilities.

        Equal probabilities: the shorter first. `longest`: no length above it. `UserError` where there are fewer lengths
        than `candidates`, or where the model's probabilities are not numbers.
        """
        log_probs = self.log_probs(states, mask)
        if log_probs.isnan().any():
            raise UserError(NOT_FINITE)
        if longest is not None:
            log_probs = log_probs.masked_fill(self._lengths(mask.sum(1, keepdim=True)) > longest, -torch.inf)
        possible = int((log_probs > -torch.inf).sum(1).min())
        if candidates > possible:
            raise UserError(
                f"{candidates} lengths at once; this model knows {possible} for one of the sources: "
                f"use a beam of at most {possible}"
            )
        found, classes = log_probs.sort(descending=True, stable=True)
        return self._lengths(mask.sum(1, keepdim=True)).gather(1, classes)[:, :candidates], found[:, :candidates]

    def _lengths(self, n: Int[Tensor, "B 1"]) -> Int[Tensor, "B C"]:
        """The length that each class stands for."""
        numbers = torch.arange(self.classes.out_features, device=n.device)
        return (numbers + 1).expand(len(n), -1) if self.form == "absolute" else n + numbers - self.most

    def _class(self, lengths: Int[Tensor, "B"], mask: Bool[Tensor, "B S"]) -> Int[Tensor, "B 1"]:
        n = mask.sum(1)
        wanted = lengths.clamp(min=1)
        number = wanted - 1 if self.form == "absolute" else (wanted - n).clamp(-self.most, self.most) + self.most
        # A row of few source positions has no class for less than one token.
        lowest = torch.zeros_like(n) if self.form == "absolute" else (1 - n + self.most).clamp(min=0)
        return number.clamp(max=self.classes.out_features - 1).maximum(lowest)[:, None]
