"""The sums behind kernel attention: dense, chunked and recurrent forms agree, at any length and magnitude."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.attention import Mask
from hasten.attention.kernels.kernel import ByHeads, KernelState, KernelStep, Means, Ratio, by_heads
from hasten.attention.kernels.log_sums import averaging_log_sums, running_logsumexp, running_max, scaled_log_sums
from hasten.attention.kernels.prefix_sums import (
    GROUP,
    LOWEST,
    decayed_prefix_sums,
    grid_of,
    prefix_sums,
    states_before,
)
from hasten.attention.kernels.traced_sums import causal_sums

CHUNKS = [1, 2, 4, 8, 16, 32, 64, 128, 256]  # all there are below 150 and one above
KINDS = ["plain", "decayed", "scaled", "averaging"]
MAKERS = {
    "plain": prefix_sums,
    "decayed": decayed_prefix_sums,
    "scaled": scaled_log_sums,
    "averaging": averaging_log_sums,
}


def close(actual, expected, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def operands(kind: str, n_queries: int, n_keys: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Features of two sentences, two heads, three features; and values of width 5."""
    q, k = draw(2, 2, n_queries, 3, dtype=dtype), draw(2, 2, n_keys, 3, seed=1, dtype=dtype)
    v = draw(2, 2, n_keys, 5, seed=2, dtype=dtype)
    if kind == "decayed":
        logs = (-draw(2, 2, n_keys, 1, seed=s, dtype=dtype).detach().abs().mul(0.2).requires_grad_() for s in (3, 4))
        return (q, k, *(x.detach().requires_grad_() for x in logs), v)
    return q, k, v


def dense_weights(kind: str, *features: Tensor) -> Tensor:
    """Weights by their definition: every pair apart."""
    q, k = features[:2]
    n_queries, n_keys = q.shape[2], k.shape[2]
    seen = torch.arange(n_keys) <= torch.arange(n_queries)[:, None] + n_keys - n_queries
    if kind == "plain":
        return (q @ k.mT).masked_fill(~seen, 0.0)
    if kind == "decayed":
        so_far, entry = features[2].cumsum(2), features[3]
        now = F.pad(so_far, (0, 0, n_queries - n_keys, 0))  # what has passed at every query
        factor = (now - so_far.mT + entry.mT).masked_fill(~seen, -torch.inf).exp()
        return (q @ k.mT) * factor
    pairs = (q[:, :, :, None] + k[:, :, None]).masked_fill(~seen[..., None], -torch.inf)
    if kind == "scaled":  # up to a factor for each query: here the weights of a row sum to 1
        log_sums = pairs.flatten(3).logsumexp(-1)[..., None, None]
        return (pairs - log_sums).exp().nan_to_num(0.0).sum(-1)
    averages = k[:, :, None].masked_fill(~seen[..., None], -torch.inf).softmax(3).nan_to_num(0.0)
    return (q.exp()[:, :, :, None] * averages).sum(-1)


def applied(kind: str, sums, v: Tensor) -> Tensor:
    return Ratio(sums)(v) if kind == "scaled" else sums(v)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_in_chunks_of_any_size_are_the_dense_sums(kind: str, chunk: int):
    *features, v = operands(kind, 150, 150)
    out = applied(kind, MAKERS[kind](*features, chunk), v)
    expected = dense_weights(kind, *features) @ v
    close(out, expected)
    cotangent = draw(*out.shape, seed=5).detach()
    gradients, wanted = (torch.autograd.grad(x, (*features, v), cotangent) for x in (out, expected))
    close(gradients, wanted)


@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 1), (1, 40), (9, 40), (40, 9), (40, 1), (17, 16), (16, 17)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_query_is_aligned_with_the_last_key_whatever_the_chunks(kind: str, n_queries: int, n_keys: int):
    *features, v = operands(kind, n_queries, n_keys)
    if n_queries > n_keys:
        features = [x[:, :, -n_queries:] for x in features]
    late = max(0, n_queries - n_keys)  # queries before the first key read nothing
    expected = dense_weights(kind, *features) @ v
    for chunk in (1, 4, 16):
        out = applied(kind, MAKERS[kind](*features, chunk), v)
        close(out[:, :, late:], expected[:, :, late:])
        assert not out[:, :, :late].any()


def test_a_chunk_is_a_power_of_two():
    for chunk in (0, 3, 48):
        with pytest.raises(ValueError, match="power of two"):
            grid_of(5, 5, chunk)


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_thousand_positions_equal_the_recurrence(kind: str):
    length = 16384
    *features, v = (x.detach()[:1, :1] for x in operands(kind, length, length, torch.float32))
    if kind == "plain":
        features = [x.abs() for x in features]  # no cancellation, which would be an error of its own
    wide = [x.double() for x in (*features, v)]
    if kind == "plain":
        q, k, past = wide[0], wide[1], 1.0
    elif kind == "decayed":
        q, k, past = wide[0].abs(), wide[1].abs() * wide[3].exp(), wide[2].exp()
        features[:2] = [x.abs() for x in features[:2]]
    else:
        q, k, past = wide[0].exp(), wide[1].exp(), 1.0
    rows = torch.stack((wide[-1], torch.ones_like(wide[-1])))  # values, and the sum of weights
    if isinstance(past, float):
        states = (k[..., None] * rows[..., None, :]).cumsum(3)
        sums = (q[..., None] * states).sum(-2) if kind != "averaging" else (q[..., None] * states / states[1]).sum(-2)
    else:
        state, sums = torch.zeros(2, 1, 1, 3, 5, dtype=torch.float64), []
        for t in range(length):
            state = past[:, :, t, :, None] * state + k[:, :, t, :, None] * rows[:, :, :, t, None, :]
            sums.append((q[:, :, t, :, None] * state).sum(-2))
        sums = torch.stack(sums, dim=3)
    expected = sums[0] if kind == "averaging" else sums[0] / sums[1]
    causal = MAKERS[kind](*features)
    out = causal(v) if kind == "averaging" else Ratio(causal)(v)
    close(out.double(), expected, 1e-5)


@pytest.mark.parametrize("count", [1, 2, GROUP, GROUP + 1, 5 * GROUP + 3])
def test_states_before_are_the_sums_of_their_definition(count: int):
    states, level = draw(2, count, 3, 4), (100 * draw(2, count, 3, seed=1)).detach()
    before, reference = states_before(states, level)
    assert not before[:, 0].any()
    assert (reference[:, 0] == LOWEST).all()
    for n in range(1, count):
        assert torch.equal(reference[:, n], level[:, :n].amax(1))
        factors = (level[:, :n] - reference[:, n : n + 1]).exp()[..., None]
        close(before[:, n], (factors * states[:, :n]).sum(1))


def test_running_maxima_and_log_sums_are_those_of_torch():
    logs = (30 * draw(2, 1, 70, 3)).detach()
    logs[:, :, :5, 1] = -torch.inf
    logs.requires_grad_()
    grid = grid_of(70, 70, 8)
    cut = grid.cut(logs, -torch.inf)
    close(grid.join(running_max(cut)), logs.clamp_min(LOWEST).cummax(2).values)
    running, expected = grid.join(running_logsumexp(cut)), logs.clamp_min(LOWEST).logcumsumexp(2)
    close(running, expected)
    cotangent = draw(*running.shape, seed=4).detach()
    cotangent[:, :, :5, 1] = 0.0  # where nothing has been added torch's own gradient is not that of a log-sum
    close(torch.autograd.grad(running, logs, cotangent), torch.autograd.grad(expected, logs, cotangent))
    (gradient,) = torch.autograd.grad(grid.join(running_logsumexp(grid.cut(logs, -torch.inf))).sum(), logs)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", ["rising", "falling", "jumping", "steps"])
def test_logarithms_of_any_magnitude_leave_no_row_empty_and_no_sum_infinite(shape: str, dtype: torch.dtype):
    n = 200
    ramp = {
        "rising": torch.linspace(-2000, 2000, n),
        "falling": torch.linspace(2000, -2000, n),
        "jumping": 1500 * draw(n, seed=9).detach().float(),
        "steps": 700.0 * (torch.arange(n) // 50),
    }[shape].double()
    a = (300 * draw(1, 1, n, 4)).detach()
    b = (ramp[:, None] * torch.tensor([1.0, 0.5, -1.0, 0.0], dtype=torch.float64) + draw(n, 4, seed=1))[None, None]
    a, b = a.to(dtype), b.detach().to(dtype)
    v = draw(1, 1, n, 5, seed=2).detach().to(dtype)
    a.requires_grad_(), b.requires_grad_(), v.requires_grad_()
    tolerance = 1e-10 if dtype == torch.float64 else 2e-3  # of float32, thousands carry four digits after the point
    wide = [x.detach().double() for x in (a, b, v)]
    for kind in ("scaled", "averaging"):
        given = (a.log_softmax(-1) if kind == "averaging" else a, b)
        out = applied(kind, MAKERS[kind](*given), v)
        exact = (wide[0].log_softmax(-1) if kind == "averaging" else wide[0], wide[1])
        close(out.double(), dense_weights(kind, *exact) @ wide[2], tolerance)
        close(applied(kind, MAKERS[kind](*given), torch.ones_like(v)).double(), torch.ones_like(wide[2]), tolerance / 5)
        for gradient in torch.autograd.grad(out.square().sum(), (a, b, v)):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", ["scaled", "averaging"])
def test_large_later_keys_change_nothing_before_them(kind: str):
    *features, v = (x.detach().float() for x in operands(kind, 150, 150))
    before = applied(kind, MAKERS[kind](*features), v)
    for t in (1, 63, 64, 100, 149):
        later = features[1].clone()
        later[:, :, t:] += 500.0
        assert torch.equal(applied(kind, MAKERS[kind](features[0], later), v)[:, :, :t], before[:, :, :t])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", KINDS)
def test_a_traced_graph_computes_the_same_sums_and_gradients(kind: str):
    torch.compiler.reset()

    def call(*inputs: Tensor) -> Tensor:
        return causal_sums(kind, *inputs[:-1])(inputs[-1])  # type: ignore[arg-type]

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for n_queries, n_keys in ((150, 150), (90, 130)):
        inputs = operands(kind, n_queries, n_keys)
        out, expected = compiled(*inputs), call(*inputs)
        close(out, expected)
        cotangent = draw(*out.shape, seed=5).detach()
        close(torch.autograd.grad(out, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent))


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
def test_heads_made_apart_are_the_same_heads(causal: bool):
    q, k, v = draw(2, 3, 50, 4), draw(2, 3, 60, 4, seed=1), draw(2, 3, 60, 5, seed=2)

    def make(mask: Mask, *features: Tensor):
        return prefix_sums(*features) if mask.causal else Means(*features)

    together, apart = (by_heads(make, Mask(causal=causal), n, q, k) for n in (4, 1 << 20))
    assert not isinstance(together, ByHeads)
    assert isinstance(apart, ByHeads)
    close(apart(v), together(v))
    close(torch.autograd.grad(apart(v).sum(), (q, k, v)), torch.autograd.grad(together(v).sum(), (q, k, v)))


def ratio(weights: Tensor, v: Tensor, floor: Tensor) -> Tensor:
    return weights @ v / torch.maximum(weights.sum(-1, keepdim=True), floor)


@pytest.mark.parametrize("shape", [(2, 2, 7, 1), (2, 2, 1, 1)], ids=["a floor a query", "one floor"])
def test_means_are_products_over_their_sum_or_over_a_floor_where_it_is_less(shape: tuple[int, ...]):
    q, k, v = draw(2, 2, 7, 3), draw(2, 2, 9, 3, seed=1), draw(2, 2, 9, 5, seed=2)
    weights, floor = q @ k.mT, draw(*shape, seed=3).detach().abs().add(1.0).requires_grad_()
    assert {True, False} == set((weights.sum(-1, keepdim=True) < floor).flatten().tolist())
    expected = ratio(weights, v, floor)
    cotangent = draw(*expected.shape, seed=5).detach()
    wanted = torch.autograd.grad(expected, (q, k, v, floor), cotangent, retain_graph=True)
    for out in (Means(q, k, floor)(v), Ratio(lambda x: weights @ x, floor)(v)):
        close(out, expected)
        close(torch.autograd.grad(out, (q, k, v, floor), cotangent, retain_graph=True), wanted)


def test_gradients_of_means_have_gradients():
    inputs = draw(1, 1, 3, 2), draw(1, 1, 4, 2, seed=1), draw(1, 1, 4, 2, seed=2)
    floor = torch.full((1, 1, 3, 1), 0.5, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda q, k, v: Means(q, k, floor)(v), inputs)


def test_a_state_of_decoding_does_not_grow():
    q, k, v = draw(1, 2, 50, 3), draw(1, 2, 50, 3, seed=1), draw(1, 2, 50, 5, seed=2)
    state, outs = None, []
    for t in range(50):
        now = slice(t, t + 1)
        step = KernelStep(prefix_sums(q[:, :, now], k[:, :, now]), q[:, :, now], k[:, :, now], q.new_ones(()), None)
        out, state = step.apply(v[:, :, now], state)
        assert isinstance(state, KernelState)
        assert state.total.shape == (1, 2, 3, 5)
        outs.append(out)
    close(torch.cat(outs, 2), prefix_sums(q, k)(v))
