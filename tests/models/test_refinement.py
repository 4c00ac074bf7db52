"""Iterative refinement against plain loops: corruption, passes, losses, ends."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hasten import spec as specs
from hasten.data.batch import pair_batch, source_batch
from hasten.data.tokenizer import EOS, PAD, PLACEHOLDER, SPECIAL_IDS
from hasten.decoding.refine import Decoded, final, refine
from hasten.errors import UserError
from hasten.models.refinement import (
    REPEAT,
    REPLACE,
    SWAP,
    Refinement,
    RefinementDecoding,
    RefinementSpec,
    corrupt_each,
    corrupt_some,
)
from hasten.nn.decoder_inputs import first
from hasten.nn.draws import row_draws
from hasten.training.checkpoint import fill_matching
from hasten.translator import Translator

VOCABULARY = 20
WORDS = [7, 8, 9]
SMALL = {"d_model": 16, "n_heads": 2, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
SOURCES = [[10, 11, 12], [13], [14, 15, 14, 15, 16, 17, 18, 19], [], [7, 7, 8]]
PAIRS = list(zip(SOURCES, [[8, 9], [10], [11, 11, 12, 13], [14], [15, 16, 17]], strict=True))


def build(seed: int = 0, **changes) -> Refinement:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = RefinementSpec(**{**SMALL, **changes}).build(VOCABULARY)
        with torch.no_grad():  # a random tied table says its input and nothing else
            model.embedding.weight *= 0.5
        return model.eval()


def ending(seed: int = 0, **decoding) -> Refinement:
    return build(seed, decoding=RefinementDecoding(**decoding))


# Corruption: the plain definitions


def once(tokens: Sequence[int], at: int, what: int, word: int) -> tuple[int, ...]:
    """One corruption of one position."""
    changed = list(tokens)
    if what == REPLACE:
        changed[at] = word
    elif at + 1 < len(tokens):
        changed[at + 1] = tokens[at]
        if what == SWAP:
            changed[at] = tokens[at + 1]
    return tuple(changed)


Distribution = dict[tuple[int, ...], Fraction]


def further(before: Distribution, at: int, rate: Fraction) -> Distribution:
    """The distribution after position `at` was corrupted with probability `rate`."""
    after: Distribution = defaultdict(Fraction)
    for tokens, mass in before.items():
        after[tokens] += mass * (1 - rate)
        for what, word in itertools.product((REPEAT, REPLACE, SWAP), WORDS):
            after[once(tokens, at, what, word)] += mass * rate / (3 * len(WORDS))
    return after


def each_exactly(tokens: Sequence[int], rate: Fraction) -> Distribution:
    found: Distribution = {tuple(tokens): Fraction(1)}
    for at in range(len(tokens)):
        found = further(found, at, rate)
    return found


def some_exactly(tokens: Sequence[int], rate: Fraction) -> Distribution:
    n = len(tokens)
    count = min(max(1, math.floor(rate * n)), n - 1)
    orders = list(itertools.permutations(range(n - 1), count))
    total: Distribution = defaultdict(Fraction)
    for order in orders:
        found: Distribution = {tuple(tokens): Fraction(1)}
        for at in order:
            found = further(found, at, Fraction(1))
        for outcome, mass in found.items():
            total[outcome] += mass / len(orders)
    return total


EXACT = {corrupt_each: each_exactly, corrupt_some: some_exactly}
both = pytest.mark.parametrize("corrupt", EXACT, ids=["each", "some"])


def drawn(real: Tensor, seed: int) -> Tensor:
    _, numbers = row_draws(real.repeat_interleave(3, dim=1), torch.Generator().manual_seed(seed), 0)
    return numbers.view(*real.shape, 3)


def sampled(corrupt, tokens: Sequence[int], rate: float, n: int, words=WORDS, extra: int = 2, seed: int = 0) -> Counter:
    """Outcomes of n rows, each followed by an end symbol and padding that are not part of it."""
    row = torch.tensor([*tokens, EOS] + [PAD] * extra).repeat(n, 1)
    real = first(torch.full((n,), len(tokens)), row.shape[1])
    found = corrupt(row, real, drawn(real, seed), rate, torch.tensor(words))
    assert torch.equal(found[:, len(tokens) :], row[:, len(tokens) :])
    return Counter(map(tuple, found[:, : len(tokens)].tolist()))


@both
@pytest.mark.parametrize("rate", [Fraction(1, 4), Fraction(2, 3)], ids=str)
@pytest.mark.parametrize("tokens", [[7], [7, 8], [7, 7, 9], [10, 11, 12], [10, 8, 12, 13]], ids=str)
def test_corruptions_come_as_often_as_enumerating_all_chances_says(corrupt, rate: Fraction, tokens: list[int]):
    n = 100_000
    expected = EXACT[corrupt](tokens, rate) if len(tokens) > 1 or corrupt is corrupt_each else {tuple(tokens): 1}
    found = sampled(corrupt, tokens, float(rate), n)
    assert sum(expected.values()) == 1
    assert set(found) <= {outcome for outcome, mass in expected.items() if mass}
    for outcome, mass in expected.items():
        p = float(mass)
        assert abs(found[outcome] - n * p) <= 4 * math.sqrt(n * p * (1 - p)), outcome


@pytest.mark.parametrize(("what", "share"), [(REPEAT, 0.1), (REPLACE, 0.5), (SWAP, 0.9)])
@both
def test_a_single_corruption_is_repeat_replace_or_swap(corrupt, what: int, share: float):
    tokens, words = [10, 11, 12, 13], list(range(7, 20))
    for at in range(3):
        draws = torch.full((1, 4, 3), 0.99)
        draws[0, at] = torch.tensor([0.0, share, 0.2])  # the third word of thirteen: 9
        found = corrupt(torch.tensor([tokens]), torch.ones(1, 4, dtype=torch.bool), draws, 0.3, torch.tensor(words))
        expected = {
            REPEAT: [[10, 10, 12, 13], [10, 11, 11, 13], [10, 11, 12, 12]],
            REPLACE: [[9, 11, 12, 13], [10, 9, 12, 13], [10, 11, 9, 13]],
            SWAP: [[11, 10, 12, 13], [10, 12, 11, 13], [10, 11, 13, 12]],
        }[what][at]
        assert found[0].tolist() == expected
        assert once(tokens, at, what, 9) == tuple(expected)


def by_loops(corrupt, tokens: Sequence[int], draws: Tensor, rate: Fraction) -> tuple[int, ...]:
    """A row corrupted position after position, decided by its draws."""
    n, chosen, row = len(tokens), draws[:, 0].tolist(), tuple(tokens)
    places = [i for i in range(n) if draws[i, 0] < float(rate)]
    if corrupt is corrupt_some:
        places = sorted(range(n - 1), key=chosen.__getitem__)[: max(1, math.floor(rate * n))]
    for at in places:
        row = once(row, at, int(draws[at, 1] * 3), WORDS[int(draws[at, 2] * len(WORDS))])
    return row


@both
@pytest.mark.parametrize("rate", [Fraction(1, 10), Fraction(29, 100), Fraction(9, 10)], ids=str)
def test_corrupting_a_batch_is_a_loop_over_rows_and_positions(corrupt, rate: Fraction):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([0, 1, 2, 3, 100, *range(4, 30)])
    tokens = torch.randint(7, 20, (len(lengths), 101), generator=generator)
    real = first(lengths, 101)
    draws = drawn(real, 2)
    found = corrupt(tokens, real, draws, float(rate), torch.tensor(WORDS))
    for row, n in enumerate(lengths.tolist()):
        assert tuple(found[row, :n].tolist()) == by_loops(corrupt, tokens[row, :n].tolist(), draws[row, :n], rate)
        assert torch.equal(found[row, n:], tokens[row, n:])


@both
def test_ends_and_padding_stay_and_no_special_symbol_comes_in(corrupt):
    words = build().words
    assert words.tolist() == [i for i in range(VOCABULARY) if i not in SPECIAL_IDS]
    found = sampled(corrupt, [10, 11, 12, 13, 14], 0.9, 10_000, words.tolist(), seed=3)  # it looks at ends and padding
    seen = {token for outcome in found for token in outcome}
    assert seen == set(words.tolist())


@both
def test_nothing_to_corrupt_is_left_alone(corrupt):
    empty = torch.empty(2, 0, dtype=torch.int64)
    assert corrupt(empty, empty.bool(), torch.empty(2, 0, 3), 0.5, torch.tensor(WORDS)).shape == (2, 0)


# Decoding: passes by hand


def passes(model: Refinement, source: Sequence[int], k: int, length: int | None = None) -> list[list[int]]:
    """The outputs of k passes over one sentence, without padding, from the modules alone."""
    ids = torch.tensor([[*source, EOS]])
    everything = torch.ones_like(ids, dtype=torch.bool)
    scale = math.sqrt(model.spec.d_model)
    memory = model.encoder(model.positions(model.embedding(ids) * scale), everything)
    if length is None:
        most = model.spec.length_most
        scores = model.lengths.classes(memory.mean(1))[0]
        length = max(
            (n for n in range(1, len(source) + 1 + most + 1)), key=lambda n: float(scores[n - ids.shape[1] + most])
        )
    n = max(len(source), 1)
    places = [math.floor(i * (n - 1) / (length - 1) + 0.5) if length > 1 else 0 for i in range(length)]
    x = model.embedding(ids[:, places]) * scale
    real, outputs = torch.ones(1, length, dtype=torch.bool), []
    for i in range(k):
        states = model.decoders[0 if i == 0 else -1](model.positions(x), real, memory, everything)
        logits = states @ model.embedding.weight.T
        logits[..., list(SPECIAL_IDS)] = -torch.inf
        tokens = logits.argmax(-1)
        outputs.append(tokens[0].tolist())
        x = model.embedding(tokens) * scale + (states if model.spec.feedback == "both" else 0)
    return outputs


def decode(model: Refinement, rows: Sequence[Sequence[int]]) -> list[Decoded]:
    return final(refine(model, *source_batch(rows)), len(rows))


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"feedback": "tokens"}, {"one_decoder": True}], ids=str)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_k_iterations_are_k_passes_by_hand(changes: dict, k: int):
    model = build(**changes, decoding=RefinementDecoding(iterations=k, adaptive=False))
    for source, decoded in zip(SOURCES, decode(model, SOURCES), strict=True):
        assert decoded.iterations == k
        assert decoded.tokens == passes(model, source, k)[-1]
        assert not set(decoded.tokens) & set(SPECIAL_IDS)


@torch.no_grad()
def test_refining_adaptively_is_refining_until_the_first_repetition():
    lengths = Counter()
    for seed in range(8):
        found = decode(ending(seed, iterations=7), SOURCES)
        for source, decoded in zip(SOURCES, found, strict=True):
            outputs = passes(build(seed), source, 7)
            same = [i for i in range(1, 7) if outputs[i] == outputs[i - 1]]
            expected = same[0] + 1 if same else 7
            assert decoded.iterations == expected
            assert decoded.tokens == outputs[expected - 1]
            lengths[expected] += 1
    assert len(lengths) > 2, "sentences that end early, late and never"


def test_what_no_pass_changes_ends_with_the_second():
    model = ending(iterations=9)
    with torch.no_grad():  # layers that add nothing, and one word that is most similar to every state
        model.embedding.weight[9] = 100.0
        for decoder in model.decoders:
            decoder.norm.weight.zero_()
            decoder.norm.bias.fill_(1.0)
    assert [decoded.iterations for decoded in decode(model, SOURCES)] == [2] * len(SOURCES)
    assert {token for decoded in decode(model, SOURCES) for token in decoded.tokens} == {9}


def test_the_canvas_begins_with_placeholders_and_is_rewritten_by_every_pass():
    model = ending(iterations=3, adaptive=False)
    memory = model.encode(*source_batch(SOURCES))
    canvas = model.start(memory)
    lengths, _ = model.lengths.best(memory.states, memory.mask)
    assert torch.equal((canvas.tokens == PLACEHOLDER).sum(1), lengths[:, 0])
    assert torch.equal(canvas.tokens == PAD, ~first(lengths[:, 0]))
    frames = list(refine(model, *source_batch(SOURCES)))
    assert [frame.kind for frame in frames] == ["fill"] * 3
    assert all(torch.equal(frame.tokens == PAD, canvas.tokens == PAD) for frame in frames)


@torch.no_grad()
def test_scores_are_those_of_the_last_pass():
    model = ending(iterations=1)
    for source, decoded in zip(SOURCES, decode(model, SOURCES), strict=True):
        memory = model.encode(*source_batch([source]))
        lengths = torch.tensor([len(decoded.tokens)])
        states = model.decode(0, model.copied(memory, lengths), first(lengths), memory)
        expected = model.logits(states)[0].log_softmax(-1)[range(len(decoded.tokens)), decoded.tokens]
        torch.testing.assert_close(torch.tensor(decoded.scores), expected)


@torch.no_grad()
@pytest.mark.parametrize("candidates", [1, 3])
def test_a_length_beam_decodes_the_most_probable_lengths(candidates: int):
    model = ending(iterations=4, adaptive=False)
    source, mask = source_batch(SOURCES)
    memory = model.encode(source, mask)
    found = final(refine(model, source, mask, candidates), candidates * len(SOURCES))
    lengths, _ = model.lengths.best(memory.states, memory.mask, candidates)
    assert [len(decoded.tokens) for decoded in found] == lengths.flatten().tolist()
    for row, words in enumerate(SOURCES):
        for c in range(candidates):
            decoded = found[row * candidates + c]
            assert decoded.tokens == passes(model, words, 4, len(decoded.tokens))[-1]
    first_ones = [found[row * candidates].tokens for row in range(len(SOURCES))]
    assert first_ones == [one.tokens for one in decode(model, SOURCES)]


def test_the_end_symbol_is_not_copied_but_where_there_is_nothing_else():
    model = build()
    memory = model.encode(*source_batch([[10, 11, 12], [], [13]]))
    copies = model.copied(memory, torch.tensor([5, 2, 3])) / math.sqrt(model.spec.d_model)
    ids = torch.cdist(copies, model.embedding.weight).argmin(-1)
    assert [ids[0].tolist(), ids[1, :2].tolist(), ids[2, :3].tolist()] == [[10, 11, 11, 12, 12], [EOS] * 2, [13] * 3]


def test_repeats_are_removed_on_request():
    tokens = [8, 8, 9, 8, 8, 8, 10, 10]
    assert build().output_ids(tokens) == tokens
    assert ending(remove_repeats=True).output_ids(tokens) == [8, 9, 8, 10]
    assert ending(remove_repeats=True).output_ids([]) == []


# Training: losses by hand


def by_hand(model: Refinement, source, target, read: Sequence[Sequence[int] | None]) -> tuple[Tensor, list[list[int]]]:
    """The summed loss of the passes over one pair where each reads what is given (None: the pass before), and outputs.

    The tokens that a pass reads are constants.
    """
    ids, goal = torch.tensor([[*source, EOS]]), torch.tensor(target)
    real = torch.ones(1, len(target), dtype=torch.bool)
    memory = model.encode(ids, torch.ones_like(ids, dtype=torch.bool))
    x, total, said = model.copied(memory, torch.tensor([len(target)])), torch.zeros(()), []
    for i, given in enumerate([*read, None]):
        states = model.decode(i, x, real, memory)
        logits = model.logits(states)[0]
        total = total + F.cross_entropy(logits, goal, reduction="sum", label_smoothing=model.spec.label_smoothing)
        said.append((logits.detach() + model.banned).argmax(-1).tolist())
        tokens = said[-1] if given is None else given
        embedded = model.embedding(torch.tensor([tokens])) * math.sqrt(model.spec.d_model)
        x = embedded + states if model.spec.feedback == "both" else embedded
    return total, said


def loss_of(model: Refinement, pairs=PAIRS, seed: int = 0):
    return model.loss(pair_batch(pairs), torch.Generator().manual_seed(seed))


def gradients(model: Refinement, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("feedback", ["both", "tokens"])
def test_the_loss_is_that_of_unrolled_passes_and_nothing_is_learnt_through_the_choice_of_tokens(feedback: str):
    model = build(denoise=0.0, train_iterations=3, feedback=feedback)
    term = loss_of(model)["tokens"]
    found = gradients(model, term.sum)
    hand = [by_hand(model, source, target, [None, None])[0] for source, target in PAIRS]
    torch.testing.assert_close(term.sum, torch.stack(hand).sum())
    assert int(term.count) == 3 * sum(len(target) for _, target in PAIRS)
    for name, gradient in gradients(model, torch.stack(hand).sum()).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_earlier_passes_learn_from_later_ones_through_their_states_alone():
    for feedback, reached in (("both", True), ("tokens", False)):
        model = build(denoise=0.0, train_iterations=2, feedback=feedback)
        batch = pair_batch(PAIRS)
        real = batch.target_mask
        memory = model.encode(batch.source, batch.source_mask)
        states = model.decode(0, model.copied(memory, real.sum(1)), real, memory)
        _, own = model._said(states, batch.target, real)
        read = model.feed(model.embedding(own), states)
        last, _ = model._said(model.decode(1, read, real, memory), batch.target, real)
        assert (torch.autograd.grad(last, states, allow_unused=True)[0] is not None) is reached


@pytest.mark.parametrize("corruption", ["each", "some"])
def test_a_denoising_pass_reads_the_reference_corrupted_by_hand(corruption: str):
    model = build(denoise=0.999999, train_iterations=3, corruption=corruption, corruption_rate=(0.6, 0.2))
    source, target = [10, 11, 12], [8, 9, 13, 14, 15, 16]
    term = loss_of(model, [(source, target)], seed=5)["tokens"]
    numbers = torch.rand(2 + 6 * 2 * 3, generator=torch.Generator().manual_seed(5))
    assert (numbers[:2] < 0.999999).all()
    draws = numbers[2:].view(6, 2, 3)
    read = []
    for step, rate in enumerate((0.6, 0.2)):
        row = tuple(target)
        places = [i for i in range(6) if draws[i, step, 0] < rate]
        if corruption == "some":
            places = sorted(range(5), key=draws[:, step, 0].tolist().__getitem__)[: (3, 1)[step]]
        for at in places:
            row = once(row, at, int(3 * draws[at, step, 1]), 7 + int(13 * draws[at, step, 2]))
        read.append(row)
    assert tuple(target) not in read
    expected, _ = by_hand(model, source, target, read)
    torch.testing.assert_close(term.sum, expected)


def test_half_of_the_passes_read_a_corrupted_reference():
    model = build(denoise=0.3, train_iterations=4)
    use, draws = model._chances(torch.ones(20_000, 2, dtype=torch.bool), torch.Generator().manual_seed(0))
    assert use.shape == (3, 20_000, 1)
    assert draws.shape == (3, 20_000, 2, 3)
    for step in use.float():
        assert abs(float(step.mean()) - 0.3) < 4 * math.sqrt(0.21 / 20_000)
    mixed = use.float().squeeze(-1)
    assert abs(float(torch.corrcoef(mixed)[0, 1])) < 4 / math.sqrt(20_000)


def test_the_loss_of_a_batch_is_that_of_its_sentences_drawn_in_order():
    for corruption in ("each", "some"):
        model = build(corruption=corruption)
        together = model.loss(pair_batch(PAIRS), torch.Generator().manual_seed(3))
        one = torch.Generator().manual_seed(3)
        alone = [model.loss(pair_batch([pair]), one) for pair in PAIRS]
        for name, term in together.items():
            torch.testing.assert_close(term.sum, torch.stack([terms[name].sum for terms in alone]).sum())


def test_the_loss_follows_its_generator():
    model = build()
    once_, again, other = (loss_of(model, seed=seed)["tokens"].sum.item() for seed in (1, 1, 2))
    assert once_ == again != other


def test_one_pass_in_training_draws_nothing():
    model, generator = build(train_iterations=1), torch.Generator().manual_seed(0)
    before = generator.get_state()
    expected = sum(by_hand(model, source, target, [])[0].item() for source, target in PAIRS)
    assert model.loss(pair_batch(PAIRS), generator)["tokens"].sum.item() == pytest.approx(expected, rel=1e-4)
    assert torch.equal(generator.get_state(), before)


def test_the_encoder_can_be_kept_from_learning_lengths():
    for detach in (True, False):
        found = gradients(build(length_detach=detach), loss_of(build(length_detach=detach))["length"].sum)
        assert not found  # of another model
        model = build(length_detach=detach)
        found = gradients(model, loss_of(model)["length"].sum)
        assert any(name.startswith("encoder") for name in found) is not detach


def test_rates_are_given_once_or_for_each_refining_pass():
    assert build(corruption_rate=(0.4,)).rates == (0.4, 0.4, 0.4)
    assert build(corruption_rate=(0.6, 0.4, 0.1)).rates == (0.6, 0.4, 0.1)
    assert build(corruption_rate=(0.6,), train_iterations=1).rates == ()
    with pytest.raises(UserError, match="corruption_rate has 2 entries; give 1, or one for each of 3 refining passes"):
        build(corruption_rate=(0.6, 0.4))


def test_bfloat16_arithmetic_is_finite_and_close():
    model = build()
    plain = loss_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        low = loss_of(model)
        found = gradients(model, sum((term.sum for term in low.values()), torch.zeros(())))
        decoded = decode(model, SOURCES)
    for name, term in plain.items():
        assert low[name].sum.dtype == torch.float32
        assert low[name].sum.item() == pytest.approx(term.sum.item(), rel=0.03)
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert all(math.isfinite(score) for one in decoded for score in one.scores)


def test_large_scores_are_finite():
    model = build()
    with torch.no_grad():
        model.embedding.weight *= 60
    with torch.autocast("cpu", torch.bfloat16):
        terms = loss_of(model)
        found = gradients(model, sum((term.sum for term in terms.values()), torch.zeros(())))
    assert all(gradient.isfinite().all() for gradient in found.values())


# Around the model


def test_one_decoder_halves_the_weights_of_two():
    one, two = (sum(p.numel() for p in build(one_decoder=x).decoders.parameters()) for x in (True, False))
    assert two == 2 * one


def test_the_encoder_of_a_teacher_fits():
    from hasten.models.autoregressive import AutoregressiveSpec

    teacher, student = AutoregressiveSpec(**SMALL).build(VOCABULARY), build()
    copied = fill_matching(student, teacher.state_dict())
    encoder = [name for name in student.state_dict() if name.startswith("encoder.")]
    assert {"embedding.weight", *encoder} <= set(copied)


def test_attention_is_reported_for_every_layer():
    found: list[tuple[str, int, tuple[int, ...]]] = []
    batch = pair_batch(PAIRS)
    with torch.no_grad():
        build(decoder_layers=2).attentions(
            batch, lambda name, layer, operator, real: found.append((name, layer, tuple(operator.dense().shape)))
        )
    n, s, t = len(PAIRS), batch.source.shape[1], batch.target.shape[1]
    decoder = [(name, i, (n, 2, t, k)) for i in range(2) for name, k in (("decoder", t), ("cross", s))]
    assert found == [("encoder", 0, (n, 2, s, s)), *decoder]


def test_settings_are_read_from_a_configuration():
    table = {
        "data": {"path": "nowhere"},
        "model": {"kind": "refinement", "corruption_rate": [0.1], "decoding": {"iterations": 4, "adaptive": False}},
    }
    spec = specs.parse(table, "test").model
    assert isinstance(spec, RefinementSpec)
    assert spec.decoding == RefinementDecoding(iterations=4, adaptive=False)
    with pytest.raises(UserError, match="iterations"):
        specs.parse({**table, "model": {"kind": "refinement", "decoding": {"iterations": 0}}}, "test")


def test_words_that_no_piece_covers_come_back(tokenizer):
    lines = ["kamo ☃ 你好", "ti"]
    torch.manual_seed(0)
    model = RefinementSpec(**{**SMALL, "d_model": 32, "n_heads": 4, "label_smoothing": 0.0}).build(tokenizer.vocab_size)
    batch = pair_batch([(tokenizer.encode(line), tokenizer.encode(line)) for line in lines])
    assert not set(batch.target[batch.target_mask].tolist()) & set(SPECIAL_IDS)
    optimizer, generator = torch.optim.Adam(model.parameters(), lr=1e-2), torch.Generator().manual_seed(0)
    for _ in range(60):
        loss = sum(term.sum / term.count for term in model.loss(batch, generator).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert Translator(model.eval(), tokenizer).translate(lines) == lines
