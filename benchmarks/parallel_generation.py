"""Which orderings of the papers appear on real translation: every kind with the same updates, on the same data.

Each kind is trained by its configuration in `configs/`, with fewer updates where --updates says so, once on the
references (raw) and once on the teacher's translations (distilled). Decodings are scored on sentences spread evenly
over the test split; what two of them differ by comes with 95 % of a paired bootstrap. Runs and translations that are
there are not made again, and an interrupted run goes on, so the same command goes on after an interruption.

    OMP_NUM_THREADS=1 python benchmarks/parallel_generation.py RUNS DATA --distilled FILE [--kinds ...]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import hasten
from hasten.bench.machine import machine
from hasten.data.corpus import Corpus
from hasten.training.card import read_metrics
from hasten.training.checkpoint import WEIGHTS
from hasten.training.metrics import paired_bootstrap, quality

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "generation" / "en-de.jsonl"
TEACHER = "en-de-teacher"
KINDS = {"nat": "en-de-nat", "mask_predict": "en-de-mask-predict", "refinement": "en-de-refinement", "ctc": "en-de-ctc"}
PASSES = {f"{passes} passes": ([f"iterations={passes}"], 1, False) for passes in (1, 2, 4, 10)}
WAYS: dict[str, dict[str, tuple[list[str], int, bool]]] = {
    "nat": {
        "argmax": ([], 1, False),
        "average": (['method="average"'], 1, False),
        "10 candidates": ([], 10, False),
        "10 candidates, the teacher chooses": ([], 10, True),
    },
    "mask_predict": PASSES
    | {
        "10 passes, 3 lengths": (["iterations=10"], 3, False),
        "10 passes, 3 lengths, the teacher chooses": (["iterations=10"], 3, True),
    },
    "refinement": {name: ([*settings, "adaptive=false"], *rest) for name, (settings, *rest) in PASSES.items()},
    "ctc": {"one pass": ([], 1, False)},
}
"""Of each kind the decodings: settings, width, and whether the teacher chooses."""
ORDERINGS = {
    "nat": [("10 candidates, the teacher chooses", "argmax"), ("10 candidates", "argmax"), ("average", "argmax")],
    "mask_predict": [
        ("4 passes", "1 passes"),
        ("10 passes", "4 passes"),
        ("10 passes, 3 lengths", "10 passes"),
        ("10 passes, 3 lengths, the teacher chooses", "10 passes"),
    ],
    "refinement": [("4 passes", "1 passes"), ("10 passes", "4 passes")],
    "ctc": [],
}
"""Of each kind the decodings that are compared, with the second as the baseline."""


def trained(options: argparse.Namespace, kind: str, targets: str) -> Path:
    """The run directory of a finished model; made, or gone on with, where it is not."""
    directory = options.runs / f"{kind}-{targets}-{options.seed}"
    if (directory / WEIGHTS).exists() and (directory / "done").exists():
        return directory
    settings = [f"data.path={options.data}", f"training.seed={options.seed}", f"training.steps={options.updates}"]
    settings += [f"training.warmup={options.updates // 6}", f"training.save_every={max(1, options.updates // 8)}"]
    settings += ["training.average=3", f"training.validate_every={options.updates}", *options.override]
    if targets == "distilled":
        settings.append(f"data.distilled={options.distilled}")
    if kind == "nat":
        settings.append(f"data.fertilities={fertilities(options, targets)}")
    config = options.runs / f"{kind}-{targets}.toml"
    lines = (ROOT / "configs" / f"{KINDS[kind]}.toml").read_text(encoding="utf-8").splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith(("distilled", "fertilities"))), "utf-8")
    resume = ["--resume"] if (directory / "state").exists() else ["--force"] if directory.exists() else []
    command = [sys.executable, "-m", "hasten", "train", str(config), *settings, "--out", str(directory), "--threads=1"]
    subprocess.run([*command, *resume], check=True)
    (directory / "done").touch()
    return directory


def fertilities(options: argparse.Namespace, targets: str) -> Path:
    """Labels by eflomal, of the references or of the teacher's translations."""
    path = options.runs / f"{targets}.fertilities"
    if not path.exists():
        command = [sys.executable, "-m", "hasten", "align", f"--data={options.data}", f"--model={TEACHER}"]
        command += [f"--distilled={options.distilled}"] if targets == "distilled" else []
        subprocess.run([*command, f"--out={path}", "--threads=1"], check=True)
    return path


def translations(options: argparse.Namespace, directory: Path, kind: str, way: str, source: list[str]) -> list[str]:
    """What the run says, decoded in this way; kept beside it."""
    path = directory / f"{way} of {len(source)}.txt"
    if not path.exists():
        settings, width, chooses = WAYS[kind][way]
        model = hasten.load(directory, decoding=settings)
        rescorer = hasten.load(TEACHER) if chooses else None
        said = [" ".join(line.splitlines()) for line in model.translate(source, beam=width, rescorer=rescorer)]
        path.write_text("".join(line + "\n" for line in said), encoding="utf-8")
    return path.read_text(encoding="utf-8").splitlines()


def compared(
    said: dict[tuple[str, str, str], list[str]], target: list[str], seed: int
) -> Iterator[dict[str, str | int | float | tuple[float, float]]]:
    """Differences in BLEU and chrF of the decodings that papers order, and of the two kinds of targets."""
    keys = [key for key in said if key[1] == "distilled" and (key[0], "raw", key[2]) in said]
    pairs = [(key, (key[0], "raw", key[2])) for key in keys]
    for kind, targets in dict.fromkeys(key[:2] for key in said):
        pairs += [((kind, targets, better), (kind, targets, worse)) for better, worse in ORDERINGS[kind]]
    for better, worse in (pair for pair in pairs if said.keys() >= set(pair)):
        for found in paired_bootstrap(said[better], said[worse], target):
            yield {
                "compared": ", ".join(better),
                "baseline": ", ".join(worse),
                "seed": seed,
                "metric": found.metric,
                "delta": round(found.delta, 2),
                "interval": tuple(round(end, 2) for end in found.delta_interval),
                "p": round(found.p_value, 4),
            }


def table(rows: list[dict]) -> str:
    """BLEU and chrF of each decoding by what the model learnt from, in Markdown."""
    found = {(row["kind"], row["way"], row["targets"]): f"{row['bleu']:.1f} / {row['chrf']:.1f}" for row in rows}
    lines = ["| Model | Decoding | learns from references | from the teacher |", "| --- | --- | ---: | ---: |"]
    for kind, way in dict.fromkeys(key[:2] for key in found):
        scores = [found.get((kind, way, targets), "–") for targets in ("raw", "distilled")]
        lines.append(f"| `{kind}` | {way} | {' | '.join(scores)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="directory of the runs")
    parser.add_argument("data", type=Path, help="a data directory by `hasten data`")
    parser.add_argument("--distilled", type=Path, required=True, help="the teacher's translations of the training text")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--targets", choices=("raw", "distilled"), nargs="+", default=["distilled", "raw"])
    parser.add_argument("--updates", type=int, default=2300)
    parser.add_argument("--override", nargs="*", default=[], help="settings of every run, as of `hasten train`")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--ways", nargs="+", help="only these decodings")
    parser.add_argument("--train-only", action="store_true", help="score nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.runs.mkdir(parents=True, exist_ok=True)
    runs = {(kind, targets): trained(options, kind, targets) for kind in options.kinds for targets in options.targets}
    if options.train_only:
        return
    pairs = list(zip(*Corpus.open(options.data).pairs("test"), strict=True))
    spread = [pairs[i * len(pairs) // options.sentences] for i in range(min(options.sentences, len(pairs)))]
    source, target = [s for s, _ in spread], [t for _, t in spread]
    said, rows = {}, []
    for (kind, targets), directory in runs.items():
        seconds = max((row["seconds"] for row in read_metrics(directory) if "seconds" in row), default=None)
        for way in (name for name in WAYS[kind] if not options.ways or name in options.ways):
            said[kind, targets, way] = lines = translations(options, directory, kind, way, source)
            scores = quality(lines, target)
            row = {"kind": kind, "targets": targets, "way": way, "seed": options.seed, "bleu": round(scores.bleu, 2)}
            row |= {"chrf": round(scores.chrf, 2), "length_ratio": round(scores.length_ratio, 3)}
            row |= {"repetition": round(scores.repetition, 4), "updates": options.updates, "override": options.override}
            print(*(f"{key}={value}" for key, value in row.items()), flush=True)
            row |= {"training_seconds": seconds, "sentences": len(source), "bleu_signature": scores.bleu_signature}
            rows.append(row)
    print(table(rows))
    rows += compared(said, target, options.seed)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    with OUT.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"benchmark": "parallel_generation", **row, **machine()}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
