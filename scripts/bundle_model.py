"""Make a finished run one of the models that ship with the package.

    python scripts/bundle_model.py runs/en-de-ctc en-de-ctc --data data/en-de

Stores the weights as float16, scores the stored weights on the test splits (greedy) and writes the model card.
"""

import argparse
import json
from pathlib import Path

import hasten
from hasten import spec as specs
from hasten.data.corpus import Corpus
from hasten.training import checkpoint
from hasten.training.card import read_metrics
from hasten.training.metrics import Quality, quality

PRETRAINED = Path(hasten.__file__).parent / "pretrained"


def store(run: Path, directory: Path) -> None:
    spec, tokenizer, model = checkpoint.read_run(run)
    directory.mkdir(exist_ok=True)
    checkpoint.write_run(directory, spec, tokenizer)
    half = {name: tensor.half() for name, tensor in model.state_dict().items()}
    checkpoint.save_weights(directory / checkpoint.WEIGHTS, half, tokenizer)


def score(directory: Path, corpus: Corpus) -> dict[str, tuple[int, Quality]]:
    translator = hasten.load(directory)
    scores = {}
    for split in (name for name in corpus.splits if name.startswith("test")):
        source, target = corpus.pairs(split)
        scores[split] = (len(source), quality(translator.translate(source), target))
    return scores


def card(name: str, run: Path, corpus: Corpus, scores: dict[str, tuple[int, Quality]], recipe: str) -> str:
    spec = specs.load(run / checkpoint.CONFIG)
    rows = [row for row in read_metrics(run) if "tokens_per_second" in row]
    seconds = sum(row["seconds"] for row, after in zip(rows, [*rows[1:], None], strict=True)
                  if after is None or after["seconds"] < row["seconds"])  # fmt: skip
    train = corpus.manifest["splits"]["train"]
    packages = ", ".join(sorted(corpus.manifest["sources"]))
    quality_rows = "\n".join(
        f"| {split} | {n} | {q.bleu:.1f} | {q.chrf:.1f} | {q.length_ratio:.2f} | {100 * q.repetition:.1f} % |"
        for split, (n, q) in scores.items()
    )
    first = next(iter(scores.values()))[1]
    targets = " (targets: translations by the teacher)" if spec.data.distilled else ""
    return f"""# {name}

English to German, software documentation and descriptions. A `{spec.model.kind}` model with
{sum(t.numel() for t in checkpoint.read_weights(run / checkpoint.WEIGHTS).values()):,} parameters, stored as float16.

## Data

{train["pairs"]:,} sentence pairs ({train["source_words"]:,} English, {train["target_words"]:,} German words){targets} out
of the translations in Debian packages: {packages}. Versions, counts and licences are in the data directory that
`hasten data debian en-de` writes. The splits are by document, without near-duplicates of the training text;
`test-ood` comes from packages (gnucash, django) of which nothing is in the training text.

## Training

{spec.training.steps:,} updates, batches of {spec.training.batch_tokens:,} padded tokens, {seconds / 60:.0f} minutes on one
CPU core at {rows[-1]["tokens_per_second"]:,.0f} target tokens a second; last training loss {rows[-1]["loss"]:.3f}. The model
is small and shortly trained: it is here to show the method, not for production.

## Scores (greedy, of the stored weights)

| split | sentences | BLEU | chrF | length ratio | repeated words |
| --- | --- | --- | --- | --- | --- |
{quality_rows}

Signatures: `{first.bleu_signature}`, `{first.chrf_signature}`.

## Reproduce

```console
{recipe}
```
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, required=True, help="file with the commands that make the run")
    arguments = parser.parse_args()
    directory = PRETRAINED / arguments.name
    store(arguments.run, directory)
    corpus = Corpus.open(arguments.data)
    scores = score(directory, corpus)
    text = card(arguments.name, arguments.run, corpus, scores, arguments.recipe.read_text(encoding="utf-8").strip())
    (directory / "README.md").write_text(text, encoding="utf-8")
    (arguments.run / "scores.json").write_text(json.dumps({k: q.as_dict() for k, (_, q) in scores.items()}, indent=1))
    print(text)


if __name__ == "__main__":
    main()
