"""The state that lets a run go on, and the snapshots whose mean becomes its model."""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hasten.data.tokenizer import Tokenizer
from hasten.errors import UserError
from hasten.training.checkpoint import RECENT, STATE, WEIGHTS, fill, read_weights, save_weights

OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True)
class Progress:
    """How far a run has come: updates, batches of all processes, smoothed loss, seconds, and what it learns from."""

    step: int = 0
    batches: int = 0
    loss: float = math.nan
    seconds: float = 0.0
    data: str = ""


def save_state(
    directory: Path, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer, tokenizer: Tokenizer
) -> None:
    """Write what resuming needs; an interruption at any moment leaves the old state or the new one whole."""
    state, new, old = (directory / (STATE + suffix) for suffix in ("", ".new", ".old"))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    save_weights(new / WEIGHTS, model.state_dict(), tokenizer)
    save_weights(new / OPTIMIZER, _optimizer_tensors(model, optimizer), tokenizer)
    facts = {**dataclasses.asdict(progress), "torch": torch.__version__}
    (new / "state.json").write_text(json.dumps(facts), encoding="utf-8")
    if state.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(state, old)
    os.replace(new, state)
    shutil.rmtree(old, ignore_errors=True)


def load_state(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, tokenizer: Tokenizer) -> Progress:
    """Restore `save_state`; `UserError` where nothing is saved, or something damaged or of another model."""
    state = directory / STATE
    if not state.exists():
        state = directory / (STATE + ".old")
    if not state.exists():
        raise UserError(f"{directory} holds no saved state to resume from; start without --resume")
    progress = _read_progress(state / "state.json")
    fill(model, read_weights(state / WEIGHTS, tokenizer), str(state / WEIGHTS))
    saved = read_weights(state / OPTIMIZER, tokenizer)
    if progress.step and not saved:
        raise UserError(f"{state / OPTIMIZER} is empty; start again without --resume")
    _fill_optimizer(model, optimizer, saved, state / OPTIMIZER)
    return progress


def _fill_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Tensor], origin: Path) -> None:
    """Moments and step counts of every parameter that was ever updated; `UserError` where they are another model's."""
    for name, parameter in model.named_parameters():
        # The fused optimizer counts steps on the device of the parameter.
        entry = {key: saved.pop(f"{name}|{key}", None) for key in ("exp_avg", "exp_avg_sq", "step")}
        found = {key: tensor.to(parameter.device) for key, tensor in entry.items() if tensor is not None}
        if not found:
            continue
        if len(found) < len(entry) or found["exp_avg"].shape != parameter.shape:
            raise UserError(f"{origin} does not fit the model at {name}; start again without --resume")
        optimizer.state[parameter] = found
    if saved:
        raise UserError(f"{origin} holds {min(saved)}, which the model lacks; start again without --resume")


def _read_progress(path: Path) -> Progress:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name: facts[field.name] for field in dataclasses.fields(Progress) if field.name in facts}
        progress = Progress(**{"batches": -1, **known, "step": int(facts["step"])})
        if progress.step < 0 or not math.isfinite(progress.batches + progress.seconds):
            raise ValueError(f"{facts} is no progress")
        math.isnan(progress.loss)  # a number at least
        return progress
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is missing or damaged ({error}); start again without --resume") from error


def save_snapshot(directory: Path, step: int, model: nn.Module, tokenizer: Tokenizer) -> Path:
    """The weights at a step, kept for averaging."""
    recent = directory / RECENT
    recent.mkdir(parents=True, exist_ok=True)
    path = recent / f"step-{step:08d}.safetensors"
    save_weights(path, model.state_dict(), tokenizer)
    return path


def snapshots(directory: Path) -> list[Path]:
    """Snapshots in the order of their steps."""
    found = (directory / RECENT).glob("step-*.safetensors")
    return sorted((path for path in found if path.stem.removeprefix("step-").isdecimal()), key=step_of)


def step_of(snapshot: Path) -> int:
    """The number of updates that made a snapshot."""
    return int(snapshot.stem.removeprefix("step-"))


def average(paths: Sequence[Path], tokenizer: Tokenizer, drawn: Collection[str] = ()) -> dict[str, Tensor]:
    """The mean of several snapshots, summed in float64; of `drawn`, which are not learnt (buffers), the last one."""
    total: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for path in paths:
        weights = read_weights(path, tokenizer)
        for name in weights.keys() - set(drawn):
            total[name] = total[name] + weights[name].double() if name in total else weights[name].double()
    means = {name: (tensor / len(paths)).float() for name, tensor in total.items()}
    return {name: means.get(name, tensor) for name, tensor in weights.items()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}|{key}"] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return tensors
