"""The model card that a run leaves in its directory."""

import json
from pathlib import Path
from typing import Any

from hasten.data.corpus import Corpus
from hasten.errors import UserError
from hasten.spec import RunSpec


def write_card(directory: Path, spec: RunSpec, parameters: int) -> None:
    """README.md: the recipe, the data, the time and the scores measured during training."""
    rows = read_metrics(directory)
    corpus = Corpus.open(spec.data.path)
    train = corpus.manifest["splits"]["train"]
    options = spec.training
    lines = [
        f"# {directory.resolve().name}",
        "",
        f"Kind `{spec.model.kind}`, {corpus.source_language} to {corpus.target_language}, {parameters:,} parameters, "
        "made by hasten.",
        "",
        f"- data: `{spec.data.path}`, {train['pairs']:,} training pairs"
        + (f", targets `{spec.data.distilled}`" if spec.data.distilled else ""),
        f"- updates: {options.steps:,} of {options.accumulate:,} x {options.batch_tokens:,} padded tokens",
        *([f"- weights to begin with: `{options.init_from}`"] if options.init_from else []),
        *_measured(spec, rows),
        "- again: `hasten train config.toml --out DIR` (paths in `config.toml` count from where the run was started)",
    ]
    (directory / "README.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _measured(spec: RunSpec, rows: list[dict[str, Any]]) -> list[str]:
    trained = next((row for row in reversed(rows) if "seconds" in row), None)
    validated = next((row for row in reversed(rows) if "valid_bleu" in row), None)
    lines = []
    if trained is not None:
        hours, minutes = divmod(round(trained["seconds"] / 60), 60)
        lines.append(f"- time: {hours} h {minutes:02d} min, training loss at the end {trained['loss']:.3f}")
    if validated is not None:
        lines.append(
            f"- validation ({spec.training.validate_sentences} sentences, last weights, greedy): "
            f"BLEU {validated['valid_bleu']:.1f}, chrF {validated['valid_chrf']:.1f}"
        )
    return lines


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, without a last one that was cut off; `UserError` names a damaged line."""
    path = directory / "metrics.jsonl"
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: this is no row of metrics; remove the line")
        rows.append(row)
    return rows
