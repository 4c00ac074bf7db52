"""Which orderings of the papers appear on a small real task: letters to phonemes, every model with the same budget.

A teacher learns from the dictionary; one-pass and few-pass students then learn from the dictionary (raw) or from the
teacher's greedy words for the same letters (distilled), for each seed with equally many updates of equally many tokens.
What is scored is held out and the dictionary's. Runs that are finished are not made again, so the same command goes on
after an interruption.

    OMP_NUM_THREADS=1 python benchmarks/pronunciation.py RUNS [--seeds 1 2 3] [--kinds ctc nat ...]
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import hasten
from hasten.bench.machine import machine
from hasten.data.alignment import write_fertilities
from hasten.data.corpus import Corpus
from hasten.data.pronunciation import build_pronunciation_corpus
from hasten.spec import parse
from hasten.training import loop, prepare
from hasten.training.teacher_alignment import attention_fertilities

OUT = Path(__file__).parent / "results" / "generation" / "pronunciation.jsonl"
WORDS = 60_000
SHAPE = {"d_model": 64, "n_heads": 4, "d_ff": 256, "encoder_layers": 2, "dropout": 0.05}
KINDS = {
    "autoregressive": {"decoder_layers": 2},
    "ctc": {"refiner_layers": 1, "upsample": 2},
    "dag": {"decoder_layers": 2, "upsample": 3},
    "nat": {"decoder_layers": 2, "label_smoothing": 0.0},
    "mask_predict": {"decoder_layers": 2, "label_smoothing": 0.0},
    "refinement": {"decoder_layers": 2, "label_smoothing": 0.0},
}
TRAINING = {"steps": 600, "batch_tokens": 2000, "learning_rate": 3e-3, "warmup": 60, "decay": 0.5,
            "save_every": 600, "average": 1, "validate_sentences": 0}  # fmt: skip
PASSES = [{"decoding": [f"iterations={passes}"]} for passes in (1, 2, 4, 10)]
WIDE = [{"decoding": ["iterations=10"], "beam": 3}, {"decoding": ["iterations=10"], "beam": 3, "rescorer": True}]
WAYS = {
    "autoregressive": [{}, {"beam": 4}],
    "ctc": [{}],
    "dag": [{"decoding": [f'method="{method}"']} for method in ("greedy", "lookahead", "viterbi", "beam")],
    "nat": [{}, {"decoding": ['method="average"']}, {"beam": 10}, {"beam": 10, "rescorer": True}],
    "mask_predict": PASSES + WIDE,
    "refinement": [{"decoding": [*way["decoding"], "adaptive=false"]} for way in PASSES] + WIDE,
}
LAYER = 1  # of the teacher, whose attention over the letters makes the labels


def edits(one: Sequence[str], other: Sequence[str]) -> int:
    """Fewest insertions, deletions and substitutions. Source: Wagner and Fischer, 1974."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def learn(runs: Path, corpus: Corpus, kind: str, targets: str, seed: int) -> Path:
    """The run directory of a finished model, made if it is not there."""
    directory = runs / f"{kind}-{targets}-{seed}"
    if (directory / "done").exists():
        return directory
    data = {"path": str(corpus.directory)}
    if targets == "distilled":
        data["distilled"] = str(distilled(runs, corpus))
    if kind == "nat":
        data["fertilities"] = str(fertilities(runs, corpus, targets))
    training = TRAINING | {"seed": seed}
    settings = {"data": data, "tokenizer": {"vocab_size": 375}, "model": {"kind": kind, **SHAPE, **KINDS[kind]}}
    spec = parse(settings | {"training": training}, "benchmark")
    tokenizer = prepare.make_tokenizer(spec.tokenizer, corpus)
    task, _ = prepare.make_task(spec, corpus, tokenizer)
    began = time.perf_counter()
    loop.train(spec, directory, tokenizer, task)
    (directory / "done").write_text(f"{time.perf_counter() - began:.0f} s\n")
    return directory


def distilled(runs: Path, corpus: Corpus) -> Path:
    """The teacher's words for the letters of the training split."""
    path = runs / "distilled.phonemes"
    if not path.exists():
        said = hasten.load(learn(runs, corpus, "autoregressive", "raw", 1)).translate(corpus.pairs("train")[0])
        path.write_text("".join(line + "\n" for line in said), encoding="utf-8")
    return path


def fertilities(runs: Path, corpus: Corpus, targets: str) -> Path:
    """Labels by the teacher's attention, of the dictionary's or the teacher's own words."""
    path = runs / f"{targets}.fertilities"
    if not path.exists():
        teacher = hasten.load(learn(runs, corpus, "autoregressive", "raw", 1))
        spelt, said = corpus.pairs("train")
        if targets == "distilled":
            said = distilled(runs, corpus).read_text(encoding="utf-8").splitlines()
        pairs = [(teacher.tokenizer.encode(a), teacher.tokenizer.encode(b)) for a, b in zip(spelt, said, strict=True)]
        write_fertilities(path, attention_fertilities(teacher.model, pairs, layer=LAYER))
    return path


def scored(directory: Path, way: dict, teacher: hasten.Translator, corpus: Corpus) -> dict:
    """Phoneme error rate, share of words right, and share of lengths right on the test split."""
    source, target = corpus.pairs("test")
    model = hasten.load(directory, decoding=way.get("decoding", ()))
    rescorer = teacher if way.get("rescorer") else None
    said = model.translate(source, beam=way.get("beam", 1), rescorer=rescorer)
    pairs = [(a.split(), b.split()) for a, b in zip(said, target, strict=True)]
    wrong = sum(edits(a, b) for a, b in pairs) / sum(len(b) for _, b in pairs)
    right, lengths = (
        sum(same) / len(pairs) for same in zip(*((a == b, len(a) == len(b)) for a, b in pairs), strict=True)
    )
    return {"phoneme_error_rate": round(wrong, 4), "words_right": round(right, 4), "lengths_right": round(lengths, 4)}


def table(rows: list[dict]) -> str:
    """Mean and range over the seeds of each model and way of decoding it, in Markdown."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["kind"], row["targets"], named(row["way"])), []).append(row["phoneme_error_rate"])
    lines = [
        "| Model | Learns from | Decoding | Phoneme error rate | of the seeds |",
        "| --- | --- | --- | ---: | --- |",
    ]
    for (kind, targets, way), rates in found.items():
        each = ", ".join(f"{rate:.3f}" for rate in rates)
        lines.append(f"| `{kind}` | {targets} | {way} | {sum(rates) / len(rates):.3f} | {each} |")
    return "\n".join(lines)


def named(way: dict) -> str:
    """A way of decoding in words."""
    parts = [*way.get("decoding", ()), *([f"beam {way['beam']}"] if "beam" in way else [])]
    return ", ".join(parts + (["the teacher chooses"] if way.get("rescorer") else [])) or "its own"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("runs", type=Path)
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    chosen = options.parse_args()
    torch.set_num_threads(1)
    data = chosen.runs / "data"
    corpus = Corpus.open(data) if data.exists() else build_pronunciation_corpus(data, train=WORDS)
    teacher = hasten.load(learn(chosen.runs, corpus, "autoregressive", "raw", 1))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    keys = ("kind", "targets", "seed", "way")
    rows = [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.exists() else []
    known = [tuple(row[key] for key in keys) for row in rows]
    for seed in chosen.seeds:
        for kind in chosen.kinds:
            for targets in ("raw",) if kind == "autoregressive" else ("raw", "distilled"):
                directory = learn(chosen.runs, corpus, kind, targets, seed)
                for way in WAYS[kind]:
                    if (kind, targets, seed, way) in known:
                        continue
                    row = {"benchmark": "pronunciation", "kind": kind, "targets": targets, "seed": seed, "way": way}
                    row |= scored(directory, way, teacher, corpus)
                    row |= {"updates": TRAINING["steps"], "words": len(corpus.documents("test")), **machine()}
                    print(*(f"{key}={row[key]}" for key in (*keys, "phoneme_error_rate", "words_right")), flush=True)
                    with OUT.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    print(table([json.loads(line) for line in OUT.read_text().splitlines()]))


if __name__ == "__main__":
    main()
