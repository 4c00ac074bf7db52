"""Learning rates against their closed forms, and which parameters decay."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hasten.spec import TrainingSpec
from hasten.training.optim import adamw, learning_rate


def rates(**options) -> list[float]:
    spec = TrainingSpec(**{"learning_rate": 2.0, **options})
    return [learning_rate(spec, step) for step in range(spec.steps)]


def test_linear_rises_and_falls_straight():
    assert rates(schedule="linear", steps=8, warmup=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 1.5, 1.0, 0.5]


def test_inverse_sqrt_falls_with_the_root():
    found = rates(schedule="inverse_sqrt", steps=101, warmup=4)
    assert found[:4] == [0.5, 1.0, 1.5, 2.0]
    for step in range(4, 101):
        assert found[step] == pytest.approx(2.0 * (4 / (step + 1)) ** 0.5)


def test_hold_then_linear_holds_and_falls_over_the_last_share():
    found = rates(schedule="hold_then_linear", steps=10, warmup=2, decay=0.4)
    assert found == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5])


def test_no_decay_holds_to_the_end():
    assert rates(schedule="hold_then_linear", steps=5, warmup=0, decay=0.0) == [2.0] * 5


def test_no_warmup_starts_at_the_peak():
    assert rates(schedule="linear", steps=4, warmup=0) == [2.0, 1.5, 1.0, 0.5]
    assert rates(schedule="inverse_sqrt", steps=4, warmup=0) == pytest.approx([2.0, 2 / 2**0.5, 2 / 3**0.5, 1.0])


@pytest.mark.parametrize("schedule", ["linear", "inverse_sqrt", "hold_then_linear"])
def test_a_warmup_longer_than_the_run_only_rises(schedule):
    found = rates(schedule=schedule, steps=5, warmup=100, decay=0.0)
    assert found == pytest.approx([0.02 * (step + 1) for step in range(5)])


@given(
    st.builds(
        TrainingSpec,
        schedule=st.sampled_from(["linear", "inverse_sqrt", "hold_then_linear"]),
        steps=st.integers(1, 60),
        warmup=st.integers(0, 80),
        decay=st.floats(0, 1, exclude_max=True),
        learning_rate=st.floats(1e-6, 10),
    )
)
def test_every_rate_is_positive_and_at_most_the_peak_and_rises_before_it_falls(spec):
    found = [learning_rate(spec, step) for step in range(spec.steps)]
    assert all(0 < rate <= spec.learning_rate for rate in found)
    top = found.index(max(found))
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)


def test_matrices_decay_and_vectors_do_not():
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Embedding(4, 3))
    spec = dataclasses.replace(TrainingSpec(), weight_decay=0.25)
    groups = adamw(model, spec).param_groups
    decay = {parameter.shape: group["weight_decay"] for group in groups for parameter in group["params"]}
    assert decay == {(3, 2): 0.25, (4, 3): 0.25, (3,): 0.0}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
