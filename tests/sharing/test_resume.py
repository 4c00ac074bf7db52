"""Learning who shares, interrupted anywhere, comes to the same; whatever would make it another run is refused."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hasten import spec as specs
from hasten.errors import UserError
from hasten.sharing import learn
from hasten.sharing.learn import Original, Policy
from hasten.training import checkpoint, prepare
from sharing.learning import (
    Killed,
    Killer,
    alternating,
    learning,
    results,
    trainer,
)


@pytest.fixture(scope="module")
def uninterrupted(random_spec, model, letters, corpus, batches, tmp_path_factory):
    """An `out` that nobody disturbed."""
    place = tmp_path_factory.mktemp("uninterrupted")
    original = Original(random_spec, model, letters, batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(learn, "measure", alternating)
        learning(original, trainer(random_spec, corpus, letters, []))
    return place / "out"


@pytest.mark.parametrize("polite", [False, True])
def test_whoever_is_stopped_at_every_point_in_turn_comes_to_the_same(
    again, uninterrupted, corpus, letters, monkeypatch, polite
):
    killer = Killer(polite=polite)
    train = killer.trainer(letters, prepare.make_task(again.spec, corpus, letters)[0])
    for name in ("_write_whole", "write_model"):
        monkeypatch.setattr(learn, name, killer.around(getattr(learn, name), name))
    monkeypatch.setattr(learn, "measure", lambda *of: killer.at("measure", len(killer.trained)) or alternating(*of))
    assert killer.go_on(lambda: learning(again, train)) > 20
    assert results(Path("out")) == results(uninterrupted)
    for name in ("round-1/model", "round-2/model", "model"):
        # The state of step 2 is saved, and at a polite stop any. Steps before it are not made again.
        assert killer.trained.count((f"out/{name}", 1)) == (1 if polite else 3)


def test_the_last_training_begins_where_the_last_round_ended(uninterrupted):
    start, second = (checkpoint.read_run(uninterrupted / name)[2].state_dict() for name in ("start", "round-2/model"))
    assert start.keys() == second.keys()
    assert all(torch.equal(start[name], own) for name, own in second.items())


def cut(name: str, end: int) -> Callable[[Path], None]:
    def shorten(out: Path) -> None:
        (out / name).write_bytes((out / name).read_bytes()[:end])

    return shorten


def without(*names: str) -> Callable[[Path], None]:
    def remove(out: Path) -> None:
        for name in names:
            shutil.rmtree(out / name) if (out / name).is_dir() else (out / name).unlink()

    return remove


@pytest.mark.parametrize(
    ("damage", "trained", "anew"),
    [
        (without(), set(), None),
        (cut(learn.ROUNDS, -1), set(), None),
        (cut(learn.ROUNDS, 25), set(), None),
        (without(learn.ROUNDS), set(), None),
        (without("model"), {"model"}, None),
        (without("model/state"), {"model"}, None),
        (cut("model/state/optimizer.safetensors", 2000), {"model"}, "model"),
        (cut("model/state/model.safetensors", 2000), {"model"}, "model"),
        (cut("model/state/state.json", 5), {"model"}, "model"),
        (cut("model/config.toml", 30), {"model"}, "model"),
        (cut("start/config.toml", 30), set(), None),
        (without("round-1/start", "round-1/model/state", "round-1/model/recent"), set(), None),
        (lambda out: [cut(learn.ROUNDS, 25)(out), without("round-2/model/state")(out)], {"round-2/model"}, None),
        (without("round-1", "start"), set(), None),
    ],
)
def test_what_is_missing_or_cut_off_is_made_again(again, uninterrupted, corpus, letters, damage, trained, anew):
    shutil.copytree(uninterrupted, "out")
    damage(Path("out"))
    killer, said = Killer(), []
    killer.at = lambda *point: None
    task = prepare.make_task(again.spec, corpus, letters)[0]
    assert learning(again, killer.trainer(letters, task), said.append) == Path("out/model")
    assert {name for name, _ in killer.trained} == {f"out/{name}" for name in trained}
    expected, found = results(uninterrupted), results(Path("out"))
    assert found.items() <= expected.items(), "nothing is there that an uninterrupted run has not"
    assert all(found[name] == own for name, own in expected.items() if name.startswith(("model/", "rounds", "begun")))
    assert [line for line in said if "anew" in line] == (
        []
        if anew is None
        else [f"out/{anew}: the state saved there is damaged or another run's; this model is trained anew"]
    )


def test_a_state_of_another_run_is_not_gone_on_with(again, uninterrupted, corpus, letters):
    shutil.copytree(uninterrupted, "out")
    config = Path("out/model/config.toml")
    config.write_text(config.read_text().replace("batch_tokens = 60", "batch_tokens = 61"))
    log: list[specs.RunSpec] = []
    said: list[str] = []
    learning(again, trainer(again.spec, corpus, letters, log), said.append)
    assert "trained anew" in said[-1]
    assert results(Path("out")) == results(uninterrupted)


def test_the_same_directory_by_another_path_is_gone_on_with(again, uninterrupted, corpus, letters, tmp_path):
    shutil.copytree(uninterrupted, "out")
    asked: list[bool] = []
    found = learn.learn(
        again,
        Policy(thetas={"decoder": 0.5}),
        tmp_path / "out",
        lambda own, directory, resume: asked.append(resume),
        round_steps=3,
        most_rounds=2,
        match=True,
    )
    assert found == tmp_path / "out" / "model"
    assert asked == [True]


def test_the_same_text_by_another_path_is_gone_on_with(again, uninterrupted, corpus, tmp_path):
    shutil.copytree(uninterrupted, "out")
    shutil.copytree(corpus.directory, tmp_path / "data")
    for name in ("README.md", "model.safetensors"):  # the last training is not over
        Path("out/model", name).unlink(missing_ok=True)
    asked: list[bool] = []
    own = changed_spec(f"data.path={tmp_path / 'data'}")(again)
    learning(own, lambda own, directory, resume: asked.append(resume))
    assert asked == [True]


def changed_model(original: Original) -> Original:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return dataclasses.replace(original, model=original.spec.model.build(original.tokenizer.vocab_size).eval())


def changed_spec(*overrides: str) -> Callable[[Original], Original]:
    return lambda own: dataclasses.replace(own, spec=specs.changed(own.spec, overrides, "test"))


def fewer_batches(original: Original) -> Original:
    return dataclasses.replace(original, batches=original.batches[:-1])


@pytest.mark.parametrize(
    ("change", "options", "named"),
    [
        (changed_model, {}, "weights of the model (changed)"),
        (fewer_batches, {}, "sentences measured on (changed)"),
        (changed_spec("training.steps=9"), {}, "training.steps 3 (now 9)"),
        (changed_spec("data.max_tokens=7", "training.seed=2"), {},
         "data.max_tokens 200 (now 7), training.seed 1 (now 2)"),
        (None, {"policy": Policy(thetas={"decoder": 0.4})}, "theta.decoder 0.5 (now 0.4)"),
        (None, {"policy": Policy(thetas={"decoder": 0.5, "cross": 1})}, "theta.cross not given (now 1)"),
        (None, {"policy": Policy(thetas={"cross": 1})},
         "theta.decoder 0.5 (now not given), theta.cross not given (now 1)"),
        (None, {"policy": Policy(thetas={"decoder": 0.5}, form="map", largest=2)},
         "form blocks (now map), largest none (now 2)"),
        (None, {"policy": Policy(thetas={"decoder": 0.5}, shared_of_cross="context")},
         "shared_of_cross output (now context)"),
        (None, {"round_steps": 4, "most_rounds": 3, "match": False},
         "round_steps 3 (now 4), rounds 2 (now 3), match_heads on (now off)"),
    ],
)  # fmt: skip
def test_other_settings_than_at_the_beginning_are_named_and_refused(again, uninterrupted, change, options, named):
    shutil.copytree(uninterrupted, "out")
    with pytest.raises(UserError) as error:
        learning(again if change is None else change(again), pytest.fail, **options)
    assert str(error.value) == f"out began with other settings: {named}; restore them or choose another --out"
    assert results(Path("out")) == results(uninterrupted)


def test_other_text_than_at_the_beginning_is_refused(again, uninterrupted, corpus, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(corpus.directory, data)
    own = changed_spec(f"data.path={data}")(again)

    def kill(own: specs.RunSpec, directory: Path, resume: bool) -> None:
        raise Killed

    with pytest.raises(Killed):
        learning(own, kill)
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["splits"]["train"]["sha256"] = dict.fromkeys(manifest["splits"]["train"]["sha256"], "0" * 64)
    (data / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"out began with other settings: training text \(changed\); restore"):
        learning(own, pytest.fail)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (learn.BEGUN, "{", "out/begun.json is damaged"),
        (learn.BEGUN, "3", "out/begun.json is damaged"),
        (learn.ROUNDS, "{}\n", "out/rounds.jsonl, line 1: this is no round"),
        (learn.ROUNDS, "rounds\n", "out/rounds.jsonl, line 1: this is no round"),
        (learn.ROUNDS, '{"number": 1, "maps": {"decoder": [3]}, "similarity": {}, "scores": {}, "settled": false}\n',
         "out/rounds.jsonl, line 1: this is no round"),
        (learn.ROUNDS, '{"number": 2, "maps": {}, "similarity": {}, "scores": {}, "settled": false}\n',
         "out/rounds.jsonl, line 1: this is round 2"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(again, uninterrupted, name, text, problem):
    shutil.copytree(uninterrupted, "out")
    Path("out", name).write_text(text)
    with pytest.raises(UserError, match=problem):
        learning(again, pytest.fail)


def test_a_mistake_found_while_measuring_leaves_nothing_behind(again):
    with pytest.raises(UserError, match="a threshold for 'refiner'"):
        learning(again, pytest.fail, policy=Policy(thetas={"refiner": 0.5}))
    assert not Path("out").exists()
