"""A shortlist in PyTorch: what is said is what the whole vocabulary says with all else at -inf before the softmax."""

from dataclasses import replace

import pytest
import torch

import hasten
from hasten.data import shortlist
from hasten.data.shortlist import Shortlist
from hasten.data.tokenizer import BLANK, PAD, SPECIAL_IDS
from hasten.decoding.ctc_beam import greedy
from hasten.errors import UserError
from hasten.models.marian import MarianSpec
from hasten.translator import Translator

KINDS = ["autoregressive", "ctc", "dag", "marian"]
LINES = ["kamo ti.", "", "lunsch re, mo!", "ö", "tire tire tire tire tire", "\u2581 \x00 😀\ue000", "kamo ti."]


@pytest.fixture(scope="module")
def table(words, tokenizer) -> Shortlist:
    pairs = [(tokenizer.encode(a), tokenizer.encode(b)) for a, b in zip(words[:90], words[90:180], strict=True)]
    return shortlist.build(pairs, tokenizer, translations=4, frequent=5)


@pytest.fixture(scope="module", params=KINDS)
def translator(request: pytest.FixtureRequest, tiny_run, tokenizer) -> Translator:
    """Random weights whose outputs depend on the source."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if request.param == "marian":
            sizes = {"d_model": 32, "n_heads": 4, "d_ff": 64, "encoder_layers": 1, "decoder_layers": 1}
            made = Translator(MarianSpec(**sizes).build(tokenizer.vocab_size).eval(), tokenizer)
        else:
            made = hasten.load(tiny_run(request.param))
        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter += 0.15 * torch.randn_like(parameter)
    return made


def outside(translator: Translator, table: Shortlist, line: str) -> torch.Tensor:
    """-inf at what the line's list lacks."""
    mask = torch.full((translator.tokenizer.vocab_size,), -torch.inf)
    mask[torch.from_numpy(table.ids(translator.tokenizer.encode(line.strip())))] = 0
    return mask


def masked(translator: Translator, table: Shortlist, line: str, monkeypatch: pytest.MonkeyPatch):
    """The definition: one line, scores of all pieces, those outside of its list at -inf."""
    model, absent = translator.model, outside(translator, table, line)
    whole = type(model).logits
    monkeypatch.setattr(model, "logits", lambda states: whole(model, states) + absent)


@pytest.mark.parametrize("beam", [1, 3])
def test_what_is_said_is_what_all_pieces_say_without_the_others(translator, table, monkeypatch, beam):
    found = replace(translator, shortlist=table).candidates(LINES, beam=beam, n_best=beam)
    free = translator.candidates(LINES, beam=beam, n_best=beam)
    assert [row[0].text for row in found] != [row[0].text for row in free], "the list changes something"
    for line, own in zip(LINES, found, strict=True):
        with monkeypatch.context() as patch:
            masked(translator, table, line, patch)
            [expected] = translator.candidates([line], beam=beam, n_best=beam)
        assert [one.text for one in own] == [one.text for one in expected]
        for one, other in zip(own, expected, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-4)
            assert one.log_prob == pytest.approx(other.log_prob, abs=1e-3)


def test_ctc_says_the_best_of_each_frame_among_its_list(tiny_run, table):
    translator = hasten.load(tiny_run("ctc"))
    model = translator.model
    for line in (line for line in LINES if line):
        ids = torch.tensor([[*translator.tokenizer.encode(line), 3]])
        with torch.inference_mode():
            memory = model.encode(ids, torch.ones_like(ids, dtype=torch.bool))
            logits = model.frame_logits(memory.states, memory.mask) + outside(translator, table, line)
            banned = [i for i in SPECIAL_IDS if i != BLANK]
            expected = greedy(logits.log_softmax(-1), memory.lengths, blank=BLANK, pad=PAD, banned=banned)
        last = replace(translator, shortlist=table).trace(line)[-1]
        assert last.tokens.tolist() == expected.tokens.tolist()
        torch.testing.assert_close(last.scores, expected.scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["greedy", "lookahead", "viterbi", "beam"])
def test_every_way_through_a_graph_keeps_to_the_list(tiny_run, table, monkeypatch, method):
    translator = hasten.load(tiny_run("dag"), decoding=[f'method="{method}"'])
    [found] = replace(translator, shortlist=table).candidates(["kamo ti lunsch"])
    masked(translator, table, "kamo ti lunsch", monkeypatch)
    [expected] = translator.candidates(["kamo ti lunsch"])
    assert found[0].text == expected[0].text
    assert found[0].log_prob == pytest.approx(expected[0].log_prob, abs=1e-4)


@pytest.mark.parametrize("beam", [1, 3])
def test_a_list_of_everything_changes_nothing(translator, tokenizer, beam):
    whole = replace(translator, shortlist=shortlist.everything(tokenizer))
    expected = translator.candidates(LINES, beam=beam)
    for [one], [other] in zip(whole.candidates(LINES, beam=beam), expected, strict=True):
        assert one.text == other.text
        assert one.score == pytest.approx(other.score, abs=1e-5)


@pytest.mark.parametrize("beam", [1, 3])
def test_a_line_is_said_alone_as_in_any_batch_and_order(translator, table, beam):
    listed = replace(translator, shortlist=table)
    alone = [listed.translate([line], beam=beam)[0] for line in LINES]
    for batch_tokens in (1, 30, 4096):
        assert listed.translate(LINES, beam=beam, batch_tokens=batch_tokens) == alone
    assert listed.translate(LINES[::-1], beam=beam) == alone[::-1]


def test_every_piece_said_is_in_the_list(translator, table):
    listed = replace(translator, shortlist=table)
    for line in LINES:
        allowed = {*table.ids(listed.tokenizer.encode(line.strip())).tolist()}
        for frame in listed.trace(line):
            assert {*frame.tokens.flatten().tolist()} <= allowed


def test_a_student_with_a_list_drafts_and_the_teacher_stays_itself(tiny_run, table):
    teacher, student = hasten.load(tiny_run("autoregressive")), hasten.load(tiny_run("ctc"))
    listed = replace(student, shortlist=table)
    assert teacher.translate(LINES, draft=listed) == teacher.translate(LINES)
    with pytest.raises(UserError, match="a model with a shortlist checks no drafts"):
        replace(teacher, shortlist=table).translate(LINES, draft=student)
    assert replace(teacher, shortlist=table).translate(["kamo"], beam=2, rescorer=teacher)


def test_models_that_take_no_list_say_so(tiny_run, table):
    for kind in ("refinement", "mask_predict", "nat"):
        with pytest.raises(UserError, match="models take no shortlist; autoregressive, marian, ctc and dag ones do"):
            replace(hasten.load(tiny_run(kind)), shortlist=table)


def test_a_file_is_read_when_a_model_is_loaded(tiny_run, table, tmp_path):
    table.save(tmp_path / "x.npz")
    listed = hasten.load(tiny_run("ctc"), shortlist=tmp_path / "x.npz")
    assert listed.translate(LINES) == replace(hasten.load(tiny_run("ctc")), shortlist=table).translate(LINES)
    with pytest.raises(UserError, match=r"x\.npz is for another tokenizer"):
        hasten.load("en-de-ctc", shortlist=tmp_path / "x.npz")
