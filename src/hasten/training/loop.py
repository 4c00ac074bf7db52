"""The training loop: batch, loss, step; at intervals translate a slice of the validation text, and save."""

import array
import dataclasses
import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten import spec as specs
from hasten.attention import after_update
from hasten.data.batch import Batch, Pair, endless_batches, pair_batch
from hasten.data.tokenizer import Tokenizer
from hasten.errors import UserError
from hasten.models.base import GenerationModel
from hasten.nn.loss import LossTerm
from hasten.spec import RunSpec
from hasten.training import checkpoint, state
from hasten.training.card import read_metrics
from hasten.training.finetune import give_teacher
from hasten.training.metrics import quality
from hasten.training.optim import adamw, learning_rate
from hasten.training.processes import keep_buffers_apart, make_accelerator, multiplies_in_bfloat16
from hasten.training.state import Progress
from hasten.translator import Translator

METRICS = "metrics.jsonl"
_LARGEST_SEED = 2**63


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
    fertilities: list[list[int]] | None = None
    """Labels of the pairs, for models that learn from them: a number a source token and one for its end symbol."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """Training pairs side by side, with their labels where there are any."""
        labels = None if self.fertilities is None else [self.fertilities[i] for i in indices]
        return pair_batch([self.pairs[i] for i in indices], labels)

    def check(self) -> None:
        """`UserError` where there is nothing to learn from."""
        if not self.pairs:
            files = "data.path, data.distilled" + ("" if self.fertilities is None else ", data.fertilities")
            raise UserError(f"no training pairs are left after filtering; see {files} and data.max_tokens")

    def fingerprint(self) -> str:
        """SHA-256 of the training pairs and labels: a run goes on only with what it began with."""
        digest = hashlib.sha256()
        for source, target in self.pairs:
            digest.update(array.array("q", [len(source), len(target), *source, *target]).tobytes())
        for label in self.fertilities or ():
            digest.update(array.array("q", label).tobytes())
        return digest.hexdigest()


class Interrupted(Exception):
    """The run was asked to stop; its state is saved."""


def train(
    spec: RunSpec,
    directory: Path,
    tokenizer: Tokenizer,
    task: Task,
    *,
    resume: bool = False,
    observe: Callable[[Report], None] = lambda report: None,
    announce: Callable[[dict[str, Any]], None] = lambda row: None,
    stop: Callable[[], bool] = lambda: False,
) -> GenerationModel:
    """Run `spec` in `directory` and return the averaged model, in eval mode.

    An earlier run in `directory` is removed unless `resume`. Under `accelerate launch` or `torchrun` every process
    calls this with equal arguments; the main one writes and speaks. `observe` gets a report every step, `announce`
    every row of `metrics.jsonl` and what else is worth a line; when `stop` turns True the state is saved and
    `Interrupted` raised.
    Resuming continues to the same weights as an uninterrupted run: batches, dropout and sampling are functions of
    (seed, step) alone. The global random numbers are afterwards what they were before.

    Raises `UserError` where there is nothing to learn from, the loss stops being finite, the state to resume does not
    belong to `spec` and `task`, or the directory cannot be written; the last saved state stays.
    """
    task.check()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(spec.training.seed % _LARGEST_SEED)
        run = _Run(spec, directory, tokenizer, task, announce)
        progress = run.restore() if resume else run.initialise()
        run.loop(progress, observe, stop)
        return run.averaged()


class _Run:
    """The moving parts of one run."""

    def __init__(
        self,
        spec: RunSpec,
        directory: Path,
        tokenizer: Tokenizer,
        task: Task,
        announce: Callable[[dict[str, Any]], None],
    ):
        self.spec, self.options, self.task = spec, spec.training, task
        self.directory, self.tokenizer = directory, tokenizer
        self.accelerator = make_accelerator()
        self.main = self.accelerator.is_main_process
        self._announce = announce
        self.bfloat16 = multiplies_in_bfloat16(self.options.precision, self.accelerator.device)
        self.model: GenerationModel = spec.model.build(tokenizer.vocab_size).to(self.accelerator.device)
        give_teacher(self.model, spec, tokenizer)
        self.optimizer = adamw(self.model, self.options)
        self.data = task.fingerprint()

    def initialise(self) -> Progress:
        """A new run: fresh weights, those of `training.init_from` wherever names and shapes agree."""
        rows = [] if self.options.init_from is None else [self._copy_weights(self.options.init_from)]
        if self.main:
            checkpoint.clear_run(self.directory)
            checkpoint.write_run(self.directory, self.spec, self.tokenizer)
        for row in rows:
            self.record(row)
        return Progress(data=self.data)

    def _copy_weights(self, name: str) -> dict[str, Any]:
        from hasten.pretrained import resolve

        source = resolve(name)
        theirs = Tokenizer.load(source / checkpoint.TOKENIZER)
        if theirs.fingerprint != self.tokenizer.fingerprint:
            raise UserError(f"training.init_from {name} has another tokenizer; set tokenizer.from_model = {name!r} too")
        weights = checkpoint.read_weights(source / checkpoint.WEIGHTS, theirs)
        copied = checkpoint.fill_matching(self.model, weights)
        if not copied:
            raise UserError(
                f"training.init_from {name}: none of its weights has a name and shape of this model; "
                "give both the same d_model and d_ff, or leave init_from out"
            )
        return {"initialised_from": name, "tensors": len(copied), "of": len(self.model.state_dict())}

    def restore(self) -> Progress:
        """Go on with what is saved, after checking that it belongs to this spec and these pairs."""
        saved = specs.load(self.directory / checkpoint.CONFIG)
        if saved.tokenizer != self.spec.tokenizer:
            raise UserError(
                f"{self.directory} has {saved.tokenizer}, this configuration {self.spec.tokenizer}; "
                "a run keeps its tokenizer: leave [tokenizer] as it was or start anew"
            )
        progress = state.load_state(self.directory, self.model, self.optimizer, self.tokenizer)
        if progress.step > self.options.steps:
            raise UserError(
                f"training.steps is {self.options.steps}, but {self.directory} has made {progress.step} already; "
                "give at least as many, or start anew"
            )
        if progress.data not in ("", self.data):
            raise UserError(
                f"the training pairs are not those that {self.directory} began with (files of [data], or its settings, "
                "have changed); restore them or start anew"
            )
        if progress.batches < 0:
            progress = dataclasses.replace(progress, batches=progress.step * self._batches_per_step())
        if self.main:
            self._forget_after(progress.step)
            checkpoint.write_run(self.directory, self.spec, self.tokenizer)
            self._announce({"resumed_at": progress.step, **differences(saved, self.spec)})
        return dataclasses.replace(progress, data=self.data)

    def _forget_after(self, step: int) -> None:
        """Drop what a run that was killed had written beyond its saved state."""
        for snapshot in state.snapshots(self.directory):
            if state.step_of(snapshot) > step:
                snapshot.unlink()
        kept = [row for row in read_metrics(self.directory) if row.get("step", 0) <= step]
        (self.directory / METRICS).write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def _batches_per_step(self) -> int:
        return self.options.accumulate * self.accelerator.num_processes

    def loop(self, progress: Progress, observe: Callable[[Report], None], stop: Callable[[], bool]) -> None:
        """Steps progress.step .. steps - 1."""
        options, began, tokens = self.options, time.monotonic(), 0
        keep_buffers_apart(self.model)
        model, optimizer = self.accelerator.prepare(self.model, self.optimizer)
        batches = endless_batches(self.task.pairs, options.batch_tokens, options.seed, skip=progress.batches)
        before = progress
        for step in range(before.step, options.steps):
            self.model.train()
            self.model.progress(step / options.steps)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options, step)
            loss, parts, seen, stopping = self._update(model, optimizer, step, batches, stop())
            tokens += seen
            elapsed = time.monotonic() - began
            progress = Progress(
                step=step + 1,
                batches=progress.batches + self._batches_per_step(),
                loss=loss if math.isnan(progress.loss) else 0.98 * progress.loss + 0.02 * loss,
                seconds=before.seconds + elapsed,
                data=self.data,
            )
            rate, left = tokens / elapsed, elapsed / (step + 1 - before.step) * (options.steps - step - 1)
            if self.main:
                observe(Report(step + 1, options.steps, progress.loss, rate, left))
            self._note(progress, {**parts, "lr": learning_rate(options, step), "tokens_per_second": rate}, stopping)
            if stopping and step + 1 < options.steps:
                raise Interrupted(f"stopped and saved at step {step + 1}")

    def _note(self, progress: Progress, facts: dict[str, float], stopping: bool) -> None:
        """Rows, validation and state that are due after a step; the state comes last: it vouches for the rest."""
        options, step = self.options, progress.step
        last = step == options.steps
        regular = last or step % options.save_every == 0
        if not self.main:
            return
        if regular or stopping:
            self.record({"step": step, "loss": progress.loss, **facts, "seconds": progress.seconds})
        if options.validate_sentences and self.task.valid_source and (last or step % options.validate_every == 0):
            self.record({"step": step, **self.validate()})
        if regular or stopping:
            self._save(progress, regular)

    def _update(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        step: int,
        batches: Iterator[list[int]],
        stop: bool,
    ) -> tuple[float, dict[str, float], int, bool]:
        """One update: the objective and its parts, the target tokens seen, and whether any process wants to stop."""
        accelerator, options, total, seen = self.accelerator, self.options, 0.0, 0
        parts: dict[str, float] = {}
        mine = list(itertools.islice(batches, self._batches_per_step()))
        mine = mine[accelerator.process_index :: accelerator.num_processes]
        for number, indices in enumerate(mine):
            seed = ((options.seed * 1_000_003 + step) * 1009 + number) * 1009 + accelerator.process_index
            torch.manual_seed(seed % _LARGEST_SEED)
            generator = torch.Generator().manual_seed(seed % _LARGEST_SEED)
            batch = self.task.batch(indices).to(accelerator.device)
            with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=self.bfloat16):
                terms = model(batch, generator)
            loss = self._objective(terms) / len(mine)
            accelerator.backward(loss)
            total += float(loss.detach())
            seen += int(batch.target_mask.sum())
            parts = {name: float(term.sum.detach() / term.count.clamp(min=1)) for name, term in terms.items()}
        total, seen, stopping = self._of_all(total, seen, stop)
        norm = float(accelerator.clip_grad_norm_(model.parameters(), options.clip) or 0.0)
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise UserError(
                f"at step {step + 1} the loss became {total} and its gradient {norm} (terms: {parts}); "
                "lower training.learning_rate or raise training.warmup"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_update(model)
        return total, parts, seen, stopping

    def _of_all(self, loss: float, seen: int, stop: bool) -> tuple[float, int, bool]:
        """Mean loss, all tokens, and any wish to stop, over the processes."""
        world = self.accelerator.num_processes
        if world == 1:
            return loss, seen, stop
        mine = torch.tensor([loss / world, seen, stop], dtype=torch.float64, device=self.accelerator.device)
        everyone = self.accelerator.reduce(mine, reduction="sum")
        assert isinstance(everyone, Tensor)
        loss, tokens, wishes = everyone.tolist()
        return loss, int(tokens), wishes > 0

    def _objective(self, terms: dict[str, LossTerm]) -> Tensor:
        """Sum over terms of weight * sum / count, counted over all processes, whose gradients will be averaged."""
        world = self.accelerator.num_processes
        total = torch.zeros((), device=self.accelerator.device)
        for term in terms.values():
            count = self.accelerator.reduce(term.count.float(), reduction="sum") if world > 1 else term.count
            assert isinstance(count, Tensor)
            total = total + term.weight * world * term.sum / count.clamp(min=1)
        return total

    def record(self, row: dict[str, Any]) -> None:
        """A row of metrics: to the file, and announced."""
        if self.main:
            append_metrics(self.directory, row)
            self._announce(row)

    def validate(self) -> dict[str, Any]:
        """Scores of the current weights on the first validation sentences."""
        self.model.eval()
        count = self.options.validate_sentences
        output = Translator(self.model, self.tokenizer).translate(self.task.valid_source[:count])
        scores = quality(output, self.task.valid_target[:count])
        return {"valid_bleu": scores.bleu, "valid_chrf": scores.chrf, "valid_length_ratio": scores.length_ratio}

    def _save(self, progress: Progress, regular: bool) -> None:
        """The averaged model of the run directory, then the state for resuming.

        At a stop between the regular saves the current weights take part in this average only, so that the run goes on
        as if it had not been stopped.
        """
        keep = self.options.average
        newest = state.save_snapshot(self.directory, progress.step, self.model, self.tokenizer)
        drawn = [name for name, _ in self.model.named_buffers()]
        weights = state.average(state.snapshots(self.directory)[-keep:], self.tokenizer, drawn)
        checkpoint.save_weights(self.directory / checkpoint.WEIGHTS, weights, self.tokenizer)
        if not regular:
            newest.unlink()
        state.save_state(self.directory, progress, self.model, self.optimizer, self.tokenizer)
        for old in state.snapshots(self.directory)[:-keep]:
            old.unlink()

    def averaged(self) -> GenerationModel:
        """The model of the run directory."""
        self.accelerator.wait_for_everyone()
        weights = checkpoint.read_weights(self.directory / checkpoint.WEIGHTS, self.tokenizer)
        checkpoint.fill(self.model, weights, str(self.directory))
        return self.model.eval()


def differences(old: RunSpec, new: RunSpec) -> dict[str, str]:
    """The settings in which two runs differ, as "old -> new"."""
    found = {}
    for section in dataclasses.fields(RunSpec):
        one, other = (dataclasses.asdict(getattr(spec, section.name)) for spec in (old, new))
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key):
                found[f"{section.name}.{key}"] = f"{one.get(key)} -> {other.get(key)}"
    return found


def append_metrics(directory: Path, row: dict[str, Any]) -> None:
    """One JSON line at the end of `metrics.jsonl`."""
    with (directory / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()}) + "\n")
