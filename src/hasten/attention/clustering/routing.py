"""Routing Transformer: tokens read those of their clusters, found by k-means as the model learns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hasten.attention.base import Attention, Operator, State, StepOperator, Traits
from hasten.attention.clustering.bands import Bands, Recent, limit
from hasten.attention.clustering.centroids import Centroids
from hasten.attention.clustering.clusters import Clusters, any_cluster
from hasten.attention.clustering.definition import defined
from hasten.attention.clustering.gathered import Bounded, TileOperator, widened
from hasten.attention.clustering.nearest import nearest
from hasten.attention.clustering.rings import Members, RingStep
from hasten.attention.masks import Mask, silence
from hasten.attention.mechanism import MechanismSpec
from hasten.errors import UserError
from hasten.fields import Factor, PositiveInt, Seed, Share

_WINDOW = 128


@dataclass(frozen=True, kw_only=True)
class RoutingSpec(MechanismSpec):
    """Clustered attention (Routing Transformer): a token reads the members of its clusters."""

    kind: Literal["routing"] = "routing"
    """The mechanism's name."""
    clusters: PositiveInt = 32
    """Centroids of a head. The square root of the length makes the least work."""
    window: PositiveInt | None = None
    """Members of a cluster; without it tokens / clusters, rounded up. With `strict`: how many a token reads, 128."""
    shared_qk: bool = True
    """Keys are the queries; without it keys have a projection of their own. `strict` is for shared ones."""
    strict: bool = False
    """Read the last `window` tokens of the nearest cluster up to itself: causal in every sense, can decode."""
    decay: Share = 0.999
    """Share of a centroid that stays in an update."""
    commitment: Factor = 1e-4
    """Weight of the loss that draws tokens to their centroids in training; 0: none."""
    n_heads: PositiveInt | None = None
    """Attention heads, each with centroids of its own; a model sets it."""
    d_head: PositiveInt | None = None
    """Width of the heads; a model sets it."""
    seed: Seed = 0
    """Draws the first centroids; each layer of a model has draws of its own."""

    def build(self) -> "RoutingAttention | StrictRoutingAttention":
        """The mechanism this spec describes."""
        window = self.window or _WINDOW
        if self.strict:
            limit(f"routing: window {window} and {self.clusters} clusters", window, self.clusters)
        centroids = Centroids(
            self.size("n_heads"),
            self.clusters,
            self.size("d_head"),
            decay=self.decay,
            commitment=self.commitment,
            seed=self.seed,
        )
        if not self.strict:
            return RoutingAttention(centroids, self.window, shared_qk=self.shared_qk)
        if not self.shared_qk:
            raise UserError("routing: strict=true is for keys that are the queries; leave shared_qk=false out")
        return StrictRoutingAttention(centroids, window)


class RoutingAttention(Attention):
    """softmax(q_i k_j / sqrt(D)) over the tokens j of the clusters of i, with q and k on the sphere of radius sqrt(D).

    q, k: LayerNorm without scale and shift. Each centroid takes the `window` queries and the `window` keys nearest to
    it, equally near ones by position; a query of several clusters reads all of their keys under one softmax, one that
    no cluster took reads those of its nearest centroid. Every token reads itself besides: there are no empty rows.
    q (B, H, N, D); k likewise, not read where it is shared. Scores in float32 or wider. Padding takes no part, wherever
    it stands, nor has the number of pads a say in the window.
    Causal only in the values: a later token can push an earlier one out of a cluster. It does not decode;
    `StrictRoutingAttention` does.
    Training: tokens are collected for the centroids, which `after_update(model)` moves once per step of the optimiser.
    The operator's losses hold the mean of |x / sqrt(D) - its nearest centroid|^2 over queries and keys of their own.
    Source: Roy et al., 2021, section 4. What becomes of tokens of no cluster and of several is decided here.
    Time O(N (clusters + window) D), memory O(N clusters).
    """

    def __init__(self, centroids: Centroids, window: int | None = None, *, shared_qk: bool = True):
        super().__init__()
        self.traits = Traits(
            causal="value",
            not_strict="who is in a cluster depends on later tokens; with strict = true it can",
            cross=False,
            step=False,
            normalised=True,
            key_padding=True,
            dropout=False,
            needs=frozenset({"query"} if shared_qk else {"query", "key"}),
            shared_qk=shared_qk,
            n_heads=centroids.vectors.shape[0],
            d_head=centroids.vectors.shape[2],
            memory=1.0,
        )
        self.centroids, self.window = centroids, window

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Operator:
        """Cluster by cluster."""
        self.check(q, k, mask)
        x, real, most = _on_sphere(q, mask), _real(q, mask), self._most(q.shape[2])
        asks, closest = self._clusters(x, mask.keys, most)
        y, members, learnt = x, asks, [(x, closest)]
        if not self.traits.shared_qk:
            y = _on_sphere(k, mask)
            members, closest_y = self._clusters(y, mask.keys, most)
            learnt.append((y, closest_y))
        closest, left_out = closest[:, :, None], (real[:, None] & ~any_cluster(asks))[:, :, None]
        asks = asks.scatter(2, closest, asks.gather(2, closest) | left_out)
        tiles = Clusters(asks, members, most, causal=mask.causal, dtype=x.dtype)
        operator = TileOperator(x, y, tiles, mask.keys, q.dtype, Bounded)
        operator.losses = self.centroids.learn(learnt, real)
        return operator

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition, one sheet and token at a time."""
        return _defined(q, q if self.traits.shared_qk else k, mask, self._seen, self.centroids.of(widened(q)))

    def _seen(self, x: Tensor, y: Tensor, mu: Float[Tensor, "clusters D"]) -> list[set[int]]:
        """Whom each query of a sheet may read."""
        x, y = x.detach(), y.detach()
        window = self.window or -(-len(x) // len(mu))
        seen: list[set[int]] = [set() for _ in x]
        left_out = set(range(len(x)))
        members = {}
        for c, centroid in enumerate(mu):
            asking, members[c] = (
                sorted(range(len(x)), key=lambda i, z=z, centroid=centroid: (-float(z[i] @ centroid), i))[:window]
                for z in (x, y)
            )
            left_out -= set(asking)
            for i in asking:
                seen[i].update(members[c])
        for i in left_out:
            seen[i].update(members[int((mu @ x[i]).argmax())])
        return seen

    def _most(self, length: int) -> int:
        """Members of a cluster."""
        most = (length + self.centroids.clusters - 1) // self.centroids.clusters if self.window is None else self.window
        # One more: for all lengths, a traced program has at least two members.
        return most + 1 if torch.compiler.is_compiling() else min(most, length)

    def _clusters(
        self, x: Float[Tensor, "B H N D"], keys: Bool[Tensor, "B N"] | None, most: int
    ) -> tuple[Bool[Tensor, "B H clusters N"], Int[Tensor, "B H N"]]:
        """Which tokens each cluster takes, and the centroid nearest to each token."""
        nearness, clusters = self.centroids.nearness(x), self.centroids.clusters
        lengths = torch.full(x.shape[:1], x.shape[2], device=x.device) if keys is None else keys.sum(-1)
        wanted = (lengths + clusters - 1) // clusters if self.window is None else torch.full_like(lengths, self.window)
        return nearest(nearness.transpose(2, 3), keys, wanted[:, None, None, None], most), nearness.argmax(-1)


class StrictRoutingAttention(Attention):
    """Like `RoutingAttention`, but a token reads the last `window` tokens of its nearest centroid up to itself.

    So it reads whether the mask asks for causality or not: strictly causal. Keys are the queries. Decoding keeps, for
    each cluster, a ring of window - 1 keys and values, whatever the length; a step costs O((clusters + window) D).
    """

    def __init__(self, centroids: Centroids, window: int):
        super().__init__()
        self.traits = Traits(
            causal="strict",
            cross=False,
            step=True,
            normalised=True,
            key_padding=True,
            dropout=False,
            needs=frozenset({"query"}),
            shared_qk=True,
            n_heads=centroids.vectors.shape[0],
            d_head=centroids.vectors.shape[2],
            memory=1.0,
        )
        self.centroids, self.window = centroids, window

    def operator(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Operator:
        """Sorted by cluster, a band in each."""
        self.check(q, k, mask)
        x = _on_sphere(q, mask)
        cluster = self.centroids.nearness(x).argmax(-1)
        tiles = Bands(
            cluster[None],
            self.centroids.clusters,
            mask.keys,
            rule=Recent(self.window),
            causal=False,
            own=0.0,
            dtype=x.dtype,
        )
        operator = TileOperator(x, x, tiles, mask.keys, q.dtype, Bounded)
        operator.losses = self.centroids.learn([(x, cluster)], _real(q, mask))
        return operator

    def reference(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B H S D"], mask: Mask) -> Tensor:
        """The definition, one sheet and token at a time."""
        return _defined(q, q, mask, self._seen, self.centroids.of(widened(q)))

    def _seen(self, x: Tensor, y: Tensor, mu: Float[Tensor, "clusters D"]) -> list[set[int]]:
        cluster = [int((mu @ token).argmax()) for token in x]
        return [set([j for j in range(i + 1) if cluster[j] == cluster[i]][-self.window :]) for i in range(len(x))]

    def step(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H n D"], keys: State | None
    ) -> tuple[StepOperator, State]:
        """New tokens join their clusters; rings forget the oldest."""
        assert keys is None or isinstance(keys, Members)
        x = _on_sphere(q, Mask())
        keys = keys or Members.empty(x, 1, self.centroids.clusters, self.window)
        cluster = self.centroids.nearness(x).argmax(-1)
        return RingStep.reading(x, x, cluster[:, :, None], keys, window=self.window, own=0.0)


def _on_sphere(x: Float[Tensor, "B H N D"], mask: Mask) -> Float[Tensor, "B H N D"]:
    """LayerNorm without scale and shift, in float32 or wider; zeros at padding."""
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(silence(widened(x), mask.keys), x.shape[3:])


def _real(q: Float[Tensor, "B H N D"], mask: Mask) -> Bool[Tensor, "B N"]:
    return torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device) if mask.keys is None else mask.keys


def _defined(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B H N D"],
    mask: Mask,
    seen: Callable[[Tensor, Tensor, Tensor], list[set[int]]],
    mu: Float[Tensor, "H clusters D"],
) -> Float[Tensor, "B H N N"]:
    """On the sphere; a token reads itself besides."""

    def read(x: Float[Tensor, "n D"], y: Float[Tensor, "n D"], head: int) -> list[set[int]]:
        return [{j for j in others | {i} if not mask.causal or j <= i} for i, others in enumerate(seen(x, y, mu[head]))]

    return defined(_standardised(widened(q)), _standardised(widened(k)), mask, read)


def _standardised(x: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D"]:
    """The definition of LayerNorm without scale and shift."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
