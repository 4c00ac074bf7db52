"""What takes part in a comparison of decoders, and how it is written on the command line."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hasten.errors import UserError

_PEERS = ("ctranslate2", "onnx")
_COMPUTE = ("float32", "int8")


@dataclass(frozen=True)
class Contestant:
    """A model with the way it is decoded.

    decoding: changes to the model's settings of decoding. rescorer: the model that chooses among the outputs of a beam.
    draft: the model whose outputs this one checks. shortlist: the table of the pieces that it may say.
    directory: the exported model of a contestant in another engine; parameters: how many it has. The bench sets both.
    """

    model: str
    engine: str = "hasten"
    compute: str = "float32"
    beam: int = 1
    decoding: tuple[str, ...] = ()
    rescorer: str = ""
    draft: str = ""
    shortlist: str = ""
    directory: str = ""
    parameters: int | None = None
    full_name: bool = False

    @property
    def label(self) -> str:
        """The contestant in short: of a path the last part, unless that would be ambiguous."""
        last = self.model.rstrip("/").rpartition("/")[2]
        name = self.model if self.full_name or not last else last
        peer = f"{self.engine}:" if self.engine in _PEERS else ""
        options = [self.compute] if peer else []
        options += [f"beam={self.beam}"] if self.beam > 1 else []
        options += [f"rescorer={self.rescorer}"] if self.rescorer else []
        options += [f"draft={self.draft}"] if self.draft else []
        options += [f"shortlist={self.shortlist}"] if self.shortlist else []
        return ":".join([peer + name, *options, *self.decoding])


def parse(text: str) -> Contestant:
    """What is written as [ctranslate2:|onnx:]MODEL[:OPTION...]; or `UserError`.

    An option is float32, int8, beam=N, rescorer=MODEL, draft=MODEL, shortlist=FILE or KEY=VALUE; other keys are
    settings of the model's decoding.
    """
    engine, colon, rest = text.partition(":")
    peer = engine in _PEERS and bool(colon)
    model, *options = (rest if peer else text).split(":")
    found = Contestant(model, engine if peer else "hasten")
    given: set[str] = set()
    for option in options:
        key, equals, value = (part.strip() for part in option.partition("="))
        name = "compute" if peer and option in _COMPUTE else key
        if name in given:
            raise UserError(f"--models: {text!r} gives {name} more than once; write it once")
        given.add(name)
        if peer and option in _COMPUTE:
            found = replace(found, compute=option)
        elif key == "beam" and found.engine != "onnx" and _counts(value):
            found = replace(found, beam=int(value))
        elif key == "shortlist" and found.engine != "ctranslate2" and value:
            found = replace(found, shortlist=value)
        elif key in ("beam", "shortlist") or peer or not (key and equals and value):
            raise UserError(
                f"--models: {text!r} has the option {option!r}; allowed: beam=N (not for onnx), shortlist=FILE "
                "(not for ctranslate2), for ctranslate2 and onnx: float32, int8, for models of hasten: rescorer=MODEL, "
                "draft=MODEL and settings of their decoding, such as iterations=4"
            )
        elif key == "rescorer":
            found = replace(found, rescorer=value)
        elif key == "draft":
            found = replace(found, draft=value)
        else:
            found = replace(found, decoding=(*found.decoding, f"{key}={value}"))
    if not model:
        raise UserError(f"--models: {text!r} names no model; write NAME, NAME:beam=4 or ctranslate2:NAME:int8")
    if found.rescorer and found.beam == 1:
        raise UserError(f"--models: {text!r} has a rescorer but one output to choose from; add beam=N")
    if found.draft and found.shortlist:
        raise UserError(f"--models: {text!r} has a draft and a shortlist; what it says itself has no shortlist")
    if found.draft and found.beam > 1:
        raise UserError(f"--models: {text!r} has a draft, which is for one output without a beam; leave out beam")
    return found


def _counts(text: str) -> bool:
    """Whether it is a number from 1 in digits, of a length that Python reads."""
    return text.isdecimal() and text.isascii() and len(text) < 10 and int(text) >= 1


def parse_all(text: str) -> list[Contestant]:
    """A comma-separated list; every contestant once, with labels that tell them apart."""
    found = [parse(part.strip()) for part in text.split(",") if part.strip()]
    if not found:
        raise UserError("--models is empty; name at least one model, for example en-de-ctc,en-de-teacher")
    for entry in found:
        if found.count(entry) > 1:
            raise UserError(f"--models: {entry.label} stands there more than once")
    return told_apart(found)


def told_apart(entries: Sequence[Contestant]) -> list[Contestant]:
    """The same, with their full names where their labels would be alike."""
    labels = [entry.label for entry in entries]
    return [replace(entry, full_name=labels.count(entry.label) > 1) for entry in entries]
