"""What tests of learning who shares have in common: small runs, interruptions, and what must not depend on them."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch

from hasten import spec as specs
from hasten.data.corpus import Corpus
from hasten.data.tokenizer import Tokenizer
from hasten.models import GenerationModel
from hasten.sharing import learn
from hasten.sharing.divergence import Similarity
from hasten.sharing.learn import Original, Policy, maps_of
from hasten.training import checkpoint, prepare
from hasten.training.loop import Interrupted, Report, train

WORDS = ["a b c d", "b c", "d a b", "c c a d b", "a", "d d", "b a c"] * 4


def trainer(spec: specs.RunSpec, corpus: Corpus, letters: Tokenizer, log: list):
    task = prepare.make_task(spec, corpus, letters)[0]

    def run(own: specs.RunSpec, directory: Path, resume: bool):
        log.append(own)
        return train(own, directory, letters, task, resume=resume)

    return run


def rows(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / learn.ROUNDS).read_text().splitlines()]


def alike(n: int, value: float) -> Similarity:
    matrix = tuple(tuple(1.0 if i == j else value for j in range(n)) for i in range(n))
    return Similarity(matrix, tuple((1,) * n for _ in range(n)))


class Killed(BaseException):
    """As a kill: nobody catches it."""


class Killer:
    """Ends the work the first time that it comes to a point; any of them, in turn.

    polite: it asks a training run to save and stop after every step, where else it ends it before anything is saved.
    """

    def __init__(self, *, polite: bool = False):
        self.seen, self.polite, self.trained = set(), polite, []

    def first(self, *point: object) -> bool:
        new = point not in self.seen
        self.seen.add(point)
        return new

    def at(self, *point: object) -> None:
        if self.first(*point):
            raise Killed

    def around(self, function: Callable, *point: object) -> Callable:
        def run(*arguments: object, **named: object):
            key = (*point, *(own for own in arguments if isinstance(own, Path | str)))
            self.at(*key, "before")
            made = function(*arguments, **named)
            self.at(*key, "after")
            return made

        return run

    def trainer(self, letters: Tokenizer, task) -> Callable:
        def run(own: specs.RunSpec, directory: Path, resume: bool) -> None:
            def observe(report: Report) -> None:
                self.trained.append((str(directory), report.step))
                if not self.polite:
                    self.at(directory, report.step)

            def stop() -> bool:
                return self.polite and self.first(directory, "stop", len(self.trained))

            train(own, directory, letters, task, resume=resume, observe=observe, stop=stop)

        return self.around(run, "train")

    def go_on(self, work: Callable[[], object]) -> int:
        """The work, begun again until nobody kills it; how often it was ended."""
        for times in range(100):
            try:
                work()
            except (Killed, Interrupted):
                continue
            return times
        raise AssertionError("the work does not come to its end")


def alternating(model, batches) -> dict[str, Similarity]:
    """As if layers were alike where they do not share, and else not: every round chooses otherwise."""
    alone = maps_of(model)["decoder"].numbers == (1, 2, 3)
    return {"encoder": alike(2, 0), "decoder": alike(3, 0.9 if alone else 0.1), "cross": alike(3, 0)}


def learning(original: Original, train: Callable, note: Callable = lambda text: None, **changes) -> Path:
    options = {"round_steps": 3, "most_rounds": 2, "match": True, **changes}
    policy = options.pop("policy", Policy(thetas={"decoder": 0.5}))
    return learn.learn(original, policy, Path("out"), train, note=note, **options)


def results(directory: Path) -> dict[str, object]:
    """What must not depend on interruptions: weights, snapshots, state, configurations and rounds, but no times."""
    found: dict[str, object] = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = str(path.relative_to(directory))
        if path.suffix == ".safetensors":
            found |= {f"{name}: {key}": own.tolist() for key, own in checkpoint.read_weights(path).items()}
        elif path.suffix in (".toml", ".jsonl") and path.name != "metrics.jsonl":
            found[name] = path.read_text()
        elif path.name == "metrics.jsonl":
            kept = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [row for row in kept if "seconds" not in row]  # a stop adds a row with the loss and the time
        else:
            found[name] = None
    return found


DIFFERENT = [{"kind": "full"}, {"kind": "lsh", "chunk": 2, "strict": True}, {"kind": "synthesizer", "max_length": 300}]


def differing(spec: specs.RunSpec, letters: Tokenizer, **options) -> tuple[specs.RunSpec, GenerationModel]:
    """Three decoder layers of three mechanisms, which have weights of other shapes; the run and its model."""
    tables = json.loads(json.dumps(dataclasses.asdict(spec)))
    tables["model"] |= {"decoder_attention": DIFFERENT, **options}
    own = specs.parse(tables, "test")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return own, own.model.build(letters.vocab_size).eval()
