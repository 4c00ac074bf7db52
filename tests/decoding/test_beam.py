import random
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hasten.data.tokenizer import BOS, EOS, SPECIAL_IDS
from hasten.decoding import beam as module
from hasten.decoding.beam import Hypothesis, StepModel, beam_search, length_normalised
from hasten.decoding.refine import final, refine
from hasten.errors import UserError
from hasten.models import AutoregressiveSpec
from hasten.models.base import Memory

A, B = 7, 8
VOCABULARY = 9


@dataclass(frozen=True)
class Said:
    """A state that is the whole past: no cache can hide a mistake in the reordering."""

    sources: Tensor
    tokens: Tensor

    def select(self, rows: Tensor) -> "Said":
        return Said(self.sources[rows], self.tokens[rows])


class Toy:
    """Random but fixed log p(A, B or EOS | source, everything said)."""

    def __init__(self, seed: int, limits: list[int]):
        self.seed, self.limits = seed, limits

    def log_probs(self, source: int, said: tuple[int, ...]) -> Tensor:
        draw = random.Random(f"{self.seed} {source} {said}")
        scores = torch.full((VOCABULARY,), -torch.inf)
        scores[[A, B, EOS]] = torch.tensor([draw.gauss(0, 1.5) for _ in range(3)])
        return scores.log_softmax(0)

    def begin(self, memory: Memory) -> Said:
        return Said(memory.states[:, 0, 0].long(), torch.empty(len(memory.mask), 0, dtype=torch.int64))

    def next_log_probs(self, last: Tensor, position: int, state: Said) -> tuple[Tensor, Said]:
        if position == 0:
            assert (last == BOS).all()
        else:
            state = Said(state.sources, torch.cat((state.tokens, last[:, None]), 1))
        assert state.tokens.shape[1] == position
        pairs = zip(state.sources.tolist(), state.tokens.tolist(), strict=True)
        return torch.stack([self.log_probs(source, tuple(said)) for source, said in pairs]), state

    def limit(self, memory: Memory) -> Tensor:
        return torch.tensor([self.limits[int(source)] for source in memory.states[:, 0, 0]])

    def outputs(self, source: int, length_penalty: float) -> list[Hypothesis]:
        """All of them by enumeration, best first."""
        limit, found = self.limits[source], []
        for length in range(1, limit + 1):
            for tokens in product([A, B, EOS], repeat=length):
                if EOS in tokens[:-1] or (length < limit and tokens[-1] != EOS):
                    continue
                log_prob = sum(float(self.log_probs(source, tokens[:i])[tokens[i]]) for i in range(length))
                found.append(Hypothesis(list(tokens), log_prob, log_prob / length**length_penalty))
        return sorted(found, key=lambda one: -one.score)


def memory_of(*sources: int) -> Memory:
    return Memory(torch.tensor(sources, dtype=torch.float)[:, None, None], torch.ones(len(sources), 1) > 0)


def tokens(found: list[Hypothesis]) -> list[list[int]]:
    return [one.tokens for one in found]


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0, -0.5])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_a_beam_as_wide_as_there_are_outputs_is_enumeration(length_penalty: float, seed: int):
    toy = Toy(seed, [4])
    expected = toy.outputs(0, length_penalty)
    [found] = beam_search(toy, memory_of(0), beam=3**4, n_best=3**4, length_penalty=length_penalty)
    assert tokens(found) == tokens(expected)
    torch.testing.assert_close([one.score for one in found], [one.score for one in expected], rtol=0, atol=1e-5)
    [[best]] = beam_search(toy, memory_of(0), beam=3**4, length_penalty=length_penalty)
    assert best.tokens == expected[0].tokens


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5])
@pytest.mark.parametrize(("beam", "n_best"), [(2, 1), (3, 1), (4, 2), (4, 4)])
def test_stopping_early_returns_what_going_on_would(
    length_penalty: float, beam: int, n_best: int, monkeypatch: pytest.MonkeyPatch
):
    def search(seed: int):
        toy = Toy(seed, [8])
        return beam_search(toy, memory_of(0), beam=beam, n_best=n_best, length_penalty=length_penalty)

    early = [search(seed) for seed in range(60)]
    monkeypatch.setattr(module._Row, "settled", lambda self, best_live, length: False)
    assert early == [search(seed) for seed in range(60)]


def test_a_search_stops_as_soon_as_nothing_can_overtake(monkeypatch: pytest.MonkeyPatch):
    toy, steps = Toy(0, [50]), []
    certain = torch.full((VOCABULARY,), -torch.inf)
    certain[[A, EOS]] = torch.tensor([0.01, 0.99]).log()
    monkeypatch.setattr(toy, "log_probs", lambda source, said: steps.append(said) or certain)
    beam_search(toy, memory_of(0), beam=2, length_penalty=0.0)
    assert steps == [()]


def test_the_length_counts_the_end_symbol():
    toy = Toy(3, [4])
    for hypothesis in beam_search(toy, memory_of(0), beam=9, n_best=9, length_penalty=1.0)[0]:
        assert hypothesis.score == pytest.approx(hypothesis.log_prob / len(hypothesis.tokens))
    assert length_normalised(-6.0, 3, 1.0) == -2.0
    assert length_normalised(-6.0, 3, 0.0) == -6.0
    assert length_normalised(0.0, 0) == 0.0


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_a_row_is_found_the_same_alone_and_in_any_batch(beam: int):
    toy = Toy(1, [1, 6, 3, 9, 4])
    order = [3, 0, 4, 2, 1, 3]
    batch = beam_search(toy, memory_of(*order), beam=beam, n_best=beam)
    assert batch == [beam_search(toy, memory_of(source), beam=beam, n_best=beam)[0] for source in order]


def by_definition(toy: Toy, beam: int, length_penalty: float) -> list[Hypothesis]:
    """One sentence, one hypothesis at a time, until none is left."""
    live, found = [((), 0.0)], []
    for length in range(1, toy.limits[0] + 1):
        heirs = [
            ((*said, token), log_prob + float(toy.log_probs(0, said)[token]))
            for said, log_prob in live
            for token in (A, B, EOS)
        ]
        heirs = sorted(heirs, key=lambda heir: -heir[1])[: beam - len(found)]
        ended = [heir for heir in heirs if heir[0][-1] == EOS or length == toy.limits[0]]
        found += [Hypothesis(list(said), log_prob, log_prob / length**length_penalty) for said, log_prob in ended]
        live = [heir for heir in heirs if heir not in ended]
    return sorted(found, key=lambda one: -one.score)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("beam", [1, 2, 3, 6])
def test_a_narrow_beam_finds_what_its_definition_finds(beam: int, length_penalty: float):
    for seed in range(25):
        toy = Toy(seed, [7])
        [found] = beam_search(toy, memory_of(0), beam=beam, n_best=beam, length_penalty=length_penalty)
        assert tokens(found) == tokens(by_definition(toy, beam, length_penalty))


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_a_beam_of_one_is_greedy(seed: int):
    toy, said = Toy(seed, [7]), []
    while len(said) < 7 and EOS not in said:
        said.append(int(toy.log_probs(0, tuple(said)).argmax()))
    assert beam_search(toy, memory_of(0), beam=1)[0][0].tokens == said


def test_the_end_symbol_comes_last_or_the_limit_is_reached():
    for found in beam_search(Toy(2, [5, 1, 3]), memory_of(0, 1, 2), beam=4, n_best=4):
        assert 1 <= len(found) <= 4
        for hypothesis in found:
            assert EOS not in hypothesis.tokens[:-1]
    [short] = beam_search(Toy(2, [5, 1, 3]), memory_of(1), beam=4, n_best=4)
    assert {len(hypothesis.tokens) for hypothesis in short} == {1}
    assert len(short) == 3, "fewer outputs than asked for where there are no more"


def test_an_empty_batch_has_no_results():
    assert beam_search(Toy(0, []), Memory(torch.empty(0, 1, 1), torch.ones(0, 1) > 0), beam=2) == []


@pytest.mark.parametrize(("beam", "n_best"), [(0, 1), (2, 3), (2, 0)])
def test_numbers_out_of_range_are_refused(beam: int, n_best: int):
    with pytest.raises(UserError, match="need 1 <= n_best <= beam"):
        beam_search(Toy(0, [3]), memory_of(0), beam=beam, n_best=n_best)


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        built = AutoregressiveSpec(d_model=32, d_ff=64, encoder_layers=1, decoder_layers=2).build(60)
        # A random tied table makes a model repeat its input; a smaller one makes all tokens likely.
        built.embedding.weight.data *= 0.3
        return built.eval()


SOURCES = [[10, 11, EOS], [12, EOS], [20, 21, 22, 23, 24, EOS]]


def encode(model, rows: list[list[int]]) -> Memory:
    from hasten.data.batch import pad

    with torch.inference_mode():
        return model.encode(*pad(rows))


def test_a_transformer_found_by_a_beam_of_one_is_the_plain_loop(model):
    from hasten.data.batch import pad

    assert isinstance(model, StepModel)
    loop = final(refine(model, *pad(SOURCES)), len(SOURCES))
    for decoded, [hypothesis] in zip(loop, beam_search(model, encode(model, SOURCES), beam=1), strict=True):
        assert hypothesis.tokens == decoded.tokens
        assert hypothesis.log_prob == pytest.approx(sum(decoded.scores), abs=1e-4)


class Forgetful:
    """The same Transformer without caches: the whole output is read anew at every step."""

    def __init__(self, model):
        self.model = model

    def begin(self, memory: Memory) -> tuple[Memory, Said]:
        return memory, Said(torch.zeros(len(memory.mask)), torch.empty(len(memory.mask), 0, dtype=torch.int64))

    def next_log_probs(self, last: Tensor, position: int, state: tuple[Memory, Said]):
        memory, said = state
        said = Said(said.sources, torch.cat((said.tokens, last[:, None]), 1))
        inputs = self.model.embed(said.tokens)
        states = self.model.decoder(inputs, memory.states, memory.mask)
        return self.model.logits(states[:, -1]).log_softmax(-1) + self.model.banned, (memory, said)

    def limit(self, memory: Memory) -> Tensor:
        return self.model.limit(memory)


def test_reordered_caches_give_what_reading_everything_anew_gives(model):
    cached = beam_search(model, encode(model, SOURCES), beam=4, n_best=4)
    anew = beam_search(Forgetful(model), encode(model, SOURCES), beam=4, n_best=4)
    assert [tokens(found) for found in cached] == [tokens(found) for found in anew]
    for found, expected in zip(cached, anew, strict=True):
        torch.testing.assert_close([h.log_prob for h in found], [h.log_prob for h in expected], rtol=0, atol=1e-3)


def test_a_transformer_says_no_special_ids(model):
    for found in beam_search(model, encode(model, SOURCES), beam=5, n_best=5):
        for hypothesis in found:
            assert not set(hypothesis.tokens[:-1]) & set(SPECIAL_IDS)
            assert hypothesis.tokens[-1] not in set(SPECIAL_IDS) - {EOS}


def test_a_wider_batch_changes_no_transformer_output(model):
    together = beam_search(model, encode(model, SOURCES), beam=3, n_best=3)
    alone = [beam_search(model, encode(model, [row]), beam=3, n_best=3)[0] for row in SOURCES]
    assert [tokens(found) for found in together] == [tokens(found) for found in alone]
