"""Patterns in the places of the translation models that can take them, and the reasons where they cannot."""

import pytest
import torch

from hasten import spec as specs
from hasten.data.batch import pad, pair_batch
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
SOURCES = [[10, 11, 12, 13, 14, 15, 16, 17], [20], [30, 31, 32]]
TARGETS = [[40, 41, 42, 43, 44, 45], [50, 51], [60]]


@pytest.mark.parametrize("own", [PATTERN, SPARSE, HEADS, {"kind": "bigbird", "block": 2, "random": 1}])
def test_an_encoder_with_a_pattern_does_not_see_padding_or_other_sentences(tiny_spec, own):
    model = build(tiny_spec, encoder_attention=[own])
    together = model.encode(*pad(SOURCES)).states
    for row, source in enumerate(SOURCES):
        alone = model.encode(*pad([source])).states
        torch.testing.assert_close(together[row : row + 1, : len(source)], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own", [PATTERN, SPARSE, HEADS, {"kind": "local", "left": 1}])
def test_a_decoder_with_a_pattern_says_step_by_step_what_it_was_taught(tiny_spec, own):
    model = build(tiny_spec, decoder_layers=2, decoder_attention=[own])
    batch = pair_batch(list(zip(SOURCES, TARGETS, strict=True)))
    memory = model.encode(batch.source, batch.source_mask)
    inputs = torch.cat((torch.full((3, 1), 2), batch.target), 1)
    whole = model.logits(model.decoder(model._embed(inputs), memory.states, memory.mask)).log_softmax(-1)
    state = model.begin(memory)
    for t in range(inputs.shape[1]):
        log_probs, state = model.next_log_probs(inputs[:, t], t, state)
        finite = log_probs.isfinite()
        torch.testing.assert_close(log_probs[finite], whole[:, t][finite], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own", [PATTERN, HEADS])
def test_a_model_with_patterns_learns_and_translates(tiny_spec, own):
    model = build(tiny_spec, encoder_attention=[own], decoder_attention=[own]).train()
    batch = pair_batch(list(zip(SOURCES, TARGETS, strict=True)))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        term = model.loss(batch, torch.Generator())["tokens"]
        loss = term.sum / term.count
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("place", "own", "message"),
    [
        ("cross_attention", {"kind": "local"}, "cross attention, layer 1: local attention cannot serve here"),
        ("decoder_attention", {"kind": "bigbird"}, "decoder attention, layer 1: bigbird attention cannot serve here"),
        ("encoder_attention", {"kind": "heads", "groups": HEADS["groups"][:1]}, "made for 3 heads"),
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
