"""What a parallel decoder reads before it has said anything: the source, stretched to the target's length."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def first(lengths: Int[Tensor, "B"], width: int | None = None) -> Bool[Tensor, "B T"]:
    """True on the first `lengths` of T positions; T is the longest length unless `width` is given."""
    width = int(lengths.max()) if width is None else width
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def uniform_copy(source_lengths: Int[Tensor, "B"], lengths: Int[Tensor, "B"]) -> Int[Tensor, "B T"]:
    """For each of T target positions the source position it copies: round(i (S - 1) / (T - 1)), halves up.

    So both ends are copied to both ends; a single target position copies the first. Positions count from each
    sentence's first real token. Padding copies position 0. Source: Gu et al., 2018, section 3.1; Lee et al., 2018.
    """
    i = torch.arange(int(lengths.max()), device=lengths.device)
    last, steps = (source_lengths - 1)[:, None], (lengths - 1).clamp(min=1)[:, None]
    # In whole numbers: floor(x + 1/2) of a quotient is floor((2 a + b) / (2 b)).
    index = (2 * i * last + steps) // (2 * steps)
    return index.masked_fill(i >= lengths[:, None], 0)


def soft_copy(
    states: Float[Tensor, "B S D"], mask: Bool[Tensor, "B S"], lengths: Int[Tensor, "B"], tau: float | Tensor = 0.3
) -> Float[Tensor, "B T D"]:
    """Mixtures of source states: target position i reads source position j with softmax over j of -|j - i S / T| / tau.

    `mask` is True on real positions, padding on the right. Beyond a row's length outputs mean nothing. Source: Wei et
    al., 2019, section 3.3 (Imitation learning for non-autoregressive machine translation).
    """
    width = int(lengths.max())
    i = torch.arange(width, device=states.device, dtype=torch.float32)[None, :, None]
    j = torch.arange(states.shape[1], device=states.device, dtype=torch.float32)
    centres = i * (mask.sum(1) / lengths.clamp(min=1))[:, None, None]
    scores = (-(j - centres).abs() / tau).masked_fill(~mask[:, None, :], -torch.inf)
    silent = states.masked_fill(~mask[..., None], 0.0)
    return scores.softmax(-1).to(states.dtype) @ silent
