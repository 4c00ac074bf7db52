"""A teacher's judgement: the policy gradient against enumeration, the divergence against finite differences."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten.data.batch import Batch, pair_batch
from hasten.data.tokenizer import PAD, SPECIAL_IDS
from hasten.errors import UserError
from hasten.models.autoregressive import Autoregressive, AutoregressiveSpec
from hasten.models.nat import NAT, NATSpec
from hasten.models.nat_finetune import FineTuneSpec, policy_loss, reverse_divergence
from hasten.nn.fertility import average, copied, drawn

VOCABULARY = 14
SMALL: dict[str, Any] = {"d_model": 16, "n_heads": 2, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1}
PAIRS = [([10, 11, 12], [8, 9]), ([13], [10]), ([7, 8, 7, 8, 9], [11, 11, 12, 13]), ([9], [])]
LABELS = [[0, 2, 0, 0], [0, 1], [1, 0, 0, 2, 0, 1], [0, 0]]


def pair(dropout: float = 0.0, **tuning) -> tuple[NAT, Autoregressive]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        finetune = FineTuneSpec(teacher="somewhere", **tuning)
        student = NATSpec(**SMALL, dropout=dropout, most_fertility=3, finetune=finetune).build(VOCABULARY)
        teacher = AutoregressiveSpec(**SMALL, dropout=0.3).build(VOCABULARY).train()
        with torch.no_grad():
            for model in (student, teacher):
                model.embedding.weight *= 0.5
            student.fertility.classes.weight *= 4
    assert student.fine_tuning is not None
    student.fine_tuning.learn_from(teacher)
    return student, teacher


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


# The policy gradient


def outcomes() -> tuple[Tensor, Tensor, Tensor]:
    """Scores of the fertilities 0, 1, 2 of three positions, all 27 outcomes, and a reward for each."""
    source = torch.Generator().manual_seed(1)
    scores = torch.randn(3, 3, generator=source, dtype=torch.float64).requires_grad_()
    every = torch.tensor([*itertools.product(range(3), repeat=3)])
    return scores, every, torch.randn(27, generator=source, dtype=torch.float64)


def exact_gradient(scores: Tensor, every: Tensor, table: Tensor) -> Tensor:
    """That of -E[reward]: the sum over all outcomes of probability times reward."""
    p = scores.softmax(-1)
    expected = sum(
        (p[0, f[0]] * p[1, f[1]] * p[2, f[2]] * reward for f, reward in zip(every.tolist(), table, strict=True)),
        torch.zeros((), dtype=torch.float64),
    )
    return torch.autograd.grad(-expected, scores)[0]


def gradients(scores: Tensor, fertilities: Tensor, advantage: Tensor) -> Tensor:
    """The policy gradient of every row by itself, (N, 3, 3)."""
    n = len(fertilities)
    rows = scores.detach().expand(n, -1, -1).clone().requires_grad_()
    policy_loss(rows.log_softmax(-1), torch.ones(n, 3, dtype=torch.bool), fertilities, advantage).backward()
    assert rows.grad is not None
    return rows.grad


@pytest.mark.parametrize("baseline", [0.0, 1.7])
def test_over_all_outcomes_the_policy_gradient_is_exact_whatever_the_baseline(baseline):
    scores, every, table = outcomes()
    p = scores.detach().softmax(-1)
    weights = torch.stack([p[0, a] * p[1, b] * p[2, c] for a, b, c in every.tolist()])
    found = (weights[:, None, None] * gradients(scores, every, table - baseline)).sum(0)
    torch.testing.assert_close(found, exact_gradient(scores, every, table))


def test_the_mean_over_samples_is_the_exact_gradient_within_four_sigma():
    (scores, every, table), n = outcomes(), 20_000
    uniform = torch.rand(n, 3, generator=generator())
    fertilities = drawn(scores.detach().log_softmax(-1).expand(n, -1, -1), uniform)
    number = (fertilities * torch.tensor([9, 3, 1])).sum(1)
    each = gradients(scores, fertilities, table[number] - 0.3)
    sigma = each.std(0) / math.sqrt(n)
    distance = (each.mean(0) - exact_gradient(scores, every, table)).abs() / sigma
    assert distance.max() < 4
    assert (sigma < 0.05).all()


def test_padding_is_no_decision_of_the_policy():
    scores = torch.randn(1, 3, 3).log_softmax(-1).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    policy_loss(scores, mask, torch.zeros(1, 3, dtype=torch.int64), torch.ones(1)).backward()
    assert scores.grad is not None
    assert (scores.grad[0, 2] == 0).all()
    assert scores.grad[0, :2].any()


# The divergence


def test_the_divergence_is_as_defined_and_the_teacher_reads_what_the_student_says():
    student, teacher = pair()
    with torch.no_grad():  # special ids would be the most probable, but are never said
        student.embedding.weight[list(SPECIAL_IDS)] *= 4
    batch = pair_batch(PAIRS, LABELS)
    found = student.eval().loss(batch, generator())["teacher"].sum
    expected = 0.0
    for (source, target), label in zip(PAIRS, LABELS, strict=True):
        if not target:
            continue
        alone = pair_batch([(source, target)], [label])
        memory = student.encode(alone.source, alone.source_mask)
        states = student.states(memory, copied(torch.tensor([label])), alone.target_mask)
        p = student.logits(states)[0].softmax(-1).detach()
        said = (p.log() + student.banned).argmax(-1).tolist()
        for t in range(len(target)):
            prefix = pair_batch([(source, said[:t])])
            states, _, _ = teacher._forced(prefix)
            q = teacher.logits(states[0, t]).softmax(-1).detach()
            expected += float((p[t] * (p[t] / q).log()).sum())
    assert found.item() == pytest.approx(expected, rel=1e-4)


def test_the_gradient_of_the_divergence_is_that_of_finite_differences():
    _, teacher = pair()
    teacher = teacher.double()
    said = pair_batch([([10, 11], [8, 9]), ([7], [12])])
    logits = torch.randn(3, VOCABULARY, generator=generator())
    wide = logits.double().requires_grad_()
    reverse_divergence(wide, teacher, said).backward()
    assert wide.grad is not None
    log_q = teacher.forced_log_probs(said).double()[[0, 1, 3]]  # 2 and 4 are the ends

    def value(x: Tensor) -> float:
        log_p = x.log_softmax(-1)
        return float((log_p.exp() * (log_p - log_q)).sum())

    for place in itertools.product(range(3), range(0, VOCABULARY, 3)):
        step = torch.zeros_like(wide.detach())
        step[place] = 1e-5
        slope = (value(wide.detach() + step) - value(wide.detach() - step)) / 2e-5
        assert float(wide.grad[place]) == pytest.approx(slope, abs=1e-5)


def test_a_student_that_agrees_with_its_teacher_has_no_divergence():
    _, teacher = pair()
    said = pair_batch([([10, 11], [8, 9])])
    logits = (teacher.forced_log_probs(said)[:2] + 3).detach().requires_grad_()
    divergence = reverse_divergence(logits, teacher, said)
    divergence.backward()
    assert abs(divergence.item()) < 1e-5
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6


# Both in the objective


def gradients_of(student: NAT, batch: Batch, name: str) -> dict[str, Tensor]:
    student.zero_grad()
    student.loss(batch, generator())[name].sum.backward()
    return {name: p.grad for name, p in student.named_parameters() if p.grad is not None and p.grad.any()}


def test_the_policy_teaches_the_fertilities_alone_and_the_divergence_everything_else():
    student, teacher = pair()
    batch = pair_batch(PAIRS, LABELS)
    assert set(gradients_of(student, batch, "policy")) == {"fertility.classes.weight", "fertility.classes.bias"}
    everything = {name for name, _ in student.named_parameters()}
    taught = set(gradients_of(student, batch, "teacher"))
    assert taught == {name for name in everything if not name.startswith("fertility.")}
    assert all(p.grad is None for p in teacher.parameters())


def test_terms_have_the_weights_of_the_formula():
    student, _ = pair(share=0.4, reinforce=0.5)
    terms = student.loss(pair_batch(PAIRS, LABELS), generator())
    weights = {name: term.weight for name, term in terms.items()}
    assert weights == pytest.approx({"tokens": 0.6, "fertilities": 0.6, "teacher": 0.4, "policy": 0.2})
    counts = {name: int(term.count) for name, term in terms.items()}
    assert counts == {"tokens": 7, "fertilities": 14, "teacher": 7, "policy": 4}


def test_the_ordinary_terms_stay_as_they_are():
    student, _ = pair()
    plain = NATSpec(**SMALL, dropout=0.0, most_fertility=3).build(VOCABULARY)
    plain.load_state_dict(student.state_dict())
    batch = pair_batch(PAIRS, LABELS)
    found = student.loss(batch, generator())
    for name, term in plain.loss(batch, generator()).items():
        torch.testing.assert_close(found[name].sum, term.sum)


def test_the_policy_weighs_samples_by_what_the_teacher_thinks_of_a_decision_of_their_outputs():
    student, teacher = pair()
    draws, expected = generator(), 0.0
    for source, target in PAIRS:
        alone = pair_batch([(source, target)])
        memory = student.encode(alone.source, alone.source_mask)
        log_probs = student.fertility.log_probs(memory.states).detach()
        fertilities = drawn(log_probs, torch.rand(1, len(source) + 1, generator=draws))
        means = []
        for chosen in (fertilities, average(log_probs)):
            said = student.said(memory, chosen, log_probs)[0].tolist()
            total, count = teacher.log_probs(pair_batch([(source, said)]))
            assert int(count) == len(said) + 1
            means.append(float(total) / (len(said) + 1))
        log_p = sum(float(log_probs[0, i, f]) for i, f in enumerate(fertilities[0].tolist()))
        expected -= (means[0] - means[1]) * log_p
    assert expected
    found = student.loss(pair_batch(PAIRS, LABELS), generator())["policy"].sum
    assert found.item() == pytest.approx(expected, rel=1e-4)


def test_one_sentence_alone_has_a_policy_gradient():
    student, _ = pair()
    assert any(
        gradients_of(student, pair_batch(PAIRS[i : i + 1], LABELS[i : i + 1]), "policy") for i in range(len(PAIRS))
    )


def test_the_loss_of_a_batch_is_the_sum_of_those_of_its_sentences_whatever_padding_it_has():
    student, _ = pair()
    one, wide = generator(), torch.nn.functional.pad
    alone = [student.loss(pair_batch([p], [f]), one) for p, f in zip(PAIRS, LABELS, strict=True)]
    batch = pair_batch(PAIRS, LABELS)
    assert batch.fertilities is not None
    padded = Batch(
        wide(batch.source, (0, 3), value=PAD),
        wide(batch.source_mask, (0, 3), value=False),
        wide(batch.target, (0, 5), value=PAD),
        wide(batch.target_mask, (0, 5), value=False),
        wide(batch.fertilities, (0, 3), value=0),
    )
    for given in (batch, padded):
        for name, term in student.loss(given, generator()).items():
            expected = sum(each[name].sum.item() for each in alone)
            assert term.sum.item() == pytest.approx(expected, rel=1e-4, abs=1e-5), name


def test_what_is_judged_is_said_without_dropout_and_the_student_trains_on():
    student, _ = pair(dropout=0.5)
    student.train()
    modes = []
    handle = student.decoder.register_forward_pre_hook(lambda module, given: modes.append(module.training))
    student.loss(pair_batch(PAIRS, LABELS), generator())
    handle.remove()
    assert modes == [True, False, False]
    assert all(module.training for module in student.modules())


def test_bfloat16_gives_finite_and_close_terms_and_every_gradient():
    student, _ = pair(reinforce=1.0)
    batch = pair_batch(PAIRS, LABELS)
    plain = student.loss(batch, generator())
    with torch.autocast("cpu", torch.bfloat16):
        rough = student.loss(batch, generator())
    for name in ("tokens", "fertilities", "teacher"):
        torch.testing.assert_close(rough[name].sum, plain[name].sum, rtol=0.03, atol=0.05)
    sum((term.weight * term.sum for term in rough.values()), torch.zeros(())).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in student.parameters())


# The teacher


def test_the_teacher_is_no_part_of_the_model():
    student, teacher = pair()
    plain = NATSpec(**SMALL, most_fertility=3).build(VOCABULARY)
    assert set(student.state_dict()) == set(plain.state_dict())
    assert not set(teacher.modules()) & set(student.modules())
    assert not teacher.training
    assert not any(p.requires_grad for p in teacher.parameters())
    assert set(map(id, student.parameters())).isdisjoint(map(id, teacher.parameters()))


def test_a_loss_without_the_teacher_says_whose_judgement_is_missing():
    student, _ = pair()
    assert student.fine_tuning is not None
    student.fine_tuning.teacher = None
    with pytest.raises(UserError, match=r"learns from somewhere"):
        student.loss(pair_batch(PAIRS, LABELS), generator())


def test_a_few_steps_of_the_policy_make_the_teacher_think_more_of_what_is_said():
    """The sum over many draws of what is gained, by fertilities alone."""
    student, teacher = pair(share=0.99, reinforce=1.0)
    batch, one = pair_batch(PAIRS[:3], LABELS[:3]), generator()

    def expected_reward() -> float:
        draws = torch.Generator().manual_seed(9)
        total = 0.0
        with torch.no_grad():
            memory = student.encode(batch.source, batch.source_mask)
            log_probs = student.fertility.log_probs(memory.states)
            for _ in range(60):
                said = student.said(memory, drawn(log_probs, torch.rand(memory.mask.shape, generator=draws)), log_probs)
                log_p, count = teacher.log_probs(Batch(batch.source, batch.source_mask, said, said != PAD))
                total += float((log_p / count).sum())
        return total / 60

    before = expected_reward()
    optimizer = torch.optim.Adam(student.fertility.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        student.loss(batch, one)["policy"].sum.backward()
        optimizer.step()
    assert expected_reward() > before + 0.05
