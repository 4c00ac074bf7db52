"""The joint loop: rounds until the policy stays, from what was learnt before."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from hasten import spec as specs
from hasten.data.corpus import Corpus, Pair, write_corpus
from hasten.data.tokenizer import Tokenizer
from hasten.errors import UserError
from hasten.nn.sharing import SourceMap
from hasten.sharing import learn, sweep
from hasten.sharing.divergence import Similarity
from hasten.sharing.learn import Policy, maps_of, shared_model, with_maps
from hasten.sharing.sample import encode, in_batches
from hasten.sharing.sweep import Point, front, markdown
from hasten.training import checkpoint, prepare
from hasten.training.loop import train

WORDS = ["a b c d", "b c", "d a b", "c c a d b", "a", "d d", "b a c"] * 4


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


def trainer(spec: specs.RunSpec, corpus: Corpus, letters: Tokenizer, log: list):
    task = prepare.make_task(spec, corpus, letters)[0]

    def run(own: specs.RunSpec, directory: Path):
        log.append(own)
        return train(own, directory, letters, task)

    return run


def rows(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / learn.ROUNDS).read_text().splitlines()]


def alike(n: int, value: float) -> Similarity:
    matrix = tuple(tuple(1.0 if i == j else value for j in range(n)) for i in range(n))
    return Similarity(matrix, tuple((1,) * n for _ in range(n)))


def test_a_policy_chooses_for_the_kinds_it_names():
    similarities = {"encoder": alike(2, 0.9), "decoder": alike(3, 0.9), "cross": alike(3, 0.4)}
    maps = Policy(thetas={"decoder": 0.8, "cross": 0.5}).choose(similarities)
    assert {kind: plan.numbers for kind, plan in maps.items()} == {
        "encoder": (1, 2),
        "decoder": (1, 1, 1),
        "cross": (1, 2, 3),
    }
    with pytest.raises(UserError, match="a threshold for 'refiner': the model's attention is encoder, decoder, cross"):
        Policy(thetas={"refiner": 0.5}).choose(similarities)


def test_maps_become_settings_and_the_identity_none(spec):
    maps = {"encoder": SourceMap((0, 1)), "decoder": SourceMap((0, 0, 2)), "cross": SourceMap((0, 0, 0))}
    own = with_maps(spec, maps, "context").model
    assert (own.encoder_sharing, own.decoder_sharing, own.cross_sharing) == ((), (1, 1, 3), (1, 1, 1))
    assert own.shared_of_cross == "context"
    assert specs.parse(json.loads(json.dumps(dataclasses.asdict(with_maps(spec, maps)))), "test").model.decoder_sharing


def test_a_model_knows_who_shares_in_it(spec, model, letters):
    maps = {"encoder": SourceMap((0, 0)), "decoder": SourceMap((0, 0, 2)), "cross": SourceMap((0, 1, 0))}
    assert maps_of(shared_model(model, with_maps(spec, maps), letters.vocab_size)) == maps


def test_rounds_go_on_until_the_policy_stays(spec, model, letters, corpus, batches, tmp_path):
    log: list[specs.RunSpec] = []
    run = trainer(spec, corpus, letters, log)
    policy = Policy(thetas={"decoder": -1, "cross": -1})
    found = learn.learn(spec, model, letters, batches, policy, tmp_path, run, round_steps=2, most_rounds=4)
    first, second = rows(tmp_path)
    assert first["maps"] == second["maps"] == {"encoder": [1, 2], "decoder": [1, 1, 1], "cross": [1, 1, 1]}
    assert (first["settled"], second["settled"]) == (False, True)
    assert "valid_bleu" in first["scores"]
    assert second["similarity"]["decoder"] == [[1.0] * 3] * 3, "layers that share attend alike"
    assert first["similarity"]["decoder"] != second["similarity"]["decoder"]
    assert [own.training.steps for own in log] == [2, 4]
    again_spec, _, again = checkpoint.read_run(found)
    assert found == tmp_path / "model"
    assert again_spec.model.decoder_sharing == (1, 1, 1)
    assert maps_of(again)["cross"].numbers == (1, 1, 1)


def test_a_policy_that_does_not_settle_is_kept_and_said(spec, model, letters, corpus, batches, tmp_path, monkeypatch):
    values, said = iter([0.9, 0.1, 0.9, 0.1]), []
    monkeypatch.setattr(
        learn,
        "measure",
        lambda *_: {"encoder": alike(2, 0), "decoder": alike(3, next(values)), "cross": alike(3, 0)},
    )
    run = trainer(spec, corpus, letters, [])
    policy = Policy(thetas={"decoder": 0.5})
    learn.learn(spec, model, letters, batches, policy, tmp_path, run, round_steps=1, most_rounds=3, note=said.append)
    assert [row["maps"]["decoder"] for row in rows(tmp_path)] == [[1, 1, 1], [1, 2, 3], [1, 1, 1]]
    assert said[-1] == "the policy did not settle in 3 rounds; the last one is kept"


def test_a_round_begins_where_the_last_one_ended(spec, model, letters, corpus, batches, tmp_path):
    started = []
    task = prepare.make_task(spec, corpus, letters)[0]

    def run(own: specs.RunSpec, directory: Path):
        started.append(checkpoint.read_run(Path(own.training.init_from))[2].state_dict())
        return train(own, directory, letters, task)

    policy = Policy(thetas={"decoder": -1})
    learn.learn(spec, model, letters, batches, policy, tmp_path, run, round_steps=2, most_rounds=3)
    ended = checkpoint.read_run(tmp_path / "round-1" / "model")[2].state_dict()
    assert all(torch.equal(tensor, started[1][name]) for name, tensor in ended.items())
    own = model.state_dict()
    assert torch.equal(started[0]["encoder.layers.0.self_attention.in_proj_weight"],
                       own["encoder.layers.0.self_attention.in_proj_weight"])  # fmt: skip


# Sweeps


def point(label: str, ms: float, chrf: float, theta: float | None = 0.5) -> Point:
    return Point(label, theta, {"decoder": [1, 1]}, ms, 1 / ms, 0.0, chrf)


def test_the_front_is_what_nobody_beats():
    points = [point("a", 10, 50, None), point("b", 8, 49), point("c", 9, 48), point("d", 7, 30), point("e", 8, 49)]
    assert [p.label for p in front(points) if p.front] == ["a", "b", "d", "e"]
    assert "| a |" in markdown(front(points))
    assert "| 1.25 |" in markdown(front(points))


def test_each_different_policy_of_a_sweep_becomes_a_model_once(spec, model, letters, corpus, batches, tmp_path):
    policies = {theta: Policy(thetas={"decoder": theta, "cross": theta}) for theta in (2.0, -1.0, -2.0)}
    made = sweep.models(
        spec, model, letters, batches, policies, tmp_path, None, steps=0, match=True, note=lambda text: None
    )
    assert [(theta, path.name) for theta, _, path in made] == [(-1.0, "theta--1")]
    assert checkpoint.read_run(made[0][2])[0].model.cross_sharing == (1, 1, 1)
    with pytest.raises(UserError, match="no threshold makes any layers share"):
        sweep.models(spec, model, letters, batches, {2.0: policies[2.0]}, tmp_path, None, steps=0, match=False,
                     note=lambda text: None)  # fmt: skip


def test_heads_are_matched_where_layers_differ_in_nothing_but_their_order(spec, letters, batches):
    torch.manual_seed(1)
    own = spec.model.build(letters.vocab_size).eval()
    with torch.no_grad():  # both layers read what the embeddings say, with heads in another order
        for layer in own.encoder.layers:
            for weight in (layer.self_attention.out_proj.weight, layer.feed_forward.outer.weight):
                weight.zero_()
            layer.self_norm.load_state_dict(own.encoder.layers[0].self_norm.state_dict())
        first, second = (layer.self_attention.in_proj_weight for layer in own.encoder.layers)
        second.copy_(first.unflatten(0, (3, 2, 8))[:, [1, 0]].flatten(0, 2))
    plan = {"encoder": SourceMap((0, 0))}
    assert learn.match_heads(own, plan, batches) == {("encoder", 0, 1): [1, 0]}
