"""Every kind of attention in the places of the translation models that can take it, and the reasons where it cannot."""

import pytest
import torch

from hasten import spec as specs
from hasten.attention import after_update
from hasten.data.batch import pad, pair_batch
from hasten.data.tokenizer import BOS, EOS
from hasten.decoding.beam import beam_search
from hasten.decoding.refine import final, refine
from hasten.errors import UserError


def build(tiny_spec, **attention):
    torch.manual_seed(0)
    return tiny_spec("autoregressive", encoder_layers=2, **attention).model.build(400).eval()


PATTERN = {"kind": "pattern", "pattern": "Local(2) | Global(first=1)"}
SPARSE = {"kind": "sparse_transformer", "stride": 3, "combine": "layers"}
HEADS = {
    "kind": "heads",
    "groups": [
        {"heads": 3, "attention": {"kind": "local", "left": 2}},
        {"heads": 1, "attention": {"kind": "full"}},
    ],
}
STRICT = [
    {"kind": "lsh", "chunk": 2, "strict": True},
    {"kind": "routing", "clusters": 2, "strict": True, "window": 3},
    {"kind": "sinkhorn", "block": 2},
    {"kind": "compressed", "stride": 2, "local": 3},
    {"kind": "linear"},
    {"kind": "efficient"},
    {"kind": "rfa", "gate": True},
    {"kind": "performer", "features": 16, "redraw_every": 1},
    {"kind": "synthesizer", "parts": ["random", "dot_product"], "max_length": 40},
    {"kind": "average"},
    {"kind": "average", "gate": False},
    {"kind": "average", "feed_forward": True},
]
CROSS = [
    {"kind": "linear"},
    {"kind": "performer"},
    {"kind": "compressed"},
    {"kind": "linformer", "rank": 4, "max_length": 9},
    {"kind": "synthesizer", "max_length": 9},
]
SOURCES = [[10, 11, 12, 13, 14, 15, 16, 17], [20], [30, 31, 32]]
TARGETS = [[40, 41, 42, 43, 44, 45], [50, 51], [60]]


@pytest.mark.parametrize("own", [PATTERN, SPARSE, HEADS, {"kind": "bigbird", "block": 2, "random": 1}])
def test_an_encoder_with_a_pattern_does_not_see_padding_or_other_sentences(tiny_spec, own):
    model = build(tiny_spec, encoder_attention=[own])
    together = model.encode(*pad(SOURCES)).states
    for row, source in enumerate(SOURCES):
        alone = model.encode(*pad([source])).states
        torch.testing.assert_close(together[row : row + 1, : len(source)], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own", [PATTERN, SPARSE, HEADS, {"kind": "local", "left": 1}, *STRICT], ids=str)
def test_a_decoder_says_step_by_step_what_it_was_taught(tiny_spec, own):
    model = build(tiny_spec, decoder_layers=2, decoder_attention=[own])
    batch = pair_batch(list(zip(SOURCES, TARGETS, strict=True)))
    memory = model.encode(batch.source, batch.source_mask)
    inputs = torch.cat((torch.full((3, 1), 2), batch.target), 1)
    whole = model.logits(model.decoder(model.embed(inputs), memory.states, memory.mask)).log_softmax(-1)
    state = model.begin(memory)
    for t in range(inputs.shape[1]):
        log_probs, state = model.next_log_probs(inputs[:, t], t, state)
        finite = log_probs.isfinite()
        torch.testing.assert_close(log_probs[finite], whole[:, t][finite], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own", [PATTERN, HEADS, *STRICT], ids=str)
def test_a_model_learns_and_translates(tiny_spec, own):
    model = build(tiny_spec, encoder_attention=[own], decoder_attention=[own]).train()
    batch = pair_batch(list(zip(SOURCES, TARGETS, strict=True)))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        terms = model(batch, torch.Generator())
        loss = sum(term.weight * term.sum / term.count for term in terms.values())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        after_update(model)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    said = final(refine(model.eval(), batch.source, batch.source_mask), len(SOURCES))
    assert [model.output_ids(one.tokens) for one in said] == TARGETS


@pytest.mark.parametrize("own", [PATTERN, HEADS, *STRICT], ids=str)
def test_beams_of_a_decoder_are_those_of_its_whole_sequences(tiny_spec, own):
    model = build(tiny_spec, decoder_layers=2, decoder_attention=[own])
    source, mask = pad([[*source, EOS] for source in SOURCES])
    memory = model.encode(source, mask)
    for row, found in enumerate(beam_search(model, memory, beam=3, n_best=3)):
        alone = memory.select(torch.tensor([row]))
        for tokens, log_prob, _ in found:
            inputs = model.embed(torch.tensor([[BOS, *tokens[:-1]]]))
            scores = model.logits(model.decoder(inputs, alone.states, alone.mask)).log_softmax(-1) + model.banned
            whole = scores[0, range(len(tokens)), tokens].sum().item()
            assert log_prob == pytest.approx(whole, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("own", CROSS, ids=str)
def test_a_memory_read_by_other_attention_says_step_by_step_what_it_was_taught(tiny_spec, own):
    model = build(tiny_spec, cross_attention=[own])
    batch = pair_batch(list(zip(SOURCES, TARGETS, strict=True)))
    memory = model.encode(batch.source, batch.source_mask)
    inputs = torch.cat((torch.full((3, 1), BOS), batch.target), 1)
    whole = model.logits(model.decoder(model.embed(inputs), memory.states, memory.mask)).log_softmax(-1)
    state = model.begin(memory)
    for t in range(inputs.shape[1]):
        log_probs, state = model.next_log_probs(inputs[:, t], t, state)
        finite = log_probs.isfinite()
        torch.testing.assert_close(log_probs[finite], whole[:, t][finite], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("place", "own", "message"),
    [
        ("cross_attention", {"kind": "local"}, "cross attention, layer 1: local attention cannot serve here"),
        ("decoder_attention", {"kind": "bigbird"}, "decoder attention, layer 1: bigbird attention cannot serve here"),
        ("encoder_attention", {"kind": "heads", "groups": HEADS["groups"][:1]}, "made for n_heads = 3, got 4"),
        ("decoder_attention", {"kind": "pattern", "pattern": "Marked()"}, "decoder attention, layer 1: pattern"),
    ],
)
def test_a_pattern_that_cannot_serve_is_refused_when_the_model_is_built(tiny_spec, place, own, message):
    with pytest.raises(UserError, match=message):
        build(tiny_spec, **{place: [own]})


def test_a_pattern_between_two_sequences_reads_the_same_for_every_query(tiny_spec):
    model = build(
        tiny_spec, cross_attention=[{"kind": "pattern", "pattern": "Summary(2, 1) | Global(first=1, rows=False)"}]
    )
    batch = pair_batch(list(zip(SOURCES, TARGETS, strict=True)))
    assert model.loss(batch, torch.Generator())["tokens"].sum.isfinite()


def test_a_configuration_with_patterns_survives_writing_and_reading(tiny_spec, tmp_path):
    path = tmp_path / "config.toml"
    spec = tiny_spec("autoregressive", encoder_attention=[HEADS], decoder_attention=[PATTERN])
    path.write_text(specs.dump(spec))
    assert specs.load(path) == spec
