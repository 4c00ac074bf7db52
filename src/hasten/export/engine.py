"""Running an exported model in CTranslate2; nothing of hasten's own models is needed for it."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hasten.data.tokenizer import EOS, SPECIAL_IDS, UNK, Tokenizer
from hasten.errors import MissingExtra, UserError

VOCABULARY, CONFIG = "shared_vocabulary.json", "config.json"
_THEIRS = frozenset(("<s>", "</s>", "<unk>", "<blank>", "<pad>"))  # what converters add


def engine() -> Any:
    """The ctranslate2 package; `MissingExtra` where it is not installed."""
    try:
        return importlib.import_module("ctranslate2")
    except ImportError as error:
        raise MissingExtra("ctranslate2", "export") from error


class CTranslate2Model:
    """An exported directory: ids in, ids out, with the symbols that are no text suppressed as hasten does.

    `compute` is float32, int8, ... or "default" (what the directory was quantised to). Raises `UserError` where the
    engine cannot load the directory.
    """

    def __init__(
        self,
        directory: str | Path,
        tokenizer: Tokenizer,
        *,
        threads: int = 1,
        compute: str = "default",
        device: str = "cpu",
    ):
        self.tokenizer, self.pieces = tokenizer, tokenizer.pieces()
        self._ids = {piece: i for i, piece in enumerate(self.pieces)}
        known, config = read_vocabulary(directory), read_json(directory, CONFIG)
        if not isinstance(config, dict):
            raise UserError(f"{Path(directory) / CONFIG} is no configuration of CTranslate2")
        if foreign := [piece for piece in known if piece not in self._ids and piece not in _THEIRS]:
            raise UserError(
                f"{Path(directory) / VOCABULARY} is not that of the tokenizer: {foreign[0]!r} is none of its "
                "pieces; put the tokenizer of this very model beside it"
            )
        # A conversion of another package's model may lack special symbols, and leave the end of the source to us.
        self._suppressed = [[self.pieces[i]] for i in SPECIAL_IDS if i not in (UNK, EOS) and self.pieces[i] in known]
        self._ends = [] if config.get("add_source_eos") else [self.pieces[EOS]]
        package = engine()
        try:
            self._engine = package.Translator(
                str(directory), device=device, compute_type=compute, inter_threads=1, intra_threads=threads
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"CTranslate2 cannot load {directory}: {reason}") from error

    def decode(
        self, sources: Sequence[list[int]], *, beam: int = 1, limit: int = 512, exactly: int | None = None
    ) -> list[list[int]]:
        """The best output of each source (ids without EOS on both sides), at most `limit` ids long.

        exactly: forbid the end symbol, so that every output has that many ids (for timing).
        """
        suppressed = self._suppressed if exactly is None else [*self._suppressed, [self.pieces[EOS]]]
        results = self._engine.translate_batch(
            [[self.pieces[i] for i in source] + self._ends for source in sources],
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
            [[self.pieces[i] for i in source] + self._ends for source in sources],
            [[self.pieces[i] for i in target] for target in targets],
            max_input_length=0,
        )
        return [list(result.log_probs) for result in results]


def read_vocabulary(directory: str | Path) -> dict[str, int]:
    """The pieces of a CTranslate2 directory and their ids there; `UserError` where it is missing or damaged."""
    listed = read_json(directory, VOCABULARY)
    if not isinstance(listed, list) or not all(isinstance(piece, str) for piece in listed):
        raise UserError(f"{Path(directory) / VOCABULARY} is no list of pieces")
    return {piece: i for i, piece in enumerate(listed)}


def read_json(directory: str | Path, name: str) -> Any:
    """A file of a CTranslate2 directory; `UserError` where it is missing or damaged."""
    try:
        return json.loads((Path(directory) / name).read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot read {Path(directory) / name}: {error.strerror}; convert the model by CTranslate2 4, with one "
            "vocabulary for both sides"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{Path(directory) / name} is no JSON: {error}") from error
