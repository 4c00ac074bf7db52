"""Models as directories for ONNX Runtime, which `hasten.runtime` decodes with: no PyTorch is needed there."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hasten.attention.average import AverageLayer
from hasten.attention.full import FullAttention
from hasten.attention.multihead import MultiHeadAttention
from hasten.data.tokenizer import Tokenizer
from hasten.directories import renewed, replaceable
from hasten.errors import UserError
from hasten.export.calibration import calibrate
from hasten.export.certificate import sentences
from hasten.export.onnx_graph import Float32Graph, Graph, Int8Graph, onnx_package
from hasten.export.onnx_models import Holdable, autoregressive_graphs, beta, ctc_graphs, dag_graphs
from hasten.models.autoregressive import Autoregressive
from hasten.models.base import GenerationModel
from hasten.models.ctc import CTC
from hasten.models.dag import DAG
from hasten.runtime.engine import LISTED, STAMP
from hasten.runtime.settings import SETTINGS, Settings

COMPUTE = ("float32", "int8")
_MOST_OF_POSITIONS = 2**30
"""Bytes; a graph in ONNX ends at 2 GB."""
_FILES = ("encoder.onnx", "output.onnx", "steps.onnx", "step.onnx", *LISTED, SETTINGS)
_OTHERS = ("tokenizer.model", "README.md", "certificate.json")


def check_holdable(model: GenerationModel) -> Holdable:
    """The model, where it can be written: CTC, DAG that is read by its best edges, or autoregressive; full attention
    everywhere, in autoregressive decoders SSRU and average attention with its gate, too. Else `UserError`."""
    holds = (
        "ONNX holds ctc, dag and autoregressive models with full attention, shared between layers or not, and in "
        "autoregressive decoders ssru and average"
    )
    kind = getattr(getattr(model, "spec", None), "kind", type(model).__name__)
    if not isinstance(model, Holdable):
        raise UserError(f"cannot export a model of kind {str(kind)!r}: {holds}; distil a ctc student from it instead")
    for name in ("encoder_attention", "decoder_attention", "cross_attention", "refiner_attention"):
        known = {"full", "ssru", "average"} if name == "decoder_attention" else {"full"}
        other = sorted({str(layer.kind) for layer in getattr(model.spec, name, ())} - known)
        if other:
            raise UserError(f"cannot export {name} of kind {', '.join(other)}: {holds}")
    if isinstance(model, DAG) and model.spec.decoding.method not in ("greedy", "lookahead"):
        raise UserError(
            f"cannot export the decoding method {model.spec.decoding.method!r}: ONNX holds greedy and lookahead; set "
            'method = "lookahead" under [model.decoding] of its config.toml'
        )
    if isinstance(model, Autoregressive):
        _check_own_layers(model)
    return model


def _check_own_layers(model: Autoregressive) -> None:
    """Average attention as a layer of its own, whose weights no other layer uses."""
    attentions = [layer.get_submodule("self_attention") for layer in model.decoder.layers]
    for attention in attentions:
        if isinstance(attention, MultiHeadAttention) and not isinstance(attention.attention, FullAttention):
            raise UserError(
                "cannot export average attention between projections; ONNX holds it with its gate or network"
            )
    for number, source in enumerate(model.decoder.plan.sources):
        if source != number and isinstance(attentions[source], AverageLayer):
            raise UserError("cannot export average attention that other layers share; share full attention instead")


def export(
    model: GenerationModel,
    tokenizer: Tokenizer,
    directory: str | Path,
    *,
    max_source_tokens: int,
    compute: str = "float32",
    calibration: Sequence[str] | None = None,
    force: bool = False,
) -> Path:
    """Write `model` as a directory for `hasten.runtime`; returns the directory.

    max_source_tokens: the longest source; lines with more are split as `Translator` splits them. compute: "float32" or
    "int8". calibration: source lines that show int8 what activations reach; None: those that come with hasten. Raises
    `UserError` for a model that cannot be written or a directory in the way, `MissingExtra` without onnx. It certifies
    nothing: see `hasten.export.onnx_certificate`.
    """
    directory = Path(directory)
    if compute not in COMPUTE:
        raise UserError(f"compute {compute!r} is unknown; choose one of {', '.join(COMPUTE)}")
    own = check_holdable(model)
    onnx = onnx_package()
    old = replaceable(directory, "an ONNX model of hasten", _FILES, _OTHERS, force=force)
    settings = Settings(
        own.spec.kind,
        compute,
        max_source_tokens,
        1 if isinstance(own, Autoregressive) else own.spec.upsample,
        len(own.embedding.weight),
        sum(parameter.numel() for parameter in own.parameters()),
        tokenizer.fingerprint,
        "",
        beta(own) if isinstance(own, DAG) else 0.0,
    )
    longest = max_source_tokens + 1  # the end symbol
    _check_readable(settings, longest * own.spec.d_model * 4)
    graph: Callable[[], Graph] = Float32Graph
    if compute == "int8":
        lines = sentences() if calibration is None else calibration
        graph = partial(Int8Graph, calibrate(own, tokenizer, lines, max_source_tokens))
    if isinstance(own, Autoregressive):
        graphs = autoregressive_graphs(graph, own, longest)
    else:
        graphs = ctc_graphs(graph, own, longest) if isinstance(own, CTC) else dag_graphs(graph, own, longest)
    settings = replace(settings, graphs=_stamped(graphs.values()))
    try:
        with renewed(directory, old, last=SETTINGS) as new:
            for name, written in graphs.items():
                onnx.save_model(written, new / name)
            tokenizer.save(new / "tokenizer.model")
            settings.write(new)
            (new / "README.md").write_text(_usage(compute), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {directory}: {error.strerror}; give another --out, or --force later") from error
    return directory


def _check_readable(settings: Settings, positions: int) -> None:
    """`UserError` for what the runtime would refuse to read, or ONNX to hold; `positions`: bytes of a source's."""
    try:
        settings.check()
    except ValueError as error:
        raise UserError(f"cannot export this model: {error}") from error
    if positions * settings.upsample > _MOST_OF_POSITIONS:
        raise UserError(
            f"cannot export this model: the positions of {settings.max_source_tokens} source tokens do not fit into an "
            "ONNX graph; lower data.max_tokens in its config.toml"
        )


def _stamped(graphs: Collection[Any]) -> str:
    """A name of these graphs, by all that is in them, which each keeps: so they are known to belong together."""
    name = hashlib.sha256(b"".join(graph.SerializeToString(deterministic=True) for graph in graphs)).hexdigest()
    for graph in graphs:
        graph.metadata_props.add(key=STAMP, value=name)
    return name


def _usage(compute: str) -> str:
    return f"""# A model for ONNX Runtime written by hasten ({compute})

```bash
echo "Open the file." | python -m hasten.runtime DIR
```

DIR is this directory. It needs the packages numpy, sentencepiece and onnxruntime, and the source of hasten, but no
PyTorch. `certificate.json` says how the outputs were compared with those of the model it was made from.
"""
