"""What changes in training other than by gradients: it does so after an update of the weights, never in a call."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Adapting(nn.Module, ABC):
    """A part that `after_update` moves on: centroids, schedules of redrawing, the noise of a step.

    Within a step nothing moves. So activations that are recomputed for their gradients are what they were, batches of
    one update see the same part, and processes that train together stay equal.
    """

    @abstractmethod
    def after_update(self) -> None:
        """One update of the weights is over; does nothing in evaluation."""


def after_update(model: nn.Module) -> None:
    """Call after each step of the optimiser: moves on whatever in `model` changes other than by gradients."""
    for module in model.modules():
        if isinstance(module, Adapting):
            module.after_update()


class Drawn(Adapting):
    """Random constants, buffers that follow from (seed, draws) and their shape alone.

    They are drawn on the CPU when built, by `draw(numbers(seed, 0))`, again by `redraw`, and in training at every
    `redraw_every`-th update (0: never). Every process and every device has the same ones. State: `seed`, `draws` (how
    often drawn again), `updates` (counted where there is a schedule), and the constants themselves.
    """

    seed: Tensor
    draws: Tensor
    updates: Tensor

    def __init__(self, seed: int, redraw_every: int):
        super().__init__()
        self.redraw_every = redraw_every
        self.register_buffer("seed", torch.tensor(seed))
        self.register_buffer("draws", torch.tensor(0))
        self.register_buffer("updates", torch.tensor(0))

    @abstractmethod
    def draw(self, generator: torch.Generator) -> None:
        """Fill the buffers, with numbers drawn on the CPU."""

    def redraw(self) -> None:
        """Draw anew: the next of the seed's sequence. Decoding states made before are void."""
        self.draws += 1
        self.draw(numbers(int(self.seed), int(self.draws)))

    def after_update(self) -> None:
        """Count an update, and draw anew when it is time to; does nothing in evaluation."""
        if self.training and self.redraw_every:
            self.updates += 1
            if self.updates % self.redraw_every == 0:
                self.redraw()


def numbers(seed: int, draws: int) -> torch.Generator:
    """The random numbers of a draw."""
    # torch's generator reads 32 bits of a seed: each draw has a seed of its own, drawn from the first.
    first = torch.Generator("cpu").manual_seed(seed)
    seeds = torch.randint(2**32, (draws + 1,), generator=first, device="cpu")
    return torch.Generator("cpu").manual_seed(int(seeds[-1]))
