"""Who takes part in a comparison of attention: mechanisms of hasten, and peers in an environment of their own."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from hasten.attention.mechanism import Place
from hasten.bench.mechanism import mechanism, split
from hasten.bench.process import Process
from hasten.errors import UserError

PEER = "peer:"
_WORKER = Path(__file__).with_name("attention_worker.py")
_MODULES = Path(__file__).with_name("attention_modules.py")
_HOW = "make one with benchmarks/peers/setup and give --peers benchmarks/peers"


@dataclass(frozen=True)
class Contestant:
    """A label for tables, the name that its factory knows it by, and the command that starts its process."""

    label: str
    name: str
    engine: str
    command: tuple[str, ...]


def contestants(mechanisms: str, peers: Path | None, place: Place) -> list[Contestant]:
    """Who a comma-separated list names, in its order; peers follow, all of them unless the list names some.

    place: the heads they are measured with.
    `UserError` for an unknown mechanism or peer, for the same one twice and for a missing environment of peers.
    """
    names = split(mechanisms)
    asked = [name.removeprefix(PEER) for name in names if name.startswith(PEER)]
    own = [name for name in names if not name.startswith(PEER)]
    if not names:
        raise UserError("--mechanisms is empty; name at least one, for example full")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--mechanisms: {name} stands there more than once")
    for name in own:
        _check(name, place)
    command = (sys.executable, str(_WORKER), str(_MODULES))
    found = [Contestant(name, name, "hasten", command) for name in own]
    if asked and peers is None:
        raise UserError(f"--mechanisms: {PEER}{asked[0]} needs an environment of peers; {_HOW}")
    return found if peers is None else [*found, *_peers(asked, peers)]


def _check(name: str, place: Place) -> None:
    try:
        mechanism(name).at(place).build()
    except UserError as error:
        raise UserError(f"--mechanisms: {error}") from error


def _peers(asked: list[str], given: Path) -> list[Contestant]:
    python, factory = environment(given)
    # Isolated (-I): nothing of this process's own environment may reach the peers.
    command = (str(python), "-I", str(_WORKER), str(factory))
    process = Process(f"--peers {given}", command, 1)
    try:
        known = process.ask({"do": "names"})
    finally:
        process.close()
    for name in asked:
        if name not in known:
            raise UserError(f"--mechanisms: no peer {name!r}; known: {', '.join(known)}")
    return [Contestant(PEER + name, name, "peer", command) for name in asked or known]


def environment(given: Path) -> tuple[Path, Path]:
    """The interpreter and the factory of peers: from their directory, or from the interpreter in its `.venv`."""
    # Not resolved: an interpreter knows its environment by the path that it is called by.
    directory = given.absolute() if given.is_dir() else given.absolute().parent.parent.parent
    python = directory / ".venv" / "bin" / "python" if given.is_dir() else given.absolute()
    factory = directory / "peers.py"
    if not os.access(python, os.X_OK):
        raise UserError(f"--peers: there is no environment of peers at {given} ({python} is missing); {_HOW}")
    if not factory.is_file():
        raise UserError(f"--peers: {given} belongs to no directory with peers.py; {_HOW}")
    return python, factory
