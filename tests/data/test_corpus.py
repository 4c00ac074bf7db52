"""The parallel-text directory: what is written is read back, and damage is named."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.data.corpus import Corpus, Pair, claimed_directory, decode_lines, write_corpus
from hasten.errors import UserError

PAIRS = {
    "train": [Pair("a cat", "eine Katze", "x/1"), Pair("two dogs", "zwei Hunde", "x/2")],
    "valid": [Pair("café", "Straße", "x/3")],
    "test": [],
}


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "c", ("en", "de"), PAIRS, {"seed": 1}, licences="mine\n")


def test_a_written_corpus_reads_back(corpus):
    opened = Corpus.open(corpus.directory)
    assert (opened.source_language, opened.target_language) == ("en", "de")
    assert opened.splits == ("train", "valid", "test")
    assert opened.pairs("train") == (["a cat", "two dogs"], ["eine Katze", "zwei Hunde"])
    assert opened.pairs("test") == ([], [])
    assert opened.documents("train") == ["x/1", "x/2"]
    assert opened.manifest["seed"] == 1
    assert (corpus.directory / "LICENCES").read_text() == "mine\n"
    opened.verify()


def test_the_manifest_counts_and_hashes_every_file(corpus):
    train = corpus.manifest["splits"]["train"]
    assert (train["pairs"], train["documents"], train["source_words"], train["target_words"]) == (2, 2, 4, 4)
    data = (corpus.directory / "train.de").read_bytes()
    assert data == b"eine Katze\nzwei Hunde\n"
    assert train["sha256"]["train.de"] == hashlib.sha256(data).hexdigest()


def test_writing_twice_gives_equal_bytes(corpus, tmp_path):
    again = write_corpus(tmp_path / "d", ("en", "de"), PAIRS, {"seed": 1}, licences="mine\n")
    names = sorted(path.name for path in corpus.directory.iterdir())
    assert names == sorted(path.name for path in again.directory.iterdir())
    for name in names:
        assert (corpus.directory / name).read_bytes() == (again.directory / name).read_bytes()


def edit(directory, **entries):
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "manifest.json").unlink(), "no manifest.json"),
        (lambda d: (d / "manifest.json").write_text("{"), "not valid JSON"),
        (lambda d: (d / "manifest.json").write_text("[]"), "kind None"),
        (lambda d: (d / "manifest.json").write_text('{"kind": "points"}'), "kind 'points', expected 'parallel-text'"),
        (lambda d: (d / "manifest.json").write_text('{"kind": "parallel-text", "source": "en"}'), "no entry 'target'"),
        (lambda d: (d / "manifest.json").write_text("[" * 100_000), "not valid JSON"),
        (lambda d: edit(d, splits=["train"]), "has no number of pairs"),
        (lambda d: edit(d, splits={"train": "all"}), "split 'train' has no number of pairs"),
        (lambda d: edit(d, splits={"../train": {"pairs": 2}}), "'../train' cannot be a language or a split"),
        (lambda d: edit(d, source="../en"), "'../en' cannot be a language or a split"),
        (lambda d: edit(d, source="e\0n"), "cannot be a language or a split"),
        (lambda d: edit(d, target=5), "5 cannot be a language or a split"),
        (lambda d: (d / "train.de").unlink(), "train.de: No such file"),
        (lambda d: (d / "train.de").write_text("eins\n"), "1 lines, manifest.json says 2"),
        (lambda d: (d / "train.de").write_bytes(b"eins\nzw\xff\n"), "train.de, line 2: invalid UTF-8 at byte 3"),
    ],
)
def test_damage_is_named_in_one_line(corpus, damage, message):
    damage(corpus.directory)
    with pytest.raises(UserError) as error:
        Corpus.open(corpus.directory).pairs("train")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_sides_of_unequal_length_are_refused(corpus):
    manifest = json.loads((corpus.directory / "manifest.json").read_text())
    (corpus.directory / "train.en").write_text("one\n")
    with pytest.raises(UserError, match=r"train\.en: 1 lines"):
        Corpus(corpus.directory, manifest).pairs("train")


def test_an_unknown_split_lists_those_that_are_there(corpus):
    with pytest.raises(UserError, match="no split 'dev'; it has train, valid, test"):
        corpus.pairs("dev")


def test_a_missing_directory_says_how_to_build_one(tmp_path):
    with pytest.raises(UserError, match="hasten data"):
        Corpus.open(tmp_path / "nothing")


def test_verify_finds_a_changed_file_of_equal_length(corpus):
    (corpus.directory / "train.de").write_text("eine Katze\nzwei Hunda\n")
    corpus.pairs("train")
    with pytest.raises(UserError, match=r"train\.de: content differs"):
        corpus.verify()


def test_a_directory_in_use_is_kept_without_force(corpus):
    with pytest.raises(UserError, match="not empty"):
        write_corpus(corpus.directory, ("en", "de"), PAIRS, {})


def test_force_replaces_the_old_corpus_and_leaves_other_files(corpus):
    (corpus.directory / "notes.txt").write_text("keep")
    write_corpus(corpus.directory, ("en", "fr"), {"train": PAIRS["train"]}, {}, force=True)
    assert sorted(path.name for path in corpus.directory.iterdir()) == [
        "manifest.json",
        "notes.txt",
        "train.docs",
        "train.en",
        "train.fr",
    ]


def test_a_file_in_the_way_of_the_directory_is_a_user_error(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(UserError, match="cannot write there"), claimed_directory(tmp_path / "f"):
        pass


def test_lines_split_at_line_feeds_only():
    assert decode_lines("a\u2028b\x0bc\x85d\r\ne".encode(), "f") == ["a\u2028b\x0bc\x85d", "e"]
    assert decode_lines(b"\xef\xbb\xbfa\n\n", "f") == ["a", ""]
    assert decode_lines(b"", "f") == []


@given(st.lists(st.text(st.characters(exclude_characters="\r\n\ufeff", exclude_categories=["Cs"]))))
def test_any_text_survives_its_encoding(lines):
    assert decode_lines("".join(line + "\n" for line in lines).encode(), "f") == lines
