"""Run directories: never written over by accident, never anything else removed."""

import pytest
import torch
from torch import nn

from hasten import spec as specs
from hasten.errors import UserError
from hasten.training import checkpoint


@pytest.fixture
def run(run_spec, letters, directory):
    """A directory with all that a run leaves."""
    checkpoint.write_run(directory, run_spec(), letters)
    model = run_spec().model.build(letters.vocab_size)
    checkpoint.save_weights(directory / "model.safetensors", model.state_dict(), letters)
    for name in ("state", "state.new", "recent", "tensorboard"):
        (directory / name).mkdir()
    for name in ("metrics.jsonl", "README.md"):
        (directory / name).write_text("")
    return directory


def test_a_run_reads_back(run, run_spec, letters):
    spec, tokenizer, model = checkpoint.read_run(run)
    assert spec == run_spec()
    assert tokenizer.fingerprint == letters.fingerprint
    assert not model.training
    assert specs.load(run / "config.toml") == spec


def test_clearing_removes_the_run_and_nothing_else(run):
    (run / "notes.txt").write_text("mine")
    checkpoint.clear_run(run)
    assert [path.name for path in run.iterdir()] == ["notes.txt"]


def test_clearing_touches_no_directory_that_holds_no_run(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "state.new").mkdir()
    checkpoint.clear_run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "state.new"]


@pytest.mark.parametrize("left", ["config.toml", "model.safetensors", "state", "state.old"])
def test_anything_of_a_run_is_worth_a_question(left, run):
    for path in run.iterdir():
        if path.name != left:
            path.rename(run.parent / path.name)
    (run / left).rename(run / left) if (run / left).exists() else (run / left).mkdir()
    with pytest.raises(UserError, match="holds a run; give --resume to go on with it or --force"):
        checkpoint.claim(run, resume=False, force=False)
    checkpoint.claim(run, resume=False, force=True)
    if left.startswith("state"):
        checkpoint.claim(run, resume=True, force=False)
    else:
        with pytest.raises(UserError, match="no saved state to resume from; start without --resume"):
            checkpoint.claim(run, resume=True, force=False)


def test_a_directory_of_other_things_is_refused_even_by_force(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for force in (False, True):
        with pytest.raises(UserError, match="something other than a run; choose another --out"):
            checkpoint.claim(tmp_path, resume=False, force=force)
    with pytest.raises(UserError, match="something other"):
        checkpoint.claim(tmp_path / "thesis.tex", resume=False, force=False)


def test_new_and_empty_directories_are_welcome(tmp_path):
    checkpoint.claim(tmp_path, resume=False, force=False)
    checkpoint.claim(tmp_path / "new" / "deep", resume=False, force=False)


def test_a_place_that_cannot_be_written_is_one_line(run_spec, letters, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write a run to .*file/run: Not a directory"):
        checkpoint.write_run(tmp_path / "file" / "run", run_spec(), letters)


def test_only_names_with_equal_shapes_are_copied():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    before = model[1].weight.clone()
    given = {
        "0.weight": torch.ones(3, 2).half(),
        "0.bias": torch.ones(4),
        "1.weight": torch.ones(2, 2),
        "x": torch.ones(1),
    }
    assert checkpoint.fill_matching(model, given) == ["0.weight"]
    assert torch.equal(model[0].weight, torch.ones(3, 2))
    assert model[0].weight.dtype == torch.float32
    assert torch.equal(model[1].weight, before)
