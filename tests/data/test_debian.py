"""The Debian corpus, from small files made here; no network and no Debian needed."""

import hashlib
import io
import json
import os
import struct
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.cli.data import app
from hasten.data import debian, debian_packages
from hasten.data.corpus import Corpus, Pair
from hasten.data.debian import SOURCES, DebianOptions, build_debian_corpus, named_licences, target_of
from hasten.data.debian_packages import Download, Packages
from hasten.data.debian_readers import (
    package_family,
    parse_descriptions,
    parse_sources,
    read_catalogues,
    read_descriptions,
    read_html,
    read_libreoffice_help,
    read_mallard,
    read_mo,
)
from hasten.errors import UserError


def mo(messages, order="<"):
    """A compiled gettext catalogue (GNU gettext manual, "MO Files")."""
    texts = [(key.encode(), value.encode()) for key, value in sorted(messages.items())]
    table, data, start = [], b"", 28 + 16 * len(texts)
    for side in (0, 1):
        for text in texts:
            table.append(struct.pack(order + "2I", len(text[side]), start + len(data)))
            data += text[side] + b"\0"
    head = struct.pack(order + "7I", 0x950412DE, 0, len(texts), 28, 28 + 8 * len(texts), 0, 0)
    return head + b"".join(table) + data


def read(reader, files, language="de"):
    dropped = Counter()
    return list(reader(files, language, dropped)), dropped


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_catalogue_of_either_byte_order_gives_its_messages(order):
    messages = {"": "header", "Open": "Öffnen", "menu\x04File": "Datei", "empty": "", "%d a\0%d as": "%d A\0%d As"}
    found = list(read_mo(mo(messages, order)))
    assert sorted(found) == [("%d a", "%d A"), ("%d as", "%d As"), ("File", "Datei"), ("Open", "Öffnen")]


def test_plural_forms_that_do_not_pair_up_are_counted():
    pairs, dropped = read(read_catalogues, {"locale/de/LC_MESSAGES/a.mo": mo({"a\0as": "A\0B\0C", "b": "B"})})
    assert pairs == [Pair("b", "B", "locale/XX/LC_MESSAGES/a.mo")]
    assert dropped == {"plural forms": 1}


@given(st.binary(max_size=80), st.integers(0, 200))
def test_damaged_catalogues_give_no_error(noise, cut):
    list(read_mo(noise))
    list(read_mo(b"\xde\x12\x04\x95" + noise))
    list(read_mo(mo({"Open": "Öffnen", "Close": "Schließen"})[:cut]))


def test_catalogues_are_chosen_by_language_and_keyed_without_it():
    one = mo({"_Open the file": "Datei ö_ffnen"})
    files = {
        "usr/share/locale/de/LC_MESSAGES/x.mo": one,
        "usr/share/locale/nds/LC_MESSAGES/x.mo": one,
        "usr/share/locale/fr/LC_MESSAGES/x.mo": one,
        "languages/admin-de_DE.mo": one,
        "usr/share/locale/de/readme.txt": one,
    }
    pairs, _ = read(read_catalogues, files)
    assert pairs == [
        Pair("Open the file", "Datei öffnen", "languages/admin-XX.mo"),
        Pair("Open the file", "Datei öffnen", "usr/share/locale/XX/LC_MESSAGES/x.mo"),
    ]


def test_help_pages_align_by_paragraph_id_and_occurrence():
    english = (
        '<h1 id="h">Title</h1><p class="x" id="p1">Press <span>Ctrl</span>'
        '<span hidden="true" id="MAC1" class="MAC">Cmd</span></p><p id="p2">first</p><p id="p2">second</p>'
    )
    german = '<p id="p2">erster</p><p id="p2">zweiter</p><p id="p3">neu</p><p id="p1">Drücken Sie <b>Strg</b></p>'
    files = {
        "usr/share/libreoffice/help/en-US/text/swriter/a.html": english.encode(),
        "usr/share/libreoffice/help/de/text/swriter/a.html": german.encode(),
        "usr/share/libreoffice/help/de/text/swriter/only.html": german.encode(),
    }
    pairs, dropped = read(read_libreoffice_help, files)
    assert pairs == [
        Pair("first", "erster", "swriter/a.html"),
        Pair("second", "zweiter", "swriter/a.html"),
        Pair("Press Ctrl", "Drücken Sie Strg", "swriter/a.html"),
    ]
    assert dropped == {"paragraph without English": 5}


def page(*blocks):
    inner = "".join(f"<{tag}>{text}</{tag}>" for tag, text in blocks)
    return f'<page xmlns="http://projectmallard.org/1.0/">{inner}</page>'.encode()


def test_mallard_pages_align_when_their_blocks_do():
    files = {
        "help/C/app/a.page": page(("title", "A &lt;tag&gt;"), ("p", "Press <key>x</key> &amp; go")),
        "help/de/app/a.page": page(("title", "Ein &lt;tag&gt;"), ("p", "<key>x</key> drücken &amp; los")),
        "help/C/app/b.page": page(("title", "B")),
        "help/de/app/b.page": page(("title", "B"), ("p", "mehr")),
        "help/C/app/c.page": b"<page",
        "help/de/app/only.page": page(("title", "C")),
        "help/C/app/d.page": page(("title", "D")),
        "help/de/app/d.page": b"<page",
    }
    pairs, dropped = read(read_mallard, {f"usr/share/{path}": data for path, data in files.items()})
    document = "usr/share/help/C/app/a.page"
    assert pairs == [Pair("A <tag>", "Ein <tag>", document), Pair("Press x & go", "x drücken & los", document)]
    assert dropped == {"page structure differs": 2}


@pytest.mark.parametrize(
    ("english", "german"),
    [
        ("share/ref/ch01.en.html", "share/ref/ch01.de.html"),
        ("share/ref/ch01.html", "share/ref/de/ch01.html"),
        ("doc/harden/html/en-US/ch01.html", "doc/harden/html/de-DE/ch01.html"),
        ("doc/faq/ch01.html", "doc/faq-de/de/ch01.html"),
    ],
)
def test_web_pages_are_found_under_every_naming(english, german):
    files = {english: b"<p>A cat.</p>", german: b"<p>Eine Katze.</p>"}
    pairs, _ = read(read_html, files)
    assert [(pair.source, pair.target) for pair in pairs] == [("A cat.", "Eine Katze.")]
    assert "de" not in pairs[0].document.replace("harden", "").split("/")


def test_web_pages_of_another_structure_are_counted():
    files = {
        "a.en.html": b"<h1>T</h1><p>A<p>B</p><pre><p>code</p></pre><script>x</script>",
        "a.de.html": b"<h1>U</h1><p>C<p>D</p><pre>code</pre>",
        "b.en.html": b"<p>A</p>",
        "b.de.html": b"<p>A</p><p>B</p>",
        "c.en.html": b"<p>only English</p>",
    }
    pairs, dropped = read(read_html, files)
    assert [(pair.source, pair.target) for pair in pairs] == [("T", "U"), ("A", "C"), ("B", "D")]
    assert dropped == {"page structure differs": 1}


ENGLISH = """Package: libfoo1
Description-md5: 11
Description-en: foo library
 This is folded
 text.
 .
 It offers:
  * one thing
    folded
  - another
 .
 o a third

Package: libfoo-dev
Description-md5: 22
Description-en: foo headers
 One paragraph.

Package: untranslated
Description-md5: 33
Description-en: nothing
"""
GERMAN = """Package: libfoo1
Description-md5: 11
Description-de: Foo-Bibliothek
 Dies ist
 umbrochener Text.
 .
 Sie bietet:
  * eine Sache
  * eine andere
 .
 o eine dritte

Package: libfoo1-udeb
Description-md5: 11
Description-de: dieselbe

Package: libfoo-dev
Description-md5: 22
Description-de: Foo-Header
 Ein Absatz.
 .
 Noch einer.

Package: libfoo-dev
Description-md5: 44
Description-de: veraltet
"""


def test_a_description_is_cut_at_dots_and_bullets():
    first = next(parse_descriptions(ENGLISH))
    assert first == (
        "libfoo1",
        "11",
        "foo library",
        ["This is folded text.", "It offers:", "one thing folded", "another", "o a third"],
    )


def test_descriptions_align_by_package_digest_and_paragraph():
    dropped = Counter()
    pairs = list(read_descriptions(ENGLISH, GERMAN, {"libfoo1": "foo"}, dropped))
    assert [(pair.source, pair.target) for pair in pairs] == [
        ("foo library", "Foo-Bibliothek"),
        ("This is folded text.", "Dies ist umbrochener Text."),
        ("It offers:", "Sie bietet:"),
        ("one thing folded", "eine Sache"),
        ("another", "eine andere"),
        ("a third", "eine dritte"),
        ("foo headers", "Foo-Header"),
    ]
    assert dropped == {"paragraph count differs": 1}
    assert {pair.document for pair in pairs} == {"foo", "libfoo"}


@pytest.mark.parametrize(
    ("package", "family"),
    [
        ("libfoo1", "libfoo"),
        ("libfoo2-dev", "libfoo"),
        ("libfoo-1.2-doc", "libfoo"),
        ("gcc-12", "gcc"),
        ("python3.11-dbg", "python"),
        ("foo-data", "foo"),
        ("foo-common-data", "foo"),
        ("7zip", "7zip"),
        ("vim", "vim"),
        ("9-dev", "9"),
    ],
)
def test_packages_of_one_family_share_a_document(package, family):
    assert package_family(package) == family


def test_sources_are_read_from_the_packages_index():
    assert parse_sources("Package: a\nSource: b (1.0)\n\nPackage: c\nVersion: 1\n\nPackage: d\nSource: e\n") == {
        "a": "b",
        "d": "e",
    }


@pytest.mark.parametrize("pair", ["en-it", "de-en", "en", "", "en-de-fr"])
def test_other_language_pairs_are_refused_with_those_there_are(pair):
    with pytest.raises(UserError, match="en-de, en-fr, en-es"):
        target_of(pair)


def test_licence_names_are_read_from_a_copyright_file():
    assert named_licences("Files: *\nLicense: GPL-2+\n text\n\nLicense: MIT\n\nLicense: GPL-2+\n") == ["GPL-2+", "MIT"]
    assert named_licences("Free to use.") == []


class Shelf:
    """Stands in for `Packages`: every package holds one catalogue; one package is not in this release."""

    absent = "harden-doc"

    def __init__(self, directory):
        self.updated = False

    def has_lists(self):
        return self.updated

    def update(self):
        self.updated = True

    def descriptions(self, language):
        kinds = ("library", "program", "game", "driver")
        records = []
        for number in range(40):
            words = " ".join(f"{language}{number}{kind}" for kind in kinds)
            records.append(f"Package: p{number}x\nDescription-md5: {number}\nDescription-{language}: {words}\n")
        return "\n".join(records)

    def description_indexes(self, language):
        return {f"stable_main_i18n_Translation-{language}": "0"}

    def packages_index(self):
        return ""

    def locate(self, packages):
        return {name: Download(name, f"{name}_1_all.deb", 1, "") for name in packages if name != self.absent}

    def fetch(self, downloads):
        return iter(downloads)

    def version(self, download):
        return "1"

    def read(self, download, suffixes):
        name = download.package.replace("-", "")
        messages = {f"{name} one two three {i}{name}": f"{name} eins zwei drei {i}" for i in range(3)}
        if name == "python3django":
            messages["evolutioncommon one two three 0evolutioncommon"] = "ganz anders gesagt als dort"
        return {
            f"usr/share/locale/de/LC_MESSAGES/{name}.mo": mo({f"open {k}": f"öffne {v}" for k, v in messages.items()}),
            f"usr/share/doc/{download.package}/copyright": b"License: GPL-3\n",
        }


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setattr(debian, "Packages", Shelf)


def test_the_corpus_records_sources_versions_and_licences(shelf, tmp_path):
    heard = []
    options = DebianOptions(valid=5, test=8)
    corpus = build_debian_corpus("en-de", tmp_path / "out", options=options, progress=heard.append)
    assert corpus.splits == ("train", "valid", "test", "test-ood")
    sources = corpus.manifest["sources"]
    assert sources["krita"]["packages"] == {"krita-l10n": "1"}
    assert len(sources["debian-descriptions"]["indexes"]) == 2
    assert sources["harden-doc"] == {
        "packages": {},
        "absent": ["harden-doc"],
        "aligned": 0,
        "filtered": {},
        "usable": 0,
        "pairs": {"train": 0, "valid": 0, "test": 0, "test-ood": 0},
    }
    assert any("harden-doc: left out" in message for message in heard)
    total = sum(sum(facts["pairs"].values()) for facts in sources.values())
    assert total == sum(split["pairs"] for split in corpus.manifest["splits"].values())
    licences = (tmp_path / "out" / "LICENCES").read_text()
    assert "not stated in the index" in licences
    assert "Packages: krita-l10n 1\nLicences named: GPL-3" in licences
    Corpus.open(tmp_path / "out").verify()


def test_out_of_domain_sources_are_a_split_of_their_own(shelf, tmp_path):
    corpus = build_debian_corpus("en-de", tmp_path / "out", options=DebianOptions(valid=5, test=8))
    for split in ("train", "valid", "test"):
        assert not any(key.startswith(("gnucash/", "django/")) for key in corpus.documents(split))
    assert {key.split("/")[0] for key in corpus.documents("test-ood")} <= {"gnucash", "django"}
    assert set(corpus.pairs("test-ood")[0]).isdisjoint(corpus.pairs("train")[0])


def test_two_builds_are_byte_identical(shelf, tmp_path):
    for name in ("one", "two"):
        build_debian_corpus("en-de", tmp_path / name, options=DebianOptions(valid=5, test=8))
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_the_command_builds_and_prints_a_summary(shelf, tmp_path, capsys):
    app(["debian", "en-de", "--out", str(tmp_path / "out"), "--valid", "5", "--test", "8"], standalone_mode=False)
    printed = capsys.readouterr()
    assert "krita" in printed.out
    assert "libreoffice-help" in printed.err
    with pytest.raises(UserError, match="not empty"):
        app(["debian", "en-de", "--out", str(tmp_path / "out")], standalone_mode=False)


def test_every_source_names_packages_for_its_languages():
    for source in SOURCES.values():
        assert source.readers
        assert all(language in debian.TARGETS for language in source.languages)


APT = """#!/bin/sh
# Writes lists and packages out of $FAKE_ARCHIVE; every call is logged.
echo "$@" >> "$FAKE_ARCHIVE/log"
for part in "$@"; do case "$part" in Dir::State::lists=*) lists="${part#*=}";; esac; done
case "$*" in
  *--print-uris*nothing*) echo "E: Unable to locate package nothing"; exit 100;;
  *--print-uris*) cat "$FAKE_ARCHIVE/uris";;
  *update*)
    if [ -e "$FAKE_ARCHIVE/offline" ]; then
      echo "Err:1 http://archive.example stable InRelease"
      echo "  Could not resolve 'archive.example'"
      echo "W: Failed to fetch http://archive.example/dists/stable/InRelease  Could not resolve 'archive.example'"
      exit 0
    fi
    for code in en de fr es; do echo "Package: $code" > "$lists/x_main_i18n_Translation-$code"; done;;
  *download*)
    if [ -e "$FAKE_ARCHIVE/offline" ]; then echo "E: Failed to fetch foo_1_all.deb"; exit 100; fi
    cp "$FAKE_ARCHIVE"/*.deb .;;
esac
"""


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """An apt whose archive is a directory and whose packages are plain tar files."""
    tools, shelf = tmp_path / "bin", tmp_path / "archive"
    tools.mkdir()
    shelf.mkdir()
    for name, script in {
        "apt-get": APT,
        "dpkg-deb": '#!/bin/sh\ncat "$2"\n',
        "helper": '#!/bin/sh\ncat "$2"\n',
    }.items():
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in ("./usr/share/a.mo", "./usr/share/a.png", "./usr/share/doc/foo/copyright"):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"data"))
        link = tarfile.TarInfo("./usr/share/link.mo")
        link.type, link.linkname = tarfile.SYMTYPE, "a.mo"
        tar.addfile(link)
    (shelf / "foo_1%3a2_all.deb").write_bytes(data.getvalue())
    digest = hashlib.sha256(data.getvalue()).hexdigest()
    (shelf / "uris").write_text(f"'http://a/foo.deb' foo_1%3a2_all.deb {len(data.getvalue())} SHA256:{digest}\n")
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_ARCHIVE", str(shelf))
    monkeypatch.setattr(debian_packages, "APT_HELPER", str(tools / "helper"))
    return shelf


def test_lists_are_fetched_into_the_work_directory(archive, tmp_path):
    packages = Packages(tmp_path / "work")
    assert not packages.has_lists()
    packages.update()
    assert packages.has_lists()
    assert packages.descriptions("de") == "Package: de\n"
    assert packages.description_indexes("de") == {
        "x_main_i18n_Translation-de": hashlib.sha256(b"Package: de\n").hexdigest()
    }
    assert f"Dir::State::lists={tmp_path / 'work' / 'lists'}" in (archive / "log").read_text()


def test_no_network_is_one_line_with_the_reason(archive, tmp_path):
    (archive / "offline").touch()
    with pytest.raises(UserError, match=r"Could not resolve 'archive\.example'; use `hasten data text`") as error:
        Packages(tmp_path / "work").update()
    assert "\n" not in str(error.value)


def test_a_package_is_downloaded_once_and_read_without_what_is_not_needed(archive, tmp_path):
    packages = Packages(tmp_path / "work")
    found = packages.locate(["foo"])
    for _ in range(2):
        list(packages.fetch(list(found.values())))
    assert (archive / "log").read_text().count("download foo") == 1
    assert packages.version(found["foo"]) == "1:2"
    assert packages.read(found["foo"], (".mo", "doc/foo/copyright")) == {
        "usr/share/a.mo": b"data",
        "usr/share/doc/foo/copyright": b"data",
    }


def test_a_partial_package_is_fetched_again(archive, tmp_path):
    packages = Packages(tmp_path / "work")
    found = list(packages.locate(["foo"]).values())
    (packages.debs / found[0].file).write_bytes(b"part")
    list(packages.fetch(found))
    assert (packages.debs / found[0].file).stat().st_size == found[0].size


def test_a_failed_download_says_how_to_go_on(archive, tmp_path):
    packages = Packages(tmp_path / "work")
    found = list(packages.locate(["foo"]).values())
    (archive / "offline").touch()
    with pytest.raises(UserError, match=r"cannot download foo: Failed to fetch .*run the command again"):
        list(packages.fetch(found))


def test_a_package_the_release_lacks_is_absent(archive, tmp_path):
    assert set(Packages(tmp_path / "work").locate(["foo", "nothing"])) == {"foo"}


def test_a_damaged_package_is_a_user_error(archive, tmp_path):
    packages = Packages(tmp_path / "work")
    (packages.debs / "bad.deb").write_bytes(b"no archive at all")
    with pytest.raises(UserError, match="damaged package"):
        packages.read(Download("bad", "bad.deb", 0, ""), (".mo",))


def test_without_apt_the_user_is_sent_to_their_own_text(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"apt-get not found: this needs Debian or Ubuntu; use `hasten data text`"):
        Packages(tmp_path)


def test_the_manifest_holds_the_options_and_what_was_removed(shelf, tmp_path):
    build_debian_corpus("en-de", tmp_path / "out", options=DebianOptions(valid=5, test=8))
    manifest = json.loads(Path(tmp_path / "out" / "manifest.json").read_text())
    assert manifest["options"]["filter"]["max_words"] == 40
    assert manifest["removed_from_held_out"]["test-ood"]["source elsewhere"] == 1
