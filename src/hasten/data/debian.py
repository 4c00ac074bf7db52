"""A real English-German/French/Spanish corpus out of the translations in Debian packages.

Package descriptions, user-interface catalogues, help pages and manuals that Debian ships in several languages are
aligned, cleaned, split by document and written as a parallel-text directory. Counts depend on the Debian release; the
manifest records every package version.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hasten.data.cleaning import PairFilter, split_aligned
from hasten.data.corpus import Corpus, Pair, claimed_directory, write_corpus
from hasten.data.debian_packages import Download, Packages
from hasten.data.debian_readers import (
    Files,
    parse_sources,
    read_catalogues,
    read_descriptions,
    read_html,
    read_libreoffice_help,
    read_mallard,
)
from hasten.data.splits import Sizes, split_corpus
from hasten.errors import UserError

TARGETS = ("de", "fr", "es")
DESCRIPTIONS = "debian-descriptions"
OUT_OF_DOMAIN = ("gnucash", "django")
"""Sources that never enter training; they are the split `test-ood`."""

Reader = Callable[[Files, str, Counter[str]], Iterator[Pair]]


class Source(NamedTuple):
    """Packages of one origin, and the readers of the files in them; `{}` stands for the target language."""

    packages: tuple[str, ...]
    readers: tuple[Reader, ...]
    suffixes: tuple[str, ...]
    languages: tuple[str, ...] = TARGETS


SOURCES: dict[str, Source] = {
    "libreoffice-help": Source(("libreoffice-help-en-us", "libreoffice-help-{}"), (read_libreoffice_help,), (".html",)),
    "libreoffice-ui": Source(("libreoffice-l10n-{}",), (read_catalogues,), (".mo",)),
    "gnome-user-docs": Source(("gnome-user-docs",), (read_mallard,), (".page",)),
    "evolution": Source(("evolution-common",), (read_mallard, read_catalogues), (".page", ".mo")),
    "krita": Source(("krita-l10n",), (read_catalogues,), (".mo",)),
    "digikam": Source(("digikam-data",), (read_catalogues,), (".mo",)),
    "aptitude": Source(("aptitude-common",), (read_catalogues,), (".mo",)),
    "debian-reference": Source(("debian-reference-en", "debian-reference-{}"), (read_html,), (".html",)),
    "debian-faq": Source(("debian-faq", "debian-faq-{}"), (read_html,), (".html",), ("de", "fr")),
    "developers-reference": Source(
        ("developers-reference", "developers-reference-{}"), (read_html,), (".html",), ("de", "fr")
    ),
    "harden-doc": Source(("harden-doc",), (read_html,), (".html",)),
    "wordpress": Source(("wordpress-l10n",), (read_catalogues,), (".mo",)),
    "gnucash": Source(("gnucash-common",), (read_catalogues,), (".mo",)),
    "django": Source(("python3-django",), (read_catalogues,), (".mo",)),
}


@dataclass(frozen=True, kw_only=True)
class DebianOptions:
    """How the corpus is built; the defaults are those of the published numbers."""

    valid: int = 2000
    """Pairs wanted in the validation split."""
    test: int = 3000
    """Pairs wanted in the test split."""
    overlap: float = 0.7
    """Share of word trigrams in one training sentence from which a held-out sentence counts as its near-duplicate."""
    seed: int = 1
    """Seed of the choice of documents."""
    filter: PairFilter = field(default_factory=PairFilter)
    """What a usable sentence pair looks like."""


def default_work_directory() -> Path:
    """`hasten/debian` under `$XDG_CACHE_HOME` or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hasten" / "debian"


def target_of(pair: str) -> str:
    """The target language of `en-de`, `en-fr` or `en-es`; anything else raises `UserError`."""
    source, _, target = pair.partition("-")
    if source != "en" or target not in TARGETS:
        raise UserError(f"language pair {pair!r}: expected one of {', '.join(f'en-{code}' for code in TARGETS)}")
    return target


def build_debian_corpus(
    pair: str,
    out: Path,
    *,
    work: Path | None = None,
    options: DebianOptions | None = None,
    refresh: bool = False,
    force: bool = False,
    progress: Callable[[str], None] = lambda message: None,
) -> Corpus:
    """Fetch the packages of a language pair and write the corpus to `out`; `progress` hears every step.

    The same package versions and options give byte-identical files.
    """
    options = options or DebianOptions()
    language = target_of(pair)
    with claimed_directory(out, force):
        packages = Packages(work or default_work_directory())
        if refresh or not packages.has_lists():
            progress("fetching the package lists (20 MB)")
            packages.update()
        else:
            progress(f"package lists as fetched before into {packages.lists}; --refresh fetches them anew")
        groups: dict[str, list[Pair]] = {}
        report: dict[str, dict[str, Any]] = {}
        licences = Licences()
        for name, raw, facts in _read_sources(packages, language, licences, progress):
            groups[name], counts = _usable(raw, options.filter)
            report[name] = {**facts, **counts}
        progress("splitting by document, removing near-duplicates")
        splits = split_corpus(groups, Sizes(options.valid, options.test), options.seed, options.overlap, OUT_OF_DOMAIN)
        for name in report:
            report[name]["pairs"] = {
                split: sum(pair.document.startswith(f"{name}/") for pair in pairs)
                for split, pairs in splits.pairs.items()
            }
        facts = {"sources": report, "removed_from_held_out": splits.removed, "options": asdict(options)}
        progress("writing")
        return write_corpus(out, ("en", language), splits.pairs, facts, licences.text(pair), force=True)


def _read_sources(
    packages: Packages, language: str, licences: Licences, progress: Callable[[str], None]
) -> Iterator[tuple[str, list[Pair], dict[str, Any]]]:
    """Name, aligned segments and facts of every source, package descriptions first."""
    progress("package descriptions")
    dropped: Counter[str] = Counter()
    raw = list(
        read_descriptions(
            packages.descriptions("en"),
            packages.descriptions(language),
            parse_sources(packages.packages_index()),
            dropped,
        )
    )
    licences.add(DESCRIPTIONS, {}, {})
    indexes = {**packages.description_indexes("en"), **packages.description_indexes(language)}
    facts = {"packages": {}, "indexes": indexes, "unaligned": dict(sorted(dropped.items()))}
    yield DESCRIPTIONS, _keyed(DESCRIPTIONS, raw), facts

    wanted = {
        name: [package.format(language) for package in source.packages]
        for name, source in SOURCES.items()
        if language in source.languages
    }
    known = packages.locate([package for names in wanted.values() for package in names])
    for name, names in wanted.items():
        absent = [package for package in names if package not in known]
        if absent:
            progress(f"{name}: left out, this release has no package {', '.join(absent)}")
            yield name, [], {"packages": {}, "absent": absent}
            continue
        yield _read_source(name, [known[package] for package in names], packages, language, licences, progress)


def _read_source(
    name: str,
    downloads: list[Download],
    packages: Packages,
    language: str,
    licences: Licences,
    progress: Callable[[str], None],
) -> tuple[str, list[Pair], dict[str, Any]]:
    source = SOURCES[name]
    files: dict[str, bytes] = {}
    copyrights, versions = {}, {}
    progress(f"{name} ({sum(download.size for download in downloads) / 1e6:.1f} MB)")
    for download in packages.fetch(downloads):
        content = packages.read(download, (*source.suffixes, f"share/doc/{download.package}/copyright"))
        statement = content.pop(f"usr/share/doc/{download.package}/copyright", b"")
        copyrights[download.package] = statement.decode("utf-8", "replace")
        versions[download.package] = packages.version(download)
        files.update(content)
    licences.add(name, versions, copyrights)
    dropped: Counter[str] = Counter()
    raw = [pair for reader in source.readers for pair in reader(files, language, dropped)]
    return name, _keyed(name, raw), {"packages": versions, "unaligned": dict(sorted(dropped.items()))}


def _keyed(name: str, pairs: list[Pair]) -> list[Pair]:
    return [pair._replace(document=f"{name}/{pair.document}") for pair in pairs]


def _usable(raw: list[Pair], rules: PairFilter) -> tuple[list[Pair], dict[str, Any]]:
    """Sentence pairs that pass the filter, and the count for each reason of those that do not."""
    kept: list[Pair] = []
    reasons: Counter[str] = Counter()
    sentences = 0
    for segment in raw:
        for source, target in split_aligned(segment.source, segment.target):
            sentences += 1
            reason = rules.reason(source, target)
            if reason is None:
                kept.append(Pair(source, target, segment.document))
            else:
                reasons[reason] += 1
    return kept, {"aligned": sentences, "filtered": dict(sorted(reasons.items())), "usable": len(kept)}


class Licences:
    """The LICENCES file: what each source's own copyright files state."""

    def __init__(self) -> None:
        self._sections: list[str] = []

    def add(self, name: str, versions: Mapping[str, str], copyrights: Mapping[str, str]) -> None:
        """Add a source with the versions and copyright files of its packages."""
        lines = [name, "-" * len(name)]
        if not versions:
            lines.append(
                "Licence: not stated in the index; ask the Debian description translators before redistributing."
            )
        texts: dict[str, list[str]] = {}
        for package, version in versions.items():
            texts.setdefault(copyrights[package].strip(), []).append(f"{package} {version}")
        for text, holders in texts.items():
            lines.append(f"Packages: {', '.join(holders)}")
            lines.append(f"Licences named: {', '.join(named_licences(text)) or 'see the copyright file below'}")
            body = text or "The package holds no copyright file."
            lines += ["Copyright file:", *(f"    {line}".rstrip() for line in body.splitlines())]
        self._sections.append("\n".join(lines))

    def text(self, pair: str) -> str:
        """The whole file."""
        head = (
            f"Sentences of this {pair} corpus come from the sources below; each keeps its own licence.\n"
            "A corpus that mixes them may not be redistributed under one licence; check before you publish it.\n"
        )
        return "\n\n".join([head, *self._sections]) + "\n"


def named_licences(copyright_file: str) -> list[str]:
    """Short names of the `License:` fields of a machine-readable copyright file, sorted."""
    return sorted({name.strip() for name in re.findall(r"^License:[ \t]*(\S.*)$", copyright_file, re.M)})
