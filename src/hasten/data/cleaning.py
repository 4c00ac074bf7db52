"""Clean strings taken from catalogues and web pages, and say why a pair is not a usable sentence pair."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

TAG = re.compile(r"</?[A-Za-z!?][^<>]{0,400}>")
POD_MARKUP = re.compile(r"\b[BIFCLESX]<([^<>]*)>")
WHITESPACE = re.compile(r"\s+")
URL = re.compile(r"(?:https?|ftp)://\S+|www\.\S+")
WORD = re.compile(r"[^\W\d_]+(?:['’\-][^\W\d_]+)*")
TOKEN = re.compile(r"\w+|[^\w\s]")
ENTITY = re.compile(r"&(?:#\d+|#[xX][0-9A-Fa-f]+|[A-Za-z]\w*);")  # html.unescape alone would read "&copy" in "&copying"
ACCELERATOR = re.compile(r"[_~](?=\w)|&(?=\w)(?!\w+;)")
PLACEHOLDER = re.compile(
    r"%(?:\([A-Za-z_]\w*\))?(?:\d+\$)?[-+ #0]*\d*(?:\.\d+)?(?:hh?|ll?|z|j|t|L)?[a-zA-Z]\b"  # printf, Python
    r"|%\d+|%[A-Z]{4,}"  # Qt, LibreOffice
    r"|\{[^{}\s]{0,30}\}"  # str.format
    r"|\$\{?\(?\w+\)?\}?"  # shell
    r"|@\w+@"
)
SENTENCE_END = re.compile(
    r"(?<=[.!?])[\"'»“”)]?\s+(?=[\"'«„“(¿¡]?[A-ZÄÖÜÀÂÇÉÈÊÎÔÁÍÓÚÑ0-9])"
)  # the optional closing quote belongs to the sentence; `split_sentences` gives it back
PUNCTUATION = str.maketrans(
    {
        "\u00a0": " ",
        "\u202f": " ",
        "\u2009": " ",
        "\u200b": None,
        "\u00ad": None,
        "’": "'",
        "‘": "'",
        "‚": "'",
        "“": '"',
        "”": '"',
        "„": '"',
        "…": "...",
    }
)


def clean(text: str) -> str:
    """Drop markup, resolve entities, flatten whitespace, and make quotes and ellipses ASCII.

    Typographic single and double quotes become `'` and `"`, the ellipsis three dots; guillemets stay. Soft hyphens and
    zero-width spaces go, every other space becomes one plain space, bullets and dashes at either end go.
    """
    while (stripped := POD_MARKUP.sub(r"\1", text)) != text:
        text = stripped
    text = ENTITY.sub(lambda entity: html.unescape(entity.group()), TAG.sub("", text)).replace("\\n", " ")
    return WHITESPACE.sub(" ", text.translate(PUNCTUATION)).strip(" \t*-–—•·")


def strip_accelerators(source: str, target: str) -> tuple[str, str]:
    """Remove menu accelerators (`_File`, `&File`, `~File`) from both sides.

    A word that carries the marker and stands on both sides (`AT&T`, `file_name`) is a name, not an accelerator, and a
    side with several such words is code: both stay.
    """
    shared = set(source.split()) & set(target.split())
    return _strip_accelerator(source, shared), _strip_accelerator(target, shared)


def _strip_accelerator(text: str, shared: set[str]) -> str:
    marked = [word for word in text.split() if word not in shared and ACCELERATOR.search(word)]
    if len(marked) != 1 or "://" in marked[0] or marked[0].count("_") > 1:
        return text
    return text.replace(marked[0], ACCELERATOR.sub("", marked[0], count=1), 1)


def split_sentences(text: str) -> list[str]:
    """Cut a paragraph after `.`, `!` or `?` where a capital or a digit follows."""
    sentences, start = [], 0
    for match in SENTENCE_END.finditer(text):
        closing = match.group().rstrip()
        sentences.append(text[start : match.start()] + closing)
        start = match.end()
    return [*sentences, text[start:]]


def split_aligned(source: str, target: str) -> list[tuple[str, str]]:
    """Sentence pairs of an aligned paragraph when both sides have equally many sentences, else the paragraph."""
    sources, targets = split_sentences(source), split_sentences(target)
    return list(zip(sources, targets, strict=True)) if len(sources) == len(targets) else [(source, target)]


@dataclass(frozen=True, kw_only=True)
class PairFilter:
    """What a usable sentence pair looks like; `reason` names the first rule a pair breaks."""

    min_words: int = 3
    """Fewest words on either side."""
    max_words: int = 40
    """Most source words; the target may have a quarter more, and punctuation tokens 10 more than words."""
    min_characters_ratio: float = 0.55
    """Least target characters per source character."""
    max_characters_ratio: float = 2.0
    """Most target characters per source character."""
    min_words_ratio: float = 0.4
    """Least target words per source word."""
    max_words_ratio: float = 2.2
    """Most target words per source word."""
    min_letters: float = 0.75
    """Least share of letters and spaces on either side."""
    max_copied: float = 0.7
    """Most source words found in the target before the pair counts as untranslated."""

    def reason(self, source: str, target: str) -> str | None:
        """Name of the first rule the pair breaks; None when it is usable."""
        source_words, target_words = WORD.findall(source), WORD.findall(target)
        if min(len(source_words), len(target_words), len(source.split()), len(target.split())) < self.min_words:
            return "short"
        if self._is_long(source, source_words, target_words):
            return "long"
        if source.casefold() == target.casefold():
            return "untranslated"
        if sorted(PLACEHOLDER.findall(source)) != sorted(PLACEHOLDER.findall(target)):
            return "placeholders differ"
        if len(URL.findall(source)) != len(URL.findall(target)):
            return "addresses differ"
        if not self._balanced(len(target) / len(source), len(target_words) / len(source_words)):
            return "length ratio"
        if min(_letters(source), _letters(target)) < self.min_letters:
            return "few letters"
        if self._is_copied(source_words, target_words):
            return "untranslated"
        return None

    def _is_long(self, source: str, source_words: list[str], target_words: list[str]) -> bool:
        return (
            len(source_words) > self.max_words
            or len(target_words) > 1.25 * self.max_words
            or len(TOKEN.findall(source)) > self.max_words + 10
        )

    def _balanced(self, characters: float, words: float) -> bool:
        return (
            self.min_characters_ratio <= characters <= self.max_characters_ratio
            and self.min_words_ratio <= words <= self.max_words_ratio
        )

    def _is_copied(self, source_words: list[str], target_words: list[str]) -> bool:
        distinct = {word.lower() for word in source_words}
        return len(distinct & {word.lower() for word in target_words}) > self.max_copied * len(distinct)


def _letters(text: str) -> float:
    return sum(character.isalpha() or character == " " for character in text) / len(text)
