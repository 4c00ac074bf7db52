"""Locality-sensitive hashing: the hash itself, its union of rounds, and what of full attention it keeps."""

import io
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.clustering.placed import build, tokens
from hasten.attention import Mask, after_update
from hasten.attention.clustering import bands
from hasten.attention.clustering.lsh import Hash, LSHSpec, unit
from hasten.errors import UserError


def shared_qk(q: Tensor, mask: Mask) -> Tensor:
    """Full attention with k = q / |q|, a token reading itself only where nothing else is left."""
    scores = q @ (q / q.norm(dim=-1, keepdim=True)).transpose(2, 3) / math.sqrt(q.shape[3])
    itself = torch.eye(q.shape[2], dtype=torch.bool)
    allowed = mask.dense(q.shape[2], q.shape[2], q.device)
    scores = scores.masked_fill(itself, -1e5)
    return scores if allowed is None else scores.masked_fill(~allowed, -1e9)


# What it is


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 2, 13, 16])
def test_one_chunk_is_full_attention_with_shared_queries_and_keys(n: int, causal: bool):
    q, v = tokens(n).requires_grad_(), tokens(n, seed=1)
    keys = torch.ones(2, n, dtype=torch.bool)
    keys[0, n // 2] = n == 1
    for mask in (Mask(causal=causal), Mask(causal=causal, keys=keys)):
        for spec in (LSHSpec(chunk=16), LSHSpec(chunk=16, strict=True, buckets=1)):
            if spec.strict and not causal:
                continue
            out, weights = build(spec).operator(q, q, mask).apply(v), shared_qk(q, mask).softmax(-1)
            real = keys[:, None, :, None] if mask.keys is not None else torch.tensor(True)
            expected = (weights @ v).masked_fill(~real, 0)
            torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
            cotangent = torch.randn_like(v)
            torch.testing.assert_close(
                torch.autograd.grad(out, q, cotangent),
                torch.autograd.grad(expected, q, cotangent),
                rtol=1e-9,
                atol=1e-9,
            )


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 24),
    chunk=st.integers(1, 7),
    rounds=st.integers(1, 4),
    buckets=st.sampled_from([1, 2, 4, 6, 72]),
    kind=st.integers(0, 11),
)
def test_any_setting_gives_the_definition(n: int, chunk: int, rounds: int, buckets: int, kind: int):
    spec = LSHSpec(
        chunk=chunk,
        rounds=rounds,
        buckets=buckets,
        strict=kind % 3 == 2,
        attend_across_buckets=kind % 3 == 1,
        seed=kind,
    )
    attention, q, v = build(spec), tokens(n, seed=n).requires_grad_(), tokens(n, seed=n + 1)
    keys = torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < 0.7
    mask = Mask(causal=kind >= 6, keys=keys if kind % 2 else None)
    out, weights = attention.operator(q, q, mask).apply(v), attention.reference(q, q, mask)
    torch.testing.assert_close(out, weights @ v, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn(v.shape, generator=torch.Generator().manual_seed(0), dtype=v.dtype)
    torch.testing.assert_close(
        torch.autograd.grad(out, q, cotangent, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(weights @ v, q, cotangent, allow_unused=True, materialize_grads=True),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("n", [3, 4, 5, 11, 31])
@pytest.mark.parametrize("strict", [False, True])
def test_lengths_around_a_chunk_give_the_definition(n: int, strict: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bands, "_TILE", 4)
    attention, q = build(LSHSpec(chunk=4, rounds=2, buckets=4, strict=strict)), tokens(n)
    for mask in (Mask(), Mask(causal=True)):
        dense = attention.operator(q, q, mask).dense()
        torch.testing.assert_close(dense, attention.reference(q, q, mask), rtol=1e-10, atol=1e-10)


def test_the_first_chunk_does_not_read_the_last():
    q = tokens(1).expand(2, 2, 12, 6)
    weights = build(LSHSpec(chunk=4, rounds=1, buckets=1)).operator(q, q, Mask()).dense()[0, 0]
    read = (weights > 0).nonzero()
    assert {(int(i) // 4, int(j) // 4) for i, j in read} == {(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)}


# What it keeps of full attention


def test_more_rounds_come_nearer_to_full_attention():
    centre = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    q = 3 * (centre.repeat(16, 1) + 0.5 * torch.randn(128, 16, generator=torch.Generator().manual_seed(1)))[None, None]
    v = torch.randn(1, 1, 128, 16, generator=torch.Generator().manual_seed(2))
    full = shared_qk(q, Mask()).softmax(-1) @ v
    errors = []
    for rounds in (1, 2, 4, 8, 16):
        hashed = [build(LSHSpec(chunk=16, rounds=rounds, buckets=8, seed=seed), d_head=16) for seed in range(8)]
        errors.append(sum(float((attention.operator(q, q, Mask()).apply(v) - full).norm()) for attention in hashed))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.3 * errors[0]


def collisions(hashing: Hash, angle: float) -> float:
    """Share of rounds in which two unit vectors at this angle fall into one bucket."""
    pair = torch.zeros(1, 1, 2, 3)
    pair[..., 0, 0] = 1.0
    pair[..., 1, 0], pair[..., 1, 1] = math.cos(angle), math.sin(angle)
    bucket = hashing(pair, torch.tensor([hashing.buckets]))
    return float((bucket[..., 0] == bucket[..., 1]).double().mean())


def simulated(buckets: int, angle: float, n: int = 40000) -> float:
    """The same by correlated normal numbers: x R and y R have correlation cos(angle) in each column."""
    generator = torch.Generator().manual_seed(7)
    x, other = (torch.randn(n, buckets // 2, generator=generator) for _ in range(2))
    y = math.cos(angle) * x + math.sin(angle) * other
    h, g = (torch.cat((z, -z), 1).argmax(1) for z in (x, y))
    return float((h == g).double().mean())


@pytest.mark.parametrize("buckets", [2, 4, 16, 64])
def test_near_vectors_collide_as_often_as_theory_says_and_more_often_than_far_ones(buckets: int):
    hashing = Hash(buckets, rounds=20000, width=3, seed=3)
    angles = [0.0, 0.3, 0.7, 1.2, math.pi / 2, 2.2, math.pi]
    shares = [collisions(hashing, angle) for angle in angles]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1
    assert shares[-1] == 0
    for share, angle in zip(shares, angles, strict=True):
        assert share == pytest.approx(simulated(buckets, angle), abs=0.02)
        if buckets == 2:
            assert share == pytest.approx(1 - angle / math.pi, abs=0.02)


def test_many_buckets_are_the_product_of_two_hashes():
    hashing = Hash(128, rounds=20000, width=3, seed=3)
    assert hashing.factors == (8, 16)
    assert collisions(hashing, 0.5) == pytest.approx(simulated(8, 0.5) * simulated(16, 0.5), abs=0.02)
    x = torch.randn(1, 1, 500, 3, generator=torch.Generator().manual_seed(0))
    bucket = Hash(128, rounds=50, width=3, seed=3)(x, torch.tensor([128]))
    assert bucket.min() >= 0
    assert 100 < bucket.unique().numel() <= 128
    assert Hash(66, 1, 4, seed=0).factors == (66,)


def test_a_short_sentence_has_no_more_buckets_than_chunks():
    x, hashing = tokens(300), Hash(64, 3, 6, seed=0)
    for most, allowed in ((0, 1), (1, 1), (2, 2), (5, 4), (64, 64), (1000, 64)):
        bucket = hashing(x, torch.tensor([most, 64]))
        assert bucket[:, 0].unique().numel() <= allowed
        assert bucket[:, 1].unique().numel() > 8
        for r in range(3):
            assert bucket[r, 0, 1, :5].tolist() == [hashing.one(token, r, most) for token in x[0, 1, :5]]


# What must not matter


@pytest.mark.parametrize("strict", [False, True])
def test_pads_neither_take_places_in_chunks_nor_buckets(strict: bool):
    attention, q, v = build(LSHSpec(chunk=8, rounds=2, buckets=8, strict=strict)), tokens(40), tokens(40, seed=1)
    alone = attention.operator(q, q, Mask(causal=True)).apply(v)
    for n_pads in (1, 25, 100):
        place = torch.randperm(40 + n_pads, generator=torch.Generator().manual_seed(n_pads))[:40].sort().values
        padded = [torch.full((2, 2, 40 + n_pads, 6), junk, dtype=torch.float64) for junk in (math.nan, 1e10)]
        for whole, part in zip(padded, (q, v), strict=True):
            whole[:, :, place] = part
        keys = torch.zeros(2, 40 + n_pads, dtype=torch.bool)
        keys[:, place] = True
        out = attention.operator(padded[0], padded[0], Mask(causal=True, keys=keys)).apply(padded[1])
        torch.testing.assert_close(out[:, :, place], alone, rtol=1e-12, atol=1e-12)
        assert out.isfinite().all()


def test_zero_vectors_are_harmless():
    attention = build(LSHSpec(chunk=4, rounds=2, buckets=4))
    q = tokens(20)
    q[:, :, ::3] = 0
    q.requires_grad_()
    weights = attention.operator(q, q, Mask()).dense()
    torch.testing.assert_close(weights, attention.reference(q, q, Mask()), rtol=1e-10, atol=1e-10)
    (gradient,) = torch.autograd.grad((weights @ tokens(20, seed=1)).square().sum(), q)
    assert gradient.isfinite().all()
    assert gradient.abs().max() < 1e5
    assert unit(torch.zeros(3, 4)).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strict", [False, True])
def test_a_lone_token_reads_itself_and_a_sentence_of_pads_nothing(strict: bool, dtype: torch.dtype):
    attention = build(LSHSpec(chunk=4, strict=strict))
    q, v = (x.to(dtype).requires_grad_() for x in (tokens(5), tokens(5, seed=1)))
    keys = torch.zeros(2, 5, dtype=torch.bool)
    keys[1, 2] = True
    operator = attention.operator(q, q, Mask(keys=keys))
    expected = v.detach().masked_fill(~keys[:, None, :, None], 0)
    for out in (operator.apply(v), operator.materialised().apply(v)):
        assert torch.equal(out, expected)
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, v), retain_graph=True))


@pytest.mark.parametrize("t", [1, 40, 99])
def test_the_strict_one_is_blind_to_a_later_token_however_large(t: int):
    attention = build(LSHSpec(chunk=8, rounds=3, buckets=8, strict=True))
    q, v = tokens(100, dtype=torch.float32), tokens(100, seed=1, dtype=torch.float32)
    before = attention.operator(q, q, Mask(causal=True)).apply(v)
    changed, others = q.clone(), v.clone()
    changed[:, :, t:] *= 100
    others[:, :, t:] -= 100
    after = attention.operator(changed, changed, Mask(causal=True)).apply(others)
    torch.testing.assert_close(after[:, :, :t], before[:, :, :t], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(after, before)


# State


def test_rotations_follow_from_the_seed_and_change_only_when_redrawn():
    before = torch.get_rng_state()
    one, same, other = (build(LSHSpec(seed=seed)) for seed in (5, 5, 6))
    assert torch.equal(one.hashing.rotations, same.hashing.rotations)
    assert not torch.equal(one.hashing.rotations, other.hashing.rotations)
    first = one.hashing.rotations.clone()
    one.redraw()
    assert not torch.equal(one.hashing.rotations, first)
    assert torch.equal(torch.get_rng_state(), before)

    saved = io.BytesIO()
    torch.save(one.state_dict(), saved)
    same.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    assert torch.equal(one.hashing.rotations, same.hashing.rotations)
    one.redraw()
    same.redraw()
    assert torch.equal(one.hashing.rotations, same.hashing.rotations)


def test_sharing_keys_is_claimed_and_k_is_not_read():
    q, k, v = tokens(9), torch.full((2, 2, 9, 6), math.nan, dtype=torch.float64), tokens(9, seed=1)
    for strict in (False, True):
        attention = build(LSHSpec(strict=strict))
        assert attention.traits.shared_qk
        assert attention.operator(q, k, Mask()).apply(v).isfinite().all()


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: build(LSHSpec(buckets=3)), "got 3 buckets; give 1 or an even number"),
        (lambda: build(LSHSpec(buckets=2**23)), "lsh: 8388608 buckets, of which a chunk and the one before are read"),
        (
            lambda: build(LSHSpec(strict=True, chunk=2**14, buckets=2**12)),
            "lsh: chunk 16384 and 4096 buckets: their product is 67,108,864; give smaller ones, of at most 8,388,608",
        ),
        (lambda: build(LSHSpec(strict=True, attend_across_buckets=True)), "leave attend_across_buckets out"),
        (
            lambda: build(LSHSpec(d_head=4)).operator(tokens(3), tokens(3), Mask()),
            "made for d_head = 4, got 6; give both the same",
        ),
    ],
)
def test_what_cannot_be_is_refused(attempt, message: str):
    with pytest.raises(UserError, match=re.escape(message)):
        attempt()


def test_the_widest_buckets_that_are_taken_are_still_told_apart():
    q = tokens(40)
    for spec in (LSHSpec(strict=True, chunk=2**11, buckets=2**12), LSHSpec(chunk=1, buckets=2**22)):
        attention = build(spec)
        assert torch.allclose(attention.operator(q, q, Mask()).dense(), attention.reference(q, q, Mask()), atol=1e-5)


def test_an_empty_batch_gives_an_empty_batch():
    for strict in (False, True):
        x = torch.zeros(0, 2, 5, 6)
        assert build(LSHSpec(strict=strict)).operator(x, x, Mask(causal=True)).apply(x).shape == x.shape


def test_every_seed_and_every_draw_has_rotations_of_its_own():
    seen = []
    for seed in range(5):
        attention = build(LSHSpec(seed=seed))
        for _ in range(3):
            seen.append(attention.hashing.rotations.clone())
            attention.redraw()
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


@pytest.mark.parametrize("strict", [False, True])
def test_a_schedule_draws_rotations_anew_at_updates_in_training_and_at_no_other_time(strict: bool):
    attention, twin = (build(LSHSpec(strict=strict, redraw_every=every)) for every in (3, 0))
    model, q = torch.nn.Sequential(attention), tokens(9)
    for update in range(1, 8):
        before = attention.hashing.rotations.clone()
        model.eval()
        after_update(model)
        model.train()
        attention.operator(q, q, Mask())
        assert torch.equal(attention.hashing.rotations, before)
        after_update(model)
        assert torch.equal(attention.hashing.rotations, before) == (update % 3 != 0)
        if update == 5:
            resumed = build(LSHSpec(strict=strict, redraw_every=3, seed=1))
            resumed.load_state_dict(attention.state_dict())
            after_update(resumed.train())
        if update == 6:
            assert torch.equal(resumed.hashing.rotations, attention.hashing.rotations)
    for _ in range(2):
        twin.redraw()
        after_update(twin.train())
    assert torch.equal(twin.hashing.rotations, attention.hashing.rotations)
    assert int(attention.hashing.draws) == 2
