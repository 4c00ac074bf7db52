"""The directed acyclic Transformer: its loss, its ways through the graph, glancing, and what it is given."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from decoding.dag_definition import log_likelihood, path_log_prob, paths
from hasten.data.batch import pair_batch, source_batch
from hasten.data.tokenizer import PAD, PLACEHOLDER, SPECIAL_IDS
from hasten.decoding.beam import length_normalised
from hasten.decoding.dag_loss import best_path
from hasten.decoding.refine import Decoded, final, refine
from hasten.models.autoregressive import AutoregressiveSpec
from hasten.models.dag import DAG, DAGDecoding, DAGSpec
from hasten.nn.draws import row_draws
from hasten.training.checkpoint import fill_matching

VOCABULARY = 11  # seven special ids and four words: 7 .. 10
SMALL = {"d_model": 16, "n_heads": 2, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
SOURCES = [[8, 9, 10], [7], [], [10, 10, 7, 8]]
METHODS = ["greedy", "lookahead", "viterbi", "beam"]


def build(method: str = "lookahead", seed: int = 0, **changes) -> DAG:
    decoding = changes.pop("decoding", DAGDecoding(method=method))  # type: ignore[arg-type]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DAGSpec(**{**SMALL, "upsample": 2, **changes}, decoding=decoding).build(VOCABULARY)
        with torch.no_grad():  # a random model has one path, about, and one word; this one has several
            model.embedding.weight *= 0.5
            model.links.queries.weight *= 3
        return model.eval()


def decode(model: DAG, sources=SOURCES) -> list[Decoded]:
    return final(refine(model, *source_batch(sources)), len(sources))


def graph_of(model: DAG, source: list[int]) -> tuple[Tensor, Tensor]:
    """Log probabilities (L, V) of words, -inf for what is no text, and of edges (L, L)."""
    with torch.no_grad():
        memory = model.encode(*source_batch([source]))
        graph = model.graph(memory, model.inputs(memory))
        return (model.logits(graph.states[0]).log_softmax(-1) + model.banned).double(), graph.links[0].double()


def every_path(links: Tensor):
    return itertools.chain.from_iterable(paths(len(links), n) for n in range(len(links) - 1))


def said(words: Tensor, path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(words[list(path)].argmax(-1).tolist()) if path else ()


# The loss


def test_the_loss_is_the_sum_over_all_paths_of_words_and_edges():
    model, targets = build(), [[9, 9, 8], [10], [], [7, 8]]
    expected = 0.0
    for source, target in zip(SOURCES, targets, strict=True):
        expected -= log_likelihood(*graph_of(model, source), tuple(target)).item()
    term = model.loss(pair_batch(list(zip(SOURCES, targets, strict=True))), torch.Generator())["dag"]
    assert term.sum.item() == pytest.approx(expected, rel=1e-5)
    assert int(term.count) == 6 + 4, "the words, and the end of each"


def test_the_probabilities_of_all_outputs_sum_to_one_but_for_what_is_no_text():
    model = build(upsample=3)
    words, links = graph_of(model, [8])
    text = [i for i in range(VOCABULARY) if i not in SPECIAL_IDS]
    words = words[:, text].log_softmax(-1)
    total = sum(
        log_likelihood(words, links, output).exp()
        for n in range(5)
        for output in itertools.product(range(len(text)), repeat=n)
    )
    assert float(total) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("source", "target", "possible"),
    [
        ([8], [9, 10], True),
        ([8], [9, 10, 9], False),
        ([8], [9], True),
        ([8], [], True),
        ([], [], True),
        ([], [9], False),
    ],
)
def test_a_pair_can_be_learnt_where_the_graph_has_a_vertex_for_every_word_and_two_ends(source, target, possible):
    model = build()
    assert model.spec.learnable(source, target) is possible
    term = model.loss(pair_batch([(source, target)]), torch.Generator())["dag"]
    assert (int(term.count) > 0) is possible
    model.zero_grad()
    term.sum.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert possible or not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_a_graph_of_one_vertex_has_no_path_and_says_nothing():
    for method in METHODS:
        assert decode(build(method, upsample=1), [[]])[0].tokens == []
    assert not DAGSpec(upsample=1).learnable([], [])


def test_label_smoothing_is_the_mean_distance_of_the_vertices_that_say_words_to_the_uniform_distribution():
    model, batch = build(label_smoothing=0.1), pair_batch([([8, 9, 10], [9]), ([7], [8])])
    memory = model.encode(batch.source, batch.source_mask)
    graph = model.graph(memory, model.inputs(memory))
    log_probs = model.logits(graph.states).log_softmax(-1)
    terms = model.loss(batch, torch.Generator())
    assert (terms["smoothing"].weight, terms["dag"].weight) == (pytest.approx(0.1), pytest.approx(0.9))
    expected = -(log_probs[0, 1:7].mean(-1).sum() + log_probs[1, 1:3].mean(-1).sum()).item()
    assert terms["smoothing"].sum.item() == pytest.approx(expected, rel=1e-5)
    assert int(terms["smoothing"].count) == 8


@pytest.mark.parametrize("training", [False, True])
def test_bfloat16_gives_close_losses_and_finite_gradients_to_every_parameter(training):
    model, batch = build(upsample=4).train(training), pair_batch([([8, 9, 10], [9, 9, 7]), ([7], [8])])
    with torch.no_grad():
        exact = build(upsample=4).loss(batch, torch.Generator())["dag"].sum.item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        term = model.loss(batch, torch.Generator().manual_seed(0))["dag"]
    term.sum.backward()
    assert training or term.sum.item() == pytest.approx(exact, rel=0.03)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_huge_scores_in_half_precision_leave_loss_and_gradients_finite():
    model, batch = build(upsample=4), pair_batch([([8, 9, 10], [9, 9, 7]), ([7], [8])])
    with torch.no_grad():
        model.embedding.weight *= 60
        model.links.queries.weight *= 60
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.loss(batch, torch.Generator())["dag"].sum.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


# The graph


def test_edges_lead_to_later_real_vertices_and_their_probabilities_sum_to_one():
    model = build(upsample=3)
    ids, mask = source_batch(SOURCES)
    memory = model.encode(ids, mask)
    edges = model.graph(memory, model.inputs(memory)).links.exp()
    for row, source in enumerate(SOURCES):
        n = 3 * (len(source) + 1)
        assert not edges[row].tril().any()
        assert not edges[row, :, n:].any()
        assert not edges[row, n - 1 :].any()
        torch.testing.assert_close(edges[row, : n - 1].sum(1), torch.ones(n - 1))


def test_edges_are_a_mixture_of_the_heads_softmaxes():
    links, x = build().links, torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    q, k, gate = links.queries(x)[0], links.keys(x)[0], links.gate(x)[0].softmax(-1)
    found = links(x, torch.ones(1, 5, dtype=torch.bool))[0].exp()
    for v in range(4):
        scores = torch.stack([q[v, h : h + 8] @ k[v + 1 :, h : h + 8].T / math.sqrt(8) for h in (0, 8)])
        torch.testing.assert_close(found[v, v + 1 :], gate[v] @ scores.softmax(-1))
    assert not found[4].any()


# Ways through it


def sources_and_models(method, **changes):
    return ((source, build(method, seed, **changes)) for seed in range(4) for source in SOURCES)


def walked(words: Tensor, links: Tensor, beta: float) -> tuple[int, ...]:
    """By the definition, vertex by vertex; beta 0 is greedy."""
    here, path, end = 0, [], len(links) - 1
    while True:
        ahead = {u: links[here, u] + (beta * words[u].max() if u < end else 0) for u in range(here + 1, end + 1)}
        here = max(ahead, key=lambda u: float(ahead[u]))
        if here == end:
            return tuple(path)
        path.append(here)


@pytest.mark.parametrize(("method", "beta"), [("greedy", 0.0), ("lookahead", 1.0), ("lookahead", 0.3)])
def test_greedy_and_lookahead_walk_as_defined(method, beta):
    outputs = set()
    settings = DAGDecoding(method=method, beta=beta)  # type: ignore[arg-type]
    for source, model in sources_and_models(method, decoding=settings, upsample=3):
        words, links = graph_of(model, source)
        path = walked(words, links, beta)
        [decoded] = decode(model, [source])
        assert tuple(decoded.tokens) == said(words, path)
        expected = path_log_prob(words, links, path, said(words, path)).item()
        if path:
            assert sum(decoded.scores) == pytest.approx(expected, abs=1e-4)
        outputs.add(tuple(decoded.tokens))
    assert len(outputs) > 4


@pytest.mark.parametrize("power", [0.0, 1.0, 0.6])
def test_viterbi_finds_the_best_path_of_all_lengths(power):
    settings = DAGDecoding(method="viterbi", length_power=power)
    for source, model in sources_and_models("viterbi", decoding=settings):
        words, links = graph_of(model, source)
        total = lambda path: path_log_prob(words, links, path, said(words, path)).item()  # noqa: E731, B023
        best = max(every_path(links), key=lambda path: length_normalised(total(path), len(path), power))
        [decoded] = decode(model, [source])
        assert tuple(decoded.tokens) == said(words, best)
        assert not best or sum(decoded.scores) == pytest.approx(total(best), abs=1e-4)


@pytest.mark.parametrize("power", [0.0, 1.0, 0.6])
def test_a_beam_with_room_for_all_finds_the_most_probable_outputs_over_all_their_paths(power):
    settings = DAGDecoding(method="beam", length_power=power, beam=300)
    text = [i for i in range(VOCABULARY) if i not in SPECIAL_IDS]
    for seed in range(3):
        model = build(decoding=settings, seed=seed, upsample=3)
        words, links = graph_of(model, [8])
        every = {
            output: log_likelihood(words, links, output).item()
            for n in range(len(links) - 1)
            for output in itertools.product(text, repeat=n)
        }
        best = sorted(every, key=lambda output: -length_normalised(every[output], len(output), power))
        [found] = model.candidates(model.encode(*source_batch([[8]])), beam=300, n_best=5)
        assert [tuple(one.tokens) for one in found] == best[:5]
        for one in found:
            assert one.log_prob == pytest.approx(every[tuple(one.tokens)], abs=1e-4)
            assert one.score == pytest.approx(length_normalised(one.log_prob, len(one.tokens), power))
        [decoded] = decode(model, [[8]])
        assert tuple(decoded.tokens) == best[0], "the method `beam` says the first of them"
        path = max(paths(len(links), len(best[0])), key=lambda path: path_log_prob(words, links, path, best[0]).item())
        expected = path_log_prob(words, links, path, best[0]).item()
        assert not path or sum(decoded.scores) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_word_can_follow_itself(method):
    model = build(method, upsample=4)
    with torch.no_grad():  # every vertex prefers the same word, and the next vertex
        model.embedding.weight.zero_()
        model.embedding.weight[9] = 4.0
        model.decoder.norm.weight.zero_()
        model.decoder.norm.bias.fill_(1.0)
        model.links.queries.weight.zero_()
        model.links.keys.weight.zero_()
        nearest = torch.full((1, 8, 8), -20.0).masked_fill(~torch.ones(8, 8).triu(1).bool(), -torch.inf)
        for v in range(7):
            nearest[0, v, v + 1] = 0.0
    model.links.forward = lambda x, mask: nearest.log_softmax(-1).nan_to_num(nan=-torch.inf)
    assert decode(model, [[8]])[0].tokens == [9] * 6


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_a_sentence_alone_what_it_gets_in_a_batch(method):
    for seed in range(3):
        model = build(method, seed, upsample=3)
        for one, source in zip(decode(model), SOURCES, strict=True):
            [alone] = decode(model, [source])
            assert one.tokens == alone.tokens
            assert one.scores == pytest.approx(alone.scores, abs=1e-4)
            assert not set(one.tokens) & set(SPECIAL_IDS)


@pytest.mark.parametrize("method", METHODS)
def test_frames_show_the_graph_and_then_the_path(method):
    model = build(method, upsample=3)
    first, second = refine(model, *source_batch(SOURCES))
    assert (first.kind, second.kind) == ("fill", "collapse")
    assert (first.tokens != PAD).sum(1).tolist() == [3 * (len(source) + 1) - 2 for source in SOURCES]
    start = model.start(model.encode(*source_batch(SOURCES)))
    assert torch.equal(start.tokens == PLACEHOLDER, first.tokens != PAD)


def test_viterbi_and_beam_stop_at_the_limit_of_a_source():
    source = [8] * 10
    for method in ("viterbi", "beam"):
        model = build(method, upsample=8, decoding=DAGDecoding(method=method, length_power=3.0, beam=2))
        with torch.no_grad():
            model.links.queries.weight.zero_()
        [decoded] = decode(model, [source])
        assert len(decoded.tokens) == 2 * 11 + 20


def test_the_power_of_the_length_counts_words_and_no_ends():
    model = build("viterbi", decoding=DAGDecoding(method="viterbi", length_power=0.0))
    longer = dataclasses.replace(model.spec, decoding=DAGDecoding(method="viterbi", length_power=2.0)).build(VOCABULARY)
    longer.load_state_dict(model.state_dict())
    short, long = ([len(one.tokens) for one in decode(m)] for m in (model, longer.eval()))
    assert all(a <= b for a, b in zip(short, long, strict=True))
    assert short != long


# Glancing


class Watched(DAG):
    """Keeps what its vertices read."""

    def graph(self, memory, inputs, observe=None):
        self.seen = [*getattr(self, "seen", []), inputs]
        return super().graph(memory, inputs)


def watched(**changes) -> Watched:
    spec = build(**changes).spec
    torch.manual_seed(0)
    return Watched(spec, VOCABULARY).train()


def test_glancing_shows_the_scheduled_share_of_the_wrong_words_of_the_best_path():
    model = watched(glancing_start=0.8, glancing_end=0.2, upsample=6)
    pairs = [([8] * 12, list(range(7, 11)) * 6), ([9] * 5, [7, 8]), ([], [9] * 9), ([7], [])]
    batch = pair_batch(pairs)
    for fraction, share in ((0.0, 0.8), (0.5, 0.5), (1.0, 0.2)):
        model.progress(fraction)
        model.seen = []
        model.loss(batch, torch.Generator().manual_seed(1))
        before, after = model.seen
        changed = (before != after).any(-1)
        drawn = row_draws(batch.target_mask, torch.Generator().manual_seed(1), 0)[1]
        for row, (source, target) in enumerate(pairs):
            model.eval()
            words, links = graph_of(model, source)
            model.train()
            if len(target) > len(links) - 2:
                assert not changed[row].any(), "there is no path for it"
                continue
            emissions = words[:, target].T
            [path] = best_path(emissions[None], links[None], *(torch.tensor([n]) for n in (len(links), len(target))))
            wrong = sum(int(words[u].argmax()) != y for u, y in zip(path.tolist(), target, strict=True))
            lowest = drawn[row, : len(target)].argsort()[: round(share * wrong)]
            assert changed[row].nonzero()[:, 0].tolist() == sorted(path[lowest].tolist())
            for i in lowest.tolist():
                expected = 4 * model.embedding.weight[target[i]]
                torch.testing.assert_close(after[row, path[i]], expected)


def test_glancing_follows_the_generator_and_is_off_in_evaluation_or_at_a_share_of_zero():
    model, batch = watched(upsample=4), pair_batch([([8, 9, 10, 7], [10, 10, 9, 8, 7, 7])])
    once, again, other = (model.loss(batch, torch.Generator().manual_seed(s))["dag"].sum.item() for s in (1, 1, 5))
    assert once == again != other
    for mode, share in ((False, 0.5), (True, 0.0)):
        model.train(mode).glancing, model.seen = share, []
        model.loss(batch, torch.Generator())
        assert len(model.seen) == 1


# What it is given


@pytest.mark.parametrize("decoder_input", ["placeholder", "copy"])
def test_vertices_read_one_embedding_or_the_state_of_their_source_token(decoder_input):
    model = build(decoder_input=decoder_input, upsample=3)
    memory = model.encode(*source_batch([[8, 9]]))
    inputs = model.inputs(memory)
    assert inputs.shape == (1, 9, 16)
    for u in range(9):
        expected = memory.states[0, u // 3] if decoder_input == "copy" else 4 * model.embedding.weight[PLACEHOLDER]
        torch.testing.assert_close(inputs[0, u], expected)


def test_encoder_and_decoder_of_a_teacher_fit():
    teacher = AutoregressiveSpec(**SMALL).build(VOCABULARY)
    student = build()
    copied = set(fill_matching(student, teacher.state_dict()))
    parts = ("embedding.", "encoder.", "decoder.")
    assert copied == {name for name in student.state_dict() if name.startswith(parts)}
