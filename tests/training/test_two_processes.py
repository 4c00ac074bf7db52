"""Two processes train one model: they share a batch's objective, one of them writes, and resuming is exact."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hasten import spec as specs
from hasten.data.batch import endless_batches, pair_batch
from hasten.data.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


EVERYTHING_THAT_CHANGES = """
import torch
from torch import distributed, nn
from hasten import spec
from hasten.attention import after_update
from hasten.data.batch import pair_batch
from hasten.training.processes import keep_buffers_apart

distributed.init_process_group("gloo")
rank = distributed.get_rank()
kinds = [
    {"kind": "routing", "clusters": 2, "decay": 0.5},
    {"kind": "performer", "features": 8, "redraw_every": 1},
    {"kind": "sinkhorn", "block": 2},
    {"kind": "lsh", "chunk": 2, "redraw_every": 2},
    {"kind": "rfa", "redraw_every": 1},
]
shape = {"d_model": 16, "n_heads": 2, "d_ff": 16, "encoder_layers": 5, "decoder_layers": 1}
table = {"data": {"path": "x"}, "model": {"kind": "autoregressive", **shape, "encoder_attention": kinds}}
torch.manual_seed(0)
model = spec.parse(table, "test").model.build(60).train()
first = {name: tensor.clone() for name, tensor in model.named_buffers()}
keep_buffers_apart(model)
wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(3):
    torch.manual_seed(100 * step + rank)
    source = torch.randint(10, 60, (5 + rank,)).tolist()
    terms = wrapped(pair_batch([(source, source[:2])]), torch.Generator()).values()
    sum(term.weight * term.sum / term.count for term in terms).backward()
    optimizer.step()
    optimizer.zero_grad()
    after_update(wrapped)
changed = {name for name, tensor in model.named_buffers() if not torch.equal(tensor, first[name])}
for part in ("centroids.vectors", "directions.rows", "sorting.draws", "hashing.rotations"):
    assert any(part in name for name in changed), (part, changed)
for name, tensor in model.state_dict().items():
    both = [torch.empty_like(tensor) for _ in range(2)]
    distributed.all_gather(both, tensor.contiguous())
    assert torch.equal(*both), name
distributed.destroy_process_group()
"""


def test_what_attention_draws_and_learns_is_the_same_in_all_processes(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(EVERYTHING_THAT_CHANGES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def launch(config: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, "-m", "hasten", "train", str(config), *arguments, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def config(run_spec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two") / "ar.toml"
    small = {"dropout": 0.0, "label_smoothing": 0.0}
    options = {"schedule": "hold_then_linear", "decay": 0.0, "save_every": 1, "average": 1, "clip": 1e9}
    path.write_text(specs.dump(run_spec("autoregressive", small, steps=3, weight_decay=0.0, **options)))
    return path


@pytest.fixture(scope="module")
def one_step(config: Path):
    """A run of a single step: its directory and what was printed."""
    out = config.parent / "parts"
    return out, launch(config, out, "training.steps=1")


def test_only_one_process_speaks_and_writes(one_step):
    out, done = one_step
    assert done.stdout == f"{out}\n"
    assert done.stderr.count("training pairs: ") == 1
    assert done.stderr.count("step 1 ") == 1
    assert "Warning" not in done.stderr
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 1


def test_an_update_follows_the_gradient_of_all_tokens_of_both_processes(one_step, config, task):
    out, _ = one_step
    spec, letters = specs.load(config), Tokenizer.load(out / "tokenizer.model")
    pairs = task(spec).pairs
    batches = endless_batches(pairs, spec.training.batch_tokens, spec.training.seed)
    both = [pair_batch([pairs[i] for i in next(batches)]) for _ in range(2)]
    with torch.random.fork_rng():
        torch.manual_seed(spec.training.seed)
        model = spec.model.build(letters.vocab_size).train()
    terms = [model.loss(batch, torch.Generator())["tokens"] for batch in both]
    objective = (terms[0].sum + terms[1].sum) / (terms[0].count + terms[1].count)
    gradients = torch.autograd.grad(objective, list(model.parameters()))
    moments = load_file(out / "state" / "optimizer.safetensors")
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        np.testing.assert_allclose(moments[f"{name}|exp_avg"] / 0.1, gradient, rtol=2e-4, atol=2e-6)
    (row,) = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert row["loss"] == pytest.approx(float(objective.detach()), rel=1e-5)
    tokens = sum(int(batch.target_mask.sum()) for batch in both)
    assert row["tokens_per_second"] * row["seconds"] == pytest.approx(tokens, rel=1e-3)


def test_two_processes_resume_to_the_same_weights(one_step, config):
    parts, _ = one_step
    launch(config, config.parent / "whole")
    launch(config, parts, "--resume")
    whole, resumed = (load_file(out / "model.safetensors") for out in (config.parent / "whole", parts))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    progress = json.loads((parts / "state" / "state.json").read_text())
    assert (progress["step"], progress["batches"]) == (3, 6)
