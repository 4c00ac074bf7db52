"""Outputs judged by another model, and several outputs side by side."""

import dataclasses

import pytest
import torch
from torch import Tensor

from hasten.attention import SynthesizerSpec
from hasten.data.batch import source_batch
from hasten.data.tokenizer import BOS, EOS
from hasten.decoding.refine import final, refine
from hasten.errors import UserError
from hasten.models.base import Canvas, Edit, GenerationModel, Memory
from hasten.translator import Translator, load

LINES = ["kamo ti.", "lunsch re, mo!", "", "tire tire", "ö"]
WORDS = ["kamo", "ti", "re", "mo lunsch", "zu", "er en"]


@pytest.fixture(scope="module")
def teacher(tiny_run) -> Translator:
    return load(tiny_run("autoregressive"))


def by_steps(teacher: Translator, source: str, target: str) -> float:
    """Mean log probability of a text, one word after the other: nothing is computed at once."""
    model, ids = teacher.model, teacher.tokenizer.encode(target)
    with torch.inference_mode():
        memory = model.encode(*source_batch([teacher.tokenizer.encode(source)]))
        state, total = model.begin(memory).layers, 0.0  # type: ignore[operator]
        for position, (last, word) in enumerate(zip([BOS, *ids], [*ids, EOS], strict=True)):
            x, state = model.decoder.step(  # type: ignore[union-attr]
                model.positions(model.embedding(torch.tensor([[last]])) * 32**0.5, position),  # type: ignore[operator]
                state,
            )
            total += float(model.logits(x[:, 0]).log_softmax(-1)[0, word])  # type: ignore[operator]
    return total / (len(ids) + 1)


@pytest.mark.parametrize("batch_tokens", [1, 20, 4096])
def test_a_score_is_the_mean_log_probability_word_by_word(teacher: Translator, batch_tokens: int):
    targets = ["ti ti ti ti", "", "re", "kamo lunsch", "ö"]
    expected = [by_steps(teacher, s, t) for s, t in zip(LINES, targets, strict=True)]
    assert teacher.score(LINES, targets, batch_tokens=batch_tokens) == pytest.approx(expected, abs=1e-4)


def test_scores_need_as_many_targets_as_sources_and_a_model_that_gives_them(teacher: Translator, tiny_run):
    with pytest.raises(UserError, match="2 sources and 1 targets"):
        teacher.score(["a", "b"], ["c"])
    with pytest.raises(UserError, match="CTC models give no probability of a given text in one pass"):
        load(tiny_run("ctc")).score(["a"], ["b"])
    with pytest.raises(UserError, match="CTC models give no probability"):
        teacher.translate(["a"], beam=2, rescorer=load(tiny_run("ctc")))


@pytest.mark.parametrize("student", ["autoregressive", "ctc"])
def test_the_rescorer_chooses_what_it_likes_best_of_what_the_beam_found(tiny_run, words: list[str], student: str):
    # Another model than the teacher of this module: one of other weights.
    judge, model = load(tiny_run("autoregressive")), load(tiny_run(student))
    with torch.no_grad():
        judge.model.embedding.weight *= 3 * torch.randn(32, generator=torch.Generator().manual_seed(5))
    lines = [*LINES, *words[:10]]
    found = model.candidates(lines, beam=6, n_best=6)
    chosen = model.candidates(lines, beam=6, n_best=2, rescorer=judge)
    moved = 0
    for line, own, judged in zip(lines, found, chosen, strict=True):
        if not line.strip():
            continue
        alone = {candidate.text: judge.score([line], [candidate.text])[0] for candidate in own}
        ranked = sorted(alone, key=lambda text: -alone[text])
        assert [candidate.text for candidate in judged] == ranked[:2]
        assert [candidate.score for candidate in judged] == pytest.approx([alone[t] for t in ranked[:2]], abs=1e-4)
        moved += judged[0].text != own[0].text
    assert moved, "no choice was ever changed"
    assert model.translate(lines, beam=6, rescorer=judge) == [line[0].text for line in chosen]


class Dice(GenerationModel):
    """Says one of its ids as often as the source has tokens; candidate c says the id c places later."""

    def __init__(self, ids: list[int], scores: list[float]):
        super().__init__()
        self.embedding = torch.nn.Embedding(400, 4)
        self.ids, self.word_scores = torch.tensor(ids), torch.tensor(scores)
        self.edits = (Edit("fill", lambda canvas, memory, iteration: canvas),)

    def encode(self, source: Tensor, mask: Tensor) -> Memory:
        return Memory(source[..., None].float(), mask)

    def loss(self, batch, generator):
        raise NotImplementedError

    def start(self, memory: Memory) -> Canvas:
        return self.starts(memory, 1)

    def starts(self, memory: Memory, candidates: int) -> Canvas:
        shape = (len(memory.mask), candidates, memory.mask.shape[1])
        mask = memory.mask[:, None].expand(shape)
        tokens = (self.ids[:candidates, None] * mask).flatten(0, 1)
        scores = (self.word_scores[:candidates, None] * mask).flatten(0, 1)
        return Canvas(tokens, scores, torch.zeros(len(tokens), dtype=torch.bool))

    def stopped(self, before, after, memory, iteration):
        # Rows stop after as many iterations as their memory's row has tokens: the loop must keep both together.
        return memory.lengths <= iteration + 1


def test_outputs_side_by_side_are_ranked_by_their_mean_log_probability(tokenizer):
    ids = [tokenizer.encode(word)[0] for word in WORDS[:3]]
    translator = Translator(Dice(ids, [-2.0, -1.0, -1.0]).eval(), tokenizer)
    rows = final(refine(translator.model, *source_batch([[9, 9], [9]]), candidates=3), 6)
    assert [row.tokens for row in rows] == [[i] * n for n in (3, 2) for i in ids]
    assert [row.iterations for row in rows] == [3, 3, 3, 2, 2, 2]
    said = [tokenizer.decode([i] * (len(tokenizer.encode("kamo")) + 1)).strip() for i in ids]
    assert translator.translate(["kamo"]) == [said[0]]
    assert translator.translate(["kamo"], beam=3) == [said[1]], "the first of equal ones"
    [found] = translator.candidates(["kamo"], beam=3, n_best=3)
    assert [candidate.text for candidate in found] == [said[1], said[2], said[0]]
    assert found[0].score == -1.0


def test_a_rescorer_judges_outputs_side_by_side(tokenizer, teacher: Translator):
    ids = [tokenizer.encode(word)[0] for word in WORDS]
    translator = Translator(Dice(ids, [-1.0] * len(ids)).eval(), tokenizer)
    [found] = translator.candidates(["kamo ti"], beam=len(ids), n_best=len(ids), rescorer=teacher)
    scores = [teacher.score(["kamo ti"], [candidate.text])[0] for candidate in found]
    assert scores == pytest.approx([candidate.score for candidate in found], abs=1e-4)
    assert scores == sorted(scores, reverse=True)


def test_a_model_that_begins_in_one_way_says_so(tiny_run):
    model = load(tiny_run("ctc")).model
    with pytest.raises(UserError, match="CTC models begin in one way only"):
        list(refine(model, *source_batch([[9]]), candidates=2))


def test_settings_of_decoding_are_refused_where_there_are_none(tiny_run):
    with pytest.raises(UserError, match="ctc models have no settings of decoding to change; got 'iterations=4'"):
        load(tiny_run("ctc"), decoding=["iterations=4"])


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ("seed=1", "models have no setting of decoding 'seed'; allowed: adaptive, iterations, remove_repeats"),
        ("kind=ctc", "refinement models have no setting of decoding 'kind'; allowed: adaptive"),
        ("iterations.x=1", "refinement models have no setting of decoding 'iterations.x'; allowed: adaptive"),
        ("iterations", "'iterations' is no setting of decoding; write KEY=VALUE, for example iterations=10"),
        ("=4", "'=4' is no setting of decoding; write KEY=VALUE"),
        ("iterations=", "'iterations=' is no setting of decoding; write KEY=VALUE"),
        ("iterations=0", "model.decoding.iterations: Input should be greater than 0, got 0"),
    ],
)
def test_what_is_no_setting_of_decoding_is_answered_with_those_there_are(change, answer, tiny_run):
    with pytest.raises(UserError) as told:
        load(tiny_run("refinement"), decoding=["iterations=3", change])
    assert answer in str(told.value)


def test_a_length_power_that_numbers_cannot_hold_is_refused(tiny_run):
    with pytest.raises(UserError, match=r"length_power: Input should be less than or equal to 8, got 1e[+]308"):
        load(tiny_run("dag"), decoding=["length_power=1e308"])


def test_a_rescorer_that_cannot_take_a_text_says_so(tokenizer, tiny_spec):
    narrow = (SynthesizerSpec(parts=("random",), max_length=6),)
    spec = dataclasses.replace(tiny_spec("autoregressive").model, encoder_attention=narrow)
    short = Translator(spec.build(tokenizer.vocab_size).eval(), tokenizer)
    assert len(tokenizer.encode("kamo")) <= 5 < len(tokenizer.encode("kamo ti lunsch re"))
    assert short.score(["kamo"], ["ti"])[0] < 0
    for sides in (("kamo ti lunsch re", "ti"), ("ti", "kamo ti lunsch re")):
        with pytest.raises(UserError, match=r"a text of [0-9]+ pieces; the model that is to score it takes 5"):
            short.score(*([side] for side in sides))


def test_long_lines_are_judged_part_by_part(teacher: Translator):
    narrow = dataclasses.replace(teacher, max_source_tokens=16)
    text = "kamo ti lunsch re mo. " * 4
    [found] = narrow.candidates([text], beam=3, rescorer=teacher)
    assert found[0].text
    assert found[0].score < 0
