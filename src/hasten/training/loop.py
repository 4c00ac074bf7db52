"""The training loop: batch, loss, step; at intervals save, and translate a slice of the validation text."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from hasten.data.batch import Pair, endless_batches, pair_batch
from hasten.data.tokenizer import Tokenizer
from hasten.errors import UserError
from hasten.models.base import GenerationModel
from hasten.nn.loss import LossTerm
from hasten.spec import RunSpec
from hasten.training import checkpoint
from hasten.training.metrics import quality
from hasten.training.optim import adamw, learning_rate
from hasten.translator import Translator


@dataclass(frozen=True)
class Report:
    """What the loop tells its observer after every step."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    seconds_left: float


@dataclass
class Task:
    """What a run learns from: encoded training pairs and validation lines."""

    pairs: list[Pair]
    valid_source: list[str]
    valid_target: list[str]


class Interrupted(Exception):
    """The run was asked to stop; its state is saved."""


def train(
    spec: RunSpec,
    directory: Path,
    tokenizer: Tokenizer,
    task: Task,
    *,
    resume: bool,
    observe: Callable[[Report], None],
    announce: Callable[[dict[str, Any]], None],
    stop: Callable[[], bool] = lambda: False,
) -> GenerationModel:
    """Run `spec` in `directory` and return the averaged model.

    `observe` gets a report every step, `announce` every row that is written to `metrics.jsonl`; when `stop` turns
    True the state is saved and `Interrupted` raised. Resuming continues to the same weights as an uninterrupted run:
    batches, dropout and sampling are functions of (seed, step) alone.
    """
    options = spec.training
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        model = spec.model.build(tokenizer.vocab_size)
        run = _Run(spec, directory, tokenizer, model)
        start = run.restore() if resume else run.initialise(announce)
        run.loop(start, task, observe, announce, stop)
    return run.averaged()


def precision(wanted: str, device: torch.device) -> str:
    """Accelerate's name of the arithmetic; "auto" takes bfloat16 where the device multiplies it natively."""
    if wanted != "auto":
        return {"float32": "no", "bfloat16": "bf16"}[wanted]
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    return "bf16" if device.type == "cpu" and cpu_multiplies_bfloat16() else "no"


def cpu_multiplies_bfloat16() -> bool:
    """Whether this processor has bfloat16 dot products (AVX512-BF16, AMX or the Arm extension)."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return False
    return any(flag in flags.split() for flag in ("avx512_bf16", "amx_bf16", "bf16"))


class _Run:
    """The moving parts of one run."""

    def __init__(self, spec: RunSpec, directory: Path, tokenizer: Tokenizer, model: GenerationModel):
        self.spec, self.options, self.directory, self.tokenizer = spec, spec.training, directory, tokenizer
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.accelerator = Accelerator(
            mixed_precision=precision(self.options.precision, device), cpu=device.type == "cpu"
        )
        self.model = model.to(self.accelerator.device)
        self.optimizer = adamw(self.model, self.options)

    def initialise(self, announce: Callable[[dict[str, Any]], None]) -> int:
        """Weights of another model wherever names and shapes agree, if the spec names one."""
        if self.options.init_from is not None:
            from hasten.pretrained import resolve

            source = resolve(self.options.init_from)
            weights = checkpoint.read_weights(source / checkpoint.WEIGHTS)
            copied = checkpoint.fill_matching(self.model, weights)
            announce({"initialised_from": self.options.init_from, "tensors": len(copied)})
        return 0

    def restore(self) -> int:
        return checkpoint.load_state(self.directory, self.model, self.optimizer, self.tokenizer)

    def loop(
        self,
        start: int,
        task: Task,
        observe: Callable[[Report], None],
        announce: Callable[[dict[str, Any]], None],
        stop: Callable[[], bool],
    ) -> None:
        """Steps start .. steps - 1."""
        options, accelerator = self.options, self.accelerator
        if not task.pairs:
            raise UserError("no training pairs are left after filtering; see the counts above")
        model, optimizer = accelerator.prepare(self.model, self.optimizer)
        per_step = options.accumulate * accelerator.num_processes
        batches = endless_batches(task.pairs, options.batch_tokens, options.seed, skip=start * per_step)
        began, tokens, smooth = time.monotonic(), 0, math.nan
        for step in range(start, options.steps):
            self.model.train()
            self.model.progress(step / options.steps)
            mine = [next(batches) for _ in range(per_step)][accelerator.process_index :: accelerator.num_processes]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options, step)
            loss, parts, seen = self._update(model, optimizer, step, mine, task.pairs)
            tokens += seen
            smooth = loss if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss
            done, elapsed = step + 1, time.monotonic() - began
            left = elapsed / (done - start) * (options.steps - done)
            observe(Report(done, options.steps, smooth, tokens / elapsed, left))
            last = done == options.steps or stop()
            if last or done % options.save_every == 0:
                self._save(done)
                announce({"step": done, "loss": smooth, **parts, "lr": learning_rate(options, step),
                          "tokens_per_second": tokens / elapsed, "seconds": elapsed})  # fmt: skip
            if options.validate_sentences and (done == options.steps or done % options.validate_every == 0):
                announce({"step": done, **self.validate(task)})
            if last and done < options.steps:
                raise Interrupted(f"stopped and saved at step {done}")

    def _update(
        self, model: torch.nn.Module, optimizer: Any, step: int, mine: list[list[int]], pairs: list[Pair]
    ) -> tuple[float, dict[str, float], int]:
        """One update from this process's batches: the objective, its parts, and the target tokens seen."""
        accelerator, total, seen = self.accelerator, 0.0, 0
        parts: dict[str, float] = {}
        for number, indices in enumerate(mine):
            seed = ((self.options.seed * 1_000_003 + step) * 1009 + number) * 1009 + accelerator.process_index
            torch.manual_seed(seed)
            generator = torch.Generator().manual_seed(seed)
            batch = pair_batch([pairs[i] for i in indices]).to(accelerator.device)
            with accelerator.autocast():
                terms = model(batch, generator)
            objective = self._objective(terms) / len(mine)
            accelerator.backward(objective)
            total += float(objective.detach())
            seen += int(batch.target_mask.sum())
            parts = {name: float(term.sum.detach() / term.count.clamp(min=1)) for name, term in terms.items()}
        if not math.isfinite(total):
            raise UserError(f"the loss became {total} at step {step}; lower training.learning_rate (terms: {parts})")
        accelerator.clip_grad_norm_(model.parameters(), self.options.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total, parts, seen * accelerator.num_processes

    def _objective(self, terms: dict[str, LossTerm]) -> Tensor:
        """Sum over terms of weight * sum / count, counted over all processes."""
        world = self.accelerator.num_processes
        total = torch.zeros((), device=self.accelerator.device)
        for term in terms.values():
            count = self.accelerator.reduce(term.count.float(), reduction="sum") if world > 1 else term.count
            total = total + term.weight * world * term.sum / count.clamp(min=1)  # type: ignore[union-attr]
        return total

    def validate(self, task: Task) -> dict[str, Any]:
        """Scores of the current weights on the first validation sentences."""
        self.model.eval()
        count = self.options.validate_sentences
        output = Translator(self.model, self.tokenizer).translate(task.valid_source[:count])
        scores = quality(output, task.valid_target[:count])
        return {"valid_bleu": scores.bleu, "valid_chrf": scores.chrf, "valid_length_ratio": scores.length_ratio}

    def _save(self, step: int) -> None:
        """State for resuming, and the averaged model of the run directory."""
        if not self.accelerator.is_main_process:
            return
        keep = self.options.average
        checkpoint.save_state(self.directory, step, self.model, self.optimizer, self.tokenizer, keep)
        snapshots = sorted((self.directory / "recent").glob("step-*.safetensors"))[-keep:]
        weights = checkpoint.average(snapshots, self.tokenizer)
        checkpoint.save_weights(self.directory / checkpoint.WEIGHTS, weights, self.tokenizer)

    def averaged(self) -> GenerationModel:
        """The model of the run directory."""
        weights = checkpoint.read_weights(self.directory / checkpoint.WEIGHTS, self.tokenizer)
        checkpoint.fill(self.model, weights, str(self.directory))
        return self.model.eval()


def append_metrics(directory: Path, row: dict[str, Any]) -> None:
    """One JSON line at the end of `metrics.jsonl`."""
    with (directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()}) + "\n")
