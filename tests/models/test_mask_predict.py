import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from decoding.masked_definition import plainly
from hasten.attention import LinformerSpec
from hasten.data.batch import Batch, pair_batch, source_batch
from hasten.data.tokenizer import MASK, PAD, SPECIAL_IDS
from hasten.decoding.masked import FAST_DLLM, LLADA, MASK_PREDICT, MaskedSpec
from hasten.decoding.refine import final, refine
from hasten.errors import UserError
from hasten.models.autoregressive import AutoregressiveSpec
from hasten.models.base import Memory
from hasten.models.mask_predict import MaskPredict, MaskPredictSpec, hidden
from hasten.nn.decoder_inputs import uniform_copy
from hasten.training.checkpoint import fill_matching
from hasten.translator import Translator

VOCABULARY = 15  # seven special ids and eight words: 7 .. 14
SMALL = {"d_model": 16, "n_heads": 2, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
SMALL |= {"label_smoothing": 0.0, "length_form": "absolute", "length_most": 8}
SOURCE, TARGET = [8, 9, 10, 11], [12, 7, 9]
INPUTS = ("mask", "uniform_copy", "soft_copy")


def build(seed: int = 0, **changes) -> MaskPredict:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MaskPredictSpec(**{**SMALL, **changes}).build(VOCABULARY).eval()
        with torch.no_grad():
            model.embedding.weight *= 0.7  # else a random tied table repeats what it reads
    return model


def of_length(model: MaskPredict, n: int) -> MaskPredict:
    """The model, which now expects n tokens whatever it reads."""
    with torch.no_grad():
        model.lengths.classes.weight.zero_()
        model.lengths.classes.bias.zero_()[n - 1] = 50
    return model


def log_probs(model: MaskPredict, source: list[int], tokens: Sequence[int]) -> torch.Tensor:
    """(N, V) of one sentence without padding, from a target some of whose tokens are masked."""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        memory = model.encode(*source_batch([source]))
        return model.logits(model.states(ids, torch.ones_like(ids) > 0, memory))[0].double().log_softmax(-1)


# Training.

SUBSETS = [set(s) for n in (1, 2, 3) for s in itertools.combinations(range(3), n)]
PROBABILITY = {frozenset(s): 1 / (3 * math.comb(3, len(s))) for s in SUBSETS}


def nll(model: MaskPredict, masked: set[int]) -> float:
    """-log p of the masked tokens of TARGET given the others."""
    row = [MASK if i in masked else token for i, token in enumerate(TARGET)]
    found = log_probs(model, SOURCE, row)
    return -sum(float(found[i, TARGET[i]]) for i in masked)


def test_every_number_of_masks_and_every_set_of_that_many_is_equally_probable():
    n = 20_000
    rows = hidden(torch.ones(n, 3, dtype=torch.bool), torch.Generator().manual_seed(1))
    found = Counter(frozenset(row.nonzero()[:, 0].tolist()) for row in rows)
    assert set(found) == set(PROBABILITY)
    for masked, p in PROBABILITY.items():
        assert abs(found[masked] - n * p) < 4 * math.sqrt(n * p * (1 - p)), masked


@pytest.mark.parametrize("n", [1, 2, 7])
def test_one_to_all_tokens_are_masked_and_no_padding(n: int):
    mask = torch.arange(9).expand(4000, 9) < n
    rows = hidden(mask, torch.Generator().manual_seed(2))
    assert not (rows & ~mask).any()
    counts = rows.sum(1).bincount(minlength=n + 1)
    assert counts[0] == 0
    assert ((counts[1:] - 4000 / n).abs() <= 4 * math.sqrt(4000 / n * (1 - 1 / n))).all()


def test_a_row_without_tokens_has_none_masked():
    assert not hidden(torch.zeros(2, 3, dtype=torch.bool), torch.Generator()).any()
    assert hidden(torch.ones(2, 0, dtype=torch.bool), torch.Generator()).shape == (2, 0)


@pytest.mark.parametrize("decoder_input", INPUTS)
def test_the_expected_loss_is_the_pseudo_likelihood_over_all_sets_of_masks(decoder_input: str):
    model, n = build(decoder_input=decoder_input), 4000
    exact = {masked: nll(model, set(masked)) for masked in PROBABILITY}
    batch = pair_batch([(SOURCE, TARGET)] * n)
    with torch.no_grad():
        term = model.loss(batch, torch.Generator().manual_seed(3))["tokens"]
    drawn = hidden(batch.target_mask, torch.Generator().manual_seed(3))
    own = [exact[frozenset(row.nonzero()[:, 0].tolist())] for row in drawn]
    assert float(term.sum) == pytest.approx(sum(own), rel=1e-4)
    assert int(term.count) == int(drawn.sum())
    mean = sum(p * exact[masked] for masked, p in PROBABILITY.items())
    variance = sum(p * (exact[masked] - mean) ** 2 for masked, p in PROBABILITY.items())
    assert abs(float(term.sum) / n - mean) < 4 * math.sqrt(variance / n)


def test_weighted_by_tokens_a_mask_the_loss_is_the_bound_of_all_orders():
    """E[N / n * loss] = the mean over orders of -sum_t log p(y_o(t) | those before): Uria et al., 2014."""
    model = build()
    chains = []
    for order in itertools.permutations(range(3)):
        row, total = [MASK] * 3, 0.0
        for i in order:
            total -= float(log_probs(model, SOURCE, row)[i, TARGET[i]])
            row[i] = TARGET[i]
        chains.append(total)
    n, batch = 3000, pair_batch([(SOURCE, TARGET)] * 3000)
    where = hidden(batch.target_mask, torch.Generator().manual_seed(4))
    with torch.no_grad():
        memory = model.encode(batch.source, batch.source_mask)
        states = model.states(batch.target.masked_fill(where, MASK), batch.target_mask, memory)
        own = -model.logits(states).log_softmax(-1).gather(2, batch.target[..., None])[..., 0]
    weighted = 3 / where.sum(1) * (own * where).sum(1)
    assert abs(float(weighted.mean()) - sum(chains) / 6) < 4 * float(weighted.std()) / math.sqrt(n)


def test_tokens_that_are_masked_are_not_read():
    model = build(3)
    batch = pair_batch([(SOURCE, [12] * 6)])
    where = hidden(batch.target_mask, torch.Generator().manual_seed(5))
    other = dataclasses.replace(batch, target=torch.where(where, 13, batch.target))
    assert 0 < where.sum() < 6
    inputs = []

    def watched(tokens, mask, memory):
        inputs.append(tokens)
        return MaskPredict.states(model, tokens, mask, memory)

    model.states = watched  # type: ignore[method-assign]
    for one in (batch, other):
        model.loss(one, torch.Generator().manual_seed(5))
    assert torch.equal(*inputs)


def test_the_length_is_learnt_from_the_real_tokens():
    model = build(length_weight=0.25)
    batch = pair_batch([(SOURCE, TARGET), ([8], [9]), ([8, 8], [])])
    term = model.loss(batch, torch.Generator())["length"]
    memory = model.encode(batch.source, batch.source_mask)
    found = model.lengths.log_probs(memory.states, memory.mask)
    assert term.sum.item() == pytest.approx(-float((found[0, 2] + found[1, 0] + found[2, 0]).detach()), rel=1e-5)
    assert (int(term.count), term.weight) == (3, 0.25)


@pytest.mark.parametrize("decoder_input", INPUTS)
@pytest.mark.parametrize("pairs", [[(SOURCE, [])], [([], [9])], [([], [])], [(SOURCE, []), ([8], [9, 10])]], ids=str)
def test_sentences_without_or_with_one_token_have_finite_losses_and_gradients(pairs, decoder_input: str):
    model = build(decoder_input=decoder_input)
    terms = model.loss(pair_batch(pairs), torch.Generator())
    sum(term.weight * term.sum for term in terms.values()).backward()
    assert all(term.sum.isfinite() for term in terms.values())
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_label_smoothing_spreads_over_the_vocabulary():
    plain, smooth = build(), build(label_smoothing=0.2)
    batch = pair_batch([(SOURCE, [9])])
    found = log_probs(plain, SOURCE, [MASK])[0]
    term = smooth.loss(batch, torch.Generator())["tokens"]
    assert term.sum.item() == pytest.approx(float(-0.8 * found[9] - 0.2 * found.mean()), rel=1e-4)


def test_under_bfloat16_the_loss_is_finite_and_close():
    model = build(decoder_layers=2)
    batch = pair_batch([(SOURCE, TARGET), ([8], [9])])
    plain = model.loss(batch, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model.loss(batch, torch.Generator().manual_seed(0))
    for name, term in plain.items():
        assert mixed[name].sum.dtype == torch.float32
        assert mixed[name].sum.item() == pytest.approx(term.sum.item(), rel=0.03)


# Decoding.

SAMPLERS = [
    MASK_PREDICT,
    MaskedSpec(iterations=4),
    MaskedSpec(iterations=1),
    MaskedSpec(iterations=12, threshold=0.3),
    MaskedSpec(iterations=2, block=3),
    LLADA,
    dataclasses.replace(LLADA, iterations=3),
    dataclasses.replace(LLADA, iterations=2, block=3),
    dataclasses.replace(FAST_DLLM, threshold=0.25),
    dataclasses.replace(FAST_DLLM, threshold=0.25, block=2),
]


def plain_decode(model: MaskPredict, source: list[int], n: int) -> tuple[list[list[int]], list[float]]:
    """The rows after every pass and the final scores, from single sentences without padding and plain lists."""

    def predict(row: Sequence[int]) -> list[tuple[int, float]]:
        found = log_probs(model, source, row)
        words = range(len(SPECIAL_IDS), VOCABULARY)
        best = [max(words, key=lambda token, p=p: float(p[token])) for p in found]
        return [(token, float(p[token])) for token, p in zip(best, found, strict=True)]

    passes, scores = plainly(model.spec.decoding, n, predict)
    return [row for pair in passes for row in pair], scores


@pytest.mark.parametrize("decoding", SAMPLERS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_decoding_is_the_definition_sentence_by_sentence(decoding: MaskedSpec, seed: int):
    model = build(seed, decoding=decoding, decoder_input=INPUTS[seed % 3])
    sources = [SOURCE, [], [8], [9, 10, 11, 12, 13, 14, 7, 7], [13, 13]]
    lengths = [(seed + 3 * i) % 8 + 1 for i in range(len(sources))]
    model.start = lambda memory: model.sampler.start(torch.tensor(lengths))  # type: ignore[method-assign]
    frames = list(refine(model, *source_batch(sources)))
    for row, source in enumerate(sources):
        expected, scores = plain_decode(model, source, lengths[row])
        found = []
        for frame in frames:
            for i in (frame.rows == row).nonzero()[:, 0].tolist():
                found.append(frame.tokens[i, : lengths[row]].tolist())
                assert (frame.tokens[i, lengths[row] :] == PAD).all()
        assert found == expected
        torch.testing.assert_close(final(frames, len(sources))[row].scores, scores, rtol=0, atol=1e-5)
    assert {frame.kind for frame in frames} == {"fill", "mask"}


def test_one_pass_is_the_best_word_at_every_position():
    model = of_length(build(1, decoding=MaskedSpec(iterations=1)), 5)
    [decoded] = final(refine(model, *source_batch([SOURCE])), 1)
    found = log_probs(model, SOURCE, [MASK] * 5)
    found[:, list(SPECIAL_IDS)] = -math.inf
    assert decoded.tokens == found.argmax(-1).tolist()
    assert decoded.iterations == 1


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("iterations", [1, 3, 10])
def test_passes_are_as_many_as_the_schedule_leaves_masks_for(n: int, iterations: int):
    model = of_length(build(decoding=MaskedSpec(iterations=iterations)), n)
    frames = list(refine(model, *source_batch([SOURCE])))
    expected = [n * (iterations - t) // iterations for t in range(1, iterations + 1)]
    expected = expected[: expected.index(0) + 1]
    assert [int((frame.tokens == MASK).sum()) for frame in frames if frame.kind == "mask"] == expected
    assert [bool(frame.done) for frame in frames[1::2]] == [False] * (len(expected) - 1) + [True]


@pytest.mark.parametrize("decoding", SAMPLERS, ids=str)
def test_no_special_symbol_comes_out_however_much_the_model_wants_it(decoding: MaskedSpec):
    model = build(decoding=decoding)
    with torch.no_grad():
        model.embedding.weight[list(SPECIAL_IDS)] *= 30
    for n in (1, 4, 8):
        for decoded in final(refine(of_length(model, n), *source_batch([SOURCE, [8]])), 2):
            assert len(decoded.tokens) == n
            assert not set(decoded.tokens) & set(SPECIAL_IDS)
            assert all(score <= 0 for score in decoded.scores)


# Lengths.


def test_candidates_have_the_most_probable_lengths_all_different():
    model = build(5)
    memory = model.encode(*source_batch([SOURCE, [8]]))
    found = model.starts(memory, 4)
    lengths = (found.tokens == MASK).sum(1).view(2, 4)
    best = model.lengths.log_probs(memory.states, memory.mask).topk(4).indices + 1
    assert torch.equal(lengths, best)
    assert torch.equal((model.start(memory).tokens == MASK).sum(1), lengths[:, 0])


def test_every_candidate_is_decoded_as_if_it_were_alone():
    model, sources = build(6), [SOURCE, [8]]
    together = final(refine(model, *source_batch(sources), 3), 6)
    for row, source in enumerate(sources):
        for c in range(3):
            n = len(together[3 * row + c].tokens)
            model.start = lambda memory, n=n: model.sampler.start(torch.tensor([n]))  # type: ignore[method-assign]
            [alone] = final(refine(model, *source_batch([source])), 1)
            assert together[3 * row + c].tokens == alone.tokens


def test_more_candidates_than_lengths_is_an_error():
    model = build()
    with pytest.raises(UserError, match="9 lengths at once; this model knows 8"):
        model.starts(model.encode(*source_batch([SOURCE])), 9)


def limited(**changes) -> MaskPredict:
    attention = (LinformerSpec(max_length=6, rank=2),)
    return build(decoder_attention=attention, length_form="offset", length_most=9, **changes)


def test_no_output_is_longer_than_the_decoder_takes():
    model = limited()
    assert model.longest == 6
    with torch.no_grad():
        model.lengths.classes.bias[-1] = 50  # nine tokens more than the source
    memory = model.encode(*source_batch([SOURCE, [8]]))
    assert (model.starts(memory, 3).tokens != PAD).sum(1).max() <= 6
    assert all(1 <= len(decoded.tokens) <= 6 for decoded in final(refine(model, *source_batch([SOURCE])), 1))


def test_a_target_of_the_greatest_length_is_learnt():
    model = limited()
    terms = model.loss(pair_batch([([8] * 5, [9] * 6)]), torch.Generator())
    assert all(term.sum.isfinite() for term in terms.values())


def test_what_the_source_side_takes_counts_its_end():
    attention = (LinformerSpec(max_length=6, rank=2),)
    assert build(encoder_attention=attention).longest == 5
    assert build().longest is None


# What the decoder reads.


def test_masked_positions_read_the_mask_or_a_copy_and_others_their_token():
    for decoder_input in INPUTS:
        model = build(decoder_input=decoder_input)
        seen = []
        model.positions.register_forward_hook(lambda module, args, out, seen=seen: seen.append(args[0]))
        memory = model.encode(*source_batch([SOURCE, [8]]))
        tokens = torch.tensor([[9, MASK, MASK], [MASK, 10, PAD]])
        model.states(tokens, tokens != PAD, memory)
        table = model.embedding.weight * 4
        torch.testing.assert_close(seen[-1][0, 0], table[9])
        torch.testing.assert_close(seen[-1][1, 1], table[10])
        index = uniform_copy(memory.lengths, torch.tensor([3, 2]))
        if decoder_input == "mask":
            torch.testing.assert_close(seen[-1][0, 2], table[MASK])
        elif decoder_input == "uniform_copy":
            torch.testing.assert_close(seen[-1][0, 2], memory.states[0, index[0, 2]])


# The rest of the house.


def test_attention_is_reported_by_name_and_layer():
    model, batch = build(encoder_layers=2, decoder_layers=2), pair_batch([(SOURCE, TARGET), ([8], [9])])
    seen = []
    model.attentions(batch, lambda name, layer, operator, real: seen.append((name, layer, tuple(real.shape))))
    encoder = [("encoder", i, (2, 5)) for i in (0, 1)]
    assert sorted(seen) == sorted(encoder + [(name, i, (2, 3)) for name in ("decoder", "cross") for i in (0, 1)])


@pytest.mark.parametrize("shared_of_cross", ["weights", "context", "output"])
def test_layers_share_by_source_maps(shared_of_cross: str):
    sharing = {"encoder_sharing": (1, 1), "decoder_sharing": (1, 1), "cross_sharing": (1, 1)}
    layers = {"encoder_layers": 2, "decoder_layers": 2}
    model, own = build(**layers, **sharing, shared_of_cross=shared_of_cross), build(**layers)
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in own.parameters())
    alone = [final(refine(model, *source_batch([s])), 1)[0].tokens for s in (SOURCE, [8])]
    assert [row.tokens for row in final(refine(model, *source_batch([SOURCE, [8]])), 2)] == alone


def test_the_weights_of_a_teacher_fit():
    shape = {name: SMALL[name] for name in ("d_model", "n_heads", "d_ff", "encoder_layers", "decoder_layers")}
    teacher, student = AutoregressiveSpec(**shape).build(VOCABULARY), build()
    copied = set(fill_matching(student, teacher.state_dict()))
    assert {name for name in student.state_dict() if not name.startswith("lengths")} <= copied


def test_settings_of_decoding_touch_no_weights():
    assert build().state_dict().keys() == build(decoding=FAST_DLLM).state_dict().keys()


def test_words_that_the_vocabulary_lacks_come_back_as_bytes(tokenizer):
    line = "☃ kamo"
    ids = tokenizer.encode(line)
    assert len(ids) > 3
    torch.manual_seed(0)
    spec = MaskPredictSpec(**{**SMALL, "d_model": 32, "length_most": 20, "length_weight": 1.0})
    model = spec.build(tokenizer.vocab_size)
    optimizer, generator = torch.optim.Adam(model.parameters(), lr=1e-2), torch.Generator().manual_seed(0)
    batch: Batch = pair_batch([(ids, ids)] * 8)
    for _ in range(100):
        terms = model.loss(batch, generator).values()
        optimizer.zero_grad()
        sum(term.weight * term.sum / term.count for term in terms).backward()
        optimizer.step()
    assert Translator(model.eval(), tokenizer).translate([line]) == [line]


def test_memory_of_several_candidates_is_that_of_their_row():
    model = build()
    memory = model.encode(*source_batch([SOURCE, [8]]))
    rows = torch.tensor([0, 0, 1, 1])
    canvas = model.starts(memory, 2)
    filled = model.edits[0].apply(canvas, Memory(memory.states[rows], memory.mask[rows]), 0)
    assert (filled.tokens != MASK).all()
