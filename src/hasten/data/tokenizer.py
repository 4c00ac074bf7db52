"""Text to ids and back: SentencePiece unigram with byte fallback, lossless on any Unicode text."""

import hashlib
import io
import re
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from hasten.errors import UserError

PAD, UNK, BOS, EOS, MASK, BLANK, PLACEHOLDER = range(7)
SPECIAL_IDS = (PAD, UNK, BOS, EOS, MASK, BLANK, PLACEHOLDER)

# SentencePiece writes a space as U+2581, so a literal U+2581 must be escaped to survive; so must the escape itself.
_ESCAPE, _MARKER = "\ue000", "\u2581"
_TO_ESCAPED = str.maketrans({_ESCAPE: _ESCAPE + "e", _MARKER: _ESCAPE + "m"})
_FROM_ESCAPED = {_ESCAPE + "e": _ESCAPE, _ESCAPE + "m": _MARKER}
_ESCAPED = re.compile(f"{_ESCAPE}[em]")
_SMALLEST_VOCABULARY = len(SPECIAL_IDS) + 256 + 1


class Tokenizer:
    """A SentencePiece unigram model whose `decode(encode(text)) == text` for every text without lone surrogates.

    The special ids (`PAD`, `UNK`, `BOS`, `EOS`, `MASK`, `BLANK`, `PLACEHOLDER`) are control symbols: no text encodes to
    them and `decode` drops them. Unknown characters become UTF-8 bytes, so `UNK` never arises from text.

    Source: Kudo, 2018, "Subword Regularization"; byte fallback as in SentencePiece 0.1.9 and later.
    """

    def __init__(self, model: bytes):
        self._model = model
        if not model:
            raise UserError("the tokenizer file is empty")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, UnicodeDecodeError) as error:
            raise UserError("the tokenizer file is damaged: it is not a SentencePiece model") from error
        expected = tuple(self._processor.piece_to_id(piece) for piece in _SPECIAL_PIECES)
        if expected != SPECIAL_IDS:
            raise UserError(f"the tokenizer has special ids {expected}; hasten needs {SPECIAL_IDS}")
        self.vocab_size: int = self._processor.get_piece_size()
        self.fingerprint: str = hashlib.sha256(model).hexdigest()

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int, *, threads: int = 1) -> "Tokenizer":
        """Learn `vocab_size` pieces (the 7 special ids and 256 bytes among them) from `lines`.

        Raises `UserError` where the text is too small or the vocabulary too small or too large for it.
        """
        if vocab_size <= _SMALLEST_VOCABULARY:
            raise UserError(f"vocab_size {vocab_size} is too small: at least {_SMALLEST_VOCABULARY + 1} pieces")
        model = io.BytesIO()
        escaped = (_shield(line) for line in lines if line)
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=escaped,
                model_writer=model,
                model_type="unigram",
                vocab_size=vocab_size,
                byte_fallback=True,
                character_coverage=0.9999,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                split_digits=True,
                max_sentence_length=65536,
                pad_id=PAD,
                unk_id=UNK,
                bos_id=BOS,
                eos_id=EOS,
                pad_piece=_SPECIAL_PIECES[PAD],
                unk_piece=_SPECIAL_PIECES[UNK],
                bos_piece=_SPECIAL_PIECES[BOS],
                eos_piece=_SPECIAL_PIECES[EOS],
                control_symbols=list(_SPECIAL_PIECES[MASK:]),
                num_threads=threads,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise UserError(f"cannot learn {vocab_size} pieces from this text: {_reason(str(error))}") from error
        return cls(model.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a model written by `save`; `UserError` where it is missing or damaged."""
        try:
            return _of(Path(path).read_bytes(), cls)
        except OSError as error:
            raise UserError(f"cannot read the tokenizer {path}: {error.strerror}") from error
        except UserError as error:
            raise UserError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the model; the bytes are those it was made from."""
        Path(path).write_bytes(self._model)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without begin or end symbols; the empty text has none. `UserError` for a lone surrogate."""
        try:
            return self._processor.encode(_shield(text)) if text else []
        except RuntimeError as error:
            raise UserError(f"{text[:40]!r} is no Unicode text: {_LONE_SURROGATE}") from error

    def encode_target(self, text: str) -> list[int]:
        """Ids of a text that stands on the target side: here the same."""
        return self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special ids are dropped, bytes that are not UTF-8 become U+FFFD."""
        text = self._processor.decode([int(i) for i in ids if i not in SPECIAL_IDS])
        return _ESCAPED.sub(lambda found: _FROM_ESCAPED[found.group()], text.removeprefix(" "))

    def pieces(self) -> list[str]:
        """The vocabulary in id order."""
        return [self._processor.id_to_piece(i) for i in range(self.vocab_size)]


def _of(model: bytes, kind: type[Tokenizer]) -> Tokenizer:
    """The tokenizer in these bytes: an archive holds Marian's two models, anything else is one of ours."""
    if not model.startswith(_ARCHIVE):
        return kind(model)
    from hasten.data.marian_tokenizer import MarianTokenizer

    return MarianTokenizer(model)


def _shield(text: str) -> str:
    """A leading space makes the first word look like every other; `decode` removes it."""
    return " " + text.translate(_TO_ESCAPED)


def _reason(message: str) -> str:
    """SentencePiece's complaint in words of ours."""
    if found := re.search(r"Please set it to a value <= (\d+)", message):
        return f"it has too few different words; vocab_size can be at most {found[1]}, or give more text"
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"it has too many different characters; vocab_size must be at least {found[1]}"
    if "sentences_.empty()" in message:
        return "it is empty"
    if "Unable to cast" in message:
        return _LONE_SURROGATE
    return " ".join(message.split())


_LONE_SURROGATE = "it holds a lone surrogate, which UTF-8 cannot express; read text with encoding='utf-8'"
_ARCHIVE = b"PK"  # a SentencePiece model begins with the tag of its first field
_SPECIAL_PIECES = ("<pad>", "<unk>", "<s>", "</s>", "<mask>", "<blank>", "<placeholder>")
