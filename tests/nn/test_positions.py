"""Sinusoids, against their formula one number at a time."""

import math

import pytest
import torch

from hasten.nn.positions import Sinusoids, sinusoids


@pytest.mark.parametrize("d_model", [1, 2, 6, 7])
def test_the_table_is_the_formula(d_model: int):
    table = sinusoids(20, d_model)
    assert table.shape == (20, d_model)
    for position in range(20):
        for column in range(d_model):
            angle = position / 10000 ** (column // 2 * 2 / d_model)
            wanted = math.cos(angle) if column % 2 else math.sin(angle)
            assert table[position, column].item() == pytest.approx(wanted, abs=1e-7)


def test_positions_are_exact_far_out():
    assert sinusoids(100_001, 2)[100_000].tolist() == pytest.approx([math.sin(1e5), math.cos(1e5)], abs=1e-6)


def test_a_sequence_gets_the_positions_it_stands_at():
    module, x = Sinusoids(6, 8), torch.randn(2, 5, 6)
    torch.testing.assert_close(module(x), x + sinusoids(5, 6))
    torch.testing.assert_close(module(x, start=3), x + sinusoids(8, 6)[3:])
    parts = torch.cat([module(x[:, t : t + 1], start=t) for t in range(5)], dim=1)
    assert torch.equal(parts, module(x))


@pytest.mark.parametrize(("start", "length"), [(0, 9), (8, 1), (7, 2), (100, 30)])
def test_the_table_grows_when_it_must_and_says_the_same(start: int, length: int):
    module, x = Sinusoids(6, 8), torch.zeros(1, length, 6)
    torch.testing.assert_close(module(x, start)[0], sinusoids(start + length, 6)[start:])
    assert len(module.table) >= start + length
    torch.testing.assert_close(module(torch.zeros(1, 8, 6))[0], sinusoids(8, 6))


def test_growing_keeps_the_type_of_numbers():
    module = Sinusoids(6, 4).double()
    out = module(torch.zeros(1, 9, 6, dtype=torch.float64))
    assert out.dtype == torch.float64
    assert module.table.dtype == torch.float64


def test_the_table_is_not_saved_and_passes_gradients_through():
    module, x = Sinusoids(6), torch.randn(1, 3, 6, requires_grad=True)
    assert module.state_dict() == {}
    assert torch.autograd.grad(module(x).sum(), x)[0].eq(1).all()


def test_every_row_may_start_elsewhere_also_beyond_the_table():
    positions, x, starts = Sinusoids(8, initial_length=4), torch.randn(3, 2, 8), torch.tensor([0, 5, 30])
    expected = torch.cat([positions(x[b : b + 1], start) for b, start in enumerate(starts.tolist())])
    assert torch.equal(Sinusoids(8, initial_length=4).each(x, starts), expected)
