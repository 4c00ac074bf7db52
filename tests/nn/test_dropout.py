"""Dropout from random bytes, against what `torch.nn.Dropout` promises."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.errors import UserError
from hasten.nn.dropout import Dropout


def train(p: float, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return Dropout(p).train()(x)


@pytest.mark.parametrize(
    ("p", "share"), [(0.1, 26 / 256), (0.3, 77 / 256), (0.5, 0.5), (1e-6, 1 / 256), (0.999999, 255 / 256)]
)
def test_the_rate_is_the_nearest_of_256_and_the_mean_stays(p: float, share: float):
    n = 400_000
    out = train(p, torch.ones(n, dtype=torch.float64))
    kept = out[out != 0]
    assert out.eq(0).double().mean().item() == pytest.approx(share, abs=5 * (share * (1 - share) / n) ** 0.5)
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - share)), rtol=1e-12, atol=0)
    assert out.mean().item() == pytest.approx(1, abs=5 * (share / (1 - share) / n) ** 0.5)


def test_neighbouring_elements_and_calls_are_independent():
    torch.manual_seed(0)
    layer = Dropout(0.5).train()
    drawn = torch.stack([layer(torch.ones(8 * 4000)) for _ in range(2)]).ne(0).float().view(2, 4000, 8)
    columns = torch.cat((drawn[0], drawn[1]), dim=1).T
    correlation = torch.corrcoef(columns) - torch.eye(16)
    assert correlation.abs().max() < 0.08


def test_evaluation_and_rate_zero_are_the_identity_and_draw_nothing():
    x, state = torch.randn(3, 5), torch.get_rng_state()
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0).train()(x) is x
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_decides_what_is_dropped():
    x = torch.ones(1000)
    assert torch.equal(train(0.5, x, 1), train(0.5, x, 1))
    assert not torch.equal(train(0.5, x, 1), train(0.5, x, 2))


def test_the_gradient_is_that_of_the_same_choice():
    x = torch.randn(7, 9, dtype=torch.float64, requires_grad=True)
    out = train(0.25, x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, (out / x).detach())
    assert set(gradient.unique().tolist()) == {0.0, 256 / (256 - 64)}


@given(st.lists(st.integers(0, 5), max_size=4), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_any_shape_and_width_of_number_is_kept(shape: list[int], dtype: torch.dtype):
    x = torch.ones(shape, dtype=dtype)
    out = train(0.5, x)
    assert out.shape == x.shape
    assert out.dtype == dtype
    assert set(out.flatten().tolist()) <= {0.0, 2.0}


def test_a_view_that_is_not_contiguous_is_dropped_too():
    x = torch.ones(64, 32).T
    out = train(0.5, x)
    assert 0.4 < out.eq(0).float().mean() < 0.6


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0, float("nan")])
def test_a_rate_that_is_no_share_is_an_error(p: float):
    with pytest.raises(UserError, match=f"dropout is {p}"):
        Dropout(p)


@pytest.mark.usefixtures("unchecked")
def test_it_compiles_into_one_graph():
    torch.compiler.reset()
    compiled = torch.compile(Dropout(0.5).train(), fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (1000, 1001):
        out = compiled(torch.ones(n))
        assert set(out.tolist()) == {0.0, 2.0}
        assert 0.4 < out.eq(0).float().mean() < 0.6
