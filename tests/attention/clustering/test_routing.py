"""Clustered attention: who reads whom, how centroids move, and what of full attention it keeps."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.clustering.placed import build, tokens
from hasten.attention import FullAttention, Mask, after_update
from hasten.attention.clustering import bands, clusters
from hasten.attention.clustering.routing import RoutingAttention, RoutingSpec
from hasten.errors import UserError


def normalised(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


# What it is


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [1, 2, 17, 70])
def test_one_cluster_is_full_attention_on_the_sphere(n: int, causal: bool, shared: bool):
    q, v = tokens(n).requires_grad_(), tokens(n, seed=1)
    k = q if shared else tokens(n, seed=2)
    mask = Mask(causal=causal, keys=torch.arange(n) < torch.tensor([[n], [max(1, n - 3)]]))
    out = build(RoutingSpec(clusters=1, shared_qk=shared)).operator(q, k, mask).apply(v)
    expected = FullAttention().operator(normalised(q), normalised(k), mask).apply(v)
    assert mask.keys is not None
    expected = expected.masked_fill(~mask.keys[:, None, :, None], 0)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(v)
    torch.testing.assert_close(
        torch.autograd.grad(out, q, cotangent), torch.autograd.grad(expected, q, cotangent), rtol=1e-9, atol=1e-9
    )


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 20),
    n_clusters=st.sampled_from([1, 2, 3, 5, 33, 70]),
    window=st.sampled_from([None, 1, 3, 30]),
    kind=st.integers(0, 11),
)
def test_any_setting_gives_the_definition(n: int, n_clusters: int, window: int | None, kind: int):
    strict, shared = kind % 3 == 2, kind % 3 != 1
    attention = build(RoutingSpec(clusters=n_clusters, window=window, shared_qk=shared, strict=strict, seed=kind))
    q, k, v = tokens(n, seed=n).requires_grad_(), tokens(n, seed=n + 1).requires_grad_(), tokens(n, seed=n + 2)
    keys = torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < 0.7
    mask = Mask(causal=kind >= 6, keys=keys if kind % 2 else None)
    out, weights = attention.operator(q, k, mask).apply(v), attention.reference(q, k, mask)
    torch.testing.assert_close(out, weights @ v, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn(v.shape, generator=torch.Generator().manual_seed(0), dtype=v.dtype)
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, k), cotangent, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(weights @ v, (q, k), cotangent, allow_unused=True, materialize_grads=True),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("n", [7, 8, 9, 19, 31])
@pytest.mark.parametrize("strict", [False, True])
def test_lengths_around_a_tile_give_the_definition(n: int, strict: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bands, "_TILE", 8)
    monkeypatch.setattr(clusters, "_TILE_BITS", 3)
    attention, q = build(RoutingSpec(clusters=2, window=12, strict=strict)), tokens(n)
    for mask in (Mask(), Mask(causal=True)):
        dense = attention.operator(q, q, mask).dense()
        torch.testing.assert_close(dense, attention.reference(q, q, mask), rtol=1e-10, atol=1e-10)


def test_no_token_is_left_without_output():
    attention, q = build(RoutingSpec(clusters=8)), tokens(64)
    x = normalised(q)
    nearness = x @ attention.centroids.of(x).transpose(1, 2)
    taken = torch.zeros(2, 2, 64, dtype=torch.bool).scatter(2, nearness.topk(8, dim=2).indices.flatten(2), True)
    assert 0.1 < 1 - taken.double().mean() < 0.6
    weights = attention.operator(q, q, Mask()).dense()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 64, dtype=torch.float64))
    read = (weights > 0).sum(-1)
    assert read[~taken].min() >= 8
    assert weights.diagonal(dim1=2, dim2=3).min() > 0


def test_equal_tokens_are_taken_by_position():
    q = tokens(1).expand(2, 2, 12, 6)
    weights = build(RoutingSpec(clusters=2, window=3)).operator(q, q, Mask()).dense()
    members = torch.arange(12) < 3
    expected = (members | torch.eye(12, dtype=torch.bool)).double()
    torch.testing.assert_close(weights, (expected / expected.sum(-1, keepdim=True)).expand(2, 2, 12, 12))


def test_zero_vectors_are_harmless():
    attention = build(RoutingSpec(clusters=3))
    q = tokens(20)
    q[:, :, ::3] = 0
    q.requires_grad_()
    weights = attention.operator(q, q, Mask(causal=True)).dense()
    torch.testing.assert_close(weights, attention.reference(q, q, Mask(causal=True)), rtol=1e-10, atol=1e-10)
    (gradient,) = torch.autograd.grad((weights @ tokens(20, seed=1)).square().sum(), q)
    assert gradient.isfinite().all()
    assert gradient.abs().max() < 1e4


# What must not matter


@pytest.mark.parametrize("spec", [RoutingSpec(clusters=4), RoutingSpec(clusters=4, window=9, shared_qk=False)], ids=str)
def test_pads_neither_take_places_in_clusters_nor_widen_them(spec: RoutingSpec):
    attention, q, k, v = build(spec).eval(), tokens(40), tokens(40, seed=1), tokens(40, seed=2)
    alone = attention.operator(q, k, Mask(causal=True)).apply(v)
    for n_pads in (1, 25, 100):
        place = torch.randperm(40 + n_pads, generator=torch.Generator().manual_seed(n_pads))[:40].sort().values
        padded = [torch.full((2, 2, 40 + n_pads, 6), junk, dtype=torch.float64) for junk in (math.nan, 1e10, math.nan)]
        for whole, part in zip(padded, (q, k, v), strict=True):
            whole[:, :, place] = part
        keys = torch.zeros(2, 40 + n_pads, dtype=torch.bool)
        keys[:, place] = True
        out = attention.operator(padded[0], padded[1], Mask(causal=True, keys=keys)).apply(padded[2])
        torch.testing.assert_close(out[:, :, place], alone, rtol=1e-12, atol=1e-12)
        assert out.isfinite().all()


@pytest.mark.parametrize("t", [1, 40, 99])
def test_the_strict_one_is_blind_to_a_later_token_however_large(t: int):
    attention = build(RoutingSpec(clusters=4, window=8, strict=True))
    q, v = tokens(100, dtype=torch.float32), tokens(100, seed=1, dtype=torch.float32)
    before = attention.operator(q, q, Mask(causal=True)).apply(v)
    changed, others = q.clone(), v.clone()
    changed[:, :, t:] = 100 * tokens(100, seed=3, dtype=torch.float32)[:, :, t:]
    others[:, :, t:] -= 100
    after = attention.operator(changed, changed, Mask(causal=True)).apply(others)
    torch.testing.assert_close(after[:, :, :t], before[:, :, :t], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(after, before)


# Centroids


def mixture(n: int, seed: int, share: float = 0.9) -> tuple[Tensor, Tensor]:
    """Tokens around two opposite directions, most of them around the first, and these directions."""
    generator = torch.Generator().manual_seed(seed)
    axes = normalised(torch.tensor([[1.0, -1, 2, 0, 0, -2], [0, 3, -1, 1, -2, -1]]))
    which = (torch.rand(1, 1, n, generator=generator) > share).long()
    return axes[which] + 0.1 * torch.randn(1, 1, n, 6, generator=generator), F.normalize(axes, dim=-1)


def test_centroids_come_to_the_means_of_a_mixture_however_unequal_its_parts():
    attention = build(RoutingSpec(clusters=2, decay=0.9, n_heads=1, d_head=6)).train()
    _, axes = mixture(1, 0)
    attention.centroids.vectors.copy_(F.normalize(axes + torch.tensor([1.0, 0, 0, 0.5, 0, 0]), dim=-1)[None])
    for step in range(100):
        x, _ = mixture(64, step)
        attention.operator(x, x, Mask())
        after_update(torch.nn.Sequential(attention))
        assert torch.allclose(attention.centroids.vectors.norm(dim=-1), torch.ones(1, 2))
    torch.testing.assert_close(attention.centroids.vectors[0], axes, rtol=0, atol=0.03)


def test_an_update_is_an_average_of_means_over_all_that_was_seen():
    attention = build(RoutingSpec(clusters=3, decay=0.75, shared_qk=False)).train()
    q, k, keys = tokens(9), tokens(9, seed=1), torch.arange(9) < torch.tensor([[9], [5]])
    old = attention.centroids.of(q)
    for seed in (0, 7):
        attention.operator(q + seed, k * (seed + 1) + tokens(9, seed=seed), Mask(keys=keys))
    assert torch.equal(attention.centroids.of(q), old)
    after_update(attention)
    new = attention.centroids.of(q)
    for h in range(2):
        seen: dict[int, list[Tensor]] = {}
        for seed in (0, 7):
            for part in (q + seed, k * (seed + 1) + tokens(9, seed=seed)):
                for token in normalised(part)[:, h][keys] / math.sqrt(6):
                    seen.setdefault(int((old[h] @ token).argmax()), []).append(token)
        for c in range(3):
            mean = torch.stack(seen[c]).mean(0) if c in seen else old[h, c]
            moved = F.normalize(0.75 * old[h, c] + 0.25 * mean, dim=0)
            torch.testing.assert_close(new[h, c], moved, rtol=1e-5, atol=1e-6)
    after_update(attention)
    torch.testing.assert_close(attention.centroids.of(q), new)


def test_centroids_rest_in_evaluation_and_where_no_token_is():
    attention = build(RoutingSpec(clusters=5)).eval()
    before = attention.state_dict()["centroids.vectors"].clone()
    q = tokens(9)
    assert attention.operator(q, q, Mask()).losses == ()
    after_update(attention)
    torch.testing.assert_close(attention.state_dict()["centroids.vectors"], before)
    attention.train().operator(tokens(1), tokens(1), Mask(keys=torch.zeros(2, 1, dtype=torch.bool)))
    after_update(attention)
    torch.testing.assert_close(attention.state_dict()["centroids.vectors"], before)


def test_processes_that_train_together_move_centroids_together(monkeypatch: pytest.MonkeyPatch):
    def trained(parts: list[Tensor]) -> RoutingAttention:
        attention = build(RoutingSpec(clusters=3, decay=0.5)).train()
        assert isinstance(attention, RoutingAttention)
        for part in parts:
            attention.operator(part, part, Mask())
        return attention

    parts = [tokens(9), tokens(14, seed=1)]
    together, mine, other = trained(parts), trained(parts[:1]), trained(parts[1:])
    after_update(together)
    theirs = iter([other.centroids.sums, other.centroids.counts])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.add_(next(theirs)))
    after_update(mine)
    torch.testing.assert_close(mine.centroids.vectors, together.centroids.vectors)
    assert next(theirs, None) is None


def test_a_replay_under_checkpointing_moves_centroids_as_far():
    moved = []
    for replay in (False, True):
        attention, q = build(RoutingSpec(clusters=3, decay=0.5)).train(), tokens(9).requires_grad_()

        def mixed(q: Tensor, attention: RoutingAttention = attention) -> Tensor:
            return attention.operator(q, q, Mask()).apply(q)

        out = torch.utils.checkpoint.checkpoint(mixed, q, use_reentrant=False) if replay else mixed(q)
        out.sum().backward()
        after_update(attention)
        moved.append(attention.centroids.of(q))
    torch.testing.assert_close(*moved)


@pytest.mark.parametrize(
    "spec", [RoutingSpec(clusters=3, shared_qk=False, commitment=0.3), RoutingSpec(strict=True)], ids=str
)
def test_the_commitment_loss_is_the_mean_distance_to_the_nearest_centroid(spec: RoutingSpec):
    attention, q, k = build(spec).train(), tokens(9).requires_grad_(), tokens(9, seed=1).requires_grad_()
    keys = torch.arange(9) < torch.tensor([[9], [5]])
    (term,) = attention.operator(q, k, Mask(keys=keys)).losses
    distances = []
    for x in (q, k) if not spec.shared_qk else (q,):
        unit = normalised(x).transpose(1, 2)[keys] / math.sqrt(6)
        distances.append((unit[:, :, None] - attention.centroids.of(q)).square().sum(-1).min(-1).values)
    assert term.weight == spec.commitment
    assert int(term.count) == sum(d.numel() for d in distances)
    expected = torch.cat(distances).sum()
    torch.testing.assert_close(term.sum, expected)
    torch.testing.assert_close(
        torch.autograd.grad(term.sum, (q, k), allow_unused=True, materialize_grads=True),
        torch.autograd.grad(expected, (q, k), allow_unused=True, materialize_grads=True),
    )
    assert build(RoutingSpec(commitment=0.0)).train().operator(q, k, Mask()).losses == ()


# State, claims


def test_centroids_follow_from_the_seed_and_stand_ready_at_once():
    before = torch.get_rng_state()
    one, same, other = (build(RoutingSpec(seed=seed)) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.centroids.vectors, same.centroids.vectors)
    assert not torch.equal(one.centroids.vectors, other.centroids.vectors)
    torch.testing.assert_close(one.centroids.vectors.norm(dim=-1), torch.ones(2, 32))
    other.load_state_dict(one.state_dict())
    q = tokens(50)
    assert torch.equal(other.eval().operator(q, q, Mask()).dense(), one.eval().operator(q, q, Mask()).dense())


def test_only_shared_keys_save_a_projection():
    assert build(RoutingSpec()).traits.needs == {"query"}
    assert build(RoutingSpec(shared_qk=False)).traits.needs == {"query", "key"}
    assert not build(RoutingSpec(shared_qk=False)).traits.shared_qk


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: build(RoutingSpec(strict=True, shared_qk=False)), "leave shared_qk=false out"),
        (
            lambda: build(RoutingSpec(n_heads=1)).operator(tokens(3), tokens(3), Mask()),
            "made for n_heads = 1, got 2; give both the same",
        ),
        (
            lambda: build(RoutingSpec(strict=True, window=2**20, clusters=100)),
            "routing: window 1048576 and 100 clusters: their product is 104,857,600; give smaller ones",
        ),
        (lambda: build(RoutingSpec(d_head=4)).operator(tokens(3), tokens(3), Mask()), "made for d_head = 4, got 6"),
    ],
)
def test_what_cannot_be_is_refused(attempt, message: str):
    with pytest.raises(UserError, match=re.escape(message)):
        attempt()


def test_an_empty_batch_gives_an_empty_batch():
    for spec in (RoutingSpec(), RoutingSpec(shared_qk=False), RoutingSpec(strict=True)):
        x = torch.zeros(0, 2, 5, 6)
        assert build(spec).operator(x, x, Mask(causal=True)).apply(x).shape == x.shape
