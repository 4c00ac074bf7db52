"""A corpus of 60 lines whose target is its source reversed, and runs of very small models on it."""

import random
from pathlib import Path

import pytest

from hasten import spec as specs
from hasten.data.alignment import write_fertilities
from hasten.data.corpus import Corpus, Pair, write_corpus
from hasten.training import prepare


def reversed_lines(n: int, seed: int) -> list[Pair]:
    draw = random.Random(seed)
    words = [[draw.choice("abcdefgh") for _ in range(draw.randint(2, 7))] for _ in range(n)]
    return [Pair(" ".join(word), " ".join(reversed(word)), f"document/{i}") for i, word in enumerate(words)]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    splits = {"train": reversed_lines(60, 1), "valid": reversed_lines(5, 2), "test": reversed_lines(5, 3)}
    return write_corpus(tmp_path_factory.mktemp("corpus"), ("up", "down"), splits, {})


@pytest.fixture(scope="session")
def letters(corpus: Corpus):
    """The tokenizer of the corpus."""
    return prepare.make_tokenizer(specs.TokenizerSpec(vocab_size=275), corpus)


@pytest.fixture(scope="session")
def labels(corpus: Corpus, letters, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of fertilities: the targets spread evenly over the sources."""
    path = tmp_path_factory.mktemp("labels") / "train.fertilities"
    sides = ([len(letters.encode(line)) for line in side] for side in corpus.pairs("train"))
    even = ([n // m + (i < n % m) for i in range(m)] for m, n in zip(*sides, strict=True))
    write_fertilities(path, ([*fertilities, 0] for fertilities in even))
    return path


@pytest.fixture(scope="session")
def run_spec(corpus: Corpus, labels: Path):
    """A run of nine steps; keywords change [training], `model` changes [model]."""

    def make(kind: str = "autoregressive", model: dict | None = None, **training):
        shape = {"d_model": 16, "n_heads": 2, "d_ff": 32, "encoder_layers": 1, **(model or {})}
        options = {"steps": 9, "batch_tokens": 150, "warmup": 2, "learning_rate": 0.01, "validate_sentences": 0,
                   "precision": "float32", "save_every": 3, "average": 2, **training}  # fmt: skip
        depth = "refiner_layers" if kind == "ctc" else "decoder_layers"
        table = {
            "data": {"path": str(corpus.directory), **({"fertilities": str(labels)} if kind == "nat" else {})},
            "tokenizer": {"vocab_size": 275},
            "model": {"kind": kind, depth: 1, **shape},
            "training": options,
        }
        return specs.parse(table, "test")

    return make


@pytest.fixture(scope="session")
def task(corpus: Corpus, letters):
    """What a run learns from."""

    def make(spec: specs.RunSpec):
        return prepare.make_task(spec, corpus, letters)[0]

    return make


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"
