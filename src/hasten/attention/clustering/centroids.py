"""Centroids of tokens on a sphere, moved by an exponential average of their tokens' means (online k-means)."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.attention.adapting import Adapting, numbers
from hasten.nn.loss import LossTerm


class Centroids(Adapting):
    """Unit vectors mu (heads, clusters, D). A token x belongs to argmax_c x . mu_c, the first of equals.

    In training `learn` sums the tokens of every cluster, as unit vectors, and `after_update`, once per optimiser step,
    moves mu <- decay mu + (1 - decay) mean of its tokens, then makes it a unit vector again; a cluster without tokens
    stays. Means, not sums: these would weigh a centroid by the number of its tokens. Processes that train together add
    their sums first. Source: after Roy et al., 2021, section 4.
    """

    vectors: Tensor
    sums: Tensor
    counts: Tensor

    def __init__(self, n_heads: int, clusters: int, width: int, *, decay: float, commitment: float, seed: int):
        super().__init__()
        self.decay, self.commitment, self.clusters = decay, commitment, clusters
        self.register_buffer("vectors", torch.empty(n_heads, clusters, width))
        self.register_buffer("sums", torch.zeros(n_heads, clusters, width))
        self.register_buffer("counts", torch.zeros(n_heads, clusters))
        drawn = torch.randn(n_heads, clusters, width, generator=numbers(seed, 0), device="cpu")
        self.vectors.copy_(F.normalize(drawn, dim=-1))

    def of(self, x: Float[Tensor, "B H N D"]) -> Float[Tensor, "H clusters D"]:
        """The centroids for tokens such as these."""
        return F.normalize(self.vectors.to(x.dtype), dim=-1)

    @torch.no_grad()
    def nearness(self, x: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N clusters"]:
        """x . mu."""
        with torch.autocast(x.device.type, enabled=False):
            return x @ self.of(x).transpose(1, 2)

    def learn(
        self,
        tokens: Sequence[tuple[Float[Tensor, "B H N D"], Int[Tensor, "B H N"]]],
        real: Bool[Tensor, "B N"],
    ) -> tuple[LossTerm, ...]:
        """In training: count real tokens, each with its cluster, in for the next update; the loss of their distance.

        Tokens come on the sphere of radius sqrt(D). The loss is the mean of |x / sqrt(D) - mu|^2.
        """
        if not (self.training and torch.is_grad_enabled()):
            return ()
        with torch.autocast(real.device.type, enabled=False):
            distances = [self._collected(x, cluster, real) for x, cluster in tokens]
        count = real.sum() * (len(tokens) * tokens[0][0].shape[1])
        return (LossTerm(torch.stack(distances).sum(), count, self.commitment),) if self.commitment else ()

    def _collected(
        self, x: Float[Tensor, "B H N D"], cluster: Int[Tensor, "B H N"], real: Bool[Tensor, "B N"]
    ) -> Float[Tensor, ""]:
        """Sum of the squared distances, from the sums of every cluster: |x|^2 + |mu|^2 - 2 x . mu. Padding is zero."""
        chosen = x.new_zeros(*cluster.shape[:2], self.clusters, cluster.shape[2])
        chosen.scatter_(2, cluster[:, :, None], real.to(x.dtype)[:, None, None].expand_as(cluster[:, :, None]))
        counts, sums = chosen.sum((0, 3)), (chosen @ x).sum(0) / math.sqrt(x.shape[3])
        self.sums += sums.detach().to(self.sums.dtype)
        self.counts += counts.to(self.counts.dtype)
        mu = self.of(x)
        return x.square().sum() / x.shape[3] + (counts * mu.square().sum(-1) - 2 * (sums * mu).sum(-1)).sum()

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the centroids to what was gathered since the last update, in all processes."""
        if not self.training:
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.sums)
            torch.distributed.all_reduce(self.counts)
        counts = self.counts[..., None]
        mean = self.sums / counts.clamp_min(1)
        moved = F.normalize(self.decay * F.normalize(self.vectors, dim=-1) + (1 - self.decay) * mean, dim=-1)
        self.vectors.copy_(torch.where(counts > 0, moved, self.vectors))
        self.sums.zero_()
        self.counts.zero_()
