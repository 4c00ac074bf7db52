"""What takes part in a comparison of decoders, and how it is written on the command line."""

from dataclasses import dataclass, replace

from hasten.errors import UserError

_PEER = "ctranslate2:"
_COMPUTE = ("float32", "int8")


@dataclass(frozen=True)
class Contestant:
    """A model with the way it is decoded.

    directory: the exported model of a CTranslate2 contestant; parameters: how many it has. Both are set by the bench.
    """

    model: str
    engine: str = "hasten"
    compute: str = "float32"
    beam: int = 1
    directory: str = ""
    parameters: int | None = None
    full_name: bool = False

    @property
    def label(self) -> str:
        """The contestant in short: of a path the last part, unless that would be ambiguous."""
        last = self.model.rstrip("/").rpartition("/")[2]
        name = self.model if self.full_name or not last else last
        peer = _PEER if self.engine == "ctranslate2" else ""
        return peer + name + (f":{self.compute}" if peer else "") + (f":beam={self.beam}" if self.beam > 1 else "")


def parse(text: str) -> Contestant:
    """[ctranslate2:]MODEL[:float32|:int8][:beam=N]; `UserError` for anything else."""
    peer = text.startswith(_PEER)
    model, *options = text.removeprefix(_PEER).split(":")
    compute, beam = "float32", 1
    for option in options:
        width = option.removeprefix("beam=")
        if option in _COMPUTE and peer:
            compute = option
        elif width != option and width.isdecimal() and int(width) >= 1:
            beam = int(width)
        else:
            raise UserError(
                f"--models: {text!r} has the option {option!r}; allowed: beam=N, and for ctranslate2: float32, int8"
            )
    if not model:
        raise UserError(f"--models: {text!r} names no model; write NAME, NAME:beam=4 or ctranslate2:NAME:int8")
    return Contestant(model, "ctranslate2" if peer else "hasten", compute, beam)


def parse_all(text: str) -> list[Contestant]:
    """A comma-separated list; every contestant once, with labels that tell them apart."""
    found = [parse(part.strip()) for part in text.split(",") if part.strip()]
    if not found:
        raise UserError("--models is empty; name at least one model, for example en-de-ctc,en-de-teacher")
    for entry in found:
        if found.count(entry) > 1:
            raise UserError(f"--models: {entry.label} stands there more than once")
    labels = [entry.label for entry in found]
    return [replace(entry, full_name=labels.count(entry.label) > 1) for entry in found]
