import importlib.util
import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from hasten.attention import FullAttention, MechanismSpec, Place
from hasten.attention.base import Weights
from hasten.bench import attention, attention_contestant, attention_modules, attention_worker
from hasten.bench.attention import RED, Plan, over, predicted, run
from hasten.bench.attention_contestant import contestants
from hasten.bench.attention_worker import Server, Stand, memory, timed
from hasten.errors import UserError

SIZES = {"level": "module", "causal": False, "batch": 1, "heads": 2, "width": 4, "length": 16}
HEADS = Place(n_heads=2, d_head=4)
PEERS = Path(__file__).with_name("peers_of_tests.py")
REAL_PEERS = Path(__file__).parents[2] / "benchmarks" / "peers" / "peers.py"


@pytest.fixture(scope="module")
def peers(tmp_path_factory) -> Path:
    """A directory of peers, with this very interpreter as its environment."""
    directory = tmp_path_factory.mktemp("peers")
    shutil.copy(PEERS, directory / "peers.py")
    python = directory / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return directory


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Here:
    """A worker without a process of its own, which would take seconds to start."""

    def __init__(self, label: str, command: tuple[str, ...], threads: int):
        self.server = Server(load(Path(command[-1])))

    def ask(self, request):
        if request["do"] == "start":  # in a process it also limits memory
            return self.server.factory.facts(request["name"])
        return json.loads(json.dumps(self.server.answer(json.loads(json.dumps(request)))))

    def close(self) -> None:
        pass


@pytest.fixture
def here(monkeypatch):
    for module in (attention, attention_contestant):
        monkeypatch.setattr(module, "Process", Here)


# A whole run


@pytest.fixture(scope="module")
def rows(peers):
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention, attention_contestant):
            patch.setattr(module, "Process", Here)
        who = contestants("full,Local(2),peer:good,peer:wrong,peer:late", peers, HEADS)
        said: list[str] = []
        plan = Plan(who, (16, 32), heads=2, width=4, repeats=2)
        found = [row for rows in run(plan, said.append) for row in rows]
    return {(row["label"], row["length"]): row for row in found} | {"said": said}


@pytest.fixture(scope="module")
def trouble(peers):
    who = contestants("full,peer:crash,peer:greedy", peers, HEADS)
    plan = Plan(who, (16, 32), heads=2, width=4, repeats=1, memory_mib=64)
    return {(row["label"], row["length"]): row for rows in run(plan) for row in rows}


def test_what_is_measured_has_plausible_numbers(rows):
    for label in ("full", "Local(2)", "peer:good"):
        for length in (16, 32):
            row = rows[label, length]
            assert row["skipped"] is None
            assert 0 < row["forward_ms"]["min"] <= row["forward_ms"]["median"]
            assert 0 < row["training_ms"]["min"] <= row["training_ms"]["median"]
            assert 0 < row["peak_mib"]["forward"] < row["peak_mib"]["training"]
            for what in ("forward", "training"):
                ratio = row[f"{what}_ms"]["median"] / rows["full", length][f"{what}_ms"]["median"]
                assert row["ratio_to_full"][what] == pytest.approx(ratio, abs=1e-3)


def test_rows_say_what_was_measured_on_what(rows):
    row = rows["Local(2)", 32]
    assert (row["engine"], row["mechanism"], row["setting"]["pattern"]) == ("hasten", "pattern", "Local(2)")
    assert (row["level"], row["heads"], row["width"], row["batch"], row["causal"]) == ("module", 2, 4, 1, False)
    assert row["parameters"] == 4 * (8 * 8 + 8)
    assert {"cpu", "cores", "date", "threads", "repeats"} <= row.keys()
    assert row["versions"]["torch"] == torch.__version__
    peer = rows["peer:good", 32]
    assert (peer["engine"], peer["setting"], peer["versions"]["torch"]) == ("peer", "as is", "other")
    json.dumps(row)


def test_what_fails_its_check_is_not_timed(rows):
    for length in (16, 32):
        assert rows["peer:wrong", length]["forward_ms"] is None
        assert rows["peer:wrong", length]["skipped"] == dict.fromkeys(("forward", "training"), RED + "it is off")
    assert f"peer:wrong: not timed: {RED}it is off" in rows["said"]


def test_a_length_that_is_refused_leaves_the_others(rows):
    assert rows["peer:late", 16]["skipped"]["forward"] == "too short"
    assert rows["peer:late", 32]["skipped"] is None
    assert rows["peer:late", 32]["training_ms"] is not None


def test_a_process_that_dies_leaves_the_others(trouble):
    assert trouble["peer:crash", 16]["skipped"] is None
    assert "ended early (status 3)" in trouble["peer:crash", 32]["skipped"]["training"]
    assert trouble["peer:crash", 32]["forward_ms"] is None
    assert trouble["full", 32]["skipped"] is None


def test_an_allocation_beyond_the_limit_fails_alone(trouble):
    assert trouble["peer:greedy", 16]["skipped"]["forward"] == "needs more memory than allowed"
    assert trouble["peer:greedy", 32]["skipped"]["forward"] == "needs more memory than allowed"


# The worker


def test_memory_is_what_a_call_holds_at_most():
    factory, length = load(PEERS), 256
    sizes = {**SIZES, "length": length}
    x = length * 8 * 4 / 2**20
    plain, square = (Stand(factory.build(name, sizes), sizes) for name in ("good", "square"))
    assert memory(plain, "forward")["peak_mib"] == pytest.approx(x, abs=1e-4)
    assert memory(square, "forward")["peak_mib"] == pytest.approx(length**2 * 4 / 2**20, abs=1e-3)
    # output, gradient of the input, and before it is summed that of the parameter
    assert memory(plain, "training")["peak_mib"] == pytest.approx(3 * x, abs=1e-3)
    assert memory(plain, "training")["peak_mib"] == memory(plain, "training")["peak_mib"]


def test_a_turn_lasts_a_while_and_leaves_no_gradients(monkeypatch):
    monkeypatch.setattr(attention_worker, "TURN", 0.01)
    stand = Stand(nn.Linear(8, 8), SIZES)
    for what in ("forward", "training"):
        seconds = timed(stand, what)["seconds"]
        assert len(seconds) > 1
        assert sum(seconds[:-1]) < 0.01 <= sum(seconds)
        assert stand.module.training is (what == "training")
        assert all(tensor.grad is None for tensor in (*stand.inputs, *stand.module.parameters()))


def test_training_reaches_input_and_parameters():
    stand = Stand(nn.Linear(8, 8), SIZES)
    stand.ready("training")()
    assert all(tensor.grad is not None for tensor in (*stand.inputs, *stand.module.parameters()))
    stand.forget()
    stand.ready("forward")()
    assert all(tensor.grad is None for tensor in (*stand.inputs, *stand.module.parameters()))


def test_failures_are_answers_of_one_line():
    server = Server(load(PEERS))
    assert server.answer({"do": "build", "name": "late", "sizes": SIZES}) == {"refused": "too short"}
    assert server.answer({"do": "build", "name": "broken", "sizes": SIZES}) == {"parameters": 0}
    assert server.answer({"do": "time", "what": "forward"}) == {"failed": "ValueError: two lines"}


# hasten's own contestants and their parity check


@pytest.mark.parametrize("level", ["module", "core"])
@pytest.mark.parametrize("causal", [False, True])
def test_contestants_are_built_as_asked(level, causal):
    sizes = {**SIZES, "level": level, "causal": causal}
    module = attention_modules.build("full", sizes)
    stand = Stand(module, sizes)
    out = module(*stand.inputs)
    assert out.shape == stand.cotangent.shape == ((1, 2, 16, 4) if level == "core" else (1, 16, 8))
    out.backward(stand.cotangent)
    changed = [x.detach().clone() for x in stand.inputs]
    for x in changed:
        x[..., -1, :] += 1
    same = torch.allclose(module(*changed)[..., :-1, :], out[..., :-1, :])
    assert same is causal


class Off(FullAttention):
    """Full attention with a fault."""

    def __init__(self, fault: str):
        super().__init__()
        self.fault = fault

    def operator(self, q, k, mask):
        weights = super().operator(q, k, mask).dense()
        if self.fault == "output":
            weights = weights * 1.001
        elif self.fault == "NaN":
            weights = weights * math.nan
        elif self.fault == "gradient":
            weights = weights.detach()
        elif self.fault == "beyond 256" and q.shape[2] > 256:
            weights = weights.roll(1, 2)
        elif self.fault == "single" and q.dtype == torch.float32:
            weights = weights.round(decimals=2)
        return Weights(weights)


@dataclass(frozen=True)
class OffSpec(MechanismSpec):
    fault: str

    def build(self):
        return Off(self.fault)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("output", "the output at N=1 is off by"),
        ("NaN", "the output at N=1 is off by nan"),
        ("gradient", "the gradient of q at N=33 is off by"),
        ("beyond 256", "the output at N=600 is off by"),
        ("single", "(float32)"),
    ],
)
def test_parity_sees_faults(fault, said, monkeypatch):
    monkeypatch.setattr(attention_modules, "mechanism", OffSpec)
    assert said in attention_modules.check(fault, SIZES)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["full", "Local(40)"])
def test_parity_finds_no_fault_where_there_is_none(name, causal):
    assert attention_modules.check(name, {**SIZES, "causal": causal}) == ""


# Limits


def test_costs_are_foretold_by_the_last_two():
    assert predicted([], 8) == 0
    assert predicted([(4, 1.0)], 8) == pytest.approx(4)
    assert predicted([(1, 9.0), (2, 1.0), (4, 2.0)], 16) == pytest.approx(8)
    assert predicted([(2, 1.0), (4, 8.0)], 8) == pytest.approx(64)
    assert predicted([(2, 1.0), (4, 1.0)], 8) == pytest.approx(2), "noise: no cost stays as it is"
    assert predicted([(2, 1.0), (4, 99.0)], 8) == pytest.approx(99 * 8), "noise: no cost grows faster than the cube"


def test_a_length_beyond_a_limit_is_said_to_be():
    plan = Plan([], (8,), memory_mib=1024, seconds=10)
    assert over([], 8, plan) == ""
    assert over([(4, 2.4, 255)], 8, plan) == ""
    assert over([(4, 3.0, 1)], 8, plan) == "a call at N=8 would take about 12 s (limit 10)"
    assert over([(4, 0.1, 512)], 8, plan) == "a call at N=8 would need about 2.0 GiB (limit 1)"


# Who takes part


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "--mechanisms is empty"),
        ("full,full", "full stands there more than once"),
        ("ful", "--mechanisms: 'ful' is no mechanism"),
        ('sparse_transformer(combine="heads", n_heads=1)', "needs 2 heads or more"),
        ("full,peer:good", "peer:good needs an environment of peers; make one with benchmarks/peers/setup"),
    ],
)
def test_mistakes_in_the_list_are_named(text, problem):
    with pytest.raises(UserError, match=problem):
        contestants(text, None, HEADS)


@pytest.mark.usefixtures("here")
def test_all_peers_take_part_unless_some_are_named(peers):
    everyone = [entry.label for entry in contestants("full", peers, HEADS)]
    assert everyone[:3] == ["full", "peer:good", "peer:square"]
    python = peers / ".venv" / "bin" / "python"
    assert [entry.label for entry in contestants("peer:square,full", python, HEADS)] == ["full", "peer:square"]
    with pytest.raises(UserError, match="no peer 'none'; known: good, square"):
        contestants("full,peer:none", peers, HEADS)


def test_a_missing_environment_of_peers_is_one_line(tmp_path, peers):
    with pytest.raises(UserError, match=r"no environment of peers at .*make one with"):
        contestants("full", tmp_path, HEADS)
    with pytest.raises(UserError, match=r"no environment of peers at .*nowhere"):
        contestants("full", tmp_path / "nowhere", HEADS)
    with pytest.raises(UserError, match=r"no directory with peers\.py"):
        contestants("full", Path(sys.executable), HEADS)


# The peers that hasten is compared with


def test_torchs_own_attention_is_the_peer_of_full():
    peers = load(REAL_PEERS)
    try:
        module = peers.build("torch-sdpa", {**SIZES, "causal": True}).eval()
        own = attention_modules.build("full", {**SIZES, "causal": True})
        own.attention.load_state_dict(module.attention.state_dict())
        x = torch.randn(1, 16, 8)
        torch.testing.assert_close(module(x), own(x))
        assert peers.check("torch-sdpa", SIZES) == ""
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_peers_refuse_what_they_are_not_made_for():
    peers = load(REAL_PEERS)
    for name, change, said in (
        ("linformer", {"causal": True}, "cannot be causal"),
        ("sinkhorn-transformer", {"length": 100}, "multiples of 64"),
        ("hf-bigbird", {"length": 640}, "begin at 768"),
    ):
        with pytest.raises(peers.REFUSALS, match=said):
            peers.build(name, {**SIZES, **change})
    assert all(peers.names().values())
