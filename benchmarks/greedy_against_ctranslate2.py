"""Is the autoregressive baseline honest? Greedy decoding of the same random weights by hasten and by CTranslate2.

    OMP_NUM_THREADS=1 python benchmarks/greedy_against_ctranslate2.py [--heads 4] [--batch 1] [--repeats 15]

Both engines decode 25 source tokens (the end symbol included) to exactly 25 target tokens in float32 on one thread;
the end symbol is forbidden in both. First the outputs must be equal and the log probabilities close, or nothing is
timed. Rounds alternate between the engines and the median of each is kept, so that a busy neighbour hits both. What
counts is the ratio of the medians; a line with machine and versions goes to results/greedy_against_ctranslate2.jsonl.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hasten.bench.machine import machine
from hasten.data.batch import source_batch
from hasten.data.tokenizer import EOS, SPECIAL_IDS, Tokenizer
from hasten.decoding.refine import Decoded, final, refine
from hasten.export.ctranslate2 import export
from hasten.export.engine import CTranslate2Model
from hasten.models.autoregressive import Autoregressive, AutoregressiveSpec
from hasten.nn.layout import lay_out

RESULTS = Path(__file__).parent / "results" / "greedy_against_ctranslate2.jsonl"
LENGTH = 25
VOCABULARY = 8000


class FixedVocabulary(Tokenizer):
    """As many pieces as wanted without learning any: ids are all that this comparison needs."""

    def __init__(self, size: int):
        self.vocab_size = size

    def pieces(self) -> list[str]:
        special = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "<blank>", "<placeholder>"]
        return special + [f"p{i}" for i in range(len(special), self.vocab_size)]

    def save(self, path: str | Path) -> None:
        """Nothing to write."""


class FixedLength(Autoregressive):
    """Says exactly `LENGTH` tokens: the end symbol is forbidden, the limit is the length."""

    def __init__(self, spec: AutoregressiveSpec, vocab_size: int):
        super().__init__(spec, vocab_size)
        self.banned[EOS] = -torch.inf

    def limit(self, memory):
        return torch.full_like(memory.lengths, LENGTH)


def build(args: argparse.Namespace) -> FixedLength:
    torch.manual_seed(args.seed)
    spec = AutoregressiveSpec(
        d_model=args.width,
        d_ff=4 * args.width,
        n_heads=args.heads,
        encoder_layers=args.layers[0],
        decoder_layers=args.layers[1],
    )
    return lay_out(FixedLength(spec, VOCABULARY).eval())


def check_parity(decoded: list[Decoded], theirs: list[list[int]], scores: list[list[float]]) -> float:
    """The largest difference of two log probabilities; exits where the outputs differ."""
    worst = 0.0
    for number, (ours, other, log_probs) in enumerate(zip(decoded, theirs, scores, strict=True)):
        if ours.tokens != other:
            sys.exit(f"sentence {number}: hasten said {ours.tokens}, CTranslate2 {other}: nothing is timed")
        worst = max(worst, *(abs(a - b) for a, b in zip(ours.scores, log_probs, strict=False)))
    if worst > 1e-3:
        sys.exit(f"log probabilities differ by {worst:.1e}: nothing is timed")
    return worst


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Elapsed time, and processor time of this process: the latter hardly minds what else the machine does."""
    start, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - busy


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="d_model; d_ff is four times that")
    parser.add_argument("--layers", type=int, nargs=2, default=(6, 6), metavar=("ENCODER", "DECODER"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true", help="store nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = build(args), FixedVocabulary(VOCABULARY)
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(len(SPECIAL_IDS), VOCABULARY, (args.batch, LENGTH - 1), generator=generator).tolist()
    source, mask = source_batch(ids)
    with tempfile.TemporaryDirectory() as directory:
        export(model, tokenizer, directory)
        peer = CTranslate2Model(directory, tokenizer, threads=1, compute="float32")
    ours = lambda: final(refine(model, source, mask), args.batch)  # noqa: E731
    theirs = lambda: peer.decode(ids, exactly=LENGTH)  # noqa: E731
    decoded, said = ours(), theirs()
    worst = check_parity(decoded, said, peer.score(ids, said))
    times: dict[str, list[tuple[float, float]]] = {"hasten": [], "ctranslate2": []}
    for _ in range(args.repeats):
        times["hasten"].append(seconds(ours))
        times["ctranslate2"].append(seconds(theirs))
    elapsed, busy = (
        {name: round(1e3 * statistics.median(t[kind] for t in times[name]) / args.batch, 3) for name in times}
        for kind in (0, 1)
    )
    row = {
        "benchmark": "greedy_against_ctranslate2",
        "d_model": args.width,
        "heads": args.heads,
        "layers": list(args.layers),
        "vocabulary": VOCABULARY,
        "length": LENGTH,
        "batch": args.batch,
        "threads": 1,
        "repeats": args.repeats,
        "ms_per_sentence": elapsed,
        "cpu_ms_per_sentence": busy,
        "ratio": round(elapsed["hasten"] / elapsed["ctranslate2"], 3),
        "cpu_ratio": round(busy["hasten"] / busy["ctranslate2"], 3),
        "largest_score_difference": worst,
        **machine(),
    }
    print(json.dumps(row, indent=2))
    if not args.dry_run:
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
