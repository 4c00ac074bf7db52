"""Dropout whose random numbers are bytes: a generator call serves eight elements."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.errors import UserError


class Dropout(nn.Module):
    """Zeroes each element with probability round(256 p) / 256 in training and scales the rest to keep the mean.

    On a CPU, drawing a Bernoulli number an element costs more than a matrix product of a small model; bytes of 64-bit
    random integers cost a fourteenth. Draws come from torch's global generator, as in `torch.nn.Dropout`; other
    devices and compiled code use that very function. Source: Srivastava et al., 2014.
    """

    def __init__(self, p: float):
        super().__init__()
        if not 0 <= p < 1:
            raise UserError(f"dropout is {p}; give a share: 0 or more, below 1")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        if not self.training or self.p == 0:
            return x
        # torch.compile cannot trace `random_`, and makes dropout cheap by itself.
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(x, self.p)
        threshold = max(1, min(255, round(256 * self.p)))
        words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
        keep = words.view(torch.uint8)[: x.numel()].view(x.shape) >= threshold
        # A product with booleans is not vectorised: the same numbers as bytes cost a fifth.
        return x * keep.view(torch.uint8).to(x.dtype).mul_(256 / (256 - threshold))

    def extra_repr(self) -> str:
        """Shown in the module's print-out."""
        return f"p={self.p}"
