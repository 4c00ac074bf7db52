"""Autoregressive models as CTranslate2 directories. Source: Klein et al., 2020, "The OpenNMT Neural Machine Translation
Toolkit"; the format is that of CTranslate2 4."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from hasten.attention.multihead import MultiHeadAttention
from hasten.data.tokenizer import BOS, EOS, UNK, Tokenizer
from hasten.directories import renewed, replaceable
from hasten.errors import UserError
from hasten.export.engine import engine
from hasten.models.autoregressive import Autoregressive
from hasten.models.base import GenerationModel
from hasten.nn.layers import FeedForward
from hasten.nn.positions import sinusoids

QUANTIZATIONS = ("float32", "float16", "bfloat16", "int16", "int8", "int8_float32", "int8_float16", "int8_bfloat16")
_FILES = ("model.bin", "config.json", "shared_vocabulary.json")
POSITIONS = 2048
"""Rows of the exported position table: the longest source and the longest output in tokens."""


def check_exportable(model: GenerationModel) -> Autoregressive:
    """The model, where CTranslate2 can hold it: autoregressive, every layer with full attention; else `UserError`."""
    holds = "CTranslate2 holds autoregressive Transformers with full attention"
    if not isinstance(model, Autoregressive):
        raise UserError(f"cannot export a model of kind {_kind(model)!r}: {holds}; export its teacher instead")
    spec = model.spec
    for name in ("encoder_attention", "decoder_attention", "cross_attention"):
        other = sorted({str(layer.kind) for layer in getattr(spec, name)} - {"full"})
        if other:
            raise UserError(f"cannot export {name} of kind {', '.join(other)}: {holds} in every layer")
    for name in ("encoder_sharing", "decoder_sharing", "cross_sharing"):
        if any(number != layer for layer, number in enumerate(getattr(spec, name), 1)):
            raise UserError(f"cannot export {name} = {list(getattr(spec, name))}: {holds} of its own in every layer")
    return model


def export(
    model: GenerationModel,
    tokenizer: Tokenizer,
    directory: str | Path,
    *,
    quantization: str = "float32",
    force: bool = False,
) -> Path:
    """Write `model` as a CTranslate2 directory, the tokenizer beside it; returns the directory.

    Raises `UserError` for a model that the target cannot hold, an unknown quantization, or a directory in the way, and
    `MissingExtra` without ctranslate2. It certifies nothing: see `hasten.export.certificate`.
    """
    directory = Path(directory)
    if quantization not in QUANTIZATIONS:
        raise UserError(f"quantization {quantization!r} is unknown; choose one of {', '.join(QUANTIZATIONS)}")
    exportable = check_exportable(model)
    old = replaceable(directory, "a CTranslate2 model", _FILES, ("tokenizer.model", "README.md"), force=force)
    spec = build_spec(exportable, tokenizer.pieces())
    spec.validate()
    spec.optimize(quantization=quantization)
    try:
        with renewed(directory, old, last="model.bin") as new:
            spec.save(str(new))
            tokenizer.save(new / "tokenizer.model")
            (new / "README.md").write_text(_usage(quantization), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {directory}: {error.strerror}; give another --out, or --force later") from error
    return directory


def build_spec(model: Autoregressive, pieces: Sequence[str]) -> Any:
    """The model as a CTranslate2 specification.

    Linear weights are (out, in) on both sides; queries, keys and values are stacked on rows on both sides; embeddings
    are tied and scaled by sqrt(d_model) on both sides.
    """
    ctranslate2 = engine()
    spec = ctranslate2.specs.TransformerSpec.from_config(
        (model.spec.encoder_layers, model.spec.decoder_layers),
        model.spec.n_heads,
        pre_norm=True,
        activation=ctranslate2.specs.Activation.RELU,
    )
    table, positions = _array(model.embedding.weight), sinusoids(POSITIONS, model.spec.d_model).numpy()
    spec.encoder.embeddings[0].weight = table
    spec.decoder.embeddings.weight = table
    spec.decoder.projection.weight = table
    for side, stack in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        side.scale_embeddings = True
        side.position_encodings.encodings = positions
        _norm(side.layer_norm, stack.norm)
        for target, layer in zip(side.layer, stack.layers, strict=True):
            _layer(target, layer)
    spec.register_source_vocabulary(list(pieces))
    spec.register_target_vocabulary(list(pieces))
    config = spec.config
    config.unk_token, config.bos_token, config.eos_token = pieces[UNK], pieces[BOS], pieces[EOS]
    config.decoder_start_token = pieces[BOS]
    config.add_source_bos, config.add_source_eos = False, True
    config.layer_norm_epsilon = model.encoder.norm.eps
    return spec


def _layer(target: Any, layer: nn.Module) -> None:
    for name, own in (("self_attention", "self"), ("attention", "cross")):
        if hasattr(target, name):
            _attention(getattr(target, name), getattr(layer, f"{own}_attention"), getattr(layer, f"{own}_norm"))
    feed_forward, norm = layer.get_submodule("feed_forward"), layer.get_submodule("feed_forward_norm")
    assert isinstance(feed_forward, FeedForward)
    _norm(target.ffn.layer_norm, norm)
    _linear(target.ffn.linear_0, feed_forward.inner.weight, feed_forward.inner.bias)
    _linear(target.ffn.linear_1, feed_forward.outer.weight, feed_forward.outer.bias)


def _attention(target: Any, attention: MultiHeadAttention, norm: nn.Module) -> None:
    """Two linear maps hold self-attention (QKV, O), three hold cross-attention (Q, KV, O)."""
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    assert bias is not None
    split = 0 if len(target.linear) == 2 else attention.d_model
    if split:
        _linear(target.linear[0], weight[:split], bias[:split])
    _linear(target.linear[-2], weight[split:], bias[split:])
    _linear(target.linear[-1], attention.out_proj.weight, attention.out_proj.bias)
    _norm(target.layer_norm, norm)


def _linear(target: Any, weight: Tensor, bias: Tensor) -> None:
    target.weight, target.bias = _array(weight), _array(bias)


def _norm(target: Any, norm: nn.Module) -> None:
    assert isinstance(norm, nn.LayerNorm)
    target.gamma, target.beta = _array(norm.weight), _array(norm.bias)


def _array(tensor: Tensor) -> np.ndarray:
    # A copy: quantising works in place.
    return np.array(tensor.detach().float().cpu().numpy(), order="C", copy=True)


def _kind(model: GenerationModel) -> str:
    return str(getattr(getattr(model, "spec", None), "kind", type(model).__name__))


def _usage(quantization: str) -> str:
    return f"""# A CTranslate2 model written by hasten ({quantization})

```python
from pathlib import Path
from hasten.data.tokenizer import Tokenizer
from hasten.export.engine import CTranslate2Model

here = Path(".")  # this directory
tokenizer = Tokenizer.load(here / "tokenizer.model")
model = CTranslate2Model(here, tokenizer)
[ids] = model.decode([tokenizer.encode("Open the file.")])
print(tokenizer.decode(ids))
```

Without hasten: `ctranslate2.Translator(DIR)` takes and gives SentencePiece pieces (a leading space belongs to the first
word; U+2581 and U+E000 in a text are escaped). The engine appends the end symbol to sources. For exactly the outputs of
hasten pass `max_input_length=0`, `min_decoding_length=0`, `disable_unk=True`, `max_decoding_length=2 * S + 22` for S
source pieces, and `suppress_sequences=[["<pad>"], ["<s>"], ["<mask>"], ["<blank>"], ["<placeholder>"]]`. Sources and
outputs hold at most {POSITIONS} tokens.
"""
