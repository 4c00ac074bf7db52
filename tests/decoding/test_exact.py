"""Drafts checked many tokens at once: what is said is what greedy decoding says, whatever the draft."""

import dataclasses

import pytest
import torch
from torch import Tensor

from hasten.attention.average import AverageSpec
from hasten.data.batch import source_batch
from hasten.data.tokenizer import EOS, PAD, Tokenizer
from hasten.decoding import exact as module
from hasten.decoding.exact import exact, found
from hasten.decoding.refine import Decoded, final, refine
from hasten.errors import UserError
from hasten.models import AutoregressiveSpec
from hasten.models.autoregressive import Autoregressive
from hasten.translator import Translator, load

SOURCES = [[10, 11, 12], [13], [14, 15, 16, 17, 18, 19, 20], [21, 22]]
MOST = 13
SHARED = {"decoder_layers": 3, "decoder_sharing": (1, 1, 3), "cross_sharing": (1, 1, 1)}
OPTIONS = {
    "plain": {},
    "weights": {**SHARED, "shared_of_cross": "weights"},
    "context": {**SHARED, "shared_of_cross": "context"},
    "output": {**SHARED, "shared_of_cross": "output"},
}


def teacher(seed: int = 2, **options) -> Autoregressive:
    """A model of random weights, for which what stands before matters, that says at most 13 tokens."""
    spec = AutoregressiveSpec(d_model=32, d_ff=64, encoder_layers=1, **{"decoder_layers": 2, **options})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = spec.build(40).eval()
        torch.manual_seed(seed)
        for parameter in [*model.encoder.parameters(), *model.decoder.parameters()]:
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=1.2)
            else:
                parameter += 0.3 * torch.randn_like(parameter)
        model.embedding.weight *= 0.6
        model.decoder.norm.weight.mul_(5)
    model.most_steps = MOST
    return model


def greedy(model: Autoregressive) -> list[Decoded]:
    """Token by token, every source alone."""
    return [final(refine(model, *source_batch([source])), 1)[0] for source in SOURCES]


def drafted(model: Autoregressive, drafts: list[list[int]]) -> list[Decoded]:
    return final(exact(model, *source_batch(SOURCES), drafts), len(SOURCES))


def tokens(rows: list[Decoded]) -> list[list[int]]:
    return [row.tokens for row in rows]


@pytest.fixture(scope="module")
def plain() -> tuple[Autoregressive, list[Decoded]]:
    """A model, and what it says."""
    return (model := teacher()), greedy(model)


HOSTILE = {
    "empty": lambda said, limit: [],
    "perfect": lambda said, limit: said,
    "all wrong": lambda said, limit: [(token - 7) % 32 + 8 for token in said],
    "too long": lambda said, limit: [*said, *[30] * 70],
    "ending early": lambda said, limit: said[: len(said) // 2],
    "at the limit": lambda said, limit: [*said, *[31] * limit][:limit],
    "one before the limit": lambda said, limit: [*said, *[31] * limit][: limit - 1],
    "a word left out": lambda said, limit: said[:2] + said[3:],
    "a word put in": lambda said, limit: [*said[:2], 33, *said[2:]],
    "a word changed": lambda said, limit: [*said[:3], 33, *said[4:]],
    "words turned": lambda said, limit: said[::-1],
    "no text": lambda said, limit: [PAD, EOS, 1, 2, 3, *said],
}


def hostile(model: Autoregressive, expected: list[Decoded], kind: str) -> list[list[int]]:
    return [HOSTILE[kind](model.output_ids(row.tokens), MOST) for row in expected]


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_said_is_what_greedy_decoding_says_whatever_the_draft(plain, kind: str):
    model, expected = plain
    drafts = hostile(model, expected, kind)
    together = drafted(model, drafts)
    assert tokens(together) == tokens(expected)
    for row, own in zip(together, expected, strict=True):
        assert row.scores == pytest.approx(own.scores, abs=module.NEARLY_TIED / 2)
    for source, draft, row in zip(SOURCES, drafts, together, strict=True):
        [alone] = final(exact(model, *source_batch([source]), [draft]), 1)
        assert (alone.tokens, alone.iterations) == (row.tokens, row.iterations)


@pytest.mark.parametrize("options", ["weights", "context", "output"])
def test_it_is_so_where_layers_share_attention(options: str):
    model = teacher(**OPTIONS[options])
    expected = greedy(model)
    for kind in ("perfect", "ending early", "a word changed", "words turned"):
        assert tokens(drafted(model, hostile(model, expected, kind))) == tokens(expected)


def test_the_models_of_these_tests_end_some_outputs_and_vary_their_words(plain):
    said = [*tokens(plain[1]), *tokens(greedy(teacher(**OPTIONS["output"])))]
    assert len({token for row in said for token in row}) > 8
    assert len({len(row) for row in said}) > 2
    assert 0 < sum(row[-1] == EOS for row in said) < len(said)


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_random_draft_of_every_row_changes_nothing(seed: int):
    model, draw = teacher(seed), torch.Generator().manual_seed(seed)
    expected = greedy(model)
    drafts = []
    for row in expected:
        flips = (torch.rand(len(row.tokens), generator=draw) < 0.3).tolist()
        drafts.append([33 if flip else token for token, flip in zip(row.tokens, flips, strict=True)])
    assert tokens(drafted(model, drafts)) == tokens(expected)


def test_a_perfect_draft_takes_one_pass_and_none_takes_one_a_token(plain):
    model, expected = plain
    assert [row.iterations for row in drafted(model, tokens(expected))] == [1] * len(SOURCES)
    assert [row.iterations for row in drafted(model, [[]] * len(SOURCES))] == [len(row.tokens) for row in expected]


def test_every_pass_shows_what_was_said_so_far(plain):
    model, expected = plain
    frames = list(exact(model, *source_batch(SOURCES), [[]] * len(SOURCES)))
    for n, frame in enumerate(frames):
        assert (frame.iteration, frame.kind) == (n, "append")
        said = [expected[row].tokens[: n + 1] for row in frame.rows.tolist()]
        assert [[t for t in row if t != PAD] for row in frame.tokens.tolist()] == said
        assert frame.done.tolist() == [len(expected[row].tokens) == n + 1 for row in frame.rows.tolist()]


# Where a draft goes on


@pytest.mark.parametrize(
    ("draft", "place", "word", "expected"),
    [
        ([5, 6, 7, 8], 1, 7, 2),
        ([5, 6, 7, 8], 1, 9, None),
        ([5, 6, 7, 8], 2, 6, 1),
        ([7, 6, 5, 6, 7], 2, 7, 4),
        ([5] + [6] * 9, 9, 5, None),
        ([5] + [6] * 9, 8, 5, 0),
        ([6] * 9 + [5], 1, 5, 9),
        ([6] * 9 + [5], 0, 5, None),
        ([], 0, 5, None),
        ([5], 7, 5, 0),
    ],
)
def test_the_nearest_place_of_a_word_counts_of_two_the_later(draft, place, word, expected):
    assert found(draft, place, word) == expected


# Ties


@pytest.mark.parametrize("kind", ["empty", "perfect", "a word changed"])
def test_ties_go_as_in_greedy_decoding(kind: str):
    model = teacher()
    with torch.no_grad():  # every word and the end symbol have a twin that scores exactly alike
        model.embedding.weight[24:40] = model.embedding.weight[8:24]
        model.embedding.weight[39] = model.embedding.weight[EOS]
    expected = greedy(model)
    drafts = hostile(model, expected, kind)
    assert tokens(drafted(model, drafts)) == tokens(expected)
    twins = [[token + 16 if 8 <= token < 24 else token for token in draft] for draft in drafts]
    assert tokens(drafted(model, twins)) == tokens(expected)


def test_what_is_nearly_tied_single_steps_decide(plain, monkeypatch: pytest.MonkeyPatch):
    model, expected = plain
    own, turned = model.chunk_log_probs, 0

    def rounded(words: Tensor, places: Tensor, state):
        """As if rounding had made the second best the best, where they are close."""
        nonlocal turned
        log_probs, state = own(words, places, state)
        best, ids = log_probs.topk(2)
        close = best[..., 0] - best[..., 1] < 1.0
        turned += int(close.sum())
        mean = best.mean(-1, keepdim=True) + torch.tensor([-1e-4, 1e-4])
        return log_probs.scatter(-1, ids, torch.where(close[..., None], mean, best)), state

    monkeypatch.setattr(model, "chunk_log_probs", rounded)
    assert tokens(drafted(model, tokens(expected))) == tokens(expected)
    assert turned
    monkeypatch.setattr(module, "NEARLY_TIED", 0.0)
    assert tokens(drafted(model, tokens(expected))) != tokens(expected)


# What is refused


def test_a_decoder_that_cannot_take_back_tokens_is_refused_in_one_line():
    model = teacher(decoder_attention=(AutoregressiveSpec().decoder_attention[0], AverageSpec()))
    with pytest.raises(UserError, match=r"decoder attention, layer 2: AverageAttention cannot take back positions"):
        drafted(model, [[] for _ in SOURCES])


def test_scores_that_are_not_numbers_are_an_error():
    model = teacher()
    with torch.no_grad():
        model.embedding.weight[20] = torch.nan
    with pytest.raises(UserError, match="not numbers"):
        drafted(model, [[] for _ in SOURCES])


# Translating


@pytest.mark.parametrize("kind", ["ctc", "mask_predict", "autoregressive"])
def test_a_draft_by_any_model_changes_no_translation(tiny_run, kind: str):
    model, student = load(tiny_run("autoregressive")), load(tiny_run(kind))
    lines = ["kamo ti.", "", "ö", "lunsch re mo zu, er ti. kamo"]
    narrow = dataclasses.replace(model, max_source_tokens=16)
    expected = narrow.candidates(lines)
    said = narrow.candidates(lines, draft=student)
    assert [line[0].text for line in said] == [line[0].text for line in expected]
    assert [line[0].score for line in said] == pytest.approx([line[0].score for line in expected], abs=1e-4)
    assert narrow.read(narrow.trace("ö", draft=student)) == expected[2][0].text
    assert narrow.trace("", draft=student) == []


def test_a_draft_may_have_another_tokenizer(tiny_run, tiny_spec, words: list[str]):
    model = load(tiny_run("autoregressive"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        other = Tokenizer.train(words, 320)
        student = Translator(tiny_spec("ctc").model.build(other.vocab_size).eval(), other)
    assert model.translate(["kamo", "ö"], draft=student) == model.translate(["kamo", "ö"])


def test_a_draft_needs_a_model_that_checks_it_and_no_beam(tiny_run):
    model, student = load(tiny_run("autoregressive")), load(tiny_run("ctc"))
    with pytest.raises(UserError, match="CTC models check no drafts; an autoregressive model does"):
        student.translate(["ti"], draft=model)
    with pytest.raises(UserError, match="beam is 2; a draft is checked"):
        model.translate(["ti"], draft=student, beam=2)
