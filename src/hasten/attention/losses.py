"""Losses that mechanisms add to the objective, such as the distance of tokens to their centroids."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from hasten.nn.loss import LossTerm

_open: ContextVar[list[LossTerm] | None] = ContextVar("losses of attention", default=None)


@contextmanager
def attention_losses() -> Iterator[list[LossTerm]]:
    """Gather, into a list, the losses of every attention layer that is called within, in training and with gradients.

    with attention_losses() as losses:
        loss = model(x).square().mean()
    loss = loss + sum(term.weight * term.sum / term.count for term in losses)

    What recomputes activations during the backward pass stands outside, and adds nothing a second time.
    """
    found: list[LossTerm] = []
    token = _open.set(found)
    try:
        yield found
    finally:
        _open.reset(token)


def gather(losses: Sequence[LossTerm]) -> None:
    """Add an operator's losses to the innermost `attention_losses`; without one they are dropped."""
    if losses and torch.is_grad_enabled():
        found = _open.get()
        if found is not None:
            found.extend(losses)


def together(losses: Sequence[LossTerm]) -> dict[str, LossTerm]:
    """As terms of an objective: for each weight the sum over layers of their means, items of all layers alike."""
    terms: dict[str, LossTerm] = {}
    for number, weight in enumerate(sorted({term.weight for term in losses})):
        same = [term for term in losses if term.weight == weight]
        total, count = torch.stack([t.sum for t in same]).sum(), torch.stack([t.count.float() for t in same]).mean()
        terms["attention" if not number else f"attention {number + 1}"] = LossTerm(total, count, weight)
    return terms
