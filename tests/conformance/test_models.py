"""What every model must do, whatever it is."""

import dataclasses
import inspect
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hasten.data.batch import Batch, Pair, pair_batch
from hasten.data.tokenizer import BLANK, EOS, MASK, PAD, SPECIAL_IDS
from hasten.decoding.refine import Decoded, final, refine
from hasten.models import DAG, MODELS, GenerationModel, Refinement
from hasten.models.dag import DAGDecoding
from hasten.training import checkpoint

VOCABULARY = 60
SMALL = {"d_model": 32, "d_ff": 64, "n_heads": 4, "encoder_layers": 2, "decoder_layers": 2}
# Before it has learnt anything, the graph's lookahead goes straight to the end.
ALSO: dict[type[GenerationModel], dict] = {DAG: {"decoding": DAGDecoding(method="greedy")}}
SOURCES = [[10, 11, 12], [13], [14, 15, 14, 15, 16, 17, 18, 19, 20], [21, 21], [22, 23, 24, 25, 26]]
PAIRS = [
    (source, target) for source, target in zip(SOURCES, [[30, 31], [32], [33, 33, 34, 35], [36, 37], [38]], strict=True)
]


def small_spec(model: type[GenerationModel]):
    """The model's spec with small numbers wherever it has such fields, without dropout."""
    spec = inspect.get_annotations(model.__init__, eval_str=True)["spec"]
    fields = {field.name for field in dataclasses.fields(spec)}
    given = {name: value for name, value in {**SMALL, "dropout": 0.0}.items() if name in fields}
    return spec(**given, **ALSO.get(model, {}))


def build(kind: type[GenerationModel], seed: int = 0) -> GenerationModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = small_spec(kind).build(VOCABULARY)
        # Spread the scores: a random tied table makes a model say its input and nothing else.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.startswith("embedding"):
                    parameter *= 0.5
        return model.eval()


@pytest.fixture(params=MODELS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[GenerationModel]:
    return request.param


@pytest.fixture
def model(kind: type[GenerationModel]) -> GenerationModel:
    return build(kind)


def batch_of(rows: Sequence[Sequence[int]], extra: int = 0) -> tuple[Tensor, Tensor]:
    """Sources with their end symbols, padded to the longest row and `extra` positions more."""
    width = max(len(row) for row in rows) + 1 + extra
    ids = torch.tensor([[*row, EOS] + [PAD] * (width - len(row) - 1) for row in rows])
    return ids, ids != PAD


def decode(model: GenerationModel, rows: Sequence[Sequence[int]], extra: int = 0) -> list[Decoded]:
    return final(refine(model, *batch_of(rows, extra)), len(rows))


def same(found: Sequence[Decoded], expected: Sequence[Decoded]) -> None:
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.iterations for one in found] == [one.iterations for one in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.scores, other.scores, rtol=0, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_a_sentence_decodes_alone_as_in_any_batch_and_order(kind: type[GenerationModel], seed: int):
    model = build(kind, seed)
    alone = [decode(model, [row])[0] for row in SOURCES]
    same(decode(model, SOURCES), alone)
    order = [3, 0, 4, 2, 1, 2]
    same(decode(model, [SOURCES[i] for i in order]), [alone[i] for i in order])


@pytest.mark.parametrize("extra", [1, 7, 90])
def test_padding_changes_no_output(model: GenerationModel, extra: int):
    same(decode(model, SOURCES, extra), decode(model, SOURCES))


def test_what_stands_in_the_padding_changes_no_output(model: GenerationModel):
    ids, mask = batch_of(SOURCES)
    garbage = torch.where(mask, ids, torch.full_like(ids, 42))
    same(final(refine(model, garbage, mask), len(SOURCES)), decode(model, SOURCES))


def test_decoding_twice_gives_the_same(model: GenerationModel):
    torch.manual_seed(1)
    first = decode(model, SOURCES)
    torch.manual_seed(2)
    same(decode(model, SOURCES), first)


def test_decoding_draws_no_random_numbers(model: GenerationModel):
    before = torch.get_rng_state()
    decode(model, SOURCES)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("source", [[], [10], [10, 11] * 150], ids=["empty", "one token", "300 tokens"])
def test_a_source_of_any_length_ends(model: GenerationModel, source: list[int]):
    [decoded] = decode(model, [source])
    assert decoded.iterations >= 1
    assert len(decoded.tokens) == len(decoded.scores)
    assert len(decoded.tokens) <= 10 * (len(source) + 1) + 100


@pytest.mark.parametrize("seed", range(4))
def test_special_ids_never_come_out(kind: type[GenerationModel], seed: int):
    for model in (build(kind, seed), eager_for_special_ids(kind, seed)):
        for decoded in decode(model, SOURCES):
            assert not set(model.output_ids(decoded.tokens)) & set(SPECIAL_IDS)


def eager_for_special_ids(kind: type[GenerationModel], seed: int) -> GenerationModel:
    """A model to which the special symbols are by far the most similar to anything."""
    model = build(kind, seed)
    with torch.no_grad():
        model.embedding.weight[list(SPECIAL_IDS)] *= 30
    return model


def test_scores_are_log_probabilities(model: GenerationModel):
    for decoded in decode(model, SOURCES):
        assert all(score <= 1e-6 for score in decoded.scores)


def test_every_edit_keeps_the_law_of_its_kind(model: GenerationModel):
    for row in SOURCES:
        frames = list(refine(model, *batch_of([row])))
        with torch.inference_mode():
            before = model.start(model.encode(*batch_of([row]))).tokens[0].tolist()
        for frame in frames:
            after = frame.tokens[0].tolist()
            law = rewritten if isinstance(model, REWRITING) and frame.kind == "fill" else LAWS[frame.kind]
            assert law(before, after), f"{frame.kind}: {before} became {after}"
            before = after


def is_subsequence(short: list[int], long: list[int]) -> bool:
    rest = iter(long)
    return all(token in rest for token in short)


LAWS = {
    "append": lambda before, after: after[:-1] == before,
    "fill": lambda before, after: (
        len(before) == len(after) and all(a == b or a in SPECIAL_IDS for a, b in zip(before, after, strict=True))
    ),
    "collapse": lambda before, after: is_subsequence(after, before) and BLANK not in after,
    "mask": lambda before, after: (
        len(before) == len(after) and all(b in (a, MASK) for a, b in zip(before, after, strict=True))
    ),
}
# To these every token of the last pass is open again: they fill the whole canvas, and leave nothing open.
REWRITING = (Refinement,)


def rewritten(before: list[int], after: list[int]) -> bool:
    return len(before) == len(after) and not set(after) & set(SPECIAL_IDS)


def test_saving_and_loading_changes_nothing(model: GenerationModel, kind, tmp_path, tokenizer, tiny_spec):
    spec = dataclasses.replace(tiny_spec(small_spec(kind).kind), model=small_spec(kind))
    model = spec.model.build(tokenizer.vocab_size).eval()
    checkpoint.write_run(tmp_path, spec, tokenizer)
    checkpoint.save_weights(tmp_path / checkpoint.WEIGHTS, model.state_dict(), tokenizer)
    loaded_spec, loaded_tokenizer, loaded = checkpoint.read_run(tmp_path)
    assert loaded_spec == spec
    assert loaded_tokenizer.fingerprint == tokenizer.fingerprint
    assert decode(loaded, SOURCES) == decode(model, SOURCES)


def batch_for(model: GenerationModel, pairs: Sequence[Pair]) -> Batch:
    """The pairs, with a label each where the model learns from labels."""
    needed = getattr(model.spec, "needs_fertilities", False)
    return pair_batch(pairs, [even(len(s) + 1, len(t)) for s, t in pairs] if needed else None)


def even(n_sources: int, n_targets: int) -> list[int]:
    """Targets spread over the sources."""
    return [n_targets * (i + 1) // n_sources - n_targets * i // n_sources for i in range(n_sources)]


def losses(
    model: GenerationModel, batch: Batch, generator: torch.Generator | None = None
) -> dict[str, tuple[float, float]]:
    with torch.no_grad():
        terms = model.loss(batch, generator or torch.Generator().manual_seed(0))
    return {name: (float(term.sum), float(term.count)) for name, term in terms.items()}


def test_the_loss_of_a_batch_is_the_sum_of_the_losses_of_its_sentences(model: GenerationModel):
    together = losses(model, batch_for(model, PAIRS))
    generator = torch.Generator().manual_seed(0)  # what is drawn in a loss is drawn sentence by sentence
    alone = [losses(model, batch_for(model, [pair]), generator) for pair in PAIRS]
    for name, (total, count) in together.items():
        assert total == pytest.approx(sum(one[name][0] for one in alone), rel=1e-4)
        assert count == sum(one[name][1] for one in alone) > 0


def widened(batch: Batch, columns: int) -> Batch:
    def widen(tensor: Tensor, value: int | bool) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, columns), value=value)

    sides = ((batch.source, batch.source_mask), (batch.target, batch.target_mask))
    parts = [part for ids, mask in sides for part in (widen(ids, PAD), widen(mask, False))]
    fertilities = None if batch.fertilities is None else widen(batch.fertilities, 0)
    return dataclasses.replace(Batch(*parts), fertilities=fertilities)


@pytest.mark.parametrize("columns", [1, 13])
def test_padding_changes_neither_loss_nor_gradients(model: GenerationModel, columns: int):
    batch = batch_for(model, PAIRS)
    plain = losses(model, batch)
    for name, term in losses(model, widened(batch, columns)).items():
        assert term == pytest.approx(plain[name], rel=1e-5)
    expected = gradients(model, batch)
    for name, gradient in gradients(model, widened(batch, columns)).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4)


def gradients(model: GenerationModel, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    terms = model.loss(batch, torch.Generator().manual_seed(0))
    sum((term.weight * term.sum for term in terms.values()), torch.zeros(())).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_every_parameter_learns_and_no_gradient_is_infinite(model: GenerationModel):
    model.train()
    found = gradients(model, batch_for(model, PAIRS))
    for name, _ in model.named_parameters():
        assert name in found, f"{name} has no gradient"
        assert found[name].isfinite().all(), name
        assert found[name].any(), f"the gradient of {name} is zero"


@pytest.mark.parametrize("pairs", [[([], [])], [([10], [])], [([], [30])], [([10], [30])]], ids=str)
def test_short_and_empty_sentences_have_finite_losses_and_gradients(model: GenerationModel, pairs):
    model.train()
    for gradient in gradients(model, batch_for(model, pairs)).values():
        assert gradient.isfinite().all()


def test_a_step_down_the_gradient_lowers_the_loss(model: GenerationModel):
    batch = batch_for(model, PAIRS)
    before = sum(total for total, _ in losses(model, batch).values())
    found = gradients(model, batch)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= 1e-4 * found[name]
    assert sum(total for total, _ in losses(model, batch).values()) < before
