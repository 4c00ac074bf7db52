"""Who translates when text is distilled: a model of this package, or any program that maps lines to lines."""

import hashlib
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hasten.errors import UserError
from hasten.pretrained import resolve


class ReadyTeacher(NamedTuple):
    """A teacher at work: one translation a line, and the length of a text in the teacher's unit."""

    translate: Callable[[Sequence[str]], list[str]]
    length: Callable[[str], int]


class Teacher(ABC):
    """A description that another process can turn into a working teacher."""

    name: str

    @abstractmethod
    def unit(self) -> str:
        """What lengths count."""

    @abstractmethod
    def identity(self) -> dict[str, str | int]:
        """What decides about its translations; two teachers of equal identity translate alike."""

    @abstractmethod
    def ready(self) -> ReadyTeacher:
        """Load it."""


@dataclass(frozen=True)
class ModelTeacher(Teacher):
    """A model by name, directory or hub id; lengths are pieces of its tokenizer.

    Loading it gives the process that does so `threads` PyTorch threads.
    """

    name: str
    beam: int = 4
    batch_tokens: int = 4096
    device: str = "cpu"
    threads: int = 1

    def unit(self) -> str:
        """Pieces of the model's tokenizer."""
        return "pieces"

    def identity(self) -> dict[str, str | int]:
        """Checksums of its files and the settings of its decoding."""
        from hasten.training import checkpoint

        directory = resolve(self.name)
        files = {"weights": checkpoint.WEIGHTS, "config": checkpoint.CONFIG, "tokenizer": checkpoint.TOKENIZER}
        files = {f"{key} sha256": sha256_of_file(directory / file) for key, file in files.items()}
        return {**files, "beam": self.beam, "batch_tokens": self.batch_tokens, "device": self.device}

    def ready(self) -> ReadyTeacher:
        """Load the model."""
        import torch

        import hasten

        torch.set_num_threads(self.threads)
        translator = hasten.load(self.name, device=self.device)

        def translate(lines: Sequence[str]) -> list[str]:
            return translator.translate(lines, beam=self.beam, batch_tokens=self.batch_tokens)

        return ReadyTeacher(translate, lambda text: len(translator.tokenizer.encode(text)))


@dataclass(frozen=True)
class CommandTeacher(Teacher):
    """A shell command that reads lines and writes a translation for each, run anew for every shard.

    Lengths are pieces where `tokenizer` (a model's name or directory) is given, otherwise words.
    """

    name: str
    tokenizer: str | None = None

    def unit(self) -> str:
        """Pieces or words."""
        return "words" if self.tokenizer is None else "pieces"

    def identity(self) -> dict[str, str | int]:
        """The command itself."""
        if self.tokenizer is None:
            return {"command": self.name}
        return {"command": self.name, "tokenizer sha256": sha256_of_file(_tokenizer_file(self.tokenizer))}

    def ready(self) -> ReadyTeacher:
        """Load the tokenizer; the command itself starts with every shard."""
        if self.tokenizer is None:
            return ReadyTeacher(self._translate, lambda text: len(text.split()))
        from hasten.data.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(_tokenizer_file(self.tokenizer))
        return ReadyTeacher(self._translate, lambda text: len(tokenizer.encode(text)))

    def _translate(self, lines: Sequence[str]) -> list[str]:
        if not lines:
            return []
        # A carriage return inside a line is a line break to some programs.
        given = "".join(line.replace("\r", " ") + "\n" for line in lines).encode("utf-8")
        done = subprocess.run(self.name, shell=True, input=given, capture_output=True, check=False)
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise UserError(f"--teacher-command {self.name!r} ended with code {done.returncode}: {' '.join(said[-1:])}")
        try:
            answer = done.stdout.decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"--teacher-command {self.name!r} wrote invalid UTF-8: {error}") from error
        answer = answer[:-1] if answer[-1] == "" else answer
        if len(answer) != len(lines):
            raise UserError(
                f"--teacher-command {self.name!r} gave {len(answer)} lines for {len(lines)}; "
                "it must write exactly one line for every line it reads"
            )
        return answer


def _tokenizer_file(model: str) -> Path:
    from hasten.training.checkpoint import TOKENIZER

    return resolve(model) / TOKENIZER


def sha256_of_file(path: Path) -> str:
    """Of its content; `UserError` where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
