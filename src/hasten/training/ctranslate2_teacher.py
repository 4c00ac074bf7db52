"""A CTranslate2 directory as a teacher: one by `hasten export`, or a conversion of an OPUS-MT model."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.errors import UserError
from hasten.training.teachers import ReadyTeacher, Teacher, sha256_of_file

if TYPE_CHECKING:
    from hasten.data.tokenizer import Tokenizer

PREFIX = "ctranslate2:"
MOST_SOURCE_TOKENS = 200
_TOKENIZER, _SIDES = "tokenizer.model", ("source.spm", "target.spm")


@dataclass(frozen=True)
class CTranslate2Teacher(Teacher):
    """A model directory of CTranslate2 with tokenizer.model, or with source.spm and target.spm; lengths are pieces.

    name: "ctranslate2:" and the directory. Lines of more than `MOST_SOURCE_TOKENS` pieces are split. `batch_tokens`
    bounds the padded source tokens times beam, as it does for models of this package.
    """

    name: str
    beam: int = 4
    batch_tokens: int = 4096
    device: str = "cpu"
    threads: int = 1

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return Path(self.name.removeprefix(PREFIX))

    def unit(self) -> str:
        """Pieces of the model's tokenizer."""
        return "pieces"

    def identity(self) -> dict[str, str | int]:
        """Checksums of its files and the settings of its decoding."""
        names = ("model.bin", "config.json", "shared_vocabulary.json", *self._tokenizer_files())
        files: dict[str, str | int] = {f"{name} sha256": sha256_of_file(self.directory / name) for name in names}
        return {**files, "beam": self.beam, "batch_tokens": self.batch_tokens, "device": self.device}

    def ready(self) -> ReadyTeacher:
        """Load it."""
        from hasten.data.grouping import group_by_tokens
        from hasten.data.parts import Candidate, cut, of_lines, text_of
        from hasten.export.engine import CTranslate2Model

        tokenizer = self._tokenizer()
        model = CTranslate2Model(self.directory, tokenizer, threads=self.threads, device=self.device)

        def translate(lines: Sequence[str]) -> list[str]:
            parts = cut(lines, tokenizer, MOST_SOURCE_TOKENS, "split")
            said: list[list[Candidate]] = [[] for _ in parts]
            for group in group_by_tokens([len(p.ids) + 1 for p in parts], max(1, self.batch_tokens // self.beam)):
                # The engine has one limit for a batch, and a beam depends on it: lines of one length go together.
                for length, same in groupby(group, key=lambda i: len(parts[i].ids)):
                    rows = list(same)
                    found = model.decode([parts[i].ids for i in rows], beam=self.beam, limit=2 * length + 22)
                    for i, ids in zip(rows, found, strict=True):
                        said[i] = [Candidate(text_of(tokenizer, ids), 0.0, 0.0)]
            return [best[0].text for best in of_lines(len(lines), parts, said, 1)]

        return ReadyTeacher(translate, lambda text: len(tokenizer.encode(text)))

    def _tokenizer_files(self) -> tuple[str, ...]:
        """Which there are; `UserError` where it is no such directory."""
        if not (self.directory / "model.bin").is_file():
            raise UserError(f"{str(self.directory)!r} is no CTranslate2 model: it has no model.bin")
        for names in ((_TOKENIZER,), _SIDES):
            if all((self.directory / name).is_file() for name in names):
                return names
        raise UserError(
            f"{self.directory} has no tokenizer: put {_TOKENIZER}, or {' and '.join(_SIDES)}, beside model.bin"
        )

    def _tokenizer(self) -> "Tokenizer":
        from hasten.data.marian_tokenizer import MarianTokenizer
        from hasten.data.tokenizer import Tokenizer
        from hasten.export.engine import read_vocabulary

        if self._tokenizer_files() == (_TOKENIZER,):
            return Tokenizer.load(self.directory / _TOKENIZER)
        source, target = ((self.directory / name).read_bytes() for name in _SIDES)
        special = ("<pad>", "<unk>", "</s>")
        pieces = [piece for piece in read_vocabulary(self.directory) if piece not in special]
        return MarianTokenizer.pack(source, target, pieces)
