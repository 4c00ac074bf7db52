"""Small models that ship with the package, and where a model's name leads."""

import re
from pathlib import Path

from hasten.errors import UserError

_HERE = Path(__file__).parent
_ALLOWED = "give a run directory, a hub id (owner/name) or one of"
_EXPORTS = (
    ("hasten.json", "ONNX Runtime", "translate with it by --runtime onnx"),
    ("model.bin", "CTranslate2", "distill takes it as ctranslate2:DIR"),
)
"""Of each engine: a file that its directories have, its name, and what to do with them."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def names() -> list[str]:
    """The bundled models."""
    return sorted(path.parent.name for path in _HERE.glob("*/config.toml"))


def resolve(name: str | Path) -> Path:
    """The directory of a model: a run directory, a bundled name, or a Hugging Face hub id (downloaded)."""
    try:
        directory = Path(name)
        if str(name) and directory.is_dir():
            _check_no_export(directory)
            return directory
    except (OSError, TypeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or f"it is of type {type(name).__name__}"
        raise UserError(f"no model {name!r:.60}: {reason}; {_ALLOWED} {names()}") from error
    if str(name) in names():
        return _HERE / str(name)
    if _HUB_ID.fullmatch(str(name)) and not directory.is_absolute() and str(name)[0] != ".":
        return _download(str(name))
    raise UserError(f"no model {str(name)!r}: {_ALLOWED} {names()}")


def _check_no_export(directory: Path) -> None:
    """`UserError` for what `hasten export` wrote, and CTranslate2's converters: it runs in another engine."""
    for file, engine, use in _EXPORTS:
        if (directory / file).exists() and not (directory / "config.toml").exists():
            raise UserError(f"{directory} is no run directory but an export for {engine}: {use}, or name its model")


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    allowed = ["config.toml", "tokenizer.model", "model.safetensors", "README.md"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=allowed))
    except Exception as error:  # the hub raises dozens of kinds, and every one means the same to the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"no directory {hub_id!r}, and the hub does not give it: {reason}") from error
