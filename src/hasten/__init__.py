"""Transformers made fast, and measured."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.conversion import Conversion, convert
    from hasten.errors import UserError
    from hasten.translator import Candidate, Translator, load

__version__: str
__all__ = ["Candidate", "Conversion", "Translator", "UserError", "__version__", "convert", "load"]

_HOMES = {
    "Candidate": "hasten.translator",
    "Conversion": "hasten.conversion",
    "Translator": "hasten.translator",
    "UserError": "hasten.errors",
    "convert": "hasten.conversion",
    "load": "hasten.translator",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import hasten` and the command line stay light."""
    if name == "__version__":
        from importlib.metadata import version

        return version("hasten")
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hasten' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
