"""The joint loop: rounds until the policy stays, from what was learnt before."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from hasten import spec as specs
from hasten.errors import UserError
from hasten.nn.sharing import SourceMap
from hasten.sharing import learn
from hasten.sharing.learn import Original, Policy, maps_of, shared_model, with_maps
from hasten.training import checkpoint, prepare
from hasten.training.loop import train
from sharing.learning import (
    alike,
    alternating,
    differing,
    rows,
    trainer,
)


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


def test_rounds_go_on_until_the_policy_stays(original, spec, letters, corpus, tmp_path):
    log: list[specs.RunSpec] = []
    run = trainer(spec, corpus, letters, log)
    policy = Policy(thetas={"decoder": -1, "cross": -1})
    found = learn.learn(original, policy, tmp_path, run, round_steps=2, most_rounds=4)
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


def test_a_policy_that_does_not_settle_is_kept_and_said(original, spec, letters, corpus, tmp_path, monkeypatch):
    values, said = iter([0.9, 0.1, 0.9, 0.1]), []
    monkeypatch.setattr(
        learn,
        "measure",
        lambda *_: {"encoder": alike(2, 0), "decoder": alike(3, next(values)), "cross": alike(3, 0)},
    )
    run = trainer(spec, corpus, letters, [])
    policy = Policy(thetas={"decoder": 0.5})
    learn.learn(original, policy, tmp_path, run, round_steps=1, most_rounds=3, note=said.append)
    assert [row["maps"]["decoder"] for row in rows(tmp_path)] == [[1, 1, 1], [1, 2, 3], [1, 1, 1]]
    assert said[-1] == "the policy did not settle in 3 rounds; the last one is kept"


def test_a_round_begins_where_the_last_one_ended(original, spec, letters, corpus, tmp_path):
    started = []
    task = prepare.make_task(spec, corpus, letters)[0]

    def run(own: specs.RunSpec, directory: Path, resume: bool):
        started.append(checkpoint.read_run(Path(own.training.init_from))[2].state_dict())
        return train(own, directory, letters, task)

    policy = Policy(thetas={"decoder": -1})
    learn.learn(original, policy, tmp_path, run, round_steps=2, most_rounds=3)
    ended = checkpoint.read_run(tmp_path / "round-1" / "model")[2].state_dict()
    assert all(torch.equal(tensor, started[1][name]) for name, tensor in ended.items())
    own = original.model.state_dict()
    assert torch.equal(started[0]["encoder.layers.0.self_attention.in_proj_weight"],
                       own["encoder.layers.0.self_attention.in_proj_weight"])  # fmt: skip


def test_a_layer_that_follows_no_more_has_the_mechanism_that_it_used(spec, letters, batches):
    shared_spec, together = differing(spec, letters, decoder_sharing=[1, 2, 1])
    own = with_maps(shared_spec, {"decoder": SourceMap((0, 1, 2))})
    assert [layer.kind for layer in own.model.decoder_attention] == ["full", "lsh", "full"]
    alone = shared_model(together, own, letters.vocab_size)
    first, last = (alone.decoder.layers[i].self_attention.in_proj_weight for i in (0, 2))
    assert torch.equal(first[:32], last[:32])
    again = shared_model(alone, with_maps(own, {"decoder": SourceMap((0, 1, 0))}), letters.vocab_size)
    assert torch.equal(together.log_probs(batches[0])[0], again.log_probs(batches[0])[0])


@pytest.mark.parametrize("kind", ["average", "synthesizer"])
def test_followers_of_a_layer_without_queries_keep_what_they_have(spec, letters, batches, kind):
    attention = [{"kind": kind, **({"max_length": 300} if kind == "synthesizer" else {})}] + [{"kind": "full"}] * 2
    own, together = differing(spec, letters, decoder_attention=attention, decoder_sharing=[1, 1, 3])
    again = shared_model(together, with_maps(own, {"cross": SourceMap((0, 1, 2))}, "weights"), letters.vocab_size)
    assert torch.equal(together.log_probs(batches[0])[0], again.log_probs(batches[0])[0])


def test_layers_of_other_mechanisms_come_together_and_part_again(
    random_spec, letters, corpus, batches, tmp_path, monkeypatch
):
    monkeypatch.setattr(learn, "measure", alternating)
    own, start = differing(random_spec, letters)
    original = Original(own, start, letters, batches)
    policy, run = Policy(thetas={"decoder": 0.5}), trainer(own, corpus, letters, [])
    found = learn.learn(original, policy, tmp_path, run, round_steps=1, most_rounds=2)
    assert [row["maps"]["decoder"] for row in rows(tmp_path)] == [[1, 1, 1], [1, 2, 3]]
    assert [layer.kind for layer in checkpoint.read_run(found)[0].model.decoder_attention] == ["full"] * 3


def test_values_have_nowhere_to_go_when_the_leader_takes_none(spec, letters):
    attention = [{"kind": "average"}, {"kind": "full"}, {"kind": "full"}]
    own, together = differing(spec, letters, decoder_attention=attention, decoder_sharing=[1, 1, 3])
    with pytest.raises(UserError, match="decoder, layer 2 must go on to follow: the attention of layer 1"):
        shared_model(together, with_maps(own, {"decoder": SourceMap((0, 1, 2))}), letters.vocab_size)


def test_a_model_that_cannot_be_written_whole_is_not_there(spec, model, letters, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match="No space left on device"):
        learn.write_model(tmp_path / "new", spec, letters, model)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "precious").write_text("mine")
    with pytest.raises(UserError, match="No space left on device"):
        learn.write_model(tmp_path / "old", spec, letters, model)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["old", "precious"]


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
