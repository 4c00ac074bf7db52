"""A small corpus and model whose layers learn to share."""

import pytest
import torch

from hasten import spec as specs
from hasten.data.corpus import Corpus, Pair, write_corpus
from hasten.data.tokenizer import Tokenizer
from hasten.sharing import learn
from hasten.sharing.learn import Original
from hasten.sharing.sample import encode, in_batches
from hasten.training import prepare
from sharing.learning import WORDS, alternating


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    pairs = [Pair(text, " ".join(reversed(text.split())), f"document/{i}") for i, text in enumerate(WORDS)]
    splits = {"train": pairs, "valid": pairs[:6], "test": pairs[6:9]}
    return write_corpus(tmp_path_factory.mktemp("corpus"), ("up", "down"), splits, {})


@pytest.fixture(scope="module")
def letters(corpus: Corpus) -> Tokenizer:
    return prepare.make_tokenizer(specs.TokenizerSpec(vocab_size=270), corpus)


@pytest.fixture(scope="module")
def spec(corpus: Corpus) -> specs.RunSpec:
    model = {
        "kind": "autoregressive",
        "d_model": 16,
        "n_heads": 2,
        "d_ff": 16,
        "encoder_layers": 2,
        "decoder_layers": 3,
    }
    options = {"steps": 4, "batch_tokens": 60, "warmup": 1, "validate_sentences": 2, "precision": "float32"}
    table = {"data": {"path": str(corpus.directory)}, "model": {**model, "dropout": 0.0}, "training": options}
    return specs.parse({**table, "tokenizer": {"vocab_size": 270}}, "test")


@pytest.fixture(scope="module")
def model(spec: specs.RunSpec, letters: Tokenizer):
    torch.manual_seed(0)
    return spec.model.build(letters.vocab_size).eval()


@pytest.fixture(scope="module")
def batches(corpus: Corpus, letters: Tokenizer):
    return list(in_batches(encode(list(zip(*corpus.pairs("valid"), strict=True)), letters, 50), 200))


@pytest.fixture
def original(spec, model, letters, batches) -> Original:
    return Original(spec, model, letters, batches)


@pytest.fixture(scope="module")
def random_spec(spec) -> specs.RunSpec:
    """A run with dropout whose state is saved before its end."""
    overrides = ["model.dropout=0.1", "training.steps=3", "training.save_every=2", "training.validate_sentences=1"]
    return specs.changed(spec, overrides, "test")


@pytest.fixture
def again(random_spec, model, letters, batches, tmp_path, monkeypatch) -> Original:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learn, "measure", alternating)
    return Original(random_spec, model, letters, batches)
