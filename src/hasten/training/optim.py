"""The optimiser and its learning-rate schedules."""

import torch
from torch import nn

from hasten.spec import TrainingSpec


def learning_rate(spec: TrainingSpec, step: int) -> float:
    """The rate of update number `step` (from 0): a linear rise over `warmup` steps, then the schedule."""
    rise = min(1.0, (step + 1) / max(1, spec.warmup))
    if spec.schedule == "inverse_sqrt":
        return spec.learning_rate * rise * max(1.0, (step + 1) / max(1, spec.warmup)) ** -0.5
    falling = spec.steps - spec.warmup if spec.schedule == "linear" else spec.decay * spec.steps
    left = (spec.steps - step) / max(1.0, falling)
    return spec.learning_rate * min(rise, max(0.0, min(1.0, left)))


def adamw(model: nn.Module, spec: TrainingSpec) -> torch.optim.AdamW:
    """AdamW in two groups: matrices decay, vectors (biases, norms) do not. Source: Loshchilov and Hutter, 2019."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=spec.learning_rate, betas=(0.9, 0.98), eps=1e-9, fused=True)
