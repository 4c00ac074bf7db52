"""The laws of attention. A mechanism conforms when its line in CASES passes; what it cannot do, its traits say.

Reference: every law is checked against `Attention.reference`, the plain dense definition, or against the law itself.
"""

import dataclasses
import io
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from hasten.attention import ATTENTIONS, Attention, FullSpec, Mask, Operator, Traits
from hasten.attention.base import Weights
from hasten.errors import UserError

SIDES = ("right", "left", "interior")


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A mechanism that can do nothing but mix positions by a learnt table: the suite's refusals are tested on it."""

    kind: Literal["table"] = "table"

    def build(self) -> "Table":
        return Table(12)


class Table(Attention):
    """softmax(table), whatever the inputs (random Synthesizer)."""

    traits = Traits(
        causal=None,
        cross=False,
        step=False,
        normalised=True,
        key_padding=False,
        dropout=False,
        needs=frozenset(),
        max_length=12,
    )

    def __init__(self, length: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(length, length, dtype=torch.float64))

    def operator(self, q: Tensor, k: Tensor, mask: Mask) -> Operator:
        if mask != Mask() or q.shape[2] != k.shape[2] or k.shape[2] > len(self.table):
            raise UserError("table attention is for unmasked self-attention over at most 12 positions")
        return Weights(self.reference(q, k, mask))

    def reference(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        length = k.shape[2]
        return self.table[:length, :length].softmax(-1).to(q).expand(*q.shape[:2], length, length)


@dataclass(frozen=True)
class Case:
    """A mechanism and the limits of its laws: where positions have a meaning, and where padding equals dropping."""

    name: str
    spec: Any
    equivariant: bool = False
    sides: tuple[str, ...] = SIDES

    def build(self) -> Attention:
        torch.manual_seed(0)
        return self.spec.build().eval()

    @property
    def traits(self) -> Traits:
        return self.build().traits


CASES = (
    Case("full", FullSpec(), equivariant=True),
    Case("table", TableSpec()),
)

# Which masks a mechanism takes, and the masks, by name. Rows without any key are among them.
SUPPORT: dict[str, Callable[[Traits], bool]] = {
    "no mask": lambda traits: True,
    "causal": lambda traits: traits.causal is not None,
    "padded keys": lambda traits: traits.key_padding,
    "causal, padded keys": lambda traits: traits.causal is not None and traits.key_padding,
    "pattern": lambda traits: traits.allowed,
    "all three": lambda traits: traits.allowed and traits.causal is not None and traits.key_padding,
}


def make_mask(name: str, n_queries: int, n_keys: int) -> Mask:
    """For a batch of two: one row has padding on both sides, one in the middle; patterns have empty rows."""
    keys = torch.ones(2, n_keys, dtype=torch.bool)
    keys[0, 0] = keys[0, -1] = keys[1, n_keys // 2] = False
    allowed = torch.rand(2, 2, n_queries, n_keys, generator=torch.Generator().manual_seed(5)) < 0.6
    allowed[0, 0, n_queries // 2] = allowed[1, 1, 0] = False
    return Mask(
        causal="causal" in name or name == "all three",
        keys=keys if "keys" in name or name == "all three" else None,
        allowed=allowed if name in ("pattern", "all three") else None,
    )


def name_of(value: Any) -> str:
    return value.name if isinstance(value, Case) else str(value)


def those(claim: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case for case in CASES if claim(case)], ids=name_of)


each = those()
each_mask = pytest.mark.parametrize(
    ("case", "mask"),
    [(case, name) for case in CASES for name, takes in SUPPORT.items() if takes(case.traits)],
    ids=name_of,
)


def inputs(
    n_queries: int = 7, n_keys: int | None = None, *, batch: int = 2, width: int = 4, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of two heads in float64."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (n_queries, n_keys or n_queries, n_keys or n_queries)
    q, k, v = (torch.randn(batch, 2, n, width, generator=generator, dtype=torch.float64) for n in lengths)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def gradients(out: Tensor, wrt: tuple[Tensor, ...], *, retain: bool = True) -> tuple[Tensor, ...]:
    """Gradients of a random linear function of `out`; zero where there is no path."""
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    if not out.requires_grad:
        return tuple(torch.zeros_like(x) for x in wrt)
    return torch.autograd.grad(out, wrt, cotangent, retain_graph=retain, allow_unused=True, materialize_grads=True)


def assert_equal(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def readable(mask: Mask, n_queries: int, n_keys: int) -> Tensor:
    """(2, 2, T): queries that may read at least one key."""
    dense = mask.dense(n_queries, n_keys, torch.device("cpu"))
    pattern = torch.ones(2, 2, n_queries, n_keys, dtype=torch.bool)
    return (pattern if dense is None else pattern & dense).any(-1)


def test_every_mechanism_of_the_library_is_a_case():
    missing = {kind.__name__ for kind in ATTENTIONS} - {type(case.build()).__name__ for case in CASES}
    assert not missing, "add a Case to CASES"


# O1, O2: the operator is its definition


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
@each_mask
def test_the_operator_equals_the_definition_and_so_do_its_gradients(
    case: Case, mask: str, dtype: torch.dtype, tolerance: float
):
    attention, given = case.build(), make_mask(mask, 7, 7)
    qkv = q, k, v = tuple(x.detach().to(dtype).requires_grad_() for x in inputs())
    operator, weights = attention.operator(q, k, given), attention.reference(q, k, given)
    expected = gradients(weights @ v, qkv)
    assert_equal(operator.dense(), weights, tolerance)
    assert_equal(gradients(operator.dense(), (q, k)), gradients(weights, (q, k)), tolerance)
    for same in (operator, operator.materialised()):
        assert_equal(same.apply(v), weights @ v, tolerance)
        assert_equal(gradients(same.apply(v), qkv), expected, tolerance)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 11])
@each_mask
def test_any_length_will_do(case: Case, mask: str, length: int):
    attention, given = case.build(), make_mask(mask, length, length)
    q, k, v = inputs(length)
    weights = attention.reference(q, k, given)
    out = attention.operator(q, k, given).apply(v)
    assert_equal(out, weights @ v)
    assert_equal(gradients(out, (q, k, v)), gradients(weights @ v, (q, k, v)))


@each_mask
def test_values_may_have_a_width_of_their_own(case: Case, mask: str):
    attention, given = case.build(), make_mask(mask, 7, 7)
    q, k, v = inputs()
    wide = torch.cat((v, v.flip(2), v.sin()), dim=3)
    assert_equal(attention.operator(q, k, given).apply(wide), attention.reference(q, k, given) @ wide)


@each_mask
def test_gradients_are_those_of_finite_differences(case: Case, mask: str):
    attention, given = case.build(), make_mask(mask, 7, 7)

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.operator(q, k, given).apply(v)

    assert torch.autograd.gradcheck(mixed, inputs(width=2), fast_mode=True)


@each
def test_a_gradient_reaches_every_parameter(case: Case):
    attention = case.build()
    q, k, v = inputs(attention.traits.max_length or 7)
    attention.operator(q, k, Mask()).apply(v).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in attention.parameters())


# O3


@each_mask
def test_a_shift_of_all_values_shifts_the_output(case: Case, mask: str):
    attention, given = case.build(), make_mask(mask, 7, 7)
    if not attention.traits.normalised:
        pytest.skip("not claimed: rows need not sum to 1")
    q, k, v = inputs()
    operator, shift = attention.operator(q, k, given), torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    moved = operator.apply(v + shift) - operator.apply(v)
    assert_equal(moved, readable(given, 7, 7)[..., None] * shift)


# O4


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("side", SIDES)
@those(lambda case: case.traits.key_padding)
def test_padding_is_the_same_as_dropping(case: Case, side: str, causal: bool):
    attention = case.build()
    if side not in case.sides or (causal and attention.traits.causal is None):
        pytest.skip("not claimed")
    real = {"right": [0, 1, 2, 3, 4], "left": [3, 4, 5, 6, 7], "interior": [0, 2, 3, 6, 7]}[side]
    keys = torch.zeros(2, 8, dtype=torch.bool)
    keys[:, real] = True
    qkv = inputs(5)
    alone = attention.operator(*qkv[:2], Mask(causal=causal)).apply(qkv[2])
    expected = gradients(alone, qkv)
    seen = []
    for junk in (math.nan, 1e10, 0.0):
        # The queries of padding are finite: their outputs are nobody's concern, but they are computed.
        padded = [torch.full((2, 2, 8, 4), x, dtype=torch.float64) for x in (1.0, junk, junk)]
        for whole, part in zip(padded, qkv, strict=True):
            whole[:, :, real] = part.detach()
            whole.requires_grad_()
        operator = attention.operator(padded[0], padded[1], Mask(causal=causal, keys=keys))
        assert_equal(operator.materialised().apply(padded[2])[:, :, real], alone)
        out = operator.apply(padded[2])[:, :, real]
        seen.append(out)
        assert_equal(out, alone)
        for gradient, wanted in zip(gradients(out, tuple(padded)), expected, strict=True):
            assert_equal(gradient[:, :, real], wanted)
            assert not gradient.masked_fill(keys[:, None, :, None], 0.0).any()
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


@those(lambda case: case.traits.key_padding)
def test_a_promise_of_silence_changes_nothing_when_it_is_kept(case: Case):
    attention, keys = case.build(), make_mask("padded keys", 7, 7).keys
    assert keys is not None
    q, k, v = inputs()
    qkv = q, *(x.detach().masked_fill(~keys[:, None, :, None], 0.0).requires_grad_() for x in (k, v))
    out, expected = (
        attention.operator(*qkv[:2], Mask(keys=keys, silent=silent)).apply(qkv[2]) for silent in (True, False)
    )
    assert_equal(out, expected)
    assert_equal(gradients(out, qkv), gradients(expected, qkv))


# O5


@each_mask
def test_a_row_of_a_batch_does_not_see_the_others(case: Case, mask: str):
    attention, given = case.build(), make_mask(mask, 7, 7)
    q, k, v = inputs()
    together = attention.operator(q, k, given).apply(v)
    for i in range(2):
        one = slice(i, i + 1)
        own = Mask(
            causal=given.causal,
            keys=None if given.keys is None else given.keys[one],
            allowed=None if given.allowed is None else given.allowed[one],
        )
        assert_equal(attention.operator(q[one], k[one], own).apply(v[one]), together[one])


@each
def test_a_head_does_not_see_the_others(case: Case):
    attention = case.build()
    q, k, v = inputs()
    out = attention.operator(q, k, Mask()).apply(v)
    changed = [x.detach().clone() for x in (q, k, v)]
    for x in changed:
        x[:, 0] += 1.0
    again = attention.operator(changed[0], changed[1], Mask()).apply(changed[2])
    assert torch.equal(again[:, 1], out[:, 1])
    assert not torch.equal(again[:, 0], out[:, 0])


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
        assert (after[:, :, t] - before[:, :, t]).abs().min() > 1e-6
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


# O8


@those(lambda case: case.equivariant)
def test_order_means_nothing(case: Case):
    attention, order = case.build(), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    q, k, v = inputs()
    moved = attention.operator(q[:, :, order], k[:, :, order], Mask()).apply(v[:, :, order])
    assert_equal(moved, attention.operator(q, k, Mask()).apply(v)[:, :, order])


# O9


@those(lambda case: case.traits.normalised)
def test_a_single_key_is_read_as_it_is(case: Case):
    q, k, v = inputs(1)
    assert_equal(case.build().operator(q, k, Mask()).apply(v), v)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["keys", "pattern"])
@those(lambda case: case.traits.key_padding or case.traits.allowed)
def test_a_query_that_may_read_nothing_gets_exactly_nothing(case: Case, how: str, dtype: torch.dtype):
    attention = case.build()
    if not (attention.traits.key_padding if how == "keys" else attention.traits.allowed):
        pytest.skip("not claimed")
    keys = torch.tensor([[False] * 7, [True] * 7])
    masks = {"keys": Mask(keys=keys), "pattern": Mask(allowed=keys[:, None, None, :].expand(2, 1, 7, 7))}
    qkv = q, k, v = tuple(x.detach().to(dtype).requires_grad_() for x in inputs())
    operator = attention.operator(q, k, masks[how])
    for out in (operator.apply(v), operator.dense(), operator.materialised().apply(v)):
        assert out[0].eq(0).all()
        assert out[1].ne(0).any(-1).all()
        for gradient in gradients(out, qkv):
            assert gradient.isfinite().all()
            assert gradient[0].eq(0).all()
    assert attention.reference(q, k, masks[how])[0].eq(0).all()


@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 10), (2, 10), (10, 2), (10, 1)])
@those(lambda case: case.traits.cross)
def test_queries_and_keys_of_different_lengths(case: Case, n_queries: int, n_keys: int):
    attention = case.build()
    qkv = q, k, v = inputs(n_queries, n_keys)
    for name, takes in SUPPORT.items():
        if takes(attention.traits):
            given = make_mask(name, n_queries, n_keys)
            out, weights = attention.operator(q, k, given).apply(v), attention.reference(q, k, given)
            assert_equal(out, weights @ v)
            assert_equal(gradients(out, qkv), gradients(weights @ v, qkv))


@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 10), (2, 10), (10, 2)])
@those(lambda case: case.traits.cross and case.traits.causal == "strict")
def test_the_last_query_is_aligned_with_the_last_key(case: Case, n_queries: int, n_keys: int):
    attention = case.build()
    q, k, v = inputs(n_queries, n_keys)
    out = attention.operator(q, k, Mask(causal=True)).apply(v)
    for i in range(n_queries):
        seen = max(0, i + n_keys - n_queries + 1)
        alone = attention.operator(q[:, :, i : i + 1], k[:, :, :seen], Mask()).apply(v[:, :, :seen]) if seen else 0.0
        assert_equal(out[:, :, i : i + 1], torch.zeros(2, 2, 1, 4, dtype=torch.float64) + alone)


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
    again = case.spec.build().eval()
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


def slope(run: Callable[[Tensor, Tensor, Tensor], object], trace: Path) -> float:
    """Power of the length with which the peak memory of `run(q, k, v)` grows."""
    lengths, peaks = [1024, 2048, 4096], []
    for length in lengths:
        q, k, v = (x.detach()[:1, :1].float().requires_grad_() for x in inputs(length, batch=1, width=16))
        peaks.append(peak_memory(lambda q=q, k=k, v=v: run(q, k, v), trace))
    return max(math.log2(after / before) for before, after in itertools.pairwise(peaks))


@those(lambda case: case.traits.max_length is None)
def test_memory_grows_as_promised(case: Case, tmp_path: Path):
    attention = case.build()
    mask = Mask(causal=attention.traits.causal is not None)

    def train(q: Tensor, k: Tensor, v: Tensor) -> None:
        attention.operator(q, k, mask).apply(v).sum().backward()

    assert slope(train, tmp_path / "trace.json") <= attention.traits.memory + 0.1


def test_the_measurement_of_memory_tells_lines_from_squares(tmp_path: Path):
    assert slope(lambda q, k, v: (q * k, q + k), tmp_path / "trace.json") == pytest.approx(1, abs=0.05)
    assert slope(lambda q, k, v: q @ k.transpose(2, 3), tmp_path / "trace.json") == pytest.approx(2, abs=0.05)


# O12


def dropping(case: Case, p: float) -> Attention:
    return dataclasses.replace(case.spec, dropout=p).build().train()


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
    assert dropped.double().mean() == pytest.approx(p, abs=0.01)
    assert dropped.double().mean(0) == pytest.approx(torch.full((2, 7, 7), p).numpy(), abs=0.06)
    torch.manual_seed(3)
    assert torch.equal(operator.apply(identity).double(), weights)
    assert not torch.equal(operator.apply(identity).double(), weights)


# The traits are true


@each
def test_what_is_not_claimed_is_refused(case: Case):
    attention, traits = case.build(), case.traits
    q, k, _ = inputs()
    refused = {name: make_mask(name, 7, 7) for name, takes in SUPPORT.items() if not takes(traits)}
    for mask in refused.values():
        with pytest.raises(UserError):
            attention.operator(q, k, mask)
    if not traits.cross:
        with pytest.raises(UserError):
            attention.operator(q, k[:, :, :3], Mask())
    if traits.max_length is not None:
        with pytest.raises(UserError):
            attention.operator(*inputs(traits.max_length + 1)[:2], Mask())
    if not traits.step:
        with pytest.raises(TypeError, match=type(attention).__name__):
            attention.step(q, k, None)


@each
def test_only_what_is_needed_is_read(case: Case):
    qkv = inputs()
    moved = gradients(case.build().operator(*qkv[:2], Mask()).apply(qkv[2]), qkv)
    for name, gradient in zip(("query", "key"), moved[:2], strict=True):
        assert bool(gradient.any()) is (name in case.traits.needs)


# Precision, compilation, export


@pytest.mark.parametrize("n_queries", [7, 1])
@each_mask
def test_large_scores_in_half_precision_stay_accurate(case: Case, mask: str, n_queries: int):
    attention = case.build()
    if n_queries == 1 and not attention.traits.cross:
        pytest.skip("not claimed")
    given = make_mask(mask, n_queries, 7)
    # Rounded first, so that the only difference is in the computation.
    q, k, v = (x.detach().bfloat16().float() for x in inputs(n_queries, 7))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        half = attention.operator((10 * q).bfloat16(), (10 * k).bfloat16(), given).apply(v.bfloat16())
    exact = attention.operator((10 * q).bfloat16().float(), (10 * k).bfloat16().float(), given).apply(v)
    assert_equal(half.float(), exact, 2e-2)


@each_mask
def test_training_in_half_precision_is_finite_and_accurate_at_ordinary_scores(case: Case, mask: str):
    attention, given = case.build(), make_mask(mask, 7, 7)
    for scale in (1.0, 10.0):
        exact = tuple(x.detach().bfloat16().float().requires_grad_() for x in inputs())
        half = tuple(x.detach().bfloat16().requires_grad_() for x in exact)
        with torch.autocast("cpu", torch.bfloat16):
            out = attention.operator(scale * half[0], scale * half[1], given).apply(half[2])
        expected = attention.operator(scale * exact[0], scale * exact[1], given).apply(exact[2])
        moved, wanted = gradients(out.float(), half), gradients(expected, exact)
        assert all(x.isfinite().all() for x in (out, *moved))
        if scale == 1.0:
            assert_equal(out.float(), expected, 3e-2)
            assert_equal([x.float() for x in moved], list(wanted), 5e-2)


class Call(nn.Module):
    """A mechanism as a module over tensors."""

    def __init__(self, attention: Attention):
        super().__init__()
        self.attention = attention
        self.causal, self.padded = attention.traits.causal is not None, attention.traits.key_padding

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
        mask = Mask(causal=self.causal, keys=keys if self.padded else None)
        return self.attention.operator(q, k, mask).apply(v)


@pytest.mark.usefixtures("unchecked")
@each
def test_it_compiles_into_one_graph_for_all_lengths(case: Case):
    call = Call(case.build())
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (7, 5):
        qkv = inputs(length)
        keys = torch.arange(length) < torch.tensor([[length], [3]])
        out, expected = compiled(*qkv, keys), call(*qkv, keys)
        assert_equal(out, expected)
        assert_equal(gradients(out, qkv, retain=False), gradients(expected, qkv))


@pytest.mark.usefixtures("unchecked")
@each
def test_it_exports_with_a_dynamic_length(case: Case):
    call, qkv = Call(case.build()), tuple(x.detach() for x in inputs())
    # One below the limit: there torch sees a slice that is no slice.
    length = torch.export.Dim("length", min=2, max=(case.traits.max_length or 4097) - 1)
    shapes = ({2: length}, {2: length}, {2: length}, {1: length})
    exported = torch.export.export(call, (*qkv, torch.ones(2, 7, dtype=torch.bool)), dynamic_shapes=shapes).module()
    for n in (7, 11, 2):
        qkv = tuple(x.detach() for x in inputs(n))
        keys = torch.arange(n) < torch.tensor([[n], [2]])
        assert_equal(exported(*qkv, keys), call(*qkv, keys))
