"""Make a finished run one of the models that ship with the package.

    python scripts/bundle_model.py runs/NAME NAME --config configs/NAME.toml --data data/en-de --recipe FILE

Stores the weights as float16 or int8, scores the stored weights on the test splits (greedy) and writes the model card.
"""

import argparse
import functools
import json
import textwrap
from pathlib import Path

import hasten
from hasten import spec as specs
from hasten.data.corpus import Corpus
from hasten.training import checkpoint
from hasten.training.card import read_metrics
from hasten.training.metrics import Quality, quality

fill = functools.partial(textwrap.fill, width=116, break_on_hyphens=False)
PRETRAINED = Path(hasten.__file__).parent / "pretrained"


def store(run: Path, directory: Path, config: Path, numbers: str) -> None:
    """Write the run's weights as float16 or int8, with the public configuration and the tokenizer."""
    spec, tokenizer, model = checkpoint.read_run(run)
    public = specs.load(config)
    if (spec.model, spec.training.steps) != (public.model, public.training.steps):
        raise SystemExit(f"{run} was not made by {config}")
    directory.mkdir(exist_ok=True)
    checkpoint.write_run(directory, public, tokenizer)
    weights = model.state_dict()
    small = checkpoint.in_bytes(weights) if numbers == "int8" else {name: t.half() for name, t in weights.items()}
    checkpoint.save_weights(directory / checkpoint.WEIGHTS, small, tokenizer)


def score(directory: Path, corpus: Corpus) -> dict[str, tuple[int, Quality]]:
    """Scores of the stored model on every test split of the corpus."""
    translator = hasten.load(directory)
    scores = {}
    for split in (name for name in corpus.splits if name.startswith("test")):
        source, target = corpus.pairs(split)
        scores[split] = (len(source), quality(translator.translate(source), target))
    return scores


def card(
    name: str, run: Path, corpus: Corpus, scores: dict[str, tuple[int, Quality]], recipe: str, numbers: str
) -> str:
    """The model card as Markdown."""
    spec = specs.load(run / checkpoint.CONFIG)
    rows = [row for row in read_metrics(run) if "tokens_per_second" in row]
    seconds = sum(row["seconds"] for row, after in zip(rows, [*rows[1:], None], strict=True)
                  if after is None or after["seconds"] < row["seconds"])  # fmt: skip
    train = corpus.manifest["splits"]["train"]
    sources = [name for name, facts in corpus.manifest["sources"].items() if facts["pairs"]["train"]]
    quality_rows = "\n".join(
        f"| {split} | {n} | {q.bleu:.1f} | {q.chrf:.1f} | {q.length_ratio:.2f} | {100 * q.repetition:.1f} % |"
        for split, (n, q) in scores.items()
    )
    first = next(iter(scores.values()))[1]
    targets = " (targets: translations by the teacher)" if spec.data.distilled else ""
    parameters = sum(t.numel() for t in checkpoint.read_weights(run / checkpoint.WEIGHTS).values())
    words = f"{train['source_words']:,} English, {train['target_words']:,} German words"
    data = (
        f"{train['pairs']:,} sentence pairs ({words}){targets} out of the translations in Debian packages: "
        f"{', '.join(sorted(sources))}. Versions, counts and licences are in the data directory that "
        "`hasten data debian en-de` writes. The splits are by document, without near-duplicates of the training text; "
        "`test-ood` comes from packages (gnucash, django) of which nothing is in the training text. The training text "
        "keeps the licences of its sources (GPL, LGPL, MPL, CC-BY-SA, BSD; the data directory's `LICENCES` has them in "
        "full)."
    )
    training = (
        f"{spec.training.steps:,} updates, batches of {spec.training.batch_tokens:,} padded tokens, {seconds / 60:.0f} "
        f"minutes on one CPU core at {rows[-1]['tokens_per_second']:,.0f} target tokens a second; last training loss "
        f"{rows[-1]['loss']:.3f}. The model is small and shortly trained: it is here to show the method, not for "
        "production."
    )
    return f"""# {name}

English to German, software documentation and descriptions. Model kind `{spec.model.kind}`, {parameters:,} parameters,
stored as {numbers}.

## Data

{fill(data)}

## Training

{fill(training)}

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
    """Read the arguments, store, score, write the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True, help="the configuration that makes the run")
    parser.add_argument("--recipe", type=Path, required=True, help="file with the commands that make the run")
    parser.add_argument("--numbers", choices=("float16", "int8"), default="float16", help="how weights are stored")
    arguments = parser.parse_args()
    directory = PRETRAINED / arguments.name
    store(arguments.run, directory, arguments.config, arguments.numbers)
    corpus = Corpus.open(arguments.data)
    scores = score(directory, corpus)
    recipe = arguments.recipe.read_text(encoding="utf-8").strip()
    text = card(arguments.name, arguments.run, corpus, scores, recipe, arguments.numbers)
    (directory / "README.md").write_text(text, encoding="utf-8")
    (arguments.run / "scores.json").write_text(json.dumps({k: q.as_dict() for k, (_, q) in scores.items()}, indent=1))
    print(text)


if __name__ == "__main__":
    main()
