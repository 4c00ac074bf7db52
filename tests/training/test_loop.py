"""A run is a function of its spec: interrupted, killed or split into smaller batches, it ends in the same weights."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hasten.data.batch import endless_batches
from hasten.data.tokenizer import Tokenizer
from hasten.errors import UserError
from hasten.models import Autoregressive
from hasten.nn.loss import LossTerm
from hasten.training import checkpoint, loop
from hasten.training.loop import Interrupted, Task, train

KINDS = ("autoregressive", "ctc", "dag", "refinement", "mask_predict", "nat")
DRAWS_NOTHING = {"ctc": {"glancing_start": 0.0}, "dag": {"glancing_start": 0.0}, "refinement": {"denoise": 0.0}}
TIMES = ("seconds", "tokens_per_second")


def rows(directory: Path) -> list[dict]:
    """The metrics without what a clock decides."""
    lines = (directory / loop.METRICS).read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def files(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {str(path.relative_to(directory)): load_file(path) for path in directory.rglob("*.safetensors")}


def assert_same_run(one: Path, other: Path) -> None:
    left, right = files(one), files(other)
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].keys() == right[name].keys()
        for key in left[name]:
            assert torch.equal(left[name][key], right[name][key]), f"{name}: {key}"


class Killed(BaseException):
    """What no handler of ours may catch."""


def kill_after(step: int) -> Callable[[loop.Report], None]:
    def observe(report: loop.Report) -> None:
        if report.step == step:
            raise Killed

    return observe


def stop_after(step: int):
    """An observer and a question that is answered by yes once the observer has seen `step` - 1."""
    seen: list[int] = []
    return {"observe": lambda report: seen.append(report.step), "stop": lambda: bool(seen) and seen[-1] >= step - 1}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(kind, accumulate, run_spec, task, letters, tmp_path):
    spec = run_spec(kind, accumulate=accumulate, validate_every=4, validate_sentences=2)
    whole = train(spec, tmp_path / "whole", letters, task(spec))
    parts = tmp_path / "parts"
    with pytest.raises(Interrupted, match="step 2"):
        train(spec, parts, letters, task(spec), **stop_after(2))
    with pytest.raises(Interrupted, match="step 5"):
        train(spec, parts, letters, task(spec), resume=True, **stop_after(5))
    with pytest.raises(Killed):
        train(spec, parts, letters, task(spec), resume=True, observe=kill_after(8))
    # The last stop comes between the two snapshots whose mean is the model.
    with pytest.raises(Interrupted, match="step 8"):
        train(spec, parts, letters, task(spec), resume=True, **stop_after(8))
    resumed = train(spec, parts, letters, task(spec), resume=True)
    assert_same_run(tmp_path / "whole", parts)
    regular = [row for row in rows(parts) if row["step"] not in (2, 5, 8) or "loss" not in row]
    assert regular == rows(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


CHANGING = [
    {"kind": "routing", "clusters": 2, "decay": 0.5, "commitment": 0.01},
    {"kind": "performer", "features": 8, "redraw_every": 2},
    {"kind": "sinkhorn", "block": 2},
    {"kind": "lsh", "chunk": 2, "redraw_every": 1},
]


def test_what_attention_draws_and_learns_resumes_bit_for_bit(run_spec, task, letters, tmp_path):
    spec = run_spec("ctc", {"encoder_layers": 4, "encoder_attention": CHANGING}, average=1)
    train(spec, tmp_path / "whole", letters, task(spec))
    parts = tmp_path / "parts"
    with pytest.raises(Interrupted, match="step 5"):
        train(spec, parts, letters, task(spec), **stop_after(5))
    train(spec, parts, letters, task(spec), resume=True)
    assert_same_run(tmp_path / "whole", parts)
    weights = load_file(parts / "model.safetensors")
    counts = {name: int(weights[name]) for name in weights if name.endswith(".draws")}
    assert sorted(counts.values()) == [4, 9, 9], "a redraw every 2 steps, noise and rotations of each step"
    assert all("attention" in row for row in rows(parts) if "loss" in row)


def test_a_stop_before_the_first_save_leaves_a_complete_directory(run_spec, task, letters, directory):
    spec = run_spec()
    with pytest.raises(Interrupted):
        train(spec, directory, letters, task(spec), **stop_after(1))
    _, _, model = checkpoint.read_run(directory)
    state = load_file(directory / "state" / "model.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_what_a_killed_run_wrote_beyond_its_state_is_forgotten(run_spec, task, letters, tmp_path, monkeypatch):
    spec = run_spec(validate_every=3, validate_sentences=2)
    train(spec, tmp_path / "whole", letters, task(spec))

    def die(*_: object) -> None:
        raise Killed

    with pytest.raises(Killed):
        train(spec, tmp_path / "killed", letters, task(spec), observe=kill_after(4))
    monkeypatch.setattr(loop.state, "save_state", die)
    with pytest.raises(Killed):
        train(spec, tmp_path / "killed", letters, task(spec), resume=True)
    monkeypatch.undo()
    assert (tmp_path / "killed" / "recent" / "step-00000006.safetensors").exists()
    with (tmp_path / "killed" / loop.METRICS).open("a") as file:
        file.write('{"step": 6, "lo')
    with pytest.raises(Killed):
        train(spec, tmp_path / "killed", letters, task(spec), resume=True, observe=kill_after(4))
    assert [path.name for path in (tmp_path / "killed" / "recent").iterdir()] == ["step-00000003.safetensors"]
    train(spec, tmp_path / "killed", letters, task(spec), resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")


def test_a_finished_run_resumes_to_itself_and_goes_on_when_asked_for_more(run_spec, task, letters, directory):
    spec = run_spec()
    first = train(spec, directory, letters, task(spec))
    again = train(spec, directory, letters, task(spec), resume=True)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    said: list[dict] = []
    train(run_spec(steps=10), directory, letters, task(spec), resume=True, announce=said.append)
    assert said[0] == {"resumed_at": 9, "training.steps": "9 -> 10"}
    assert rows(directory)[-1]["step"] == 10


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_everything(kind, run_spec, task, letters, tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        spec = run_spec(kind, steps=3, seed=seed)
        torch.manual_seed(len(name) + seed)
        train(spec, tmp_path / name, letters, task(spec))
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert rows(tmp_path / "a")[-1]["loss"] != rows(tmp_path / "c")[-1]["loss"]


def test_the_largest_seed_works(run_spec, task, letters, directory):
    spec = run_spec(steps=1, seed=2**32 - 1)
    train(spec, directory, letters, task(spec))


def test_training_leaves_the_global_random_numbers_alone(run_spec, task, letters, directory):
    spec = run_spec("ctc", steps=2, validate_every=1, validate_sentences=1)
    torch.manual_seed(17)
    before = torch.get_rng_state()
    train(spec, directory, letters, task(spec))
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(Killed):
        train(spec, directory, letters, task(spec), observe=kill_after(1))
    assert torch.equal(torch.get_rng_state(), before)


def gradient_by_definition(spec, letters: Tokenizer, task: Task, step_batches: int) -> dict[str, np.ndarray]:
    """Mean over the batches of one update of d/dw sum over terms of weight * sum / count."""
    torch.manual_seed(spec.training.seed)
    model = spec.model.build(letters.vocab_size).train()
    batches = endless_batches(task.pairs, spec.training.batch_tokens, spec.training.seed)
    gradients = []
    for _ in range(step_batches):
        terms = model.loss(task.batch(next(batches)), torch.Generator())
        objective = sum(term.weight * term.sum / term.count for term in terms.values())
        found = torch.autograd.grad(objective, list(model.parameters()))
        gradients.append([gradient.double().numpy() for gradient in found])
    means = [np.mean(of_one, axis=0) for of_one in zip(*gradients, strict=True)]
    return dict(zip(dict(model.named_parameters()), means, strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mask_predict"])  # whose loss always draws
def test_an_update_follows_the_mean_gradient_of_its_batches(kind, accumulate, run_spec, task, letters, directory):
    extra = {"label_smoothing": 0.2, "dropout": 0.0, **DRAWS_NOTHING.get(kind, {})}
    spec = run_spec(kind, extra, steps=1, accumulate=accumulate, clip=1e9, weight_decay=0.0)
    torch.manual_seed(0)
    train(spec, directory, letters, task(spec))
    moments = load_file(directory / "state" / "optimizer.safetensors")
    with torch.random.fork_rng():
        expected = gradient_by_definition(spec, letters, task(spec), accumulate)
    for name, gradient in expected.items():
        # After one update Adam's first moment is (1 - 0.9) times the gradient.
        np.testing.assert_allclose(moments[f"{name}|exp_avg"].numpy() / 0.1, gradient, rtol=2e-4, atol=2e-6)


def test_the_gradient_is_clipped(run_spec, task, letters, directory):
    spec = run_spec(steps=1, clip=1e-3)
    train(spec, directory, letters, task(spec))
    moments = load_file(directory / "state" / "optimizer.safetensors")
    norm = math.sqrt(sum(float((t / 0.1).square().sum()) for name, t in moments.items() if name.endswith("|exp_avg")))
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_the_model_is_the_mean_of_the_last_snapshots(run_spec, task, letters, directory):
    spec = run_spec(average=2)
    model = train(spec, directory, letters, task(spec))
    kept = sorted((directory / "recent").iterdir())
    assert [path.name for path in kept] == ["step-00000006.safetensors", "step-00000009.safetensors"]
    snapshots = [load_file(path) for path in kept]
    for name, tensor in model.state_dict().items():
        mean = np.mean([snapshot[name].double().numpy() for snapshot in snapshots], axis=0)
        np.testing.assert_array_equal(tensor.numpy(), mean.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_on_a_toy_task(kind, run_spec, task, letters, directory):
    spec = run_spec(kind, {"d_model": 32, "dropout": 0.0}, steps=60, save_every=60, batch_tokens=400)
    losses: list[float] = []
    train(spec, directory, letters, task(spec), observe=lambda report: losses.append(report.loss))
    assert rows(directory)[-1][kind if kind in ("ctc", "dag") else "tokens"] < 0.6 * losses[0]


def test_bfloat16_leaves_weights_in_float32_and_follows_another_run_in_one_process(run_spec, task, letters, tmp_path):
    losses = {}
    for precision in ("float32", "bfloat16", "float32"):
        spec = run_spec(steps=2, precision=precision)
        model = train(spec, tmp_path / precision, letters, task(spec))
        assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
        losses[precision] = rows(tmp_path / precision)[-1]["loss"]
    state = load_file(tmp_path / "bfloat16" / "state" / "model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)


def test_init_from_copies_what_matches_and_says_how_much(run_spec, task, letters, tmp_path):
    teacher = run_spec(steps=1)
    train(teacher, tmp_path / "teacher", letters, task(teacher))
    said: list[dict] = []
    student = run_spec("ctc", steps=1, learning_rate=1e-30, weight_decay=0.0, init_from=str(tmp_path / "teacher"))
    train(student, tmp_path / "student", letters, task(student), announce=said.append)
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("teacher", "student"))
    shared = [name for name in new if name in old]
    assert "embedding.weight" in shared
    assert len(shared) > 10
    for name in shared:
        assert torch.allclose(old[name], new[name], atol=1e-6), name
    assert said[0] == {"initialised_from": str(tmp_path / "teacher"), "tensors": len(shared), "of": len(new)}
    assert rows(tmp_path / "student")[0] == said[0]


def test_init_from_refuses_another_tokenizer_and_a_model_of_no_use(run_spec, task, letters, tokenizer, tmp_path):
    teacher = run_spec(steps=1)
    checkpoint.write_run(tmp_path / "other", teacher, tokenizer)
    student = run_spec(init_from=str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"another tokenizer; set tokenizer.from_model"):
        train(student, tmp_path / "student", letters, task(student))
    checkpoint.write_run(tmp_path / "other", teacher, letters)
    checkpoint.save_weights(tmp_path / "other" / "model.safetensors", {"x": torch.zeros(1)}, letters)
    with pytest.raises(UserError, match="none of its weights"):
        train(student, tmp_path / "student", letters, task(student))
    assert not (tmp_path / "student").exists()


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_last_state(run_spec, task, letters, directory):
    spec = run_spec(learning_rate=1e30, warmup=0, save_every=1)
    with pytest.raises(UserError, match=r"at step \d the loss became .*; lower training.learning_rate"):
        train(spec, directory, letters, task(spec))
    state = json.loads((directory / "state" / "state.json").read_text())
    assert state["step"] >= 1
    assert all(t.isfinite().all() for t in load_file(directory / "state" / "model.safetensors").values())


def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(run_spec, task, letters, directory, monkeypatch):
    def loss(self: Autoregressive, batch: object, generator: object) -> dict[str, LossTerm]:
        return {"tokens": LossTerm((self.embedding.weight * 0).sum().sqrt(), torch.tensor(1))}

    monkeypatch.setattr(Autoregressive, "loss", loss)
    spec = run_spec()
    with pytest.raises(UserError, match=r"at step 1 the loss became 0.0 and its gradient nan"):
        train(spec, directory, letters, task(spec))


def test_a_run_without_pairs_is_refused(run_spec, letters, directory):
    with pytest.raises(UserError, match="no training pairs are left"):
        train(run_spec(), directory, letters, Task([], [], []))
    with pytest.raises(UserError, match=r"see data\.path, data\.distilled, data\.fertilities and data\.max_tokens"):
        Task([], [], [], []).check()
    assert not directory.exists()


def test_a_new_run_removes_all_of_the_old_one(run_spec, task, letters, directory):
    spec = run_spec()
    train(spec, directory, letters, task(spec))
    short = run_spec(steps=1)
    train(short, directory, letters, task(short))
    assert [path.name for path in (directory / "recent").iterdir()] == ["step-00000001.safetensors"]
    assert [row["step"] for row in rows(directory)] == [1]


def test_resuming_refuses_what_is_not_the_same_run_and_changes_nothing(run_spec, task, letters, directory):
    spec = run_spec()
    with pytest.raises(Interrupted):
        train(spec, directory, letters, task(spec), **stop_after(2))
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    wider = run_spec(model={"d_ff": 64})
    with pytest.raises(UserError, match=r"feed_forward.inner.bias has shape \(32,\), the model .* needs \(64,\)"):
        train(wider, directory, letters, task(wider), resume=True)
    fewer = task(spec)
    with pytest.raises(UserError, match="the training pairs are not those"):
        train(spec, directory, letters, Task(fewer.pairs[1:], [], []), resume=True)
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


def test_resuming_refuses_another_tokenizer(run_spec, task, letters, tokenizer, directory):
    import dataclasses

    spec = run_spec()
    with pytest.raises(Interrupted):
        train(spec, directory, letters, task(spec), **stop_after(2))
    other = dataclasses.replace(spec, tokenizer=dataclasses.replace(spec.tokenizer, vocab_size=276))
    with pytest.raises(UserError, match="a run keeps its tokenizer"):
        train(other, directory, letters, task(spec), resume=True)
    with pytest.raises(UserError, match="another tokenizer"):
        train(spec, directory, tokenizer, task(spec), resume=True)


def test_reports_count_steps_and_tokens(run_spec, task, letters, directory):
    spec = run_spec(steps=3)
    reports: list[loop.Report] = []
    train(spec, directory, letters, task(spec), observe=reports.append)
    assert [(report.step, report.steps) for report in reports] == [(1, 3), (2, 3), (3, 3)]
    assert all(report.tokens_per_second > 0 and report.seconds_left >= 0 for report in reports)
    assert reports[-1].seconds_left == 0
