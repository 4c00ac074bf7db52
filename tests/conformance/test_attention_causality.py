"""What comes later changes nothing, and steps equal the whole sequence."""

import pytest
import torch

from conformance.mechanisms import Case, assert_equal, gradients, inputs, those
from hasten.attention import Mask
from hasten.attention.base import Rewinding

# O6


@those(lambda case: case.traits.causal is not None)
def test_what_comes_later_changes_nothing(case: Case):
    attention = case.build()
    qkv = inputs()
    before = attention.operator(*qkv[:2], Mask(causal=True)).apply(qkv[2])
    for t in range(7):
        changed = [x.detach().clone() for x in qkv]
        for x in changed if attention.traits.causal == "strict" else changed[2:]:
            x[:, :, t:] += torch.randn(2, 2, 7 - t, 4, dtype=torch.float64)
        after = attention.operator(changed[0], changed[1], Mask(causal=True)).apply(changed[2])
        assert_equal(after[:, :, :t], before[:, :, :t], 1e-12)
        assert not case.itself or (after[:, :, t] - before[:, :, t]).abs().min() > 1e-6
        moved = gradients(before[:, :, :t], qkv)
        for gradient in moved if attention.traits.causal == "strict" else moved[2:]:
            assert not gradient[:, :, t:].any()


# O7


@pytest.mark.parametrize("chunks", [[1] * 7, [3, 1, 2, 1], [7], [2, 5], [1, 6]], ids=str)
@those(lambda case: case.traits.step)
def test_steps_of_any_size_equal_the_whole_sequence(case: Case, chunks: list[int]):
    attention = case.build()
    qkv = inputs()
    whole = attention.operator(*qkv[:2], Mask(causal=True)).apply(qkv[2])
    outs, keys, values = [], None, None
    for q, k, v in zip(*(x.split(chunks, dim=2) for x in qkv), strict=True):
        operator, keys = attention.step(q, k, keys)
        out, values = operator.apply(v, values)
        outs.append(out)
    assert_equal(torch.cat(outs, dim=2), whole)
    assert_equal(gradients(torch.cat(outs, dim=2), qkv), gradients(whole, qkv))


@those(lambda case: case.traits.step)
def test_two_layers_share_the_keys_of_one(case: Case):
    attention = case.build()
    q, k, v = inputs()
    other = torch.randn(2, 2, 7, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    operator = attention.operator(q, k, Mask(causal=True))
    keys, values, others = None, None, None
    for t in range(7):
        now = slice(t, t + 1)
        step, keys = attention.step(q[:, :, now], k[:, :, now], keys)
        out, values = step.apply(v[:, :, now], values)
        assert_equal(out, operator.apply(v)[:, :, now])
        out, others = step.apply(other[:, :, now], others)
        assert_equal(out, operator.apply(other)[:, :, now])


@those(lambda case: case.traits.step)
def test_states_follow_their_rows(case: Case):
    attention, rows = case.build(), torch.tensor([2, 0, 0, 1])
    q, k, v = inputs(batch=3)
    step, keys = attention.step(q[:, :, :4], k[:, :, :4], None)
    _, values = step.apply(v[:, :, :4], None)
    q, k, v = q[rows], k[rows], v[rows]
    step, _ = attention.step(q[:, :, 4:], k[:, :, 4:], keys.select(rows))
    out, _ = step.apply(v[:, :, 4:], values.select(rows))
    assert_equal(out, attention.operator(q, k, Mask(causal=True)).apply(v)[:, :, 4:])


@pytest.mark.parametrize("dropped", [[0, 0, 0], [2, 2, 2], [0, 3, 1], [4, 0, 2], [1, 4, 4]], ids=str)
@those(lambda case: case.traits.rewind)
def test_what_is_taken_back_was_never_there(case: Case, dropped: list[int]):
    attention, qkv, places = case.build(), inputs(9, batch=3), [0, 0, 0]
    whole = attention.operator(*qkv[:2], Mask(causal=True)).apply(qkv[2])
    keys, values = None, None
    # Every row reads on where it stands, which differs between rows from the first time of taking back on.
    for n, back in ((4, dropped), (2, [2, 0, 1]), (1, [1, 1, 1]), (2, [0, 0, 0])):
        q, k, v, expected = (
            torch.stack([x[b, :, place : place + n] for b, place in enumerate(places)]) for x in (*qkv, whole)
        )
        step, keys = attention.step(q, k, keys)
        out, values = step.apply(v, values)
        assert_equal(out, expected)
        assert isinstance(keys, Rewinding)
        assert isinstance(values, Rewinding)
        keys, values = keys.rewind(torch.tensor(back)), values.rewind(torch.tensor(back))
        places = [place + n - b for place, b in zip(places, back, strict=True)]
