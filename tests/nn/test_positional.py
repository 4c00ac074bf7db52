"""Decoder layers that attend by position, and of which no position attends to itself."""

import math
from typing import Any

import pytest
import torch

from hasten.attention import FullSpec, LocalSpec, Mask
from hasten.attention.base import Operator
from hasten.errors import UserError
from hasten.nn.decoder_inputs import first
from hasten.nn.positional import PositionalAttention, PositionalDecoder, others
from hasten.nn.positions import Sinusoids, sinusoids

SHARED = {"sharing": (1, 1, 3), "positional_sharing": (1, 2, 1), "cross_sharing": (1, 1, 3)}


def decoder(**settings) -> PositionalDecoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        attention = settings.pop("attention", (FullSpec(),))
        return PositionalDecoder(3, 8, 2, 16, 0.0, attention, (FullSpec(),), **settings).eval()


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def self_attention(model: PositionalDecoder) -> Any:
    """That of the first layer."""
    return getattr(model.layers[0], "self_attention")  # noqa: B009


def full(n: int) -> torch.Tensor:
    return torch.ones(1, n, dtype=torch.bool)


def test_attention_by_position_is_as_defined():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = PositionalAttention(8, 2, Sinusoids(8))
    x, mask = numbers(2, 5, 8), first(torch.tensor([5, 3]))
    found = layer.attend(x, Mask(keys=mask)).output
    w, b, places = layer.in_proj_weight, layer.in_proj_bias, sinusoids(5, 8)
    for row, n in enumerate([5, 3]):
        for i in range(5):
            context = []
            for h in range(2):
                q, k, v = (slice(part * 8 + h * 4, part * 8 + h * 4 + 4) for part in range(3))
                query, keys = w[q] @ places[i] + b[q], places[:n] @ w[k].T + b[k]
                weights = (keys @ query / math.sqrt(4)).softmax(-1)
                context.append(weights @ (x[row, :n] @ w[v].T + b[v]))
            expected = layer.out_proj(torch.cat(context))
            torch.testing.assert_close(found[row, i], expected, rtol=1e-4, atol=1e-5)


def test_what_stands_at_a_place_moves_no_weight_by_position():
    layer = PositionalAttention(8, 2, Sinusoids(8))
    weights = [layer.attend(numbers(1, 5, 8, seed=seed), Mask()).operator for seed in (1, 2)]
    assert torch.equal(*(operator.materialised().dense() for operator in weights if isinstance(operator, Operator)))


def test_no_position_attends_to_itself():
    attention, x = self_attention(decoder()), numbers(1, 5, 8)
    weights = attention.attend(x, others(full(5))).operator.dense()
    assert (weights.diagonal(dim1=-2, dim2=-1) == 0).all()
    assert (weights > 0).sum() == 2 * 5 * 4
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 5))


def test_of_two_positions_each_reads_the_other_whatever_stands_at_its_own():
    attention, x = self_attention(decoder()), numbers(1, 2, 8)
    before = attention.attend(x, others(full(2))).output
    x[0, 0] += 1
    after = attention.attend(x, others(full(2))).output
    torch.testing.assert_close(after[0, 0], before[0, 0])
    assert not torch.allclose(after[0, 1], before[0, 1])


def test_the_value_at_a_position_never_enters_its_own_self_attention():
    attention, x = self_attention(decoder()), numbers(1, 5, 8)
    operator = attention.attend(x, others(full(5))).operator
    values = numbers(1, 2, 5, 4, seed=2).requires_grad_()
    for i in range(5):
        [gradient] = torch.autograd.grad(operator.apply(values)[0, :, i].sum(), values)
        assert (gradient[0, :, i] == 0).all()
        assert (gradient.abs().sum((1, 3)) > 0).sum() == 4


def test_a_single_position_reads_nothing_and_stays_finite():
    model, x = decoder(), numbers(1, 1, 8).requires_grad_()
    attended = self_attention(model).attend(x, others(full(1)))
    assert (attended.context == 0).all()
    out = model(x, full(1), numbers(1, 3, 8), full(3))
    assert out.isfinite().all()
    out.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in [x, *model.parameters()])


@pytest.mark.parametrize("settings", [{}, SHARED], ids=["own", "shared"])
def test_rows_do_not_know_of_each_other_nor_of_padding(settings):
    model = decoder(**settings)
    x, memory = numbers(3, 6, 8), numbers(3, 5, 8, seed=2)
    lengths = [(4, 5), (6, 2), (1, 1)]
    masks = [first(torch.tensor(side), n) for side, n in zip(zip(*lengths, strict=True), (6, 5), strict=True)]
    together = model(x, masks[0], memory, masks[1])
    for row, (t, s) in enumerate(lengths):
        alone = model(x[row : row + 1, :t], full(t), memory[row : row + 1, :s], full(s))
        torch.testing.assert_close(together[row, :t], alone[0], rtol=1e-4, atol=1e-5)


def test_followers_use_the_weights_of_their_leader():
    seen = {}
    model = decoder(**SHARED)
    x, memory = numbers(1, 5, 8), numbers(1, 4, 8, seed=2)
    model(x, full(5), memory, full(4), lambda kind, i, attended: seen.update({(kind, i): attended.operator.dense()}))
    assert set(seen) == {(kind, i) for kind in ("self", "positional", "cross") for i in range(3)}
    assert torch.equal(seen["positional", 2], seen["positional", 0])
    assert not torch.allclose(seen["positional", 1], seen["positional", 0])
    assert torch.equal(seen["self", 1], seen["self", 0])


def test_followers_have_no_queries_and_keys_of_their_own():
    own, shared = (sum(p.numel() for p in decoder(**s).parameters()) for s in ({}, {"positional_sharing": (1, 1, 1)}))
    assert own - shared == 2 * (2 * 8 * 8 + 2 * 8)


def test_a_mechanism_that_cannot_leave_out_a_position_is_refused():
    with pytest.raises(UserError, match=r"layer 1: local attention cannot serve here, where no position may attend"):
        decoder(attention=(LocalSpec(left=2, right=2),))
