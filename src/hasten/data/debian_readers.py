"""Read aligned segments out of Debian package files: catalogues, help pages, web pages, package descriptions.

Every reader takes the files of a source as `{path: bytes}` and yields `Pair`s whose document key names the catalogue or
page without its language. What cannot be aligned is dropped and counted in `dropped`.
"""

from __future__ import annotations

import html
import re
import struct
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hasten.data.cleaning import clean, strip_accelerators
from hasten.data.corpus import Pair

Files = Mapping[str, bytes]

MO_MAGIC = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
HELP_BLOCK = re.compile(r'<(h\d|p)\b[^>]*\bid="([^"]+)"[^>]*>(.*?)</\1>', re.S)
HELP_MAC_VARIANT = re.compile(r'<span hidden="true" id="MAC[^"]*" class="MAC">(?:<span[^>]*>[^<]*</span>|[^<])*</span>')
MALLARD = "{http://projectmallard.org/1.0/}"
MALLARD_BLOCKS = {MALLARD + name for name in ("p", "title", "desc")}
HTML_NOT_TEXT = re.compile(r"<(script|style|pre)\b.*?</\1>", re.S)
HTML_BLOCK = re.compile(
    r'<(p|h\d|dt|li|td|th|caption|summary|div(?=\s+class="para"))\b[^>]*>(.*?)'
    r"(?=<(?:/?(?:p|h\d|dt|dd|li|td|th|ul|ol|dl|div|pre|table|tr|section)\b))",
    re.S,
)
HTML_LANGUAGES = {"en": ("en-US", "en", "C"), "de": ("de-DE", "de"), "fr": ("fr-FR", "fr"), "es": ("es-ES", "es")}
LIST_ITEM = re.compile(r"\s*[*\-+o·•]\s+")
DESCRIPTION = re.compile(r"^Package: (\S+)\nDescription-md5: (\S+)\nDescription-\S+: (.*)((?:\n .*)*)", re.M)
PACKAGE_SUFFIX = re.compile(
    r"(?:-(?:dev|devel|doc|docs|dbg|dbgsym|data|common|bin|utils|tools|examples|gui|core|extra|extras|all|\d[\w.]*))$"
)


def read_catalogues(files: Files, language: str, dropped: Counter[str]) -> Iterator[Pair]:
    """Pairs of all gettext catalogues (`.mo`) of a language; English is the message id."""
    code = re.escape(language)
    region = rf"{code}(?:_{code.upper()})?"
    name = re.compile(rf"(?:^|(?<=[/_.\-])){region}(?=[/.])")
    for path in sorted(files):
        if not path.endswith(".mo") or not name.search(path):
            continue
        document = name.sub("XX", path)
        for source, target in read_mo(files[path]):
            if target is None:
                dropped["plural forms"] += 1
                continue
            source, target = strip_accelerators(source, target)
            yield Pair(clean(source), clean(target), document)


def read_mo(data: bytes) -> Iterator[tuple[str, str | None]]:
    """Messages and translations of a compiled gettext catalogue (GNU gettext manual, "MO Files").

    A plural message gives its singular and its plural where the language has two forms; with another number of forms
    the translation is None. Contexts are dropped. Data that is no whole catalogue gives nothing.
    """
    order = MO_MAGIC.get(data[:4])
    if order is None or len(data) < 20:
        return
    count, originals, translations = struct.unpack_from(order + "3I", data, 8)
    if max(originals, translations) + 8 * count > len(data):
        return
    for index in range(count):
        try:
            message = _mo_string(data, order, originals + 8 * index)
            translation = _mo_string(data, order, translations + 8 * index)
        except (struct.error, UnicodeDecodeError):
            continue
        if not message or not translation:
            continue
        forms = message.rpartition("\x04")[2].split("\0")
        translated = translation.split("\0")
        if len(forms) == 1:
            yield forms[0], translated[0]
        elif len(forms) == len(translated):
            yield from zip(forms, translated, strict=True)
        else:
            yield forms[0], None


def _mo_string(data: bytes, order: str, position: int) -> str:
    length, start = struct.unpack_from(order + "2I", data, position)
    return data[start : start + length].decode("utf-8")


def read_libreoffice_help(files: Files, language: str, dropped: Counter[str]) -> Iterator[Pair]:
    """Paragraphs of LibreOffice help pages, aligned by page, paragraph id and occurrence."""
    english = _help_paragraphs(files, "en-US")
    for (page, name, occurrence), target in _help_paragraphs(files, language).items():
        source = english.get((page, name, occurrence))
        if source is None:
            dropped["paragraph without English"] += 1
            continue
        yield Pair(clean(source), clean(target), page)


def _help_paragraphs(files: Files, language: str) -> dict[tuple[str, str, int], str]:
    """Paragraphs by (page, id, occurrence), without the hidden macOS variant of key names."""
    directory = f"/help/{language}/text/"
    paragraphs = {}
    for path in sorted(files):
        if directory not in path or not path.endswith(".html"):
            continue
        page = path.split(directory, 1)[1]
        seen: Counter[str] = Counter()
        for _, name, content in HELP_BLOCK.findall(HELP_MAC_VARIANT.sub("", files[path].decode("utf-8", "replace"))):
            seen[name] += 1
            paragraphs[page, name, seen[name]] = content
    return paragraphs


def read_mallard(files: Files, language: str, dropped: Counter[str]) -> Iterator[Pair]:
    """Blocks of Mallard help pages (`.page`) whose two versions have the same sequence of blocks."""
    for path in sorted(files):
        english = path.replace(f"/help/{language}/", "/help/C/")
        if not path.endswith(".page") or english == path or english not in files:
            continue
        sources, targets = _mallard_blocks(files[english]), _mallard_blocks(files[path])
        if [kind for kind, _ in sources] != [kind for kind, _ in targets]:
            dropped["page structure differs"] += 1
            continue
        for (_, source), (_, target) in zip(sources, targets, strict=True):
            yield Pair(clean(source), clean(target), english)


def _mallard_blocks(data: bytes) -> list[tuple[str, str]]:
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError:
        return []
    blocks = [element for element in root.iter() if element.tag in MALLARD_BLOCKS]
    return [(element.tag, html.escape("".join(element.itertext()), quote=False)) for element in blocks]


def read_html(files: Files, language: str, dropped: Counter[str]) -> Iterator[Pair]:
    """Blocks of HTML pages built from one source, where both versions have the same sequence of block tags."""
    pages: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(files):
        if path.endswith(".html"):
            page, found = _page_and_language(path)
            pages[page].setdefault(found, path)
    for page, versions in pages.items():
        if "en" not in versions or language not in versions:
            continue
        sources, targets = _html_blocks(files[versions["en"]]), _html_blocks(files[versions[language]])
        if [tag for tag, _ in sources] != [tag for tag, _ in targets]:
            dropped["page structure differs"] += 1
            continue
        for (_, source), (_, target) in zip(sources, targets, strict=True):
            yield Pair(source, target, page)


def _page_and_language(path: str) -> tuple[str, str]:
    """The path without its language, and the language; a path that names none is English."""
    found = "en"
    for language, codes in HTML_LANGUAGES.items():
        for code in codes:
            shorter = re.sub(rf"[/.]{code}(?=[/.])", "", path)
            if shorter != path:
                found, path = language, shorter
    return re.sub(r"-(?:de|fr|es|en)(?=/)", "", path), found


def _html_blocks(data: bytes) -> list[tuple[str, str]]:
    text = HTML_NOT_TEXT.sub("", data.decode("utf-8", "replace"))
    return [(tag, clean(content)) for tag, content in HTML_BLOCK.findall(text)]


class Description(NamedTuple):
    """One record of a Translation index."""

    package: str
    digest: str
    synopsis: str
    paragraphs: list[str]


def read_descriptions(
    english: str, translated: str, sources: Mapping[str, str], dropped: Counter[str]
) -> Iterator[Pair]:
    """Package descriptions of two Translation indexes, aligned by package and digest, then by paragraph.

    The document is the source package without its version (`sources` maps packages to source packages), so that
    `libfoo1`, `libfoo-dev` and `libfoo-doc` stay together. A description shared by several packages counts once.
    """
    known = {(record.package, record.digest): record for record in parse_descriptions(english)}
    seen = set()
    for record in parse_descriptions(translated):
        original = known.get((record.package, record.digest))
        if original is None or record.digest in seen:
            continue
        seen.add(record.digest)
        document = package_family(sources.get(record.package, record.package))
        yield Pair(clean(original.synopsis), clean(record.synopsis), document)
        if len(original.paragraphs) != len(record.paragraphs):
            dropped["paragraph count differs"] += 1
            continue
        for source, target in zip(original.paragraphs, record.paragraphs, strict=True):
            if source.startswith("o ") and target.startswith("o "):  # a bullet; on one side alone it may be a word
                source, target = source[2:], target[2:]
            yield Pair(clean(source), clean(target), document)


def parse_descriptions(index: str) -> Iterator[Description]:
    """Records of a Translation index."""
    for record in index.split("\n\n"):
        match = DESCRIPTION.search(record)
        if match:
            yield Description(match[1], match[2], match[3], _description_paragraphs(match[4].split("\n")[1:]))


def _description_paragraphs(lines: list[str]) -> list[str]:
    """Join folded lines: ` .` ends a paragraph, a bullet starts one (Debian policy 5.6.13)."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        text = line[1:]
        if text.strip() == ".":
            paragraphs.append([])
        elif text.startswith((" ", "*", "-")) and LIST_ITEM.match(text):
            paragraphs.append([LIST_ITEM.sub("", text, count=1).strip()])
        else:
            paragraphs[-1].append(text.strip())
    return [" ".join(paragraph) for paragraph in paragraphs if paragraph]


def package_family(package: str) -> str:
    """A package name without version digits and the usual suffixes: `libfoo2-dev` and `libfoo-doc` give `libfoo`."""
    previous = ""
    while package != previous:
        previous = package
        package = re.sub(r"(?<=[a-z])[-.]?\d[\d.]*$", "", PACKAGE_SUFFIX.sub("", package)) or package
    return package


def parse_sources(packages_index: str) -> dict[str, str]:
    """Source package of every package of a Packages index that names one."""
    sources, package = {}, ""
    for line in packages_index.split("\n"):
        if line.startswith("Package: "):
            package = line[9:]
        elif line.startswith("Source: "):
            sources[package] = line[8:].split(" ", 1)[0]
    return sources
