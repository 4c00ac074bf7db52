"""How alike layers attend, against its plain definition, and what must not change it."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hasten.attention import (
    BigBirdSpec,
    FullSpec,
    LinearSpec,
    LocalSpec,
    LSHSpec,
    NystromSpec,
)
from hasten.attention.base import Operator, Weights
from hasten.data.batch import Batch, pair_batch
from hasten.data.tokenizer import EOS
from hasten.errors import UserError
from hasten.models.autoregressive import Autoregressive, AutoregressiveSpec
from hasten.models.base import GenerationModel
from hasten.models.ctc import CTCSpec
from hasten.sharing import Similarity, head_divergences, js_divergence, measure

SMALL = {"d_model": 8, "n_heads": 2, "d_ff": 8, "encoder_layers": 3}
PAIRS = [([9, 10, 11, 12, 13], [14, 15]), ([16], [17, 18, 19, 20]), ([21, 22, 23], [24, 25, 26])]


def randomised(model: GenerationModel) -> GenerationModel:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=1.0, generator=generator)
    return model.double().eval()


def autoregressive(**options) -> GenerationModel:
    return randomised(AutoregressiveSpec(**{**SMALL, "decoder_layers": 3, **options}).build(30))


def ctc(**options) -> GenerationModel:
    return randomised(CTCSpec(**{**SMALL, "refiner_layers": 2, **options}).build(30))


# The plain definition


def plain_jsd(p, q) -> float:
    """(KL(p, m) + KL(q, m)) / 2 in bits, m the mean of both, term by term."""
    total = 0.0
    for a, b in zip(p, q, strict=True):
        middle = (a + b) / 2
        total += sum(x * math.log2(x / middle) / 2 for x in (float(a), float(b)) if x > 0)
    return total


def plain_share(row) -> list[float]:
    """Parts of what a row reads, positive and negative weights apart."""
    parts = [max(float(w), 0.0) for w in row] + [max(-float(w), 0.0) for w in row]
    return [part / sum(parts) for part in parts]


def lengths(name: str, sentence: tuple[list[int], list[int]]) -> int:
    """Queries of a sentence: the source with its end, frames, or the target after its begin."""
    source, target = sentence
    return {"encoder": len(source) + 1, "refiner": 2 * (len(source) + 1)}.get(name, len(target) + 1)


def weights_of(model: GenerationModel, batch: Batch) -> dict[str, list[np.ndarray]]:
    found: dict[str, list[np.ndarray]] = {}

    def observe(name: str, layer: int, operator: Operator, real: Tensor) -> None:
        assert len(found.setdefault(name, [])) == layer
        found[name].append(operator.dense().detach().numpy()[:, :, -real.shape[1] :])

    model.attentions(batch, observe)
    return found


def rows_of(model: GenerationModel, pairs, name: str) -> list[list[np.ndarray]]:
    """For each sentence and real query, the rows of all layers and heads: (L, H, S)."""
    weights = weights_of(model, pair_batch(pairs))[name]
    return [
        [np.stack([layer[b, :, t] for layer in weights]) for t in range(name == "decoder", lengths(name, pair))]
        for b, pair in enumerate(pairs)
    ]


def plain_similarity(model: GenerationModel, pairs, name: str) -> np.ndarray:
    rows = [row for sentence in rows_of(model, pairs, name) for row in sentence]
    n_layers, n_heads, _ = rows[0].shape
    mu = np.ones((n_layers, n_layers))
    for i in range(n_layers):
        for j in range(n_layers):
            found = [
                1 - plain_jsd(plain_share(row[i, h]), plain_share(row[j, h]))
                for row in rows
                for h in range(n_heads)
                if row[i, h].any() and row[j, h].any()
            ]
            mu[i, j] = sum(found) / len(found)
    return mu


def check(model: GenerationModel, pairs=PAIRS) -> None:
    found = measure(model, [pair_batch(pairs)])
    for name, own in found.items():
        expected = plain_similarity(model, pairs, name)
        np.testing.assert_allclose(own.mu, expected, atol=1e-9)
        if len(own.mu) > 1:
            assert expected[0, 1] < 0.99, f"{name}: layers so alike test little"


# Two distributions


def test_the_divergence_of_a_hand_made_pair():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.5, 0.5])
    assert js_divergence(p, q).item() == pytest.approx(0.5)  # half of what each says is the other's, too
    assert js_divergence(p, p).item() == 0
    assert js_divergence(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item() == 1


@given(st.integers(1, 9), st.integers(0, 2**31))
def test_the_divergence_of_rows_is_the_plain_one_symmetric_and_from_0_to_1(n_keys: int, seed: int):
    draw = np.random.default_rng(seed)
    p, q = (draw.dirichlet(np.full(n_keys, 0.3), size=3) for _ in range(2))
    found = js_divergence(torch.tensor(p), torch.tensor(q))
    np.testing.assert_allclose(found, [plain_jsd(a, b) for a, b in zip(p, q, strict=True)], atol=1e-12)
    assert torch.equal(found, js_divergence(torch.tensor(q), torch.tensor(p)))
    assert ((found >= 0) & (found <= 1)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_compared_in_float32(dtype: torch.dtype):
    p, q = torch.rand(2, 50, generator=torch.Generator().manual_seed(0)).softmax(-1).to(dtype)
    found = js_divergence(p, q)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, js_divergence(p.double(), q.double()).float(), atol=1e-6, rtol=0)


# Layers of models


@pytest.mark.parametrize("model", [autoregressive(), ctc()], ids=["autoregressive", "ctc"])
def test_similarity_is_the_plain_mean_over_heads_positions_and_sentences(model: GenerationModel):
    check(model)


def test_each_kind_has_its_name_and_its_number_of_rows():
    found = measure(autoregressive(), [pair_batch(PAIRS)])
    rows = {"encoder": 6 + 2 + 4, "decoder": 2 + 4 + 3, "cross": 3 + 5 + 4}  # first positions of "decoder" not
    assert {name: {count for row in own.counts for count in row} for name, own in found.items()} == {
        name: {2 * count} for name, count in rows.items()
    }
    assert set(measure(ctc(), [pair_batch(PAIRS)])) == {"encoder", "refiner"}
    assert set(measure(ctc(refiner_layers=0), [pair_batch(PAIRS)])) == {"encoder"}


def test_similarity_is_symmetric_from_0_to_1_and_1_on_the_diagonal():
    for own in measure(autoregressive(), [pair_batch(PAIRS)]).values():
        mu = np.array(own.mu)
        assert (mu == mu.T).all()
        assert ((mu >= 0) & (mu <= 1)).all()
        assert (mu.diagonal() == 1).all()


@pytest.mark.parametrize(
    "mechanism", [LinearSpec(), LSHSpec(), NystromSpec(landmarks=2), LocalSpec(left=1, right=0)], ids=str
)
def test_every_mechanism_is_measured_by_its_matrix(mechanism):
    model = autoregressive(encoder_attention=(mechanism, FullSpec(), FullSpec()))
    signed = (weights_of(model, pair_batch(PAIRS))["encoder"][0] < 0).any()
    assert signed == (mechanism.kind == "nystrom")
    check(model)


def test_rows_of_learnt_tokens_before_the_sequence_are_no_queries_and_stay_keys():
    spec = BigBirdSpec(block=1, random=1, external=2)
    model = autoregressive(encoder_attention=(spec,))
    (weights, *_) = weights_of(model, pair_batch(PAIRS))["encoder"]
    assert weights.shape[2:] == (6, 8)
    check(model)


def similar(one: dict[str, Similarity], other: dict[str, Similarity]) -> None:
    assert list(one) == list(other)
    for name in one:
        np.testing.assert_allclose(one[name].mu, other[name].mu, atol=1e-12)
        assert one[name].counts == other[name].counts


@pytest.mark.parametrize("make", [autoregressive, ctc])
@settings(max_examples=8)
@given(order=st.permutations(range(len(PAIRS))), cut=st.integers(0, len(PAIRS)))
def test_order_batches_and_padding_change_nothing(make, order: list[int], cut: int):
    model = make()
    expected = measure(model, [pair_batch([pair]) for pair in PAIRS])  # alone: no padding at all
    pairs = [PAIRS[i] for i in order]
    similar(measure(model, [pair_batch(part) for part in (pairs[:cut], pairs[cut:]) if part]), expected)


def test_what_padding_holds_changes_nothing():
    model, batch = autoregressive(), pair_batch(PAIRS)
    padded = dataclasses.replace(
        batch,
        source=batch.source.where(batch.source_mask, 29),
        target=batch.target.where(batch.target_mask, 28),
    )
    similar(measure(model, [padded]), measure(model, [batch]))


def test_identical_layers_are_wholly_alike():
    model = autoregressive()
    assert isinstance(model, Autoregressive)
    weights = model.encoder.layers[0].state_dict()
    for layer in model.encoder.layers:
        layer.load_state_dict(weights)
        nn.init.zeros_(layer.self_attention.out_proj.weight)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(layer.feed_forward.outer.weight)  # type: ignore[union-attr, arg-type]
        for bias in (layer.self_attention.out_proj.bias, layer.feed_forward.outer.bias):  # type: ignore[union-attr]
            nn.init.zeros_(bias)  # type: ignore[arg-type]
    assert measure(model, [pair_batch(PAIRS)])["encoder"].mu == ((1.0,) * 3,) * 3


@pytest.mark.parametrize("shared", ["weights", "context", "output"])
def test_layers_that_share_are_wholly_alike_and_the_others_not(shared: str):
    plans = {"encoder_sharing": (1, 1, 3), "decoder_sharing": (1, 2, 1), "cross_sharing": (1, 1, 3)}
    found = measure(autoregressive(**plans, shared_of_cross=shared), [pair_batch(PAIRS)])
    for name, (i, j) in {"encoder": (0, 1), "decoder": (0, 2), "cross": (0, 1)}.items():
        alike = np.array(found[name].mu) == 1
        expected = np.eye(3, dtype=bool)
        expected[i, j] = expected[j, i] = True
        assert (alike == expected).all()


# Rows without meaning


class Given(GenerationModel):
    """A model whose attention is given."""

    def __init__(self, layers: list[Tensor]):
        super().__init__()
        self.embedding = nn.Embedding(1, 1)
        self.layers = layers
        self.eval()

    def attentions(self, batch: Batch, observe) -> None:
        for layer, weights in enumerate(self.layers):
            observe("encoder", layer, Weights(weights), torch.ones(1, weights.shape[2], dtype=torch.bool))

    encode = loss = start = stopped = None  # type: ignore[assignment]


def given_rows(*layers: list[list[float]]) -> tuple[Similarity, Tensor]:
    """Similarity and head divergences of layers with one head, given by their rows."""
    model = Given([torch.tensor([[rows]]) for rows in layers])
    batches = [pair_batch(PAIRS)]
    return measure(model, batches)["encoder"], head_divergences(model, batches, "encoder", (0, 1))


def test_rows_that_read_nothing_are_skipped():
    found, heads = given_rows([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    assert found == Similarity(((1.0, 0.0), (0.0, 1.0)), ((2, 1), (1, 1)))
    assert heads.tolist() == [[1.0]]


def test_scale_tells_nothing_and_signs_tell_apart():
    found, heads = given_rows([[2.0, 2.0]], [[0.5, 0.5]])
    assert (found.mu[0][1], heads.item()) == (1, 0)
    found, heads = given_rows([[0.5, 0.5]], [[0.5, -0.5]])
    assert found.mu[0][1] == pytest.approx(0.5)
    assert heads.item() == pytest.approx(0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_an_error_that_names_the_layer(value: float):
    with pytest.raises(UserError, match="encoder, layer 2: attention weights are not finite"):
        given_rows([[1.0, 0.0]], [[value, 0.0]])


def test_layers_without_a_row_in_common_are_an_error():
    with pytest.raises(UserError, match="encoder: there are no query positions where both layer 1 and layer 2"):
        measure(Given([torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)]), [pair_batch(PAIRS)])


def test_no_sentences_training_mode_and_silent_models_are_errors():
    model = autoregressive()
    with pytest.raises(UserError, match="no sentences to measure"):
        measure(model, [])
    with pytest.raises(UserError, match="in training mode"):
        measure(model.train(), [pair_batch(PAIRS)])
    silent = Given([])
    silent.attentions = lambda *_: GenerationModel.attentions(silent, *_)  # type: ignore[method-assign]
    with pytest.raises(UserError, match="Given models do not report their attention"):
        measure(silent, [pair_batch(PAIRS)])


# Pairs of heads


@pytest.mark.parametrize("name", ["encoder", "decoder", "cross"])
def test_divergences_of_all_pairs_of_heads_are_plain_means(name: str):
    model = autoregressive()
    found = head_divergences(model, [pair_batch(PAIRS[:1]), pair_batch(PAIRS[1:])], name, (2, 0))
    rows = [row for sentence in rows_of(model, PAIRS, name) for row in sentence]
    expected = [
        [np.mean([plain_jsd(plain_share(row[2, h]), plain_share(row[0, g])) for row in rows]) for g in range(2)]
        for h in range(2)
    ]
    np.testing.assert_allclose(found, expected, atol=1e-9)
    mu = measure(model, [pair_batch(PAIRS)])[name].mu
    assert 1 - found.trace().item() / 2 == pytest.approx(mu[2][0])


def test_a_layer_or_kind_that_is_not_there_is_an_error():
    with pytest.raises(UserError, match=r"no attention 'refiner'; it has encoder, decoder, cross"):
        head_divergences(autoregressive(), [pair_batch(PAIRS)], "refiner", (0, 1))
    with pytest.raises(UserError, match="give two from 0 to 2"):
        head_divergences(autoregressive(), [pair_batch(PAIRS)], "encoder", (0, 3))


# What models report


def test_a_model_reports_the_attention_of_its_loss():
    """Rows of the target's first words do not know the rest, and every report has the sentence's own keys."""
    model = autoregressive()
    long, short = (weights_of(model, pair_batch([([9, 10], target)])) for target in ([11, 12, 13], [11]))
    for name in ("decoder", "cross"):
        for layer, other in zip(long[name], short[name], strict=True):
            np.testing.assert_allclose(layer[:, :, :2, : other.shape[3]], other, atol=1e-12)
            np.testing.assert_allclose(layer.sum(-1), 1)
    assert [layer.shape for layer in long["cross"]] == [(1, 2, 4, 3)] * 3
    assert EOS in pair_batch([([9, 10], [11])]).source
    seen: list[Tensor] = []
    model.decoder.register_forward_hook(lambda module, given, states: seen.append(states))  # type: ignore[union-attr, operator]
    model.attentions(pair_batch(PAIRS), lambda *_: None)
    model.loss(pair_batch(PAIRS), torch.Generator())
    assert torch.equal(*seen)
