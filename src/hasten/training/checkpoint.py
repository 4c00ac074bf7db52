"""Model directories: complete and pickle-free."""

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hasten import spec as specs
from hasten.data.tokenizer import Tokenizer
from hasten.directories import made
from hasten.errors import UserError
from hasten.models.base import GenerationModel
from hasten.spec import RunSpec

CONFIG, TOKENIZER, WEIGHTS = "config.toml", "tokenizer.model", "model.safetensors"
STATE, RECENT = "state", "recent"
_KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)  # int64: seeds and counters
_FORMAT = {"format": "hasten", "version": "1"}
_SCALE = ".row_scale"
"""What a matrix of whole numbers is multiplied by, row by row, has the matrix's name and this behind it."""


def write_run(directory: Path, spec: RunSpec, tokenizer: Tokenizer) -> None:
    """The parts of a model directory that are known before training."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG).write_text(specs.dump(spec), encoding="utf-8")
        tokenizer.save(directory / TOKENIZER)
    except OSError as error:
        raise UserError(f"cannot write a run to {directory}: {error.strerror}") from error


def clear_run(directory: Path) -> None:
    """Remove what an earlier run left, so that nothing of it is taken for the new one; other directories stay."""
    if not holds_run(directory):
        return
    for name in (STATE, STATE + ".new", STATE + ".old", RECENT, "tensorboard"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in (CONFIG, TOKENIZER, WEIGHTS, "metrics.jsonl", "README.md"):
        (directory / name).unlink(missing_ok=True)


def save_weights(path: Path, weights: Mapping[str, Tensor], tokenizer: Tokenizer) -> None:
    """Write tensors with the tokenizer's fingerprint; the file appears whole or not at all."""
    partial = path.with_suffix(".partial")
    plain: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        own = tensor.detach().cpu().contiguous()
        # The format has no tensors in common: what several layers share is written for each.
        plain[name] = own.clone() if any(own.data_ptr() == other.data_ptr() for other in plain.values()) else own
    try:
        save_file(plain, partial, metadata={**_FORMAT, "tokenizer": tokenizer.fingerprint})
        partial.chmod(0o666 & ~_umask())  # safetensors writes files that only their owner can read
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}; what was saved before is whole") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def in_bytes(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same for `save_weights` in about a quarter of the memory: of every matrix bytes and a scale for each row.

    A weight moves by at most 1/254 of the largest of its row; what is no matrix of floating-point numbers is kept in
    half precision. `read_weights` multiplies again.
    """
    small: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if tensor.ndim == 2 and tensor.is_floating_point():
            scale = tensor.float().abs().amax(1).clamp_min(1e-30) / 127  # rows of zeros have one, too
            small[name] = (tensor.float() / scale[:, None]).round().to(torch.int8)
            small[name + _SCALE] = scale
        else:
            small[name] = tensor.half() if tensor.is_floating_point() else tensor
    return small


def _multiplied(weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Matrices that were kept in bytes, in float32."""
    scales = {name.removesuffix(_SCALE): weights.pop(name) for name in list(weights) if name.endswith(_SCALE)}
    for name, scale in scales.items():
        integers = weights.get(name)
        if integers is None or integers.dtype != torch.int8 or integers.ndim != 2 or scale.shape != integers.shape[:1]:
            raise UserError(f"{path}: {name + _SCALE} belongs to no matrix of bytes; the file is damaged")
        weights[name] = integers.float() * scale.float()[:, None]
    return weights


def read_weights(path: Path, tokenizer: Tokenizer | None = None) -> dict[str, Tensor]:
    """Tensors of a file by `save_weights`; `UserError` where it is missing, damaged or of another tokenizer."""
    require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if {key: metadata.get(key) for key in _FORMAT} != _FORMAT:
                raise UserError(f"{path} was not written by this version of hasten (metadata {metadata})")
            if tokenizer is not None and metadata.get("tokenizer") != tokenizer.fingerprint:
                raise UserError(f"{path} was trained with another tokenizer than {path.parent / TOKENIZER}")
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {error}") from error
    weights = _multiplied(weights, path)
    for name, tensor in weights.items():
        if tensor.dtype not in _KINDS:
            allowed = ", ".join(str(kind).removeprefix("torch.") for kind in _KINDS)
            raise UserError(f"{path}: {name} is of type {str(tensor.dtype).removeprefix('torch.')}, allowed {allowed}")
    return weights


def require_file(path: Path) -> None:
    """`UserError` unless a regular file is there; a pipe or a device would keep its reader waiting."""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not regular:
        raise UserError(f"cannot read {path}: it is no regular file")


def read_run(directory: Path, decoding: Sequence[str] = ()) -> tuple[RunSpec, Tokenizer, GenerationModel]:
    """The spec, the tokenizer and the model (in float32, in eval mode) of a model directory.

    decoding: changes to the settings of decoding, as "key=value".
    Raises `UserError` for whatever is missing, damaged or at odds; the global random numbers stay as they were.
    """
    for name in (CONFIG, TOKENIZER):
        require_file(directory / name)
    spec = specs.load(directory / CONFIG)
    if decoding:
        spec = _decoding_otherwise(spec, decoding)
    tokenizer = Tokenizer.load(directory / TOKENIZER)
    origin = str(directory / WEIGHTS)
    weights = read_weights(directory / WEIGHTS, tokenizer)
    for name, tensor in weights.items():
        if not tensor.float().isfinite().all():
            raise UserError(f"{origin}: {name} holds numbers that are not finite; train again with a lower rate")
    if not _plausible(spec, weights):  # the certain check makes torch import for a second
        _check_fit(spec, tokenizer.vocab_size, weights, directory)
    with torch.random.fork_rng(devices=[]):
        model = spec.model.build(tokenizer.vocab_size)
    fill(model, weights, origin)
    return spec, tokenizer, model.eval()


def _decoding_otherwise(spec: RunSpec, decoding: Sequence[str]) -> RunSpec:
    settings = getattr(spec.model, "decoding", None)
    if settings is None:
        raise UserError(f"{spec.model.kind} models have no settings of decoding to change; got {decoding[0]!r}")
    for change in decoding:
        key, equals, value = (part.strip() for part in change.partition("="))
        if not (key and equals and value):
            name, default = next(iter(vars(settings).items()))
            raise UserError(f"{change!r} is no setting of decoding; write KEY=VALUE, for example {name}={default}")
        if key not in vars(settings):
            allowed = ", ".join(sorted(vars(settings)))
            raise UserError(f"{spec.model.kind} models have no setting of decoding {key!r}; allowed: {allowed}")
    return specs.changed(spec, [f"model.decoding.{change}" for change in decoding], "the model's settings of decoding")


def _plausible(spec: RunSpec, weights: Mapping[str, Tensor]) -> bool:
    """Whether a model of this spec cannot be much larger than the weights."""
    embedding = weights.get("embedding.weight")
    widest = max((size for tensor in weights.values() for size in tensor.shape), default=0)
    numbers = {name: value for name, value in vars(spec.model).items() if isinstance(value, int)}
    fits = embedding is not None and embedding.ndim == 2 and numbers.get("d_model") == embedding.shape[1]
    return fits and all(value <= max(widest, len(weights)) for value in numbers.values())


def _check_fit(spec: RunSpec, vocab_size: int, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Compare shapes before any memory is taken: a configuration may ask for a model larger than the machine."""
    try:
        with torch.device("meta"):
            shapes = spec.model.build(vocab_size).state_dict()
    except (RuntimeError, OverflowError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{directory / CONFIG} describes a model that cannot be built: {reason}") from error
    compare(shapes, weights, str(directory / WEIGHTS))


def fill(model: nn.Module, weights: Mapping[str, Tensor], origin: str) -> None:
    """Copy weights into the model, names and shapes equal; `UserError` names the first difference."""
    compare(model.state_dict(), weights, origin)
    model.load_state_dict({name: _widened(tensor) for name, tensor in weights.items()})


def _widened(tensor: Tensor) -> Tensor:
    """Numbers in float32; whole ones as they are, since float32 does not hold every seed."""
    return tensor.float() if tensor.is_floating_point() else tensor


def compare(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], origin: str) -> None:
    """`UserError` names the first difference in names, shapes or kinds of numbers."""
    for name in sorted(own.keys() | weights.keys()):
        if name not in own or name not in weights:
            raise UserError(f"{origin}: {name} is {'unknown to the model' if name in weights else 'missing'}")
        if own[name].shape != weights[name].shape:
            got, want = tuple(weights[name].shape), tuple(own[name].shape)
            raise UserError(f"{origin}: {name} has shape {got}, the model of {CONFIG} needs {want}")
        if own[name].is_floating_point() != weights[name].is_floating_point():
            got, want = (str(kind).removeprefix("torch.") for kind in (weights[name].dtype, own[name].dtype))
            raise UserError(f"{origin}: {name} is of type {got}, the model of {CONFIG} needs {want}")


def fill_matching(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """Copy the weights whose names and shapes agree; returns the names copied."""
    own = model.state_dict()
    kinds = {n: (t.shape, t.is_floating_point()) for n, t in own.items()}
    matching = {n: _widened(t) for n, t in weights.items() if kinds.get(n) == (t.shape, t.is_floating_point())}
    model.load_state_dict(matching, strict=False)
    return sorted(matching)


def holds_run(directory: Path) -> bool:
    """Whether anything of a run is there that would be lost."""
    names = (CONFIG, WEIGHTS, STATE, STATE + ".old")
    foreign = (directory / "config.json").exists() and not (directory / CONFIG).exists()  # another package's weights
    return not foreign and any((directory / name).exists() for name in names)


def claim(directory: Path, *, resume: bool, force: bool) -> None:
    """`UserError` unless a run may be written there: new, empty, or as `resume` and `force` say."""
    if resume and force:
        raise UserError("--resume goes on with a run, --force writes over it; leave out one of them")
    occupied = directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
    if resume and not any((directory / name).exists() for name in (STATE, STATE + ".old")):
        raise UserError(f"{directory} holds no saved state to resume from; start without --resume")
    if occupied and not holds_run(directory):
        raise UserError(f"{directory} holds something other than a run; choose another --out")
    if occupied and not resume and not force:
        raise UserError(f"{directory} holds a run; give --resume to go on with it or --force to write over it")


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Nobody else trains there meanwhile: another process that tries gets a `UserError`."""
    with made(directory, "cannot write a run to"):
        try:
            descriptor = os.open(directory, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"cannot write a run to {directory}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                hint = "wait for it or choose another --out"
                raise UserError(f"another process trains in {directory}; {hint}") from error
            yield
        finally:
            os.close(descriptor)
