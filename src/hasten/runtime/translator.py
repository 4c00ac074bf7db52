"""Text in, text out, with an exported model."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hasten.data.grouping import group_by_tokens
from hasten.data.parts import Candidate, OnLong, checked, cut, of_lines, text_of
from hasten.data.shortlist import Shortlist
from hasten.data.tokenizer import Tokenizer
from hasten.errors import UserError
from hasten.runtime import engine
from hasten.runtime.settings import Settings

BATCH_TOKENS = 1024
MOST_THREADS = 1024


def load(directory: str | Path, *, threads: int = 0, shortlist: str | Path | None = None) -> "RuntimeTranslator":
    """A translator from a directory that `hasten export --to onnx` wrote.

    threads: CPU threads of a matrix product, 0: as many as ONNX Runtime thinks best. shortlist: a table by `hasten
    shortlist`; each sentence is said in the pieces that it lists for it, and scores are over that list. Raises
    `UserError` where anything is missing or damaged, `MissingExtra` without onnxruntime.
    """
    directory = Path(directory)
    if not 0 <= threads <= MOST_THREADS:
        raise UserError(f"threads is {threads}, allowed 0 to {MOST_THREADS}")
    settings = Settings.read(directory)
    tokenizer = Tokenizer.load(directory / "tokenizer.model")
    if tokenizer.fingerprint != settings.tokenizer:
        raise UserError(f"{directory / 'tokenizer.model'} is not the tokenizer of this model; export the model again")
    if tokenizer.vocab_size != settings.vocabulary:
        raise UserError(
            f"{directory} says that it has {settings.vocabulary} pieces, its tokenizer has {tokenizer.vocab_size}; "
            "export the model again"
        )
    table = None if shortlist is None else Shortlist.load(shortlist).check(tokenizer, str(shortlist))
    return RuntimeTranslator(engine.load(directory, settings, threads, table), tokenizer)


@dataclass(frozen=True)
class RuntimeTranslator:
    """Translates lines as `hasten.Translator` does without a beam: the same parts of long lines, the same outputs."""

    engine: engine.Engine
    tokenizer: Tokenizer

    @property
    def max_source_tokens(self) -> int:
        """Lines with more pieces are long: they are split or refused."""
        return self.engine.settings.max_source_tokens

    def translate(
        self, lines: Iterable[str], *, batch_tokens: int = BATCH_TOKENS, on_long: OnLong = "split"
    ) -> list[str]:
        """One translation a line, in order, without line breaks; lines without text stay empty."""
        return [best.text for [best] in self.candidates(lines, batch_tokens=batch_tokens, on_long=on_long)]

    def candidates(
        self, lines: Iterable[str], *, batch_tokens: int = BATCH_TOKENS, on_long: OnLong = "split"
    ) -> list[list[Candidate]]:
        """The greedy translation of every line with its score and log probability, as in `hasten.Translator`.

        `batch_tokens` bounds the padded source tokens that are decoded at once; it changes speed and memory. Raises
        `UserError` for lines that are no strings, and with on_long "error" `LineTooLong` before anything is decoded.
        """
        if batch_tokens < 1:
            raise UserError(f"batch_tokens is {batch_tokens}, allowed 1 or more")
        texts = checked(lines)
        parts = cut(texts, self.tokenizer, self.max_source_tokens, on_long)
        found: list[list[Candidate]] = [[] for _ in parts]
        for group in group_by_tokens([len(part.ids) + 1 for part in parts], batch_tokens):
            for i, decoded in zip(group, self.engine.decode([parts[i].ids for i in group]), strict=True):
                total = sum(decoded.scores)
                mean = total / max(1, len(decoded.scores))
                found[i] = [Candidate(text_of(self.tokenizer, decoded.ids), mean, total)]
        return of_lines(len(texts), parts, found, 1)
