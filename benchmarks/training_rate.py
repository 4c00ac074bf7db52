"""How many target tokens a second does training learn from?

    OMP_NUM_THREADS=2 python benchmarks/training_rate.py [--precision float32] [--steps 12] [--sizes 9.4M,teacher]

Every size runs `hasten.training.loop.train` itself, as `hasten train` does, on random ids with the lengths of
sentences; what loading, saving and validation cost is not in the rate. The first steps are left out. The yardstick was
measured with two threads in float32 on a processor without bfloat16. A line a size, with machine and versions, goes to
results/training_rate.jsonl.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hasten import spec as specs
from hasten.bench.machine import machine
from hasten.data.batch import Pair, endless_batches
from hasten.data.tokenizer import SPECIAL_IDS, Tokenizer
from hasten.training import loop, memory

RESULTS = Path(__file__).parent / "results" / "training_rate.jsonl"
WARM_UP = 3

AR = "autoregressive"
SIZES: dict[str, tuple[dict[str, Any], int, int | None]] = {
    # name: model, vocabulary, target tokens a second of the yardstick
    "2.4M": (dict(kind=AR, d_model=128, d_ff=512, encoder_layers=3, decoder_layers=3), 8000, 5000),
    "4.7M": (dict(kind=AR, d_model=192, d_ff=768, encoder_layers=3, decoder_layers=3), 8000, 3000),
    "9.4M": (dict(kind=AR, d_model=256, d_ff=1024, encoder_layers=4, decoder_layers=4), 8000, 1400),
    "teacher": (dict(kind=AR, d_model=192, d_ff=768, encoder_layers=6, decoder_layers=6), 6000, None),
    "student": (dict(kind="ctc", d_model=192, d_ff=768, encoder_layers=6, refiner_layers=3), 6000, None),
}


class FixedVocabulary(Tokenizer):
    """As many pieces as wanted without learning any: ids are all that training needs."""

    def __init__(self, size: int):
        self.vocab_size, self.fingerprint = size, f"none-{size}"

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(b"none")


def sentences(n: int, vocabulary: int) -> list[Pair]:
    """Random ids; target lengths are log-normal around 20, sources a little shorter."""
    draw = random.Random(0)
    pairs = []
    for _ in range(n):
        target = min(100, max(2, round(draw.lognormvariate(3.0, 0.6))))
        source = min(100, max(2, round(target * draw.uniform(0.7, 1.1))))
        pairs.append(tuple([draw.randrange(len(SPECIAL_IDS), vocabulary) for _ in range(m)] for m in (source, target)))
    return pairs


def measure(name: str, steps: int, precision: str) -> dict[str, Any]:
    model, vocabulary, yardstick = SIZES[name]
    training = {"steps": steps + WARM_UP, "batch_tokens": 2560, "precision": precision, "validate_sentences": 0}
    spec = specs.parse({"data": {"path": "none"}, "model": model, "training": training}, "benchmark")
    pairs = sentences(3000, vocabulary)
    clock, cpu = [], []

    def observe(report: loop.Report) -> None:
        clock.append(time.perf_counter())
        cpu.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        task, tokenizer = loop.Task(pairs, [], []), FixedVocabulary(vocabulary)
        built = loop.train(spec, Path(folder) / "run", tokenizer, task, observe=observe)
    batches = endless_batches(pairs, spec.training.batch_tokens, spec.training.seed, skip=WARM_UP)
    tokens = sum(len(pairs[i][1]) for _ in range(steps) for i in next(batches))
    seconds, cpu_seconds = clock[-1] - clock[WARM_UP - 1], cpu[-1] - cpu[WARM_UP - 1]
    return {
        "size": name,
        "parameters": sum(parameter.numel() for parameter in built.parameters()),
        "precision": precision,
        "threads": torch.get_num_threads(),
        "target_tokens": tokens,
        "target_tokens_per_second": round(tokens / seconds),
        "target_tokens_per_cpu_second": round(tokens / cpu_seconds),
        "yardstick_float32_2_threads": yardstick,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--precision", default="auto,float32", help="auto, float32, bfloat16, or several")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    memory.keep_freed_memory()
    RESULTS.parent.mkdir(exist_ok=True)
    for precision in options.precision.split(","):
        for name in options.sizes.split(","):
            facts = machine()
            row = {**measure(name, options.steps, precision), **facts}
            rate, of_cpu = row["target_tokens_per_second"], row["target_tokens_per_cpu_second"]
            print(
                f"{name:8} {precision:8} {row['threads']} threads: {rate:6,} target tokens/s, {of_cpu:6,} per CPU "
                f"second, yardstick {SIZES[name][2]}",
                flush=True,
            )
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
