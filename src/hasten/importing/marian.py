"""Hugging Face checkpoints of Marian models (OPUS-MT) as model directories; nothing in them is executed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hasten.data.marian_tokenizer import MarianTokenizer
from hasten.data.tokenizer import BOS, EOS, PAD, SPECIAL_IDS, UNK
from hasten.errors import UserError
from hasten.models.marian import MarianSpec
from hasten.nn.positions import halves
from hasten.spec import DataSpec, RunSpec, TokenizerSpec
from hasten.training import checkpoint

WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"
NEVER = -1e4
"""The bias of special ids that Marian lacks: their probability is 0 in float32."""
_ACTIVATIONS = {"swish": "swish", "silu": "swish", "relu": "relu"}
_TABLES = (
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)
_POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
_BIAS = "final_logits_bias"
_PARTS = {
    "self_attention.out_proj": "self_attn.out_proj",
    "self_norm": "self_attn_layer_norm",
    "feed_forward.inner": "fc1",
    "feed_forward.outer": "fc2",
    "feed_forward_norm": "final_layer_norm",
}
_CROSS_PARTS = {"cross_attention.out_proj": "encoder_attn.out_proj", "cross_norm": "encoder_attn_layer_norm"}


def import_marian(directory: Path, out: Path, *, force: bool = False) -> Path:
    """Write the model of a checkpoint directory as a model directory; returns it.

    Raises `UserError` where something is missing, damaged or at odds with itself, for weights that only a pickle
    holds, for settings that `MarianSpec` cannot say, and for an `out` in the way.
    """
    if out.exists() and directory.exists() and out.samefile(directory):
        raise UserError(f"{out} is the checkpoint itself; choose another --out")
    checkpoint.claim(out, resume=False, force=force)
    config = _config(directory)
    spec = _spec(config, directory)
    pieces = _pieces(directory, config["vocab_size"])
    order = _order(pieces, config, directory)
    ordinary = [pieces[i] for i in order[len(SPECIAL_IDS) :]]
    tokenizer = MarianTokenizer.pack(_bytes(directory / "source.spm"), _bytes(directory / "target.spm"), ordinary)
    weights = _converted(_weights(directory), spec, order, str(directory / WEIGHTS))
    with torch.device("meta"):  # no memory is taken for what a configuration may ask for
        shapes = spec.build(tokenizer.vocab_size).state_dict()
    checkpoint.compare(shapes, weights, str(directory / WEIGHTS))
    checkpoint.clear_run(out)
    run = RunSpec(
        model=spec,
        data=DataSpec(path="not at hand", max_tokens=max(2, config["max_position_embeddings"]) - 1),
        tokenizer=TokenizerSpec(vocab_size=tokenizer.vocab_size),
    )
    checkpoint.write_run(out, run, tokenizer)
    checkpoint.save_weights(out / checkpoint.WEIGHTS, weights, tokenizer)
    (out / "README.md").write_text(_card(directory, out, spec, tokenizer.vocab_size), encoding="utf-8")
    return out


def _config(directory: Path) -> dict[str, Any]:
    """config.json with the settings that some files leave out."""
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory; give that of a Marian checkpoint (config.json, {WEIGHTS}, ...)")
    config = _json(directory / "config.json")
    if not isinstance(config, dict) or config.get("model_type") != "marian":
        kind = config.get("model_type") if isinstance(config, dict) else None
        raise UserError(f"{directory} is no Marian checkpoint: model_type in its config.json is {kind!r}, not 'marian'")
    config = {"max_position_embeddings": 512, "dropout": 0.1, "scale_embedding": False, **config}
    if not isinstance(config["dropout"], int | float) or not 0 <= config["dropout"] < 1:
        raise UserError(f"{directory / 'config.json'}: dropout is {config['dropout']!r}, allowed 0 to less than 1")
    for name in (*_NUMBERS, *_IDS):
        value, least = config.get(name), int(name in _NUMBERS)
        most = _MOST_LAYERS if name.endswith("_layers") else _MOST
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            told = f"{name} is {value!r:.40}, needed a whole number, {least} to {most}"
            raise UserError(f"{directory / 'config.json'}: {told}")
    return config


_MOST, _MOST_LAYERS = 2**31 - 1, 1000
_NUMBERS = (
    "vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads",
    "encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings",
)  # fmt: skip
_IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")


def _spec(config: Mapping[str, Any], directory: Path) -> MarianSpec:
    """The model; `UserError` names the first setting that it cannot have."""
    activation = config.get("activation_function", "gelu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise _unsupported(directory, "activation_function", activation, "swish or relu")
    if config["d_model"] % 2:
        raise _unsupported(directory, "d_model", config["d_model"], "an even number")
    wanted = {
        "tie_word_embeddings": (True,),
        "share_encoder_decoder_embeddings": (True,),
        "decoder_vocab_size": (None, config["vocab_size"]),
        "decoder_attention_heads": (config["encoder_attention_heads"],),
        "decoder_ffn_dim": (config["encoder_ffn_dim"],),
        "normalize_before": (False,),
        "normalize_embedding": (False,),
        "add_final_layer_norm": (False,),
    }
    for name, allowed in wanted.items():
        if config.get(name, allowed[0]) not in allowed:
            raise _unsupported(directory, name, config[name], str(allowed[-1]))
    return MarianSpec(
        d_model=config["d_model"],
        n_heads=config["encoder_attention_heads"],
        d_ff=config["encoder_ffn_dim"],
        encoder_layers=config["encoder_layers"],
        decoder_layers=config["decoder_layers"],
        activation=_ACTIVATIONS[activation],  # type: ignore[arg-type]
        scale_embedding=bool(config["scale_embedding"]),
        dropout=float(config["dropout"]),
    )


def _unsupported(directory: Path, name: str, value: object, allowed: str) -> UserError:
    return UserError(f"{directory / 'config.json'}: {name} is {value!r}; supported is {allowed}")


def _pieces(directory: Path, vocab_size: int) -> list[str]:
    """The joint vocabulary in the order of its ids."""
    vocabulary = _json(directory / "vocab.json")
    numbered = isinstance(vocabulary, dict) and len(vocabulary) == vocab_size  # before memory is taken for so many
    if not numbered or sorted(map(str, vocabulary.values())) != sorted(map(str, range(vocab_size))):
        raise UserError(f"{directory / 'vocab.json'} does not number {vocab_size} pieces from 0, as config.json says")
    return sorted(vocabulary, key=lambda piece: int(vocabulary[piece]))


def _order(pieces: Sequence[str], config: Mapping[str, Any], directory: Path) -> list[int]:
    """Marian's id for every id of ours; for those that it lacks that of the pad, as a place holder."""
    if "<unk>" not in pieces:
        raise UserError(f"{directory / 'vocab.json'} has no piece <unk>")
    for name in _IDS:
        if config[name] >= len(pieces):
            raise UserError(f"{directory / 'config.json'}: {name} is {config[name]}, beyond {len(pieces)} pieces")
    order = [config["pad_token_id"]] * len(SPECIAL_IDS)
    order[UNK], order[EOS] = pieces.index("<unk>"), config["eos_token_id"]
    order[BOS] = config["decoder_start_token_id"]
    special = {order[PAD], order[UNK], order[EOS]}
    if len(special) < 3 or order[BOS] not in special:
        raise UserError(
            f"{directory / 'config.json'}: pad_token_id, eos_token_id and <unk> must differ and decoder_start_token_id "
            "be one of them"
        )
    return order + [i for i in range(len(pieces)) if i not in special]


def _weights(directory: Path) -> dict[str, Tensor]:
    """The tensors, in float32."""
    path = directory / WEIGHTS
    if not path.exists() and (directory / PICKLE).exists():
        raise UserError(
            f"{directory / PICKLE} is a pickle, which may execute anything when it is read; if you trust it, convert "
            f"it: from transformers import MarianMTModel as M; M.from_pretrained({str(directory)!r})"
            f".save_pretrained({str(directory)!r})"
        )
    checkpoint.require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {error}") from error
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{path}: {name} is of type {kind}; supported are weights in floating point")
        if not tensor.float().isfinite().all():
            raise UserError(f"{path}: {name} holds numbers that are not finite")
    return {name: tensor.float() for name, tensor in weights.items()}


def _converted(
    theirs: Mapping[str, Tensor], spec: MarianSpec, order: Sequence[int], origin: str
) -> dict[str, Tensor]:  # fmt: skip
    """The weights under our names; `UserError` names one that is missing or left over."""
    left = dict(theirs)

    def take(name: str) -> Tensor:
        if name not in left:
            raise UserError(f"{origin}: {name} is missing")
        return left.pop(name)

    own = _tables(left, order, origin)
    _check_positions(left, spec, origin)
    for side, layers in (("encoder", spec.encoder_layers), ("decoder", spec.decoder_layers)):
        attentions = {"self_attention": "self_attn"}
        parts = _PARTS
        if side == "decoder":
            attentions, parts = {**attentions, "cross_attention": "encoder_attn"}, {**_PARTS, **_CROSS_PARTS}
        for i in range(layers):
            here, there = f"{side}.layers.{i}", f"model.{side}.layers.{i}"
            for kind in ("weight", "bias"):
                for name, their in parts.items():
                    own[f"{here}.{name}.{kind}"] = take(f"{there}.{their}.{kind}")
                for name, their in attentions.items():
                    three = [take(f"{there}.{their}.{part}_proj.{kind}") for part in "qkv"]
                    if len({part.shape for part in three}) > 1:
                        raise UserError(f"{origin}: the projections of {there}.{their} differ in their {kind}'s shape")
                    own[f"{here}.{name}.in_proj_{kind}"] = torch.cat(three)
    if left:
        raise UserError(f"{origin}: {min(left)} is unknown to a Marian model of the layers in config.json")
    return own


def _tables(left: dict[str, Tensor], order: Sequence[int], origin: str) -> dict[str, Tensor]:
    """The one table of embeddings and the bias of the output, in our order of ids."""
    tables = [left.pop(name) for name in _TABLES if name in left]
    if not tables:
        raise UserError(f"{origin}: {_TABLES[0]} is missing")
    if any(not torch.equal(tables[0], other) for other in tables[1:]):
        raise UserError(f"{origin}: source, target and output have different embeddings; supported is one table")
    n_pieces = max(order) + 1
    bias = left.pop(_BIAS, torch.zeros(1, n_pieces)).flatten()
    if tables[0].dim() != 2 or len(tables[0]) != n_pieces or len(bias) != n_pieces:
        raise UserError(f"{origin}: embeddings or {_BIAS} are not those of {n_pieces} pieces, as config.json says")
    table, bias = tables[0][list(order)], bias[list(order)]
    lacking = [i for i in SPECIAL_IDS if i not in (PAD, UNK, BOS, EOS)]
    table[lacking] = 0.0
    bias[[BOS, *lacking]] = NEVER
    return {"embedding.weight": table, "output_bias": bias}


def _check_positions(left: dict[str, Tensor], spec: MarianSpec, origin: str) -> None:
    for name in _POSITIONS:
        table = left.pop(name, None)
        if table is not None and not (
            table.dim() == 2
            and table.shape[1] == spec.d_model
            and torch.allclose(table, halves(len(table), spec.d_model), atol=1e-2)
        ):
            raise UserError(f"{origin}: {name} is no table of sinusoids; supported are Marian's sinusoids")


def _bytes(path: Path) -> bytes:
    checkpoint.require_file(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _json(path: Path) -> Any:
    data = _bytes(path)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}") from error


def _card(directory: Path, out: Path, spec: MarianSpec, vocab_size: int) -> str:
    return (
        f"# {out.resolve().name}\n\nKind `marian`, imported by hasten from `{directory.resolve().name}`: "
        f"{spec.encoder_layers} and {spec.decoder_layers} layers, width {spec.d_model}, {vocab_size:,} ids.\n"
        "The licence is that of the original.\n"
    )
