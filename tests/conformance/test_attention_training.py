"""Evaluation is deterministic, memory grows as promised, dropout does what it says."""

import dataclasses
import io
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conformance.mechanisms import Case, assert_equal, each, inputs, those
from hasten.attention import Attention, Mask

# O10


@each
def test_evaluation_is_deterministic_survives_saving_and_draws_nothing(case: Case):
    attention, state = case.build(), torch.get_rng_state()
    q, k, v = inputs()
    out = attention.operator(q, k, Mask()).apply(v)
    assert torch.equal(attention.operator(q, k, Mask()).apply(v), out)
    if attention.traits.step:
        attention.step(q, k, None)[0].apply(v, None)
    attention.operator(q, k, Mask()).dense()
    assert torch.equal(torch.get_rng_state(), state)

    saved = io.BytesIO()
    torch.save(attention.state_dict(), saved)
    torch.manual_seed(1)
    again = case.build()
    again.load_state_dict(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    assert torch.equal(again.operator(q, k, Mask()).apply(v), out)


# O11


def peak_memory(run: Callable[[], object], trace: Path) -> int:
    """Bytes that torch held at most, beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    profile.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


def slope(run: Callable[[Tensor, Tensor, Tensor], object], trace: Path, heads: int = 1) -> float:
    """Power of the length with which the peak memory of `run(q, k, v)` grows."""
    lengths, peaks = [1024, 2048, 4096], []
    for length in lengths:
        q, k, v = (x.detach()[:1, :heads].float().requires_grad_() for x in inputs(length, batch=1, width=16))
        peaks.append(peak_memory(lambda q=q, k=k, v=v: run(q, k, v), trace))
    return max(math.log2(after / before) for before, after in itertools.pairwise(peaks))


@those(lambda case: case.traits.max_length is None and case.large)
def test_memory_grows_as_promised(case: Case, tmp_path: Path):
    attention = case.build(d_head=16)
    mask = Mask(causal=attention.traits.causal is not None)

    def train(q: Tensor, k: Tensor, v: Tensor) -> None:
        attention.operator(q, k, mask).apply(v).sum().backward()

    assert slope(train, tmp_path / "trace.json", attention.traits.n_heads or 1) <= attention.traits.memory + 0.1


def test_the_measurement_of_memory_tells_lines_from_squares(tmp_path: Path):
    assert slope(lambda q, k, v: (q * k, q + k), tmp_path / "trace.json") == pytest.approx(1, abs=0.05)
    assert slope(lambda q, k, v: q @ k.transpose(2, 3), tmp_path / "trace.json") == pytest.approx(2, abs=0.05)


# O12


def dropping(case: Case, p: float) -> Attention:
    return case.build(dropout=p).train()


@each
def test_dropout_can_be_asked_for_where_it_is_claimed(case: Case):
    assert ("dropout" in {field.name for field in dataclasses.fields(case.spec)}) is case.traits.dropout


@those(lambda case: case.traits.dropout)
def test_dropout_of_nothing_is_no_dropout(case: Case):
    q, k, v = inputs()
    assert_equal(dropping(case, 0.0).operator(q, k, Mask()).apply(v), case.build().operator(q, k, Mask()).apply(v))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@those(lambda case: case.traits.dropout)
def test_dropout_zeroes_weights_and_keeps_their_mean(case: Case, dtype: torch.dtype):
    attention, p = dropping(case, 0.25), 0.25
    q, k, _ = (x.to(dtype).expand(2000, 2, 7, 4) for x in inputs(batch=1))
    identity = torch.eye(7, dtype=dtype).expand(2000, 2, 7, 7)
    operator = attention.operator(q, k, Mask())
    torch.manual_seed(3)
    weights = operator.apply(identity).double()
    dropped, full = weights == 0, operator.dense().double()
    assert_equal(weights[~dropped], full[~dropped] / (1 - p), 1e-10 if dtype == torch.float64 else 1e-2)
    read = full[0] > 0
    assert dropped[:, read].double().mean() == pytest.approx(p, abs=0.01)
    assert dropped[:, read].double().mean(0) == pytest.approx(torch.full((int(read.sum()),), p).numpy(), abs=0.06)
    torch.manual_seed(3)
    assert torch.equal(operator.apply(identity).double(), weights)
    assert not torch.equal(operator.apply(identity).double(), weights)
