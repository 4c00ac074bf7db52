"""Fertility: how many target tokens a source token becomes. Its distribution, choices, and what they copy."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hasten.nn.loss import LossTerm


class FertilityHead(nn.Module):
    """p(f_i | source) = softmax(W h_i) over 0 .. most, from every encoder state h_i, in float32.

    Source: Gu et al., 2018, section 3.2.
    """

    def __init__(self, d_model: int, most: int):
        super().__init__()
        self.most = most
        self.classes = nn.Linear(d_model, most + 1)

    def log_probs(self, states: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows C"]:
        """Log probabilities of the fertilities 0 .. most at every position, in float32."""
        return self.classes(states).float().log_softmax(-1)

    def loss(
        self,
        states: Float[Tensor, "B S D"],
        mask: Bool[Tensor, "B S"],
        fertilities: Int[Tensor, "B S"],
        weight: float = 1.0,
    ) -> LossTerm:
        """-log p(f) over the real positions; a label above `most` is learnt as `most`."""
        log_probs = self.log_probs(states[mask])
        wanted = fertilities[mask].clamp(max=self.most)
        return LossTerm(F.nll_loss(log_probs, wanted, reduction="sum"), mask.sum(), weight)


def most_probable(log_probs: Float[Tensor, "B S C"]) -> Int[Tensor, "B S"]:
    """The most probable fertility of every position."""
    return log_probs.argmax(-1)


def average(log_probs: Float[Tensor, "B S C"]) -> Int[Tensor, "B S"]:
    """The expected fertility of every position, rounded, halves up."""
    fertilities = torch.arange(log_probs.shape[-1], device=log_probs.device)
    return ((log_probs.exp() * fertilities).sum(-1) + 0.5).floor().long()


def drawn(
    log_probs: Float[Tensor, "B S C"], uniform: Float[Tensor, "B S"], temperature: float = 1.0
) -> Int[Tensor, "B S"]:
    """A fertility a position with probability p^(1 / temperature) / its sum, by uniform numbers from [0, 1)."""
    reached = (log_probs / temperature).softmax(-1).cumsum(-1)
    # Rounding may leave the last sum below 1.
    return (reached <= uniform[..., None]).sum(-1).clamp(max=log_probs.shape[-1] - 1)


def noise(seed: int, candidate: int, length: int) -> Float[Tensor, "S"]:
    """Uniform numbers from [0, 1): number i is a function of the seed, the candidate and i, whatever the length."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + candidate) % 2**63)
    return torch.rand(length, generator=generator)


def feasible(
    fertilities: Int[Tensor, "B S"],
    log_probs: Float[Tensor, "B S C"],
    mask: Bool[Tensor, "B S"],
    limit: Int[Tensor, "B"],
) -> Int[Tensor, "B S"]:
    """The fertilities that are used: none at padding, at least 1 and at most `limit` in all.

    Where all are 0, the position that is least likely to have 0 gets 1, of several the first.
    """
    used = fertilities.masked_fill(~mask, 0)
    likeliest = log_probs[..., 0].masked_fill(~mask, torch.inf).argmin(1, keepdim=True)
    one = torch.zeros_like(used).scatter(1, likeliest, 1)
    return capped(torch.where(used.sum(1, keepdim=True) == 0, one, used), limit)


def capped(fertilities: Int[Tensor, "B S"], limit: Int[Tensor, "B"]) -> Int[Tensor, "B S"]:
    """Rows whose sum exceeds their limit, in proportion: f_i limit / sum, by largest remainders; the sum is the limit.

    Every part of the source keeps its share, where dropping what is too much from the right would drop the end. Of
    equal remainders the first is rounded up. No fertility grows. Source: Hamilton's method of apportionment.
    """
    total = fertilities.sum(1, keepdim=True)
    over = total > limit[:, None]
    scaled, total = fertilities * limit[:, None], total.clamp(min=1)
    whole, rest = scaled // total, scaled % total
    left = limit[:, None] - whole.sum(1, keepdim=True)
    rank = rest.argsort(dim=1, descending=True, stable=True).argsort(1)
    return torch.where(over, whole + (rank < left), fertilities)


def copied(fertilities: Int[Tensor, "B S"]) -> Int[Tensor, "B T"]:
    """For each of T target positions the source position it copies: i stands there f_i times, in order.

    T is the largest sum, at least 1; beyond a row's own sum stands 0.
    """
    ends = fertilities.cumsum(1)
    places = torch.arange(max(1, int(ends[:, -1].max())), device=ends.device).expand(len(ends), -1)
    index = torch.searchsorted(ends, places.contiguous(), right=True)
    return index.masked_fill(places >= ends[:, -1:], 0)
