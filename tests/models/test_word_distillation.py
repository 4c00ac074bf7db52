"""Learning from a teacher's distributions, against plain loops over sentences and positions."""

import pytest
import torch
from torch import Tensor

from hasten.data.batch import pair_batch
from hasten.errors import UserError
from hasten.models.autoregressive import Autoregressive, AutoregressiveSpec
from hasten.models.word_distillation import WordDistillationSpec

VOCABULARY = 30
SMALL = {"d_model": 16, "n_heads": 2, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0}
PAIRS = [([10, 11, 12], [20, 21]), ([13], [22]), ([14, 15], [23, 23, 24, 25, 26]), ([16], [])]


def build(share: float | None, seed: int = 0, **settings) -> Autoregressive:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        taught = None if share is None else WordDistillationSpec(teacher="somewhere", share=share)
        return AutoregressiveSpec(**{**SMALL, **settings}, distillation=taught).build(VOCABULARY).eval()


def objective(model: Autoregressive) -> Tensor:
    terms = model.loss(pair_batch(PAIRS), torch.Generator())
    return torch.stack([term.weight * term.sum for term in terms.values()]).sum()


def by_hand(student: Autoregressive, teacher: Autoregressive, share: float) -> Tensor:
    """Sentence by sentence, position by position, without padding."""
    total = torch.zeros(())
    for source, target in PAIRS:
        batch = pair_batch([(source, target)])
        p, q = (model.forced_log_probs(batch) for model in (student, teacher))
        assert len(p) == len(target) + 1
        for t in range(len(p)):
            divergence = sum(q[t, v].exp() * (q[t, v] - p[t, v]) for v in range(VOCABULARY))
            word = ([*target, 3])[t]
            total = total + share * divergence - (1 - share) * p[t, word]
    return total


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_objective_and_its_gradients_are_as_defined(share: float):
    student, teacher = build(share, label_smoothing=0.0), build(None, seed=1, decoder_sharing=(1, 1))
    expected = by_hand(student, teacher, share)
    student.learn_from(teacher)
    found = objective(student)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    names = [name for name, _ in student.named_parameters()]
    parameters = list(student.parameters())
    own, plain = torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters)
    for name, a, b in zip(names, own, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


def test_who_says_what_the_teacher_says_has_nothing_to_learn():
    student = build(1.0)
    student.learn_from(build(None))
    loss = objective(student)
    assert abs(float(loss.detach())) < 1e-4
    for gradient in torch.autograd.grad(loss, list(student.parameters())):
        assert gradient.abs().max() < 1e-4


def test_the_teacher_is_frozen_sees_no_dropout_and_is_no_part_of_the_model():
    student, teacher = build(0.5), build(None, seed=1, dropout=0.5).train()
    before = set(student.state_dict())
    student.learn_from(teacher)
    assert set(student.state_dict()) == before
    assert not teacher.training
    assert torch.equal(objective(student), objective(student))
    objective(student).backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_counts_are_of_decisions():
    student = build(0.25)
    student.learn_from(build(None, seed=1))
    terms = student.loss(pair_batch(PAIRS), torch.Generator())
    decisions = sum(len(target) + 1 for _, target in PAIRS)
    assert {name: int(term.count) for name, term in terms.items()} == {"tokens": decisions, "teacher": decisions}
    assert {name: term.weight for name, term in terms.items()} == {"tokens": 0.75, "teacher": 0.25}


def test_a_model_that_was_given_no_teacher_says_so():
    with pytest.raises(UserError, match="this model learns from somewhere, which has not been given to it"):
        objective(build(0.5))


def test_half_precision_is_finite_and_close():
    student, teacher = build(0.5), build(None, seed=1)
    student.learn_from(teacher)
    with torch.autocast("cpu", torch.bfloat16):
        found = objective(student)
    assert found.isfinite()
    torch.testing.assert_close(found, objective(student), rtol=0.02, atol=0.1)
