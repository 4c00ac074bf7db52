"""A corpus out of a user's own files."""

import gzip
import random

import pytest

from hasten.cli.data import app
from hasten.data.corpus import Corpus, Pair
from hasten.data.text import (
    TextFiles,
    TextOptions,
    build_text_corpus,
    check_languages,
    drop_reason,
    language_of,
    read_lines,
    read_pairs,
)
from hasten.errors import UserError


def sentences(count, seed=0):
    """Random words: no two sentences share trigrams."""
    rng = random.Random(seed)
    return [" ".join(f"w{rng.randrange(10**6)}" for _ in range(8)) for _ in range(count)]


def write(path, lines):
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def two_files(directory, source, target):
    return TextFiles(write(directory / "c.en", source), write(directory / "c.de.gz", target))


def test_a_corpus_of_two_files_holds_every_pair_once(tmp_path):
    source, target = sentences(1000, 1), sentences(1000, 2)
    corpus = build_text_corpus(two_files(tmp_path, source, target), tmp_path / "out", ("en", "de"))
    pairs = [pair for split in corpus.splits for pair in zip(*corpus.pairs(split), strict=True)]
    assert sorted(pairs) == sorted(zip(source, target, strict=True))
    assert [corpus.manifest["splits"][name]["pairs"] for name in ("train", "valid", "test")] == [900, 50, 50]
    Corpus.open(tmp_path / "out").verify()


def test_blocks_of_neighbouring_lines_stay_together(tmp_path):
    files = two_files(tmp_path, sentences(1000, 1), sentences(1000, 2))
    options = TextOptions(block_lines=10, valid=100, test=100)
    corpus = build_text_corpus(files, tmp_path / "out", ("en", "de"), options=options)
    order = {line: number for number, line in enumerate(read_lines(files.source))}
    blocks = [{order[line] // 10 for line in corpus.pairs(split)[0]} for split in corpus.splits]
    assert sum(map(len, blocks)) == len(set().union(*blocks)) == 100


def test_given_documents_stay_together(tmp_path):
    files = two_files(tmp_path, sentences(300, 1), sentences(300, 2))
    docs = write(tmp_path / "docs", [f"page {number % 60}" for number in range(300)])
    corpus = build_text_corpus(files, tmp_path / "out", ("en", "de"), documents=docs)
    homes = [set(corpus.documents(split)) for split in corpus.splits]
    assert sum(map(len, homes)) == len(set().union(*homes)) == 60


def test_too_few_document_keys_are_refused(tmp_path):
    files = two_files(tmp_path, sentences(30, 1), sentences(30, 2))
    with pytest.raises(UserError, match=r"docs has 3 lines, fewer than the text"):
        build_text_corpus(files, tmp_path / "o", ("en", "de"), documents=write(tmp_path / "docs", ["a"] * 3))


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("ja", "", "empty"),
        ("", "yes", "empty"),
        ("yes", "ja", None),
        ("no", "auf gar keinen Fall", None),
        ("no way at all", "auf gar keinen Fall und unter keinen Umständen jemals", "length ratio"),
        ("w " * 251, "w " * 251, "long"),
        ("w " * 250, "w " * 250, None),
    ],
)
def test_pairs_are_dropped_for_a_reason(source, target, reason):
    assert drop_reason(Pair(source, target, "0"), TextOptions()) == reason


def test_what_is_dropped_is_counted(tmp_path):
    source, target = sentences(100, 1), sentences(100, 2)
    rows = [("", "leer"), ("  ", "leer"), (source[0], target[0]), ("x " * 300, "y " * 300)]
    files = two_files(tmp_path, source + [a for a, _ in rows], target + [b for _, b in rows])
    corpus = build_text_corpus(files, tmp_path / "out", ("en", "de"))
    filtered = corpus.manifest["sources"]["text"]["filtered"]
    assert filtered == {"lines": 104, "empty": 2, "duplicate": 1, "long": 1}
    assert sum(split["pairs"] for split in corpus.manifest["splits"].values()) == 100


def test_two_builds_are_byte_identical(tmp_path):
    files = two_files(tmp_path, sentences(200, 1), sentences(200, 2))
    one = build_text_corpus(files, tmp_path / "one", ("en", "de")).directory
    two = build_text_corpus(files, tmp_path / "two", ("en", "de")).directory
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes()


def test_held_out_pairs_near_training_pairs_are_removed_and_counted(tmp_path):
    source, target = sentences(400, 1), sentences(400, 2)
    source = [line for line in source for _ in range(2)]
    target = [line + tail for line in target for tail in ("", " mehr")]
    corpus = build_text_corpus(two_files(tmp_path, source, target), tmp_path / "out", ("en", "de"))
    assert set(corpus.pairs("train")[0]).isdisjoint(corpus.pairs("test")[0])
    assert corpus.manifest["removed_from_held_out"]["test"]["before"] >= len(corpus.pairs("test")[0])


def test_a_test_set_of_the_users_own_stays_whole_and_leaves_training(tmp_path):
    source, target = sentences(200, 1), sentences(200, 2)
    own = TextFiles(
        write(tmp_path / "own.en", [source[3], source[3], "", "new words"]),
        write(tmp_path / "own.de", ["alpha", "beta", "", "gamma"]),
    )
    corpus = build_text_corpus(
        two_files(tmp_path, source, target), tmp_path / "out", ("en", "de"), held_out={"test": own}
    )
    assert corpus.pairs("test") == ([source[3], source[3], "new words"], ["alpha", "beta", "gamma"])
    assert source[3] not in corpus.pairs("train")[0] + corpus.pairs("valid")[0]
    assert corpus.manifest["removed_from_train"] == {"near a given held-out sentence": 1}
    assert len(corpus.pairs("valid")[0]) > 0


@pytest.mark.parametrize("count", [3, 10, 40, 199, 201])
def test_small_texts_fill_every_split(tmp_path, count):
    files = two_files(tmp_path, sentences(count, 1), sentences(count, 2))
    corpus = build_text_corpus(files, tmp_path / "out", ("en", "de"))
    assert all(corpus.pairs(split)[0] for split in corpus.splits)


@pytest.mark.parametrize("count", [1, 2])
def test_too_small_a_text_says_what_to_do(tmp_path, count):
    files = two_files(tmp_path, sentences(count, 1), sentences(count, 2))
    with pytest.raises(UserError, match=r"--valid-src|nothing is left for training"):
        build_text_corpus(files, tmp_path / "out", ("en", "de"))


def test_a_text_may_go_to_training_as_a_whole(tmp_path):
    files = two_files(tmp_path, sentences(2, 1), sentences(2, 2))
    corpus = build_text_corpus(files, tmp_path / "out", ("en", "de"), options=TextOptions(valid=0, test=0))
    assert len(corpus.pairs("train")[0]) == 2


def test_unequal_line_counts_are_refused_with_both(tmp_path):
    with pytest.raises(UserError, match=r"c\.en has 2 lines, .*c\.de\.gz has 3"):
        read_pairs(two_files(tmp_path, ["a", "b"], ["c", "d", "e"]))


def test_invalid_text_is_named_by_file_and_line(tmp_path):
    (tmp_path / "bad.en").write_bytes(b"fine\nna\xefve\n")
    with pytest.raises(UserError, match=r"bad\.en, line 2: invalid UTF-8 at byte 3"):
        read_lines(tmp_path / "bad.en")


def test_a_missing_file_and_a_damaged_archive_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_lines(tmp_path / "none.en")
    whole = gzip.compress(b"text\n" * 100)
    for data in (b"not gzip", whole[:-9], whole[:12] + b"\xff" * 8 + whole[20:]):
        (tmp_path / "bad.gz").write_bytes(data)
        with pytest.raises(UserError, match=r"bad\.gz: damaged gzip data"):
            read_lines(tmp_path / "bad.gz")


def test_a_text_that_cannot_be_read_leaves_no_directory(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        build_text_corpus(TextFiles(tmp_path / "a.en", tmp_path / "a.de"), tmp_path / "new" / "out", ("en", "de"))
    assert not (tmp_path / "new").exists()


def test_an_empty_text_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no usable pairs"):
        build_text_corpus(two_files(tmp_path, [], []), tmp_path / "out", ("en", "de"))


def test_tab_separated_columns_are_read_and_checked(tmp_path):
    table = write(tmp_path / "t.tsv.gz", ["a\tb", "c\td"])
    assert read_pairs(TextFiles(table)) == [Pair("a", "b", "0"), Pair("c", "d", "1")]
    with pytest.raises(UserError, match=r"u\.tsv, line 2: 3 tab-separated columns, expected 2"):
        read_pairs(TextFiles(write(tmp_path / "u.tsv", ["a\tb", "c\td\te"])))


def test_language_codes_are_read_from_file_names(tmp_path):
    assert language_of(tmp_path / "europarl.de-en.en.gz") == "en"
    assert language_of(tmp_path / "c.pt-BR") == "pt-BR"
    for name in ("plain", "c.txt", "c.txt.gz", "c.tsv"):
        with pytest.raises(UserError, match="--source-language"):
            language_of(tmp_path / name)


@pytest.mark.parametrize("languages", [("en", "en"), ("e", "de"), ("en", "docs"), ("en", "../de"), ("en", "")])
def test_unusable_language_codes_are_refused(languages):
    with pytest.raises(UserError, match="language"):
        check_languages(languages)


@pytest.mark.parametrize(
    ("field", "value"),
    [("valid", -1), ("test", -1), ("max_words", 0), ("block_lines", 0), ("max_ratio", 0.5), ("overlap", 0.0)],
)
def test_options_out_of_range_are_refused(field, value):
    with pytest.raises(UserError, match=field):
        TextOptions(**{field: value})


def run(*arguments):
    app([str(argument) for argument in arguments], standalone_mode=False)


def test_the_command_builds_a_corpus_and_prints_its_counts(tmp_path, capsys):
    files = two_files(tmp_path, sentences(100, 1), sentences(100, 2))
    run("text", "--src", files.source, "--tgt", files.target, "--out", tmp_path / "out")
    corpus = Corpus.open(tmp_path / "out")
    assert (corpus.source_language, corpus.target_language) == ("en", "de")
    assert "train" in capsys.readouterr().out


def test_the_command_reads_a_table(tmp_path):
    table = write(tmp_path / "t.tsv", [f"{a}\t{b}" for a, b in zip(sentences(50, 1), sentences(50, 2), strict=True)])
    run("text", "--tsv", table, "--source-language", "en", "--target-language", "fr", "--out", tmp_path / "out")
    assert Corpus.open(tmp_path / "out").target_language == "fr"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--src", "a.en"], "--src and --tgt"),
        (["--src", "a.en", "--tgt", "a.de", "--tsv", "a.tsv"], "or --tsv alone"),
        (["--tsv", "a.tsv"], "--source-language"),
        (["--src", "a.en", "--tgt", "a.de", "--valid-src", "v.en"], "--valid-src and --valid-tgt"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        run("text", *arguments, "--out", tmp_path / "out")


def test_a_directory_in_use_is_kept_without_force(tmp_path):
    files = two_files(tmp_path, sentences(50, 1), sentences(50, 2))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    arguments = ["text", "--src", files.source, "--tgt", files.target, "--out", tmp_path / "out"]
    with pytest.raises(UserError, match="not empty"):
        run(*arguments)
    run(*arguments, "--force")
    assert (tmp_path / "out" / "mine").read_text() == "keep"


def test_a_text_is_not_its_own_translation(tmp_path):
    path = write(tmp_path / "c.en", sentences(300))
    with pytest.raises(UserError, match="as source and as target"):
        build_text_corpus(TextFiles(path, path), tmp_path / "out", ("en", "de"))


def test_the_directory_of_the_text_is_not_written(tmp_path):
    source, target = sentences(300, 1), sentences(300, 2)
    files = TextFiles(write(tmp_path / "train.en", source), write(tmp_path / "train.de", target))
    with pytest.raises(UserError, match="lies in the directory that is to be written"):
        build_text_corpus(files, tmp_path, ("en", "de"), force=True)
    assert read_pairs(files)[0][:2] == (source[0], target[0])


def test_a_split_is_given_or_drawn_but_not_both(tmp_path):
    files = two_files(tmp_path, sentences(300, 1), sentences(300, 2))
    given = {"valid": TextFiles(write(tmp_path / "v.en", sentences(9, 3)), write(tmp_path / "v.de", sentences(9, 4)))}
    with pytest.raises(UserError, match="valid is given"):
        build_text_corpus(files, tmp_path / "out", ("en", "de"), held_out=given, options=TextOptions(valid=5))


def test_a_ratio_that_is_no_number_is_refused():
    with pytest.raises(UserError, match="max_ratio is nan"):
        TextOptions(max_ratio=float("nan"))


def test_languages_differ_on_every_file_system():
    with pytest.raises(UserError, match="differ"):
        check_languages(("de", "DE"))
