"""What a model thinks of given outputs: all of them judged in one pass, however they came to be."""

from collections.abc import Sequence

import torch

from hasten.data.batch import Pair, pair_batch
from hasten.data.grouping import group_by_tokens
from hasten.decoding.beam import length_normalised
from hasten.errors import NOT_FINITE, UserError
from hasten.models.base import Scoring


def judge(
    model: Scoring, pairs: Sequence[Pair], *, batch_tokens: int, device: torch.device
) -> list[tuple[float, float]]:  # fmt: skip
    """Of every (source ids, target ids) the log probability of the target, and its mean over tokens and end symbol.

    `batch_tokens` bounds the padded tokens (the longer side) of a batch; it does not change results. Raises
    `UserError` for scores of NaN. Source: Gu et al., 2018, section 4.2 (noisy parallel decoding).
    """
    results = [(0.0, 0.0)] * len(pairs)
    with torch.inference_mode():
        for group in group_by_tokens([max(map(len, pair)) + 1 for pair in pairs], batch_tokens):
            found = model.log_probs(pair_batch([pairs[i] for i in group]).to(device))
            for i, log_prob, n in zip(group, *(part.tolist() for part in found), strict=True):
                if log_prob != log_prob:
                    raise UserError(NOT_FINITE)
                results[i] = (log_prob, length_normalised(log_prob, n))
    return results
