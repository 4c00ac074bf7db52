"""What shared attention saves in the decoder: the steps of one and the same output, for several policies.

Weights do not matter for time, so the bundled teacher is only reshaped (`hasten.sharing.retrofit`); every policy
decodes the same number of steps of the same real sentences, cached, in turns. The baseline is the teacher itself, as
cached as the rest.

    OMP_NUM_THREADS=1 python benchmarks/shared_decoding.py DATA   # a directory by `hasten data`
"""

import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import torch

import hasten
from hasten.attention import AverageSpec, SSRUSpec
from hasten.bench.machine import machine
from hasten.data.batch import source_batch
from hasten.data.corpus import Corpus
from hasten.data.tokenizer import BOS
from hasten.models import Autoregressive
from hasten.nn.layout import lay_out
from hasten.sharing.retrofit import retrofit

OUT = Path(__file__).parent / "results" / "sharing" / "decoding.jsonl"
SIX, STEPS, ROUNDS = (1,) * 6, 25, {1: 31, 32: 9}
POLICIES = {
    "unshared": {},
    "self {6}": {"decoder_sharing": SIX},
    "cross {6}, output": {"cross_sharing": SIX},
    "self {6}, cross {1,5}, output": {"decoder_sharing": SIX, "cross_sharing": (1, 2, 2, 2, 2, 2)},
    "self {6}, cross {1,4,1}, output": {"decoder_sharing": SIX, "cross_sharing": (1, 2, 2, 2, 2, 6)},
    "self {6}, cross {6}, output": {"decoder_sharing": SIX, "cross_sharing": SIX},
    "self {6}, cross {6}, context": {"decoder_sharing": SIX, "cross_sharing": SIX, "shared_of_cross": "context"},
    "average attention (AAN)": {"decoder_attention": (AverageSpec(),)},
    "average attention (AAN), cross {6}, output": {"decoder_attention": (AverageSpec(),), "cross_sharing": SIX},
    "SSRU": {"decoder_attention": (SSRUSpec(),)},
    "SSRU, cross {6}, output": {"decoder_attention": (SSRUSpec(),), "cross_sharing": SIX},
    "self {6}, cross {6}, weights": {"decoder_sharing": SIX, "cross_sharing": SIX, "shared_of_cross": "weights"},
}


def build(teacher: Autoregressive, vocab_size: int, changes: dict) -> Autoregressive:
    model = dataclasses.replace(teacher.spec, **changes).build(vocab_size).eval()
    if "decoder_attention" not in changes:  # other layers have other weights; time does not mind
        retrofit(teacher, model)
    return lay_out(model)


def decode(model: Autoregressive, sources: list[list[int]]) -> float:
    """Seconds of the decoder for STEPS steps."""
    ids, mask = source_batch(sources)
    memory = model.encode(ids, mask)
    last, began = torch.full((len(sources),), BOS), time.perf_counter()
    state = model.begin(memory)
    for step in range(STEPS):
        log_probs, state = model.next_log_probs(last, step, state)
        last = log_probs.argmax(-1)
    return time.perf_counter() - began


def main() -> None:
    translator = hasten.load("en-de-teacher")
    teacher, tokenizer = translator.model, translator.tokenizer
    assert isinstance(teacher, Autoregressive)
    models = {name: build(teacher, tokenizer.vocab_size, changes) for name, changes in POLICIES.items()}
    lines = [tokenizer.encode(line) for line in Corpus.open(sys.argv[1]).pairs("test")[0]]
    sources = sorted((ids for ids in lines if 20 <= len(ids) <= 30), key=len)[:32]
    rows = []
    with torch.inference_mode():
        for batch in (1, 32):
            seconds: dict[str, list[float]] = {name: [] for name in models}
            for _ in range(ROUNDS[batch]):
                for name, model in models.items():
                    seconds[name].append(decode(model, sources[:batch]))
            base = statistics.median(seconds["unshared"])
            for name, own in seconds.items():
                median = statistics.median(own)
                rows.append(
                    {
                        "benchmark": "shared_decoding",
                        "policy": name,
                        "batch": batch,
                        "steps": STEPS,
                        "source_tokens": len(sources[0]),
                        "threads": torch.get_num_threads(),
                        "milliseconds": round(1000 * median, 2),
                        "speed_up": round(base / median, 3),
                        "parameters": sum(p.numel() for p in models[name].parameters()),
                        **machine(),
                    }
                )
                print(batch, name, rows[-1]["milliseconds"], rows[-1]["speed_up"])
    OUT.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
