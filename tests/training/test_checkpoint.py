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


def test_bytes_are_read_back_within_half_a_step_of_every_row(letters, tmp_path):
    generator = torch.Generator().manual_seed(1)
    weights = {
        "matrix": torch.randn(40, 30, generator=generator) * torch.logspace(-20, 20, 40)[:, None],
        "vector": torch.randn(30, generator=generator),
        "seed": torch.tensor([2**60]),
    }
    weights["matrix"][7] = 0
    checkpoint.save_weights(tmp_path / "w.safetensors", checkpoint.in_bytes(weights), letters)
    found = checkpoint.read_weights(tmp_path / "w.safetensors", letters)
    assert found.keys() == weights.keys()
    largest = weights["matrix"].abs().amax(1, keepdim=True)
    assert ((found["matrix"] - weights["matrix"]).abs() <= largest / 254 * 1.00001).all()
    assert (found["matrix"] != weights["matrix"]).any()
    assert (found["matrix"][7] == 0).all()
    assert torch.equal(found["vector"], weights["vector"].half())
    assert torch.equal(found["seed"], weights["seed"])
    size = (tmp_path / "w.safetensors").stat().st_size
    assert size < 40 * 30 + 40 * 4 + 1000


@pytest.mark.parametrize("damage", ["no matrix", "other rows", "floats"])
def test_scales_without_their_matrix_are_damage(letters, tmp_path, damage):
    kept = checkpoint.in_bytes({"matrix": torch.ones(4, 3)})
    if damage == "no matrix":
        del kept["matrix"]
    else:
        kept["matrix"] = torch.ones(3, 3, dtype=torch.int8) if damage == "other rows" else torch.ones(4, 3)
    checkpoint.save_weights(tmp_path / "w.safetensors", kept, letters)
    with pytest.raises(UserError, match=r"matrix\.row_scale belongs to no matrix of bytes"):
        checkpoint.read_weights(tmp_path / "w.safetensors", letters)


def test_a_model_kept_in_bytes_is_a_model(run, run_spec, letters):
    _, _, model = checkpoint.read_run(run)
    checkpoint.save_weights(run / checkpoint.WEIGHTS, checkpoint.in_bytes(model.state_dict()), letters)
    _, _, again = checkpoint.read_run(run)
    for name, tensor in again.state_dict().items():
        assert tensor.dtype == model.state_dict()[name].dtype
        assert torch.allclose(tensor, model.state_dict()[name], atol=0.01)
