"""Running an exported model in CTranslate2; nothing of hasten's own models is needed for it."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hasten.data.tokenizer import EOS, SPECIAL_IDS, UNK, Tokenizer
from hasten.errors import MissingExtra


def engine() -> Any:
    """The ctranslate2 package; `MissingExtra` where it is not installed."""
    try:
        return importlib.import_module("ctranslate2")
    except ImportError as error:
        raise MissingExtra("ctranslate2", "export") from error


class CTranslate2Model:
    """An exported directory: ids in, ids out, with the symbols that are no text suppressed as hasten does.

    `compute` is float32, int8, ... or "default" (what the directory was quantised to).
    """

    def __init__(self, directory: str | Path, tokenizer: Tokenizer, *, threads: int = 1, compute: str = "default"):
        self.tokenizer, self.pieces = tokenizer, tokenizer.pieces()
        self._ids = {piece: i for i, piece in enumerate(self.pieces)}
        self._suppressed = [[self.pieces[i]] for i in SPECIAL_IDS if i not in (UNK, EOS)]
        self._engine = engine().Translator(
            str(directory), device="cpu", compute_type=compute, inter_threads=1, intra_threads=threads
        )

    def decode(
        self, sources: Sequence[list[int]], *, beam: int = 1, limit: int = 512, exactly: int | None = None
    ) -> list[list[int]]:
        """The best output of each source (ids without EOS on both sides), at most `limit` ids long.

        exactly: forbid the end symbol, so that every output has that many ids (for timing).
        """
        suppressed = self._suppressed if exactly is None else [*self._suppressed, [self.pieces[EOS]]]
        results = self._engine.translate_batch(
            [[self.pieces[i] for i in source] for source in sources],
            beam_size=beam,
            max_input_length=0,
            max_decoding_length=limit if exactly is None else exactly,
            min_decoding_length=exactly or 0,
            suppress_sequences=suppressed,
            disable_unk=True,
        )
        return [[self._ids[piece] for piece in result.hypotheses[0]] for result in results]

    def score(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[list[float]]:
        """Log probabilities of each target's ids and of the end symbol after them."""
        results = self._engine.score_batch(
            [[self.pieces[i] for i in source] for source in sources],
            [[self.pieces[i] for i in target] for target in targets],
            max_input_length=0,
        )
        return [list(result.log_probs) for result in results]
