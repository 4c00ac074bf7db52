import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hasten.attention import AverageSpec, FullSpec, LinearSpec, SSRUSpec
from hasten.data.batch import source_batch
from hasten.data.tokenizer import BOS, EOS, Tokenizer
from hasten.decoding.refine import final, refine
from hasten.errors import MissingExtra, UserError
from hasten.export import onnx_certificate
from hasten.export.certificate import sentences
from hasten.export.onnx import check_holdable, export
from hasten.models.autoregressive import Autoregressive, AutoregressiveSpec
from hasten.models.ctc import CTC, CTCSpec
from hasten.models.dag import DAG, DAGDecoding, DAGSpec
from hasten.models.nat import NATSpec
from hasten.nn.layout import lay_out
from hasten.runtime import engine
from hasten.runtime.settings import Settings

pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

LINES = sentences()
ODD = ["x", "a", "😀 \u2581 zażółć", "word " * 40, "Open."]
SIZES = {"d_model": 32, "n_heads": 4, "d_ff": 48, "dropout": 0.0, "encoder_layers": 2}
SPECS = {
    "ctc": CTCSpec(**SIZES, refiner_layers=2),
    "ctc, three frames, one head": CTCSpec(**{**SIZES, "n_heads": 1}, refiner_layers=1, upsample=3),
    "ctc, no refiner": CTCSpec(**SIZES, refiner_layers=0),
    "ctc, shared": CTCSpec(**SIZES, refiner_layers=2, encoder_sharing=(1, 1), refiner_sharing=(1, 1)),
    "dag": DAGSpec(**SIZES, decoder_layers=2, upsample=3, decoding=DAGDecoding(beta=0.3)),
    "dag, greedy, copy, shared": DAGSpec(
        **{**SIZES, "encoder_layers": 1},
        decoder_layers=4,
        upsample=2,
        decoder_input="copy",
        decoder_sharing=(1, 1, 3, 1),
        cross_sharing=(1, 1, 3, 3),
        shared_of_cross="context",
        decoding=DAGDecoding(method="greedy"),
    ),
    "dag, shared weights": DAGSpec(
        **SIZES,
        decoder_layers=2,
        upsample=4,
        cross_sharing=(1, 1),
        shared_of_cross="weights",
        decoding=DAGDecoding(beta=0.05),
    ),
    "autoregressive": AutoregressiveSpec(**SIZES, decoder_layers=2),
    "12-1": AutoregressiveSpec(**{**SIZES, "encoder_layers": 4}, decoder_layers=1),
    "ssru": AutoregressiveSpec(**SIZES, decoder_layers=2, decoder_attention=(SSRUSpec(),)),
    "average": AutoregressiveSpec(**SIZES, decoder_layers=2, decoder_attention=(AverageSpec(),)),
    "average, network": AutoregressiveSpec(
        **SIZES,
        decoder_layers=3,
        decoder_attention=(AverageSpec(feed_forward=True), FullSpec(), AverageSpec(gate=False, feed_forward=True)),
        cross_sharing=(1, 1, 1),
    ),
    **{
        f"shared, {what}": AutoregressiveSpec(
            **SIZES,
            decoder_layers=4,
            encoder_sharing=(1, 1),
            decoder_sharing=(1, 1, 3, 1),
            cross_sharing=(1, 1, 3, 3),
            shared_of_cross=what,
        )
        for what in ("weights", "context", "output")
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(LINES, 500)


def build(tokenizer: Tokenizer, name: str) -> Autoregressive | CTC | DAG:
    """Random weights whose outputs depend on the source: drawn wide, norms and biases too."""
    torch.manual_seed(len(name))
    model = SPECS[name].build(tokenizer.vocab_size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
        if isinstance(model, Autoregressive):
            model.embedding.weight[EOS] *= 2  # so that outputs end before their limit
    return model


def exported(model, tokenizer: Tokenizer, directory: Path, compute: str = "float32") -> engine.Engine:
    export(model, tokenizer, directory, max_source_tokens=150, compute=compute, calibration=LINES[:20])
    return engine.load(directory, Settings.read(directory), 1)


def decoded(model, sources: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    rows = final(refine(model, *source_batch(sources)), len(sources))
    return [(model.output_ids(row.tokens), row.scores) for row in rows]


@pytest.mark.parametrize("name", SPECS)
def test_the_runtime_says_what_pytorch_says_with_the_same_scores(tokenizer, tmp_path, name):
    model = build(tokenizer, name)
    peer = exported(model, tokenizer, tmp_path / "x")
    sources = [tokenizer.encode(line) for line in [*LINES[:15], *ODD]]
    expected, found = decoded(model, sources), peer.decode(sources)
    assert [row.ids for row in found] == [ids for ids, _ in expected]
    for row, (_, scores) in zip(found, expected, strict=True):
        assert np.allclose(row.scores, scores, atol=1e-4)
    assert len({tuple(row.ids) for row in found}) > 5, "outputs depend on the source"


@pytest.mark.parametrize("name", ["ctc", "ctc, three frames, one head", "ctc, shared"])
def test_logits_of_frames_are_those_of_pytorch(tokenizer, tmp_path, name):
    model = build(tokenizer, name)
    peer = exported(model, tokenizer, tmp_path / "x")
    source, mask = source_batch([tokenizer.encode(line) for line in LINES[:5]])
    real = mask.numpy()
    frames = real.repeat(model.spec.upsample, 1)
    inputs = {"source": source.numpy(), "masked": engine.masked(real), "frames_masked": engine.masked(frames)}
    [states] = peer._encoder.graph.run(None, inputs)
    logits = peer._words.logits(states)
    with torch.no_grad():
        memory = model.encode(source, mask)
        expected = model.frame_logits(memory.states, memory.mask).flatten(0, 1).numpy()
    assert np.abs(logits - expected)[frames.ravel()].max() < 1e-4


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if isinstance(spec, AutoregressiveSpec)])
def test_log_probabilities_of_steps_are_those_of_pytorch(tokenizer, tmp_path, name):
    model = build(tokenizer, name)
    peer = exported(model, tokenizer, tmp_path / "x")
    source, mask = source_batch([tokenizer.encode(line) for line in LINES[:5]])
    state, every = peer._begin(source.numpy(), mask.numpy()), peer._words.of(LINES[:5])
    with torch.no_grad():
        kept = model.begin(model.encode(source, mask)).layers
        for position in range(6):
            last = torch.arange(5) + 20 * position + 10
            x = model.positions(model.embedding(last[:, None]) * model.spec.d_model**0.5, position)
            x, kept = model.decoder.step(x, kept)
            expected = model.logits(x[:, 0]).log_softmax(-1).numpy()
            for asked in (EOS, 7, 100, 499):  # all others are banned, so that this one is said
                banned = np.full(tokenizer.vocab_size, -np.inf, dtype=np.float32)
                banned[asked] = 0
                only = dataclasses.replace(every, given=every.given | {"banned": peer._tensor(banned)})
                tokens, scores, after = peer._advance(last.numpy(), position, 1, state, only)
                assert (tokens == asked).all()
                assert tokens.shape == scores.shape == (1, 5)
                assert np.abs(scores[0] - expected[:, asked]).max() < 1e-4
            state = after


@pytest.mark.parametrize("name", ["ctc", "autoregressive", "ssru"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_scores_that_are_no_numbers_are_refused(tokenizer, tmp_path, name, number):
    model = build(tokenizer, name)
    with torch.no_grad():
        model.encoder.norm.bias[3] = number
    peer = exported(model, tokenizer, tmp_path / "x")
    with pytest.raises(UserError, match="not numbers"):
        peer.decode([tokenizer.encode(LINES[0])])


@pytest.mark.parametrize("name", ["autoregressive", "ssru", "average, network"])
def test_many_steps_at_once_are_many_single_steps_until_a_row_ends(tokenizer, tmp_path, name):
    peer = exported(build(tokenizer, name), tokenizer, tmp_path / "x")
    source, mask = (part.numpy() for part in source_batch([tokenizer.encode(line) for line in LINES[:5]]))
    start, every, last = peer._begin(source, mask), peer._words.of(LINES[:5]), np.full(5, BOS)
    tokens, scores, after = peer._advance(last, 0, 40, start, every)
    assert 1 < len(tokens) <= 40
    assert (tokens[:-1] != EOS).all()
    assert (tokens[-1] == EOS).any() == (len(tokens) < 40)
    state = start
    for position, (said, score) in enumerate(zip(tokens, scores, strict=True)):
        one, own, state = peer._advance(last, position, 1, state, every)
        assert (one[0] == said).all()
        assert np.allclose(own[0], score, atol=1e-6)
        last = said
    for name in peer._past:
        assert np.allclose(state[name].numpy(), after[name].numpy(), atol=1e-6)


@pytest.mark.parametrize("compute", ["float32", "int8"])
@pytest.mark.parametrize("name", ["ctc", "dag", "autoregressive", "shared, output", "ssru", "average, network"])
def test_a_batch_says_what_each_sentence_says_alone(tokenizer, tmp_path, name, compute):
    peer = exported(build(tokenizer, name), tokenizer, tmp_path / "x", compute)
    sources = [tokenizer.encode(line) for line in [*LINES[:12], *ODD]]
    together = peer.decode(sources)
    for source, row in zip(sources, together, strict=True):
        [alone] = peer.decode([source])
        assert alone.ids == row.ids
        assert np.allclose(alone.scores, row.scores, atol=1e-4 if compute == "float32" else 0.2)


@pytest.mark.parametrize("name", ["ctc", "autoregressive"])
def test_integer_weights_are_a_quarter_and_stay_close(tokenizer, tmp_path, name):
    model = build(tokenizer, name)
    whole, small = (exported(model, tokenizer, tmp_path / c, c) for c in ("float32", "int8"))
    sources = [tokenizer.encode(line) for line in LINES[:8]]
    first = [[row.scores[0] for row in peer.decode(sources)] for peer in (whole, small)]
    assert np.allclose(*first, atol=0.5)
    assert not np.allclose(*first, atol=1e-5)
    positions = 4 * 32 * sum({"ctc": (151, 302), "autoregressive": (151, 322, 322)}[name])
    sizes = [sum(file.stat().st_size for file in (tmp_path / c).glob("*.onnx")) for c in ("float32", "int8")]
    assert sizes[1] - positions < 0.6 * (sizes[0] - positions)


def test_a_product_of_integers_is_the_product_of_what_they_stand_for(tmp_path):
    """Extreme bytes, too: sums of products do not saturate, and inputs out of reach are held at its ends."""
    import onnx
    import onnxruntime

    from hasten.export.calibration import Ranges
    from hasten.export.onnx_graph import Int8Graph

    weight, bias = torch.randn(24, 64, generator=torch.Generator().manual_seed(1)), torch.arange(24.0)
    weight[0], weight[1], weight[2] = 1.0, -1.0, 0.0  # bytes 255, 1 and 128, all through
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    x[0], x[1], x[2] = 3.0, -2.0, 50.0
    ranges = Ranges()
    ranges.see(weight, torch.tensor([-2.0, 3.0]))
    graph = Int8Graph(ranges)
    graph.output(graph.linear(graph.input("x", "FLOAT", ["n", 64]), weight, bias), "y", ["n", 24])
    onnx.save_model(graph.model("product"), tmp_path / "x.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "x.onnx", providers=["CPUExecutionProvider"])
    [found] = session.run(None, {"x": x.numpy()})
    scales = weight.abs().amax(1, keepdim=True).clamp_min(1e-20) / 127
    kept = (weight / scales).round() * scales
    step = 5 / 255
    zero = round(2 / step)
    held = ((x / step).round() + zero).clamp(0, 255).sub(zero) * step
    assert np.allclose(found, held @ kept.T + bias, atol=1e-3)
    assert float(held.max()) == pytest.approx(3, abs=step)
    [alone] = session.run(None, {"x": x[4:5].numpy()})
    assert (alone == found[4:5]).all()


@pytest.mark.parametrize("name", ["ctc", "average, network", "shared, weights", "ssru"])
def test_calibration_sees_what_reaches_every_matrix(tokenizer, name):
    from hasten.export.calibration import calibrate

    for model in (build(tokenizer, name), lay_out(build(tokenizer, name))):
        seen = []
        hook = (
            model.encoder.layers[1]
            .get_submodule("feed_forward_norm")
            .register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output))
        )
        ranges = calibrate(model, tokenizer, ["", *LINES[:5]], 150)
        hook.remove()
        feed_forward: Any = model.encoder.layers[1].get_submodule("feed_forward")
        reached = torch.cat([output.flatten() for output in seen])
        assert ranges.of(feed_forward.inner.weight) == (float(reached.min()), float(reached.max()))
        assert ranges.of(feed_forward.outer.weight).low == 0, "after relu"


def test_blocks_of_one_matrix_have_ranges_of_their_own():
    from hasten.export.calibration import Ranges

    for layout in (torch.zeros(12, 7), torch.zeros(7, 12).T, torch.zeros(24, 7)[12:]):
        ranges = Ranges()
        for block, high in ((slice(0, 4), 1.0), (slice(4, 12), 2.0)):
            ranges.see(layout[block], torch.tensor([high, 0.5]))
        assert ranges.of(layout[:4]) == (0, 1)
        assert ranges.of(layout[8:]) == (0, 2)
        assert ranges.of(layout) == (0, 2)
        with pytest.raises(UserError, match="reached only a part"):
            ranges.of(torch.zeros(12, 7))
        for number in (torch.nan, torch.inf):
            with pytest.raises(UserError, match="not numbers"):
                ranges.see(layout[:1], torch.tensor([number]))


def test_int8_without_a_sentence_to_calibrate_with_is_refused(tokenizer, tmp_path):
    with pytest.raises(UserError, match="no sentence to calibrate with"):
        export(
            build(tokenizer, "ctc"),
            tokenizer,
            tmp_path / "x",
            max_source_tokens=20,
            compute="int8",
            calibration=["", " ", "word " * 90],
        )
    assert not (tmp_path / "x").exists()


def test_quantised_rows_are_within_half_a_step():
    from hasten.export.onnx_graph import quantised

    weight = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    weight[2] = 0
    integers, scales = quantised(weight)
    assert integers.dtype == np.uint8
    assert np.abs((integers.astype(np.float32) - 128) * scales[:, None] - weight).max() <= 0.5001 * scales.max()
    assert integers.min() >= 1, "127 on either side"
    assert (integers[2] == 128).all()


def test_the_certificate_of_a_right_export_is_valid_and_lies_beside_it(tokenizer, tmp_path):
    for name in ("ctc", "dag", "autoregressive"):
        model = build(tokenizer, name)
        exported(model, tokenizer, tmp_path / name)
        found = onnx_certificate.certify(model, tokenizer, tmp_path / name, ["", *LINES[:10]], ["", *LINES[:10]])
        assert found.valid, str(found)
        assert (found.sentences, found.identical, found.likeness) == (10, 10, pytest.approx(100))
        assert found.bleu is not None
        assert found.bleu[0] == found.bleu[1]
        found.write(tmp_path / name)
        said = json.loads((tmp_path / name / "certificate.json").read_text())
        assert said["valid"] is True
        assert said["largest_difference"] < 1e-4


def test_equal_outputs_are_certified_however_short_they_are(tokenizer, tmp_path):
    model = build(tokenizer, "dag")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    exported(model, tokenizer, tmp_path / "x", "int8")
    found = onnx_certificate.certify(model, tokenizer, tmp_path / "x", LINES[:3])
    assert found.identical == 3
    assert found.valid, str(found)


@pytest.mark.parametrize("name", ["ctc", "autoregressive"])
def test_a_wrong_normalisation_epsilon_fails_the_certificate(tokenizer, tmp_path, name):
    model = build(tokenizer, name)
    right = model.encoder.norm.eps
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-1
    exported(model, tokenizer, tmp_path / "x")
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = right
    found = onnx_certificate.certify(model, tokenizer, tmp_path / "x", LINES[:5])
    assert not found.valid
    assert str(found).startswith("NOT certified (float32): ")


def test_a_tie_is_no_mismatch(tokenizer, tmp_path, monkeypatch):
    model = build(tokenizer, "autoregressive")
    exported(model, tokenizer, tmp_path / "x")
    with torch.no_grad():  # of two equal rows the runtime takes the lower id, this model just the other
        source = tokenizer.encode(LINES[0])
        first = decoded(model, [source])[0][0][0]
        other = first + 1 if first < 400 else first - 1
        model.embedding.weight[other] = model.embedding.weight[first] * (1 + 1e-7)
    exported_twin = tmp_path / "twin"
    peer = exported(model, tokenizer, exported_twin)
    with torch.no_grad():
        swapped = {first: other, other: first}
        log_probs = onnx_certificate._parting(model, peer, source, [first], [swapped[first]])
    assert abs(log_probs) < 1e-4
    assert onnx_certificate._parting(model, peer, source, [first], [first + 7]) > 1e-4


def test_integer_weights_that_lose_too_much_are_refused():
    kept = onnx_certificate.OnnxCertificate("int8", 200, 3000, 180, 0, 0.1, 96.0, (28.6, 28.4))
    assert kept.valid
    assert "180 of 200 outputs identical" in str(kept)
    for likeness, bleu, problem in ((60.0, None, "against the outputs"), (96.0, (28.6, 27.0), "BLEU falls from 28.6")):
        lost = onnx_certificate.OnnxCertificate("int8", 200, 3000, 180, 0, 0.1, likeness, bleu)
        assert problem in str(lost)
        assert not lost.valid
    assert "nothing to compare" in str(onnx_certificate.OnnxCertificate("int8", 0, 0, 0, 0, 0.0, 0.0))


def test_memory_layout_does_not_change_the_export(tokenizer, tmp_path):
    exported(build(tokenizer, "ctc"), tokenizer, tmp_path / "rows")
    exported(lay_out(build(tokenizer, "ctc")), tokenizer, tmp_path / "columns")
    for name in ("encoder.onnx", "output.onnx"):
        assert (tmp_path / "rows" / name).read_bytes() == (tmp_path / "columns" / name).read_bytes()


def test_ways_of_a_graph_that_part_at_a_tie_are_a_tie_and_no_others(tokenizer, tmp_path):
    model = build(tokenizer, "dag")
    peer = exported(model, tokenizer, tmp_path / "x")
    source = tokenizer.encode(LINES[0])
    with torch.inference_mode():
        assert onnx_certificate._parting_ways(model, peer, source) < 1e-4
    other = dataclasses.replace(model.spec, decoding=DAGDecoding(method="greedy"))
    twin = other.build(tokenizer.vocab_size).eval()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.links.keys.weight *= -1
    with torch.inference_mode():
        assert onnx_certificate._parting_ways(model, peer, source) > 1e-3
        assert onnx_certificate._parting_ways(twin, peer, source) > 1e-3, "the method of the model counts"


@pytest.mark.parametrize("method", ["viterbi", "beam"])
def test_a_way_that_it_cannot_find_is_refused(tokenizer, method):
    spec = DAGSpec(**SIZES, decoder_layers=1, decoding=DAGDecoding(method=method))
    with pytest.raises(UserError, match=rf"method '{method}'.*greedy and lookahead"):
        check_holdable(spec.build(tokenizer.vocab_size))


def test_a_way_is_that_of_the_definition():
    """Against the sum over the way that pure Python walks, ties to the earlier vertex, for graphs of any size."""
    draw = np.random.default_rng(5)
    for size in [1, 2, 3, *range(4, 40)]:
        links = np.where(np.triu(np.ones((size, size)), 1), draw.integers(-4, 0, (size, size)), -np.inf)
        scores = draw.integers(-4, 0, size).astype(float)
        for beta in (0.0, 1.0, 0.3):
            here, expected, edges = 0, [], []
            while here < size - 1:
                gains = [links[here, u] + beta * (0 if u == size - 1 else scores[u]) for u in range(here + 1, size)]
                following = here + 1 + gains.index(max(gains))
                edges.append(links[here, following])
                here = following
                expected.append(here)
            visited, found = engine.follow(links, scores, beta)
            assert visited.tolist() == expected[:-1]
            assert np.allclose(found, [*edges[:-2], edges[-2] + edges[-1]] if len(edges) > 1 else [])


def test_models_that_it_cannot_hold_are_refused(tokenizer):
    with pytest.raises(UserError, match=r"kind 'nat'.*holds ctc, dag and autoregressive"):
        check_holdable(NATSpec(d_model=16, n_heads=2, d_ff=16).build(tokenizer.vocab_size))
    model = build(tokenizer, "ctc")

    class Other:
        kind = "linear"

    object.__setattr__(model, "spec", CTCSpec(**SIZES))
    object.__setattr__(model.spec, "refiner_attention", (Other(),))
    with pytest.raises(UserError, match="refiner_attention of kind linear"):
        check_holdable(model)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"decoder_attention": (AverageSpec(gate=False),)}, "between projections"),
        ({"decoder_attention": (AverageSpec(),), "decoder_sharing": (1, 1)}, "that other layers share"),
        ({"encoder_attention": (AverageSpec(),)}, "encoder_attention of kind average"),
        ({"decoder_attention": (LinearSpec(),)}, r"decoder_attention of kind linear.*ssru and average"),
    ],
)
def test_attention_that_it_cannot_hold_is_refused(tokenizer, spec, problem):
    model = AutoregressiveSpec(**SIZES, decoder_layers=2, **spec).build(tokenizer.vocab_size)
    with pytest.raises(UserError, match=problem):
        check_holdable(model)


@pytest.mark.parametrize(
    ("name", "sizes", "longest", "problem"),
    [
        ("ctc", {"upsample": 1001}, 20, "upsample is 1001, allowed 1 to 1000"),
        ("dag", {"upsample": 1001}, 20, "upsample is 1001, allowed 1 to 1000"),
        ("autoregressive", {}, 2**40, "max_source_tokens is 1099511627776"),
        ("autoregressive", {}, 2**31, r"positions of 2147483648 source tokens .* data\.max_tokens"),
        ("ctc", {"upsample": 1000}, 2**20, r"positions of 1048576 source tokens .* data\.max_tokens"),
    ],
)
def test_what_the_runtime_would_not_read_is_refused_before_anything_is_lost(
    tokenizer, tmp_path, name, sizes, longest, problem
):
    export(build(tokenizer, "ctc"), tokenizer, tmp_path / "x", max_source_tokens=20)
    before = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}
    model = dataclasses.replace(SPECS[name], **sizes).build(tokenizer.vocab_size)
    with pytest.raises(UserError, match=problem):
        export(model, tokenizer, tmp_path / "x", max_source_tokens=longest, force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()} == before


def test_a_directory_in_use_is_kept(tokenizer, tmp_path):
    model, out = build(tokenizer, "ctc"), tmp_path / "x"
    exported(model, tokenizer, out)
    with pytest.raises(UserError, match="--force"):
        export(model, tokenizer, out, max_source_tokens=150)
    export(model, tokenizer, out, max_source_tokens=150, force=True)
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not overwritten"):
        export(model, tokenizer, out, max_source_tokens=150, force=True)
    with pytest.raises(UserError, match="is a file"):
        export(model, tokenizer, out / "thesis.txt", max_source_tokens=150, force=True)
    with pytest.raises(UserError, match=r"'int3' is unknown.*int8"):
        export(model, tokenizer, tmp_path / "y", max_source_tokens=150, compute="int3")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_an_export_that_fails_half_way_changes_nothing(tokenizer, tmp_path, monkeypatch, kind):
    out, model = tmp_path / "x", build(tokenizer, "ctc")
    exported(model, tokenizer, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(*_):
        raise kind(28, "No space left on device")

    monkeypatch.setattr(Tokenizer, "save", fail)
    for directory, force in ((out, True), (tmp_path / "new" / "y", False)):
        with pytest.raises(UserError if kind is OSError else kind, match="No space left"):
            export(build(tokenizer, "12-1"), tokenizer, directory, max_source_tokens=150, force=force)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_what_a_killed_export_left_is_in_nobodys_way(tokenizer, tmp_path):
    out = tmp_path / "x"
    (out / ".growing").mkdir(parents=True)
    (out / ".growing" / "encoder.onnx").write_bytes(b"half")
    exported(build(tokenizer, "ctc"), tokenizer, out)
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["README.md", "encoder.onnx", "hasten.json", "listed.onnx", "output.onnx", "rows.onnx", "tokenizer.model"]
    )
    exported(build(tokenizer, "12-1"), tokenizer, tmp_path / "y")
    (tmp_path / "y" / "hasten.json").unlink()  # leaves first and comes last
    with pytest.raises(UserError, match="no model for ONNX Runtime"):
        Settings.read(tmp_path / "y")
    export(build(tokenizer, "ctc"), tokenizer, tmp_path / "y", max_source_tokens=150, force=True)
    assert {path.name for path in (tmp_path / "y").iterdir()} == {path.name for path in out.iterdir()}


def test_a_folder_by_the_name_of_a_graph_is_kept(tokenizer, tmp_path):
    (tmp_path / "x" / "encoder.onnx").mkdir(parents=True)
    (tmp_path / "x" / "encoder.onnx" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not overwritten"):
        export(build(tokenizer, "ctc"), tokenizer, tmp_path / "x", max_source_tokens=150, force=True)
    assert (tmp_path / "x" / "encoder.onnx" / "thesis.txt").exists()


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_missing_package_names_its_extra(tokenizer, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"hasten\[onnx\]"):
        exported(build(tokenizer, "ctc"), tokenizer, tmp_path / "x")


def test_a_damaged_export_is_one_clear_error(tokenizer, tmp_path):
    exported(build(tokenizer, "ctc"), tokenizer, tmp_path / "x")
    with pytest.raises(UserError, match="no model for ONNX Runtime"):
        Settings.read(tmp_path)
    (tmp_path / "x" / "output.onnx").write_bytes(b"not a graph")
    with pytest.raises(UserError, match=r"output\.onnx cannot be loaded"):
        engine.load(tmp_path / "x", Settings.read(tmp_path / "x"))
    for text, problem in (("{", "damaged"), ('{"format": 9}', "format 9"), ('{"format": 2}', "damaged")):
        (tmp_path / "x" / "hasten.json").write_text(text)
        with pytest.raises(UserError, match=problem):
            Settings.read(tmp_path / "x")
