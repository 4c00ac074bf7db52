"""The NAT against plain loops: its loss, its candidates, its ends."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hasten import spec as specs
from hasten.attention import LocalSpec
from hasten.data.batch import Batch, pair_batch, source_batch
from hasten.data.tokenizer import PAD, SPECIAL_IDS
from hasten.decoding.refine import Decoded, final, refine
from hasten.errors import UserError
from hasten.models.autoregressive import AutoregressiveSpec
from hasten.models.nat import NAT, NATDecoding, NATSpec
from hasten.nn.fertility import noise
from hasten.training.checkpoint import fill_matching
from hasten.translator import Translator

VOCABULARY = 20
SMALL = {"d_model": 16, "n_heads": 2, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0}
SOURCES = [[10, 11, 12], [13], [14, 15, 14, 15, 16, 17, 18, 19], [], [7, 7, 8]]
TARGETS = [[8, 9], [10], [11, 11, 12, 13], [14], [15, 16, 17]]
LABELS = [[0, 2, 0, 0], [0, 1], [1, 0, 0, 2, 0, 0, 1, 0, 0], [1], [1, 1, 1, 0]]
PAIRS = list(zip(SOURCES, TARGETS, strict=True))


def build(seed: int = 0, most_fertility: int = 4, **changes) -> NAT:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = NATSpec(**{**SMALL, **changes}, most_fertility=most_fertility).build(VOCABULARY)
        with torch.no_grad():  # a random tied table says its input and nothing else
            model.embedding.weight *= 0.5
            model.fertility.classes.weight *= 3
        return model.eval()


def batch_of(sources: Sequence[Sequence[int]], extra: int = 0) -> tuple[Tensor, Tensor]:
    ids, mask = source_batch([list(row) for row in sources])
    pad = torch.nn.functional.pad
    return pad(ids, (0, extra), value=PAD), pad(mask, (0, extra), value=False)


def decode(model: NAT, sources: Sequence[Sequence[int]], candidates: int = 1, extra: int = 0) -> list[Decoded]:
    return final(refine(model, *batch_of(sources, extra), candidates), candidates * len(sources))


def told(decoded: Sequence[Decoded]) -> list[list[int]]:
    return [one.tokens for one in decoded]


def distribution(model: NAT, source: Sequence[int]) -> Tensor:
    """Probabilities of the fertilities of one source, (S, C)."""
    with torch.no_grad():
        return model.fertility.log_probs(model.encode(*batch_of([source])).states)[0].exp()


# The loss


def test_the_loss_is_the_cross_entropy_given_the_labels_and_that_of_the_labels():
    model = build(label_smoothing=0.1, fertility_weight=0.7)
    tokens, fertilities = 0.0, 0.0
    for source, target, label in zip(SOURCES, TARGETS, LABELS, strict=True):
        ids, mask = batch_of([source])
        memory = model.encode(ids, mask)
        copies = [*itertools.chain.from_iterable(itertools.repeat(i, f) for i, f in enumerate(label))]
        real = torch.ones(1, len(copies), dtype=torch.bool)
        states = model.states(memory, torch.tensor([copies]), real)
        log_p = (states[0] @ model.embedding.weight.T).log_softmax(-1)
        tokens += sum(-0.9 * log_p[t, y] - 0.1 * log_p[t].mean() for t, y in enumerate(target))
        for i, f in enumerate(label):
            fertilities -= float(distribution(model, source)[i, f].log())
    terms = model.loss(pair_batch(PAIRS, LABELS), torch.Generator())
    torch.testing.assert_close(terms["tokens"].sum, torch.as_tensor(tokens), rtol=1e-4, atol=1e-4)
    assert terms["fertilities"].sum.item() == pytest.approx(fertilities, rel=1e-4)
    assert {name: (int(term.count), term.weight) for name, term in terms.items()} == {
        "tokens": (sum(map(len, TARGETS)), 1.0),
        "fertilities": (sum(map(len, LABELS)), 0.7),
    }


def test_copies_are_of_the_embeddings_not_of_the_states():
    model = build()
    memory = model.encode(*batch_of([[9, 10]]))
    index, real = torch.tensor([[0, 0, 1]]), torch.ones(1, 3, dtype=torch.bool)
    seen = []
    handle = model.decoder.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model.states(memory, index, real)
    handle.remove()
    expected = 4 * model.embedding.weight[torch.tensor([9, 9, 10])] + model.positions.table[:3]
    torch.testing.assert_close(seen[0][0], expected)


def test_a_label_above_the_most_is_copied_as_often_as_it_says_and_learnt_as_the_most():
    model, pair = build(most_fertility=2), ([9, 10], [11, 12, 13, 14, 15])
    terms = model.loss(pair_batch([pair], [[4, 1, 0]]), torch.Generator())
    assert int(terms["tokens"].count) == 5
    probabilities = distribution(model, pair[0])
    expected = -(probabilities[0, 2] * probabilities[1, 1] * probabilities[2, 0]).log()
    torch.testing.assert_close(terms["fertilities"].sum, expected)


def test_batches_without_labels_or_with_such_of_another_length_are_refused():
    with pytest.raises(UserError, match="hasten align"):
        build().loss(pair_batch(PAIRS), torch.Generator())
    batch = pair_batch([([7], [8, 9]), ([7], [8, 9])], [[1, 0], [1, 2]])  # too few, too many: together as many
    with pytest.raises(UserError, match="do not sum"):
        build().loss(batch, torch.Generator())


@pytest.mark.parametrize(("n_target", "possible"), [(0, True), (12, True), (13, False)])
def test_a_pair_can_be_learnt_if_the_largest_fertilities_suffice(n_target, possible):
    assert NATSpec(most_fertility=4).learnable([7, 8], [9] * n_target) is possible


def test_bfloat16_gives_close_losses_and_gradients_to_every_parameter():
    model, batch = build().train(), pair_batch(PAIRS, LABELS)
    plain = model.loss(batch, torch.Generator())
    with torch.autocast("cpu", torch.bfloat16):
        rough = model.loss(batch, torch.Generator())
    for name, term in rough.items():
        assert term.sum.dtype == torch.float32
        torch.testing.assert_close(term.sum, plain[name].sum, rtol=0.02, atol=0.02)
    sum((term.sum for term in rough.values()), torch.zeros(())).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_large_scores_leave_the_loss_finite_in_bfloat16():
    model = build()
    with torch.no_grad():
        model.embedding.weight *= 60
        model.fertility.classes.weight *= 60
    with torch.autocast("cpu", torch.bfloat16):
        terms = model.loss(pair_batch(PAIRS, LABELS), torch.Generator())
    assert all(term.sum.isfinite() for term in terms.values())


# Decoding


def test_a_sentence_is_said_in_one_pass():
    for candidates in (1, 5):
        frames = list(refine(build(), *batch_of(SOURCES), candidates))
        assert [(frame.iteration, frame.kind, bool(frame.done.all())) for frame in frames] == [(0, "fill", True)]
        assert len(frames[0].rows) == candidates * len(SOURCES)


@pytest.mark.parametrize("method", ["argmax", "average"])
def test_outputs_are_as_long_as_the_chosen_fertilities_say(method):
    lengths = set()
    for seed in range(4):
        model = build(seed, decoding=NATDecoding(method=method))
        for source, decoded in zip(SOURCES, decode(model, SOURCES), strict=True):
            p = distribution(model, source)
            mean = [sum(f * float(q) for f, q in enumerate(row)) for row in p]
            chosen = p.argmax(-1).tolist() if method == "argmax" else [int(m + 0.5) for m in mean]
            assert len(decoded.tokens) == max(1, sum(chosen))
            lengths.add(len(decoded.tokens))
    assert len(lengths) > 3


def test_every_token_is_the_most_probable_one_with_its_log_probability():
    model = build()
    for source, decoded in zip(SOURCES, decode(model, SOURCES), strict=True):
        memory = model.encode(*batch_of([source]))
        index = model.start(memory).cache.index
        logits = model.logits(model.states(memory, index, torch.ones_like(index, dtype=torch.bool)))[0]
        log_p = logits.log_softmax(-1)
        log_p[:, list(SPECIAL_IDS)] = -torch.inf
        assert decoded.tokens == log_p.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(decoded.scores), log_p.amax(-1), rtol=1e-4, atol=1e-4)


def test_what_is_too_long_is_cut_in_proportion():
    model = build(most_fertility=49)
    with torch.no_grad():
        model.fertility.classes.weight.zero_()
        model.fertility.classes.bias[49] = 9
    for source in SOURCES:
        n = len(source) + 1
        index = model.start(model.encode(*batch_of([source]))).cache.index[0]
        assert len(index) == min(49 * n, 2 * n + 20)
        shares = index.bincount(minlength=n)
        assert (index.diff() >= 0).all()
        assert int(shares.max() - shares.min()) <= 1


def test_no_output_is_empty():
    model = build()
    with torch.no_grad():
        model.fertility.classes.weight.zero_()
        model.fertility.classes.bias[0] = 9
    assert [len(tokens) for tokens in told(decode(model, SOURCES, 3))] == [1] * 15


def test_an_attention_limit_bounds_the_output():
    model = build(most_fertility=49)
    model.most_tokens = 5
    with torch.no_grad():
        model.fertility.classes.bias[49] = 99
    assert [len(tokens) for tokens in told(decode(model, SOURCES))] == [5] * 5


# Candidates: noisy parallel decoding


def test_the_first_candidate_is_what_is_said_without_candidates():
    for method in ("argmax", "average"):
        model = build(decoding=NATDecoding(method=method))
        found = decode(model, SOURCES, 4)
        assert told(found[::4]) == told(decode(model, SOURCES))
    memory = model.encode(*batch_of(SOURCES))
    assert torch.equal(model.starts(memory, 1).cache.index, model.start(memory).cache.index)


def test_other_candidates_have_fertilities_drawn_by_their_own_noise():
    model = build(decoding=NATDecoding(temperature=2.0, seed=5))
    memory = model.encode(*batch_of(SOURCES))
    starts = model.starts(memory, 4)
    for row, source in enumerate(SOURCES):
        p = distribution(model, source) ** 0.5
        reached = (p / p.sum(-1, keepdim=True)).cumsum(-1).tolist()
        for number in range(1, 4):
            uniform = noise(5, number, len(source) + 1).tolist()
            drawn = [next(f for f, c in enumerate(cdf) if u < c) for u, cdf in zip(uniform, reached, strict=True)]
            real = starts.tokens[4 * row + number] != PAD
            index = starts.cache.index[4 * row + number][real]
            if sum(drawn):
                assert index.bincount(minlength=len(drawn)).tolist() == drawn


@pytest.mark.parametrize("extra", [0, 9])
def test_candidates_depend_on_their_sentence_alone(extra: int):
    model, n = build(decoding=NATDecoding(temperature=1.5)), 6
    alone = [told(decode(model, [source], n)) for source in SOURCES]
    assert any(len({tuple(tokens) for tokens in own}) > 3 for own in alone)
    order = [3, 0, 4, 2, 1, 2]
    together = told(decode(model, [SOURCES[i] for i in order], n, extra))
    assert [together[n * row : n * row + n] for row in range(6)] == [alone[i] for i in order]


def test_more_candidates_leave_the_first_ones_as_they_are():
    model = build()
    few, many = told(decode(model, SOURCES, 3)), told(decode(model, SOURCES, 7))
    assert [few[3 * row : 3 * row + 3] for row in range(5)] == [many[7 * row : 7 * row + 3] for row in range(5)]


def test_another_seed_draws_other_candidates_and_leaves_the_first():
    one, other = (decode(build(decoding=NATDecoding(seed=seed)), SOURCES, 5) for seed in (0, 1))
    assert told(one[::5]) == told(other[::5])
    assert told(one) != told(other)


def test_at_a_low_temperature_all_candidates_are_the_most_probable():
    found = told(decode(build(decoding=NATDecoding(temperature=1e-6)), SOURCES, 4))
    assert found == [found[4 * row] for row in range(5) for _ in range(4)]


def test_candidates_draw_no_global_random_numbers_and_have_no_special_ids():
    model = build()
    with torch.no_grad():
        model.embedding.weight[list(SPECIAL_IDS)] *= 30
    before = torch.get_rng_state()
    found = told(decode(model, SOURCES, 5))
    assert torch.equal(torch.get_rng_state(), before)
    assert not set(itertools.chain.from_iterable(found)) & set(SPECIAL_IDS)


# What else a model has


def test_attentions_are_reported_by_name_and_no_position_reads_itself():
    seen: dict[tuple[str, int], Tensor] = {}
    model = build(positional_sharing=(1, 1))
    batch = pair_batch(PAIRS)
    model.attentions(batch, lambda name, layer, operator, real: seen.update({(name, layer): operator.dense()}))
    assert list(seen) == [("encoder", 0)] + [
        (name, i) for i in range(2) for name in ("decoder", "positional", "cross")
    ]  # fmt: skip
    assert (seen["decoder", 0].diagonal(dim1=-2, dim2=-1) == 0).all()
    assert torch.equal(seen["positional", 0], seen["positional", 1])


def test_a_decoder_attention_that_cannot_leave_out_a_position_is_refused():
    with pytest.raises(UserError, match="decoder attention, layer 1: local attention cannot serve here"):
        build(decoder_attention=(LocalSpec(left=2, right=2),))


def test_shared_layers_learn_and_say_something():
    model = build(decoder_sharing=(1, 1), positional_sharing=(1, 1), cross_sharing=(1, 1), shared_of_cross="context")
    model.train()
    terms = model.loss(pair_batch(PAIRS, LABELS), torch.Generator())
    sum((term.sum for term in terms.values()), torch.zeros(())).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(told(decode(model.eval(), SOURCES)))


def test_a_teacher_of_the_same_size_lends_its_encoder_and_what_its_decoder_has_in_common():
    teacher, student = AutoregressiveSpec(**SMALL).build(VOCABULARY), build()
    copied = fill_matching(student, teacher.state_dict())
    assert set(copied) == set(teacher.state_dict())
    new = set(student.state_dict()) - set(copied)
    assert all(name.startswith("fertility.") or ".positional_" in name for name in new)


def test_batches_go_to_a_device_with_their_labels():
    batch = pair_batch(PAIRS, LABELS).to("meta")
    assert isinstance(batch, Batch)
    assert batch.fertilities is not None
    assert batch.fertilities.device.type == "meta"


def test_settings_of_decoding_are_read_and_checked():
    table = {"data": {"path": "d"}, "model": {"kind": "nat", "decoding": {"method": "average", "seed": 3}}}
    spec = specs.parse(table, "here").model
    assert isinstance(spec, NATSpec)
    assert spec.decoding == NATDecoding(method="average", seed=3)
    for wrong in ({"temperature": 0.0}, {"method": "beam"}, {"noise": 1}):
        with pytest.raises(UserError, match=r"model\.decoding|decoding"):
            specs.parse({"data": {"path": "d"}, "model": {"kind": "nat", "decoding": wrong}}, "here")


def test_unknown_words_come_back_as_they_were(tokenizer):
    """Characters that the tokenizer has never seen are bytes to it, and bytes are tokens like any other."""
    lines = ["kamo Ω", "ti 漢 re", "Ж"]
    pairs = [(ids, ids) for ids in map(tokenizer.encode, lines)]
    assert all(any(token < 263 for token in source) for source, _ in pairs)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = NATSpec(**{**SMALL, "d_model": 32}, label_smoothing=0.0).build(tokenizer.vocab_size)
    batch = pair_batch(pairs, [[1] * len(source) + [0] for source, _ in pairs])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        terms = model.loss(batch, torch.Generator())
        sum((term.sum / term.count for term in terms.values()), torch.zeros(())).backward()
        optimizer.step()
    assert Translator(model.eval(), tokenizer).translate(lines) == lines
    assert Translator(model, tokenizer).translate(lines, beam=3) == lines


@pytest.mark.parametrize("method", ["argmax", "average"])
@pytest.mark.parametrize("candidates", [1, 3])
def test_fertilities_that_are_not_numbers_are_refused(method, candidates: int):
    model = build(decoding=NATDecoding(method=method))
    with torch.no_grad():
        model.fertility.classes.bias.fill_(3e38)
        model.fertility.classes.weight.mul_(1e38)
    with pytest.raises(UserError, match="not numbers"):
        decode(model, SOURCES, candidates)
