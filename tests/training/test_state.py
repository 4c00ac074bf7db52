"""Saving may be interrupted at any moment: what is on disk is the old state or the new one."""

import itertools
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hasten.errors import UserError
from hasten.training import checkpoint, state
from hasten.training.optim import adamw
from hasten.training.state import Progress


class Killed(BaseException):
    """What no handler of ours may catch."""


def trained(spec, letters, steps: int):
    """A model and its optimizer after some updates with random gradients."""
    torch.manual_seed(steps)
    model = spec.model.build(letters.vocab_size)
    optimizer = adamw(model, spec.training)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


def test_a_saved_state_reads_back(run_spec, letters, tmp_path):
    spec = run_spec()
    model, optimizer = trained(spec, letters, 3)
    progress = Progress(step=3, batches=7, loss=0.1 + 0.2, seconds=1.5, data="x")
    state.save_state(tmp_path, progress, model, optimizer, letters)
    other, fresh = trained(spec, letters, 0)
    assert state.load_state(tmp_path, other, fresh, letters) == progress
    for parameter, copy in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, copy)
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, fresh.state[copy][key]), key


def test_a_loss_that_is_not_known_yet_reads_back(run_spec, letters, tmp_path):
    model, optimizer = trained(run_spec(), letters, 0)
    state.save_state(tmp_path, Progress(), model, optimizer, letters)
    assert math.isnan(state.load_state(tmp_path, model, optimizer, letters).loss)


def test_a_state_that_tells_only_its_step_is_still_read(run_spec, letters, tmp_path):
    model, optimizer = trained(run_spec(), letters, 1)
    state.save_state(tmp_path, Progress(step=1), model, optimizer, letters)
    (tmp_path / "state" / "state.json").write_text('{"step": 1, "torch": "2.6.0"}')
    progress = state.load_state(tmp_path, model, optimizer, letters)
    assert (progress.step, progress.batches, progress.data) == (1, -1, "")


def test_a_kill_at_any_moment_of_saving_leaves_the_old_state_or_the_new(run_spec, letters, tmp_path, monkeypatch):
    spec = run_spec()
    old, new, reader = (trained(spec, letters, steps) for steps in (1, 2, 0))
    places = [(os, "replace"), (shutil, "rmtree"), (Path, "mkdir"), (Path, "write_text"), (state, "save_weights")]
    real = {place: getattr(*place) for place in places}
    seen = set()
    for survivors in itertools.count():
        directory = tmp_path / str(survivors)
        state.save_state(directory, Progress(step=1), *old, letters)
        calls = itertools.count()

        def counted(function, calls=calls, survivors=survivors):
            def call(*args, **kwargs):
                if next(calls) == survivors:
                    raise Killed
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for (module, name), function in real.items():
                patch.setattr(module, name, counted(function))
            try:
                state.save_state(directory, Progress(step=2), *new, letters)
                done = True
            except Killed:
                done = False
        model, optimizer = reader
        step = state.load_state(directory, model, optimizer, letters).step
        seen.add(step)
        expected = {1: old, 2: new}[step][0]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
        assert checkpoint.holds_run(directory)
        checkpoint.claim(directory, resume=True, force=False)
        state.save_state(directory, Progress(step=2), *new, letters)
        assert sorted(path.name for path in directory.iterdir()) == ["state"]
        if done:
            break
    assert seen == {1, 2}
    assert survivors > 5


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"step": "many"}', '{"step": null}'])
def test_a_damaged_note_of_progress_is_one_line(content, run_spec, letters, tmp_path):
    model, optimizer = trained(run_spec(), letters, 1)
    state.save_state(tmp_path, Progress(step=1), model, optimizer, letters)
    (tmp_path / "state" / "state.json").write_text(content)
    with pytest.raises(UserError, match=r"state.json is missing or damaged"):
        state.load_state(tmp_path, model, optimizer, letters)


def test_nothing_saved_is_one_line(run_spec, letters, tmp_path):
    with pytest.raises(UserError, match="holds no saved state"):
        state.load_state(tmp_path, *trained(run_spec(), letters, 0), letters)


def test_a_full_disk_is_one_line_and_leaves_the_old_state(run_spec, letters, tmp_path, monkeypatch):
    model, optimizer = trained(run_spec(), letters, 1)
    state.save_state(tmp_path, Progress(step=1), model, optimizer, letters)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match="No space left"):
        state.save_state(tmp_path, Progress(step=2), model, optimizer, letters)
    assert json.loads((tmp_path / "state" / "state.json").read_text())["step"] == 1


def test_the_average_is_numpys_mean(run_spec, letters, tmp_path):
    models = [trained(run_spec(), letters, steps)[0] for steps in (1, 2, 5)]
    paths = [state.save_snapshot(tmp_path, 10 * i, model, letters) for i, model in enumerate(models)]
    assert state.snapshots(tmp_path) == paths
    assert [state.step_of(path) for path in paths] == [0, 10, 20]
    averaged = state.average(paths, letters)
    raw = [load_file(path) for path in paths]
    assert averaged.keys() == raw[0].keys()
    for name, tensor in averaged.items():
        mean = np.mean([weights[name].double().numpy() for weights in raw], axis=0)
        np.testing.assert_allclose(tensor.numpy(), mean, rtol=1e-7, atol=0)


def test_snapshots_are_ordered_by_step_beyond_eight_digits(run_spec, letters, tmp_path):
    model, _ = trained(run_spec(), letters, 0)
    steps = [99_999_999, 100_000_000]
    assert [state.step_of(state.save_snapshot(tmp_path, step, model, letters)) for step in reversed(steps)] == steps[
        ::-1
    ]
    assert [state.step_of(path) for path in state.snapshots(tmp_path)] == steps


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda saved: {}, "is empty"),
        (lambda saved: {"other.weight|exp_avg": torch.zeros(1)}, "the model lacks"),
        (lambda saved: {**saved, "embedding.weight|exp_avg": torch.zeros(3)}, "does not fit the model at embedding"),
        (lambda saved: {k: v for k, v in saved.items() if k != "embedding.weight|step"}, "does not fit the model"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(run_spec, letters, tmp_path, change, what: str):
    model, optimizer = trained(run_spec(), letters, 2)
    state.save_state(tmp_path, Progress(step=2, batches=2, loss=1.0), model, optimizer, letters)
    path = tmp_path / "state" / state.OPTIMIZER
    checkpoint.save_weights(path, change(load_file(path)), letters)
    with pytest.raises(UserError, match=what):
        state.load_state(tmp_path, *trained(run_spec(), letters, 0), letters)


@pytest.mark.parametrize("facts", ['{"step": -1}', '{"step": 1, "loss": "low"}', '{"step": 1, "seconds": null}'])
def test_progress_that_is_none_is_refused(run_spec, letters, tmp_path, facts: str):
    model, optimizer = trained(run_spec(), letters, 1)
    state.save_state(tmp_path, Progress(step=1), model, optimizer, letters)
    (tmp_path / "state" / "state.json").write_text(facts)
    with pytest.raises(UserError, match="missing or damaged"):
        state.load_state(tmp_path, model, optimizer, letters)


def test_files_that_are_no_snapshots_are_left_alone(tmp_path):
    (tmp_path / "recent").mkdir()
    (tmp_path / "recent" / "step-best.safetensors").touch()
    assert state.snapshots(tmp_path) == []
