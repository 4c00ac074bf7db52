"""The joint loop: rounds until the policy stays, from what was learnt before."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hasten import spec as specs
from hasten.data.corpus import Corpus, Pair, write_corpus
from hasten.data.tokenizer import Tokenizer
from hasten.errors import UserError
from hasten.models import GenerationModel
from hasten.nn.sharing import SourceMap
from hasten.sharing import learn, sweep
from hasten.sharing.divergence import Similarity
from hasten.sharing.learn import Original, Policy, maps_of, shared_model, with_maps
from hasten.sharing.sample import encode, in_batches
from hasten.sharing.sweep import Point, front, markdown
from hasten.training import checkpoint, prepare
from hasten.training.loop import Interrupted, Report, train

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


@pytest.fixture
def original(spec, model, letters, batches) -> Original:
    return Original(spec, model, letters, batches)


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


# Interruptions


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


@pytest.fixture(scope="module")
def random_spec(spec) -> specs.RunSpec:
    """A run with dropout whose state is saved before its end."""
    overrides = ["model.dropout=0.1", "training.steps=3", "training.save_every=2", "training.validate_sentences=1"]
    return specs.changed(spec, overrides, "test")


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


@pytest.fixture
def again(random_spec, model, letters, batches, tmp_path, monkeypatch) -> Original:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learn, "measure", alternating)
    return Original(random_spec, model, letters, batches)


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


# Layers with mechanisms of their own


DIFFERENT = [{"kind": "full"}, {"kind": "lsh", "chunk": 2, "strict": True}, {"kind": "synthesizer", "max_length": 300}]


def differing(spec: specs.RunSpec, letters: Tokenizer, **options) -> tuple[specs.RunSpec, GenerationModel]:
    """Three decoder layers of three mechanisms, which have weights of other shapes; the run and its model."""
    tables = json.loads(json.dumps(dataclasses.asdict(spec)))
    tables["model"] |= {"decoder_attention": DIFFERENT, **options}
    own = specs.parse(tables, "test")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return own, own.model.build(letters.vocab_size).eval()


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


# Sweeps


def point(label: str, ms: float, chrf: float, theta: float | None = 0.5) -> Point:
    return Point(label, theta, {"decoder": [1, 1]}, ms, 1 / ms, 0.0, chrf)


def test_the_front_is_what_nobody_beats():
    points = [point("a", 10, 50, None), point("b", 8, 49), point("c", 9, 48), point("d", 7, 30), point("e", 8, 49)]
    assert [p.label for p in front(points) if p.front] == ["a", "b", "d", "e"]
    assert "| a |" in markdown(front(points))
    assert "| 1.25 |" in markdown(front(points))


def test_a_picture_that_cannot_be_written_names_its_place(tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*nowhere"):
        sweep.picture([point("a", 10, 50, None)], tmp_path / "nowhere" / "sweep.png")


def swept(original: Original, thetas: list[float], directory: Path, train=None, steps: int = 0, match: bool = True):
    policy, kinds = Policy(thetas={}), ["decoder", "cross"]
    return sweep.models(
        original, thetas, kinds, policy, directory, train, steps=steps, match=match, note=lambda text: None
    )


def test_each_different_policy_of_a_sweep_becomes_a_model_once(original, tmp_path):
    made = swept(original, [2.0, -1.0, -2.0], tmp_path / "sweep")
    assert [(theta, path.name) for theta, _, path in made] == [(-1.0, "theta--1")]
    assert checkpoint.read_run(made[0][2])[0].model.cross_sharing == (1, 1, 1)
    with pytest.raises(UserError, match="no threshold makes any layers share"):
        swept(original, [2.0], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_policy_that_cannot_be_built_is_told_before_another_is_trained(spec, letters, batches, tmp_path, monkeypatch):
    similarities = {"encoder": alike(2, 0), "decoder": alike(3, 0.4), "cross": alike(3, 0.9)}
    monkeypatch.setattr(sweep, "measure", lambda *of: similarities)
    own, model = differing(spec, letters, decoder_attention=[{"kind": "average"}] * 3)
    with pytest.raises(UserError, match="decoder, layer 2 cannot follow"):
        swept(Original(own, model, letters, batches), [0.8, 0.3], tmp_path / "out", pytest.fail, steps=3)
    assert not (tmp_path / "out").exists()


def test_heads_that_cannot_be_matched_are_told_before_a_sweep_writes(spec, letters, batches, tmp_path):
    own, model = differing(spec, letters, decoder_attention=[{"kind": "full"}], d_model=34, n_heads=17)
    with pytest.raises(UserError, match="give --no-match-heads"):
        swept(Original(own, model, letters, batches), [-1.0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sweep_that_is_stopped_at_every_point_comes_to_the_same_models(
    again, corpus, letters, tmp_path_factory, monkeypatch
):
    similarities = {"encoder": alike(2, 0), "decoder": alike(3, 0.9), "cross": alike(3, 0.4)}
    killer, thetas, task = Killer(), [0.8, 0.3], prepare.make_task(again.spec, corpus, letters)[0]
    plain = trainer(again.spec, corpus, letters, [])
    monkeypatch.setattr(sweep, "measure", lambda *of: similarities)
    monkeypatch.chdir(tmp_path_factory.mktemp("uninterrupted"))
    made, expected = swept(again, thetas, Path("out"), plain, steps=3), results(Path("out"))
    monkeypatch.chdir(tmp_path_factory.mktemp("interrupted"))
    monkeypatch.setattr(sweep, "measure", lambda *of: killer.at("measure", len(killer.trained)) or similarities)
    monkeypatch.setattr(sweep, "write_model", killer.around(learn.write_model, "write_model"))
    train = killer.trainer(letters, task)
    assert killer.go_on(lambda: swept(again, thetas, Path("out"), train, steps=3)) > 12
    trained = len(killer.trained)
    assert swept(again, thetas, Path("out"), train, steps=3) == made
    assert results(Path("out")) == expected
    assert len(killer.trained) == trained, "finished models are not trained again"
    with pytest.raises(UserError, match=r"out began with other settings: steps 3 \(now 4\); restore"):
        swept(again, thetas, Path("out"), pytest.fail, steps=4)


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
