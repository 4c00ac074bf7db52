"""Sweeps over thresholds: which models are made, and which no other one beats."""

from pathlib import Path

import pytest

from hasten.errors import UserError
from hasten.sharing import learn, sweep
from hasten.sharing.learn import Original, Policy
from hasten.sharing.sweep import Point, front, markdown
from hasten.training import checkpoint, prepare
from sharing.learning import Killer, alike, differing, results, trainer


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
