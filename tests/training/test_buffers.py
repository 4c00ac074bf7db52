"""What a mechanism has drawn, and does not learn, survives training, averaging, saving and resuming as it was."""

import pytest
import torch

from hasten.training import checkpoint, state
from hasten.training.loop import Interrupted, train

# The largest seed: float32 does not hold it.
SEED = 2**32 - 1
MODEL = {"encoder_attention": [{"kind": "bigbird", "block": 2, "random": 1, "external": 2, "seed": SEED}]}
BUFFER = "encoder.layers.0.self_attention.attention.seed"


def test_seeds_survive_training_and_resuming(run_spec, task, letters, directory):
    spec, seen = run_spec(model=MODEL, steps=6), []
    with pytest.raises(Interrupted):
        train(spec, directory, letters, task(spec), observe=seen.append, stop=lambda: len(seen) > 2)
    model = train(spec, directory, letters, task(spec), resume=True)
    _, _, again = checkpoint.read_run(directory)
    assert int(model.state_dict()[BUFFER]) == int(again.state_dict()[BUFFER]) == SEED
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_what_is_drawn_is_not_averaged(run_spec, letters, tmp_path):
    model, paths = run_spec(model=MODEL).model.build(letters.vocab_size), []
    for step in range(3):
        model.state_dict()[BUFFER].fill_(step)
        paths.append(state.save_snapshot(tmp_path, step, model, letters))
    averaged = state.average(paths, letters, [BUFFER])
    assert averaged.keys() == model.state_dict().keys()
    assert averaged[BUFFER].dtype == torch.int64
    assert int(averaged[BUFFER]) == 2
