"""The model card that a run leaves in its directory."""

import json
from pathlib import Path
from typing import Any

from hasten.data.corpus import Corpus
from hasten.spec import RunSpec


def write_card(directory: Path, spec: RunSpec, parameters: int) -> None:
    """README.md: the recipe, the data, the time and the scores measured during training."""
    rows = read_metrics(directory)
    trained = [row for row in rows if "seconds" in row]
    validated = [row for row in rows if "valid_bleu" in row]
    corpus = Corpus.open(spec.data.path)
    lines = [
        f"# {directory.name}",
        "",
        f"A `{spec.model.kind}` model, {corpus.source_language} to {corpus.target_language}, "
        f"{parameters:,} parameters, made by hasten.",
        "",
        f"- data: `{spec.data.path}`" + (f", targets `{spec.data.distilled}`" if spec.data.distilled else ""),
        f"- updates: {spec.training.steps:,} of about {spec.training.batch_tokens:,} padded tokens",
    ]
    if trained:
        lines.append(f"- last training loss: {trained[-1]['loss']:.3f}")
    if validated:
        last = validated[-1]
        lines.append(
            f"- validation ({spec.training.validate_sentences} sentences, greedy): BLEU {last['valid_bleu']:.1f}, "
            f"chrF {last['valid_chrf']:.1f}"
        )
    lines += ["", "Everything that defines the run is in `config.toml`.", ""]
    (directory / "README.md").write_text("\n".join(lines), encoding="utf-8")


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`."""
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
