"""Marian's tokenizers: a SentencePiece model for each side, and one list of pieces for both."""

import hashlib
import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Sequence

import sentencepiece

from hasten.data.tokenizer import SPECIAL_IDS, UNK, Tokenizer
from hasten.errors import UserError

_SOURCE, _TARGET, _PIECES = "source.spm", "target.spm", "pieces.json"
_CODE = re.compile(">>.*?<<", re.DOTALL)
_SPECIAL = ("<pad>", "<unk>", "<s>", "</s>", "<mask>", "<blank>", "<placeholder>")


class MarianTokenizer(Tokenizer):
    """Ids of two SentencePiece models that read a joint list of pieces, in one file.

    Pieces that the list lacks are `UNK`; a code at the beginning such as >>fr<< is one piece. No text encodes to the
    other special ids, and `decode` drops all of them. Unlike `Tokenizer` it loses what its SentencePiece models
    normalise away.
    """

    def __init__(self, model: bytes):
        self._model = model
        try:
            with zipfile.ZipFile(io.BytesIO(model)) as archive:
                source, target, listed = (archive.read(name) for name in (_SOURCE, _TARGET, _PIECES))
            self._source, self._target = _processor(source, _SOURCE), _processor(target, _TARGET)
            ordinary = json.loads(listed)
        except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, RuntimeError, EOFError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"the tokenizer file is damaged: {error}") from error
        if not isinstance(ordinary, list) or not all(isinstance(piece, str) for piece in ordinary):
            raise UserError(f"the tokenizer file is damaged: {_PIECES} is no list of pieces")
        if len(set(ordinary)) < len(ordinary):
            raise UserError(f"the tokenizer file is damaged: {_PIECES} has a piece twice")
        self._pieces = [*_SPECIAL, *ordinary]
        self._ids = {piece: i for i, piece in enumerate(self._pieces) if i not in SPECIAL_IDS}
        self.vocab_size = len(self._pieces)
        self.fingerprint = hashlib.sha256(model).hexdigest()

    @classmethod
    def pack(cls, source: bytes, target: bytes, pieces: Sequence[str]) -> "MarianTokenizer":
        """Of two SentencePiece models and the joint pieces without special ones, in the order of their ids."""
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in ((_SOURCE, source), (_TARGET, target), (_PIECES, _listed(pieces))):
                archive.writestr(zipfile.ZipInfo(name), content)  # without a time, so that equal parts are equal bytes
        return cls(file.getvalue())

    def encode(self, text: str) -> list[int]:
        """Ids of a source text, without begin or end symbols. `UserError` for a lone surrogate."""
        return self._encode(self._source, text)

    def encode_target(self, text: str) -> list[int]:
        """Ids of a target text."""
        return self._encode(self._target, text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of target ids; special ids are dropped."""
        pieces = [self._pieces[int(i)] for i in ids if i not in SPECIAL_IDS]
        return self._target.decode_pieces(pieces).replace("\u2581", " ").strip()

    def pieces(self) -> list[str]:
        """The vocabulary in id order."""
        return list(self._pieces)

    def _encode(self, processor: sentencepiece.SentencePieceProcessor, text: str) -> list[int]:
        code = _CODE.match(text)
        rest = text[code.end() :] if code else text
        try:
            pieces = [*([code[0]] if code else []), *processor.encode(rest, out_type=str)]
        except (RuntimeError, UnicodeEncodeError) as error:
            raise UserError(f"{text[:40]!r} is no Unicode text: it holds a lone surrogate") from error
        return [self._ids.get(piece, UNK) for piece in pieces]


def _listed(pieces: Sequence[str]) -> bytes:
    return json.dumps(list(pieces), ensure_ascii=False).encode("utf-8")


def _processor(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    if not model:
        raise UserError(f"{name} is empty")
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, UnicodeDecodeError) as error:
        raise UserError(f"{name} is damaged: it is not a SentencePiece model") from error
