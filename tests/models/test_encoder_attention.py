"""Translation models with any attention in their encoders, from the words of a configuration to a translation."""

from pathlib import Path

import pytest
import torch

from hasten import spec as specs
from hasten.attention import SecondProjections
from hasten.data.batch import pair_batch
from hasten.data.tokenizer import EOS, PAD, SPECIAL_IDS, Tokenizer
from hasten.decoding.refine import Decoded, final, refine
from hasten.models import GenerationModel
from hasten.training import checkpoint

ATTENTION = {
    "bigbird": '{ kind = "bigbird", block = 2, random = 1 }',
    "bigbird, external": '{ kind = "bigbird", block = 2, random = 1, external = 3 }',
    "longformer": '{ kind = "longformer", window = 1, first = 2 }',
    "external pattern": '{ kind = "pattern", pattern = "External(2) | Local(1)" }',
    "lsh": '{ kind = "lsh", chunk = 2, rounds = 2 }',
    "routing": '{ kind = "routing", clusters = 2, shared_qk = false }',
    "sinkhorn": '{ kind = "sinkhorn", block = 3 }',
    "sinkhorn, cut": '{ kind = "sinkhorn", block = 2, cut = 2 }',
    "compressed": '{ kind = "compressed", stride = 2, per_head = true, over_channels = true }',
    "linformer": '{ kind = "linformer", max_length = 40, rank = 4, sharing = "layerwise" }',
    "linformer, by head": '{ kind = "linformer", max_length = 40, rank = 4, sharing = "none" }',
    "nystrom": '{ kind = "nystrom", landmarks = 3, residual = 3 }',
    "linear": '{ kind = "linear" }',
    "efficient": '{ kind = "efficient" }',
    "rfa": '{ kind = "rfa" }',
    "performer": '{ kind = "performer", features = 32 }',
    "synthesizer": '{ kind = "synthesizer", parts = ["dense", "random"], max_length = 40 }',
}
SOURCES = [[10, 11, 12], [13], [14, 15, 14, 15, 16, 17, 18, 19, 20], [21, 21], [22, 23, 24, 25, 26]]
PAIRS = list(zip(SOURCES, [[30, 31], [32], [33, 33, 34, 35], [36, 37], [38]], strict=True))
LABELS = [[1, 0, 1, 0], [1, 0], [1, 0, 0, 2, 0, 0, 0, 1, 0, 0], [1, 1, 0], [0, 0, 0, 0, 1, 0]]
# In turn: every mechanism in two kinds of models, every kind with a third of the mechanisms. Those on the right read it
# in two stacks.
KINDS = ("autoregressive", "nat", "mask_predict"), ("ctc", "dag", "refinement")
each = pytest.mark.parametrize(
    ("kind", "attention"),
    [(kinds[i % 3], name) for i, name in enumerate(ATTENTION) for kinds in KINDS],
)


def configuration(directory: Path, kind: str, attention: str) -> specs.RunSpec:
    depth = "refiner_layers = 1" if kind == "ctc" else "decoder_layers = 1"
    reads = [f"encoder_attention = [{ATTENTION[attention]}]"]
    if kind == "ctc":
        reads.append(f"refiner_attention = [{ATTENTION[attention]}]")
    if kind == "dag":
        reads.append("upsample = 2")
    if kind in ("dag", "refinement", "mask_predict") and "external" not in attention:
        reads.append(f"decoder_attention = [{ATTENTION[attention]}]")
    lines = [
        '[data]\npath = "nowhere"\n[model]',
        f'kind = "{kind}"\n{depth}\nencoder_layers = 2\nd_model = 32\nn_heads = 4\nd_ff = 64\ndropout = 0.0',
        *reads,
    ]
    path = directory / "run.toml"
    path.write_text("\n".join(lines))
    return specs.load(path)


def build(spec: specs.RunSpec, vocab_size: int) -> GenerationModel:
    torch.manual_seed(0)
    model = spec.model.build(vocab_size)
    with torch.no_grad():
        # Spread the scores: a random tied table makes a model say its input and nothing else.
        model.embedding.weight *= 0.5
    return model.eval()


def decode(model: GenerationModel, rows: list[list[int]], extra: int = 0) -> list[Decoded]:
    width = max(map(len, rows)) + 1 + extra
    ids = torch.tensor([[*row, EOS] + [PAD] * (width - len(row) - 1) for row in rows])
    return final(refine(model, ids, ids != PAD), len(rows))


def assert_same(found: list[Decoded], expected: list[Decoded]) -> None:
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.scores, other.scores, rtol=0, atol=1e-4)


@each
def test_a_sentence_decodes_alone_as_in_any_batch_and_padding(kind: str, attention: str, tmp_path: Path):
    model = build(configuration(tmp_path, kind, attention), 60)
    alone = [decode(model, [row])[0] for row in SOURCES]
    assert_same(decode(model, SOURCES), alone)
    assert_same(decode(model, SOURCES[::-1], extra=7), alone[::-1])
    assert not {token for one in alone for token in model.output_ids(one.tokens)} & set(SPECIAL_IDS)


@each
def test_it_learns_a_few_pairs_by_heart_with_every_weight(kind: str, attention: str, tmp_path: Path):
    model, batch = build(configuration(tmp_path, kind, attention), 60).train(), pair_batch(PAIRS, LABELS)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(15):
        terms = model.loss(batch, torch.Generator().manual_seed(0)).values()
        loss = sum(term.weight * term.sum / term.count for term in terms)
        optimizer.zero_grad()
        loss.backward()
        assert not losses or all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(parameter.grad.any() for parameter in model.parameters())


@each
def test_it_is_read_back_as_it_was_saved(kind: str, attention: str, tmp_path: Path, tokenizer: Tokenizer):
    spec = configuration(tmp_path, kind, attention)
    model = build(spec, tokenizer.vocab_size)
    checkpoint.write_run(tmp_path, spec, tokenizer)
    checkpoint.save_weights(tmp_path / checkpoint.WEIGHTS, model.state_dict(), tokenizer)
    again_spec, _, again = checkpoint.read_run(tmp_path)
    assert again_spec == spec
    assert_same(decode(again, SOURCES), decode(model, SOURCES))
    two_sets = any(isinstance(module, SecondProjections) for module in again.modules())
    assert two_sets is (attention == "longformer")


def test_a_decoder_may_have_global_first_tokens_with_projections_of_their_own(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[data]\npath = "nowhere"\n[model]\nkind = "autoregressive"\nencoder_layers = 1\ndecoder_layers = 2\n'
        'd_model = 32\nn_heads = 4\nd_ff = 64\ndecoder_attention = [{ kind = "longformer", window = 1, first = 2 }]'
    )
    model = build(specs.load(path), 60)
    alone = [decode(model, [row])[0] for row in SOURCES]
    assert_same(decode(model, SOURCES), alone)
    assert max(len(one.tokens) for one in alone) > 4
