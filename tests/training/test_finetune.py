"""Runs that learn from a teacher's judgement."""

import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hasten.errors import UserError
from hasten.models.nat import NAT
from hasten.training import checkpoint, prepare
from hasten.training.finetune import give_teacher
from hasten.training.loop import Interrupted, train
from hasten.translator import load


@pytest.fixture(scope="module")
def teacher(run_spec, task, letters, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "teacher"
    spec = run_spec(steps=2)
    train(spec, directory, letters, task(spec))
    return directory


@pytest.fixture(scope="module")
def nat_spec(run_spec):
    return functools.partial(run_spec, "nat")


def tuned(teacher: Path, **settings) -> dict:
    return {"finetune": {"teacher": str(teacher), **settings}}


def test_a_run_learns_from_its_teacher_and_its_model_translates_without(
    teacher, nat_spec, task, letters, directory, tmp_path
):
    lent = teacher.rename(tmp_path / "lent")
    try:
        spec = nat_spec(tuned(lent))
        prepare.check(spec)
        model = train(spec, directory, letters, task(spec))
    finally:
        lent.rename(teacher)
    assert isinstance(model, NAT)
    row = (directory / "metrics.jsonl").read_text().splitlines()[-1]
    assert '"policy"' in row
    assert '"teacher"' in row
    stored = load_file(directory / "model.safetensors")
    assert set(stored) == set(model.state_dict())
    [[said]] = load(directory).candidates(["a b c"])
    assert said.log_prob < 0


def test_fine_tuning_goes_on_to_the_same_weights(teacher, nat_spec, task, letters, tmp_path):
    spec = nat_spec(tuned(teacher), steps=4, save_every=2)
    whole = train(spec, tmp_path / "whole", letters, task(spec)).state_dict()
    asked = iter([False, True])
    with pytest.raises(Interrupted):
        train(spec, tmp_path / "parts", letters, task(spec), stop=lambda: next(asked, True))
    resumed = train(spec, tmp_path / "parts", letters, task(spec), resume=True).state_dict()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


def test_the_teacher_stays_as_it_is(teacher, nat_spec, task, letters, directory):
    before = load_file(teacher / "model.safetensors")
    spec = nat_spec(tuned(teacher), learning_rate=0.1)
    model = train(spec, directory, letters, task(spec))
    assert isinstance(model, NAT)
    assert model.fine_tuning is not None
    assert model.fine_tuning.teacher is not None
    for name, tensor in model.fine_tuning.teacher.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_missing_teacher_is_found_before_any_data(nat_spec):
    with pytest.raises(UserError, match="no model 'nowhere/at/all'"):
        prepare.check(nat_spec({"finetune": {"teacher": "nowhere/at/all"}}))


def test_teachers_of_no_use_are_refused(teacher, nat_spec, run_spec, task, letters, tokenizer, tmp_path):
    def given(directory: Path):
        spec = nat_spec(tuned(directory))
        with torch.device("meta"):
            model = spec.model.build(letters.vocab_size)
        give_teacher(model, spec, letters)

    given(teacher)
    spec = run_spec()
    checkpoint.write_run(tmp_path / "alien", spec, tokenizer)
    checkpoint.save_weights(
        tmp_path / "alien" / checkpoint.WEIGHTS, spec.model.build(tokenizer.vocab_size).state_dict(), tokenizer
    )
    with pytest.raises(UserError, match=r"model\.finetune\.teacher .*alien has another tokenizer; set tokenizer"):
        given(tmp_path / "alien")
    spec = run_spec("ctc")
    checkpoint.write_run(tmp_path / "ctc", spec, letters)
    checkpoint.save_weights(
        tmp_path / "ctc" / checkpoint.WEIGHTS, spec.model.build(letters.vocab_size).state_dict(), letters
    )
    with pytest.raises(UserError, match="is a CTC model; give an autoregressive one"):
        given(tmp_path / "ctc")


def test_a_teacher_that_takes_too_few_tokens_is_refused(nat_spec, run_spec, letters, tmp_path):
    spec = run_spec(model={"encoder_attention": [{"kind": "linformer", "max_length": 90, "rank": 4}]})
    checkpoint.write_run(tmp_path / "short", spec, letters)
    checkpoint.save_weights(
        tmp_path / "short" / checkpoint.WEIGHTS, spec.model.build(letters.vocab_size).state_dict(), letters
    )
    spec = nat_spec(tuned(tmp_path / "short"))
    with pytest.raises(UserError, match=r"takes at most 89 tokens, outputs may have 422"):
        give_teacher(spec.model.build(letters.vocab_size), spec, letters)
