import itertools
import math

import pytest
import torch

from hasten.data.batch import pair_batch, source_batch
from hasten.data.tokenizer import BLANK, PAD, SPECIAL_IDS
from hasten.decoding.ctc_loss import best_alignment
from hasten.decoding.refine import final, refine
from hasten.errors import UserError
from hasten.models.autoregressive import AutoregressiveSpec
from hasten.models.ctc import CTC, CTCSpec
from hasten.training.checkpoint import fill_matching

VOCABULARY = 12  # seven special ids and five words: 7 .. 11
SMALL = {"d_model": 16, "n_heads": 2, "d_ff": 32, "encoder_layers": 1, "refiner_layers": 1, "dropout": 0.0}


def spec(**changes) -> CTCSpec:
    return CTCSpec(**{**SMALL, **changes})


@pytest.fixture
def model() -> CTC:
    torch.manual_seed(3)
    return spec().build(VOCABULARY).eval()


def collapse(path: tuple[int, ...]) -> list[int]:
    return [token for token, _ in itertools.groupby(path) if token != BLANK]


def enumerated(log_probs: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Probability of every output by summing over every path."""
    log_probs = log_probs.detach()
    totals: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        mass = math.exp(sum(float(log_probs[t, token]) for t, token in enumerate(path)))
        key = tuple(collapse(path))
        totals[key] = totals.get(key, 0.0) + mass
    return totals


def test_the_loss_is_the_sum_over_all_paths(model):
    batch = pair_batch([([8], [9, 10]), ([7], [])])
    memory = model.encode(batch.source, batch.source_mask)
    log_probs = model.frame_logits(memory.states, memory.mask).log_softmax(-1)
    expected = sum(
        -math.log(enumerated(row[: int(n)])[tuple(target)])
        for row, n, target in zip(log_probs, memory.lengths, ([9, 10], []), strict=True)
    )
    terms = model.loss(batch, torch.Generator())
    assert terms["ctc"].sum.item() == pytest.approx(expected, rel=1e-4)
    assert int(terms["ctc"].count) == 2


def test_an_infeasible_pair_counts_nothing_and_gives_no_gradient(model):
    possible, impossible = ([8], [9]), ([7], [9, 9, 9])  # four frames cannot carry 9 _ 9 _ 9
    both = model.loss(pair_batch([possible, impossible]), torch.Generator())["ctc"]
    alone = model.loss(pair_batch([possible]), torch.Generator())["ctc"]
    assert int(both.count) == int(alone.count) == 1
    assert both.sum.item() == pytest.approx(alone.sum.item(), rel=1e-5)
    model.loss(pair_batch([impossible]), torch.Generator())["ctc"].sum.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("source", "target", "possible"),
    [([8], [9, 10, 11, 9], True), ([8], [9, 10, 11, 9, 8], False), ([8], [9, 9], True), ([8], [9, 9, 9], False)],
)
def test_frames_must_carry_the_target_and_a_blank_between_equal_neighbours(source, target, possible):
    assert spec(upsample=2).learnable(source, target) is possible


def test_label_smoothing_is_the_mean_distance_of_real_frames_to_the_uniform_distribution():
    torch.manual_seed(0)
    model = spec(label_smoothing=0.1).build(VOCABULARY).eval()
    batch = pair_batch([([8, 9, 10], [9]), ([7], [8])])
    memory = model.encode(batch.source, batch.source_mask)
    log_probs = model.frame_logits(memory.states, memory.mask).log_softmax(-1)
    terms = model.loss(batch, torch.Generator())
    assert terms["smoothing"].weight == pytest.approx(0.1)
    assert terms["ctc"].weight == pytest.approx(0.9)
    assert terms["smoothing"].sum.item() == pytest.approx(-log_probs.mean(-1)[memory.mask].sum().item(), rel=1e-5)
    assert int(terms["smoothing"].count) == int(memory.mask.sum())


def test_one_pass_is_argmax_then_collapse(model):
    source, mask = source_batch([[8, 9, 10], [7], [11, 11]])
    memory = model.encode(source, mask)
    frames = list(refine(model, source, mask))
    assert [frame.kind for frame in frames] == ["fill", "collapse"]
    log_probs = model.frame_log_probs(memory)
    for row, decoded in enumerate(final(frames, 3)):
        path = log_probs[row, : int(memory.lengths[row])].argmax(-1).tolist()
        assert decoded.tokens == collapse(tuple(path))
        assert decoded.iterations == 1
        assert not set(decoded.tokens) & set(SPECIAL_IDS)
        assert all(score <= 0 for score in decoded.scores)
    assert (frames[0].tokens[~memory.mask] == PAD).all()


def test_only_the_blank_among_the_special_symbols_can_fill_a_frame(model):
    memory = model.encode(*source_batch([[8, 9]]))
    log_probs = model.frame_log_probs(memory)[0]
    forbidden = [i for i in SPECIAL_IDS if i != BLANK]
    assert (log_probs[:, forbidden] == -torch.inf).all()
    assert log_probs[:, BLANK].isfinite().all()


def test_a_wide_beam_finds_the_most_probable_output_of_all_paths(model):
    source, mask = source_batch([[8]])
    memory = model.encode(source, mask)
    totals = enumerated(model.frame_log_probs(memory)[0])
    best = sorted(totals.items(), key=lambda item: -item[1])[:3]
    found = model.candidates(memory, beam=500, n_best=3)[0]
    assert [tuple(h.tokens) for h in found] == [tokens for tokens, _ in best]
    for hypothesis, (_, mass) in zip(found, best, strict=True):
        assert hypothesis.log_prob == pytest.approx(math.log(mass), abs=1e-4)


def test_padding_the_source_changes_no_frame(model):
    short, long = [8, 9], [7, 8, 9, 10, 11, 7, 8]
    alone = model.encode(*source_batch([short]))
    padded = model.encode(*source_batch([short, long]))
    n = int(alone.lengths[0])
    torch.testing.assert_close(padded.states[0, :n], alone.states[0])
    a = model.frame_logits(alone.states, alone.mask)[0]
    torch.testing.assert_close(model.frame_logits(padded.states, padded.mask)[0, :n], a)


class Watched(CTC):
    """Keeps the inputs of the refining layers."""

    def frame_logits(self, frames, mask):
        self.seen = [*getattr(self, "seen", []), frames]
        return super().frame_logits(frames, mask)


def test_glancing_shows_the_scheduled_share_of_the_wrong_frames():
    torch.manual_seed(0)
    model = Watched(spec(glancing_start=0.8, glancing_end=0.2, upsample=3), VOCABULARY).train()
    batch = pair_batch([([8] * 20, list(range(7, 12)) * 8), ([9] * 5, [7, 8])])
    for fraction, share in ((0.0, 0.8), (0.5, 0.5), (1.0, 0.2)):
        model.progress(fraction)
        model.seen = []
        model.loss(batch, torch.Generator().manual_seed(1))
        before, after = model.seen
        with torch.no_grad():
            memory = model.encode(batch.source, batch.source_mask)
            logits = super(Watched, model).frame_logits(memory.states, memory.mask)
        path = best_alignment(logits, memory.lengths, batch.target, batch.target_mask.sum(1), blank=BLANK)
        wrong = (((logits + model.banned).argmax(-1) != path) & memory.mask).sum(1)
        assert (wrong > 5).all()
        assert torch.equal((before != after).any(-1).sum(1), (share * wrong).round().long())
        assert not (before != after)[~memory.mask].any()


def test_glancing_shows_tokens_of_an_alignment_of_the_target():
    torch.manual_seed(0)
    model = Watched(spec(glancing_start=0.9, glancing_end=0.9), VOCABULARY).train()
    batch = pair_batch([([8, 9, 10, 11], [11, 10, 9])])
    model.loss(batch, torch.Generator().manual_seed(1))
    before, after = model.seen
    shown = after[(before != after).any(-1)] / math.sqrt(model.spec.d_model)
    ids = torch.cdist(shown, model.embedding.weight).argmin(-1)
    assert len(ids)
    assert set(ids.tolist()) <= {11, 10, 9, BLANK}


def test_glancing_follows_the_generator_and_is_off_in_evaluation():
    torch.manual_seed(0)
    model = Watched(spec(), VOCABULARY).train()
    batch = pair_batch([([8, 9, 10, 11], [11, 10, 9])])
    once, again, other = (model.loss(batch, torch.Generator().manual_seed(s))["ctc"].sum.item() for s in (1, 1, 5))
    assert once == again != other
    model.eval()
    model.seen = []
    model.loss(batch, torch.Generator())
    assert len(model.seen) == 1


def test_the_encoder_of_a_teacher_fits():
    teacher = AutoregressiveSpec(d_model=16, n_heads=2, d_ff=32, encoder_layers=1, decoder_layers=2).build(VOCABULARY)
    student = spec().build(VOCABULARY)
    copied = fill_matching(student, teacher.state_dict())
    assert {"embedding.weight", "encoder.norm.weight"} <= set(copied)
    assert sum(name.startswith("encoder.") for name in copied) == sum(
        name.startswith("encoder.") for name in student.state_dict()
    )
    torch.testing.assert_close(student.embedding.weight, teacher.embedding.weight)


def test_layers_take_one_spec_each():
    from hasten.attention import FullSpec

    with pytest.raises(UserError, match="2 entries"):
        spec(encoder_layers=3, encoder_attention=(FullSpec(), FullSpec())).build(VOCABULARY)
