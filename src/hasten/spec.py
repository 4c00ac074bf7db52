"""A run as data: frozen specs, read from TOML with `key=value` overrides; anything unknown is an error."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import TypeAdapter, ValidationError

from hasten.errors import UserError
from hasten.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seed, Share, Spec
from hasten.models import ModelSpec
from hasten.spec_errors import explain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True, kw_only=True)
class DataSpec(Spec):
    """Which parallel text to learn from."""

    path: str
    """A data directory made by `hasten data`."""
    distilled: str | None = None
    """A file that replaces the training targets, line for line (made by `hasten distill`); empty lines are left out."""
    fertilities: str | None = None
    """A file of fertilities, line for line (made by `hasten align`); only for models that learn from them."""
    max_tokens: PositiveInt = 200
    """Training pairs with more pieces than this on either side are left out and counted."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec(Spec):
    """How text becomes ids."""

    vocab_size: PositiveInt = 8000
    """Pieces of the joint vocabulary, 7 special ids and 256 bytes among them."""
    from_model: str | None = None
    """Take the tokenizer of this model (a bundled name or a run directory) instead of learning one."""


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(Spec):
    """How long and how fast to learn."""

    steps: PositiveInt = 10000
    """Updates of the weights."""
    batch_tokens: PositiveInt = 4096
    """Padded tokens (the longer side) of one batch."""
    accumulate: PositiveInt = 1
    """Batches averaged into one update."""
    learning_rate: PositiveFloat = 1e-3
    """Peak of the schedule."""
    warmup: NonNegativeInt = 400
    """Steps of linear rise from 0."""
    schedule: Literal["linear", "inverse_sqrt", "hold_then_linear"] = "hold_then_linear"
    """After the rise: straight to 0; with 1 / sqrt(step); or level, and straight to 0 over the last `decay` share."""
    decay: Share = 0.3
    """Share of the run that `hold_then_linear` spends falling to 0."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of matrices (AdamW)."""
    clip: PositiveFloat = 1.0
    """Largest norm of the gradient."""
    seed: Seed = 1
    """Everything random in the run follows from it."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of matrix products; auto: bfloat16 where the device computes it natively."""
    save_every: PositiveInt = 500
    """Steps between checkpoints."""
    average: PositiveInt = 5
    """How many of the last checkpoints are averaged into the model."""
    validate_every: PositiveInt = 1000
    """Steps between translations of validation sentences."""
    validate_sentences: NonNegativeInt = 200
    """How many validation sentences are translated; 0: none."""
    init_from: str | None = None
    """Start from the weights of this model (a bundled name or a run directory) wherever names and shapes agree."""


@dataclass(frozen=True, kw_only=True)
class RunSpec(Spec):
    """Everything that makes a run."""

    model: ModelSpec
    data: DataSpec
    tokenizer: TokenizerSpec = dataclasses.field(default_factory=TokenizerSpec)
    training: TrainingSpec = dataclasses.field(default_factory=TrainingSpec)


_ADAPTER = TypeAdapter(RunSpec)


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunSpec:
    """The run described by a TOML file, after `section.key=value` overrides (values in TOML notation).

    Raises `UserError` naming the file, the key, what was found and what is allowed.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also for bytes, numbers and nesting beyond Python's own limits
        raise UserError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply(table, override)
    return parse(table, str(path))


def changed(spec: RunSpec, overrides: Sequence[str], origin: str) -> RunSpec:
    """A run after `section.key=value` overrides; `origin` names it in errors."""
    table = tomllib.loads(dump(spec))
    for override in overrides:
        _apply(table, override)
    return parse(table, origin)


def parse(table: dict[str, Any], origin: str) -> RunSpec:
    """A run from nested tables; `origin` names them in errors. Types are strict: "500" is no number, 1 no flag."""
    try:
        # Strictness as JSON has it: arrays become tuples and tables specs, and nothing else is converted.
        return _ADAPTER.validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        raise UserError(f"{origin}: {explain(error, table, RunSpec)}") from error
    except RecursionError as error:
        raise UserError(f"{origin}: tables are nested too deeply; a run has sections of settings") from error


def dump(spec: RunSpec) -> str:
    """The run as TOML that `load` reads back to an equal spec."""
    return tomli_w.dumps(_without_none(dataclasses.asdict(spec)))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value


def _apply(table: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *sections, key = (part.strip() for part in name.split("."))
    if not equals or not key or not sections or not all(sections):
        raise UserError(f"{override!r} is not an override; write section.key=value, for example training.steps=500")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"{override!r}: {section} is not a section")
    table[key] = _value(text)


def _value(text: str) -> Any:
    """A value in TOML notation; what is none is a string as it stands, so that paths need no quotes."""
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return read["value"] if len(read) == 1 else text
