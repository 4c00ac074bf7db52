"""Splitting by document and removing near-duplicates, against plain definitions."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.data.corpus import Pair
from hasten.data.splits import (
    Sizes,
    choose_documents,
    covering_sentences,
    near_duplicates,
    split_corpus,
    without_near_duplicates,
)


def grams(sentence):
    words = re.findall(r"\w+", sentence.casefold())
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)} if len(words) >= 3 else {tuple(words)}


def near_by_definition(sentences, training, overlap):
    return {
        index
        for index, sentence in enumerate(sentences)
        if any(len(grams(sentence) & grams(other)) >= overlap * len(grams(sentence)) for other in training)
    }


sentence = st.lists(st.sampled_from(["a", "b", "c", "D", "d"]), max_size=7).map(" ".join)


@given(st.lists(sentence, max_size=6), st.lists(sentence, max_size=6), st.sampled_from([0.3, 0.7, 1.0]))
def test_the_index_finds_what_the_definition_finds(sentences, training, overlap):
    assert near_duplicates(sentences, training, overlap) == near_by_definition(sentences, training, overlap)


def test_short_sentences_are_compared_as_a_whole():
    training = ["Save the file now", "Open file"]
    assert near_duplicates(["save the", "open FILE!", "the file now"], training) == {1, 2}


def test_seventy_percent_counts_and_less_does_not():
    words = [f"w{i}" for i in range(12)]  # ten trigrams
    seven, six = " ".join(words[:9]), " ".join(words[:8])
    assert near_duplicates([" ".join(words)], [seven]) == {0}
    assert near_duplicates([" ".join(words)], [six]) == set()


def test_trigrams_of_several_training_sentences_do_not_add_up():
    assert near_duplicates(["a b c d e f"], ["a b c d", "c d e f"]) == set()


def test_long_covering_sentences_are_found_and_short_phrases_spare_the_training_text():
    training = ["x one two three four five six seven y", "he said that it would rain today", "He said that."]
    assert covering_sentences(["one two three four five six seven"], training) == {0}
    assert covering_sentences(["he said that"], training) == {2}


def test_each_rule_counts_what_it_removes():
    training = [Pair("open the red file now", "öffne jetzt die rote Datei", "t")]
    held_out = [
        Pair("open the red file now", "anders und ganz neu gesagt", "h"),
        Pair("something else entirely here", "öffne jetzt die rote Datei", "h"),
        Pair("open the red file now please", "wieder anders und neu gesagt", "h"),
        Pair("a third and different thing", "und öffne jetzt die rote Datei", "h"),
        Pair("nothing in common with it", "nichts davon gleicht dem hier", "h"),
    ]
    kept, counts = without_near_duplicates(held_out, training)
    assert kept == held_out[4:]
    assert counts == {"before": 5, "same source": 1, "same target": 1, "near source": 1, "near target": 1}


def corpus(documents, lines, name="g"):
    """Sentences without a common trigram; every document holds `lines` of them."""
    return [
        Pair(f"s{name}{d} x{n} y{d}z{n}", f"t{name}{d} u{n} v{d}w{n}", f"{name}/{d}")
        for d in range(documents)
        for n in range(lines)
    ]


def test_a_document_stays_in_one_split():
    splits = split_corpus({"g": corpus(200, 5)}, Sizes(50, 100), seed=1).pairs
    homes = [{pair.document for pair in pairs} for pairs in splits.values()]
    assert not homes[0] & homes[1]
    assert not homes[0] & homes[2]
    assert not homes[1] & homes[2]
    assert sum(map(len, splits.values())) == 1000


def test_splits_have_the_size_asked_for():
    splits = split_corpus({"g": corpus(200, 5)}, Sizes(50, 100), seed=1).pairs
    assert len(splits["valid"]) == 50
    assert len(splits["test"]) == 100


def test_sources_share_the_held_out_splits_in_proportion():
    splits = split_corpus({"g": corpus(300, 5, "g"), "h": corpus(100, 5, "h")}, Sizes(100, 200), seed=3).pairs
    assert sum(pair.document.startswith("h/") for pair in splits["test"]) == pytest.approx(50, abs=5)
    assert sum(pair.document.startswith("h/") for pair in splits["valid"]) == pytest.approx(25, abs=5)


def test_a_document_too_large_for_the_split_stays_in_training():
    large = [Pair(f"big {i} a{i}", f"groß {i} b{i}", "g/large") for i in range(60)]
    for seed in range(10):
        assert "g/large" not in choose_documents({"g": large + corpus(100, 2)}, Sizes(50, 100), seed)


def test_the_choice_depends_on_the_seed_and_on_nothing_else():
    groups = {"g": corpus(100, 3)}
    assert split_corpus(groups, Sizes(20, 20), 1) == split_corpus(groups, Sizes(20, 20), 1)
    assert choose_documents(groups, Sizes(20, 20), 1) != choose_documents(groups, Sizes(20, 20), 2)
    reordered = {"g": groups["g"][::-1]}
    assert choose_documents(groups, Sizes(20, 20), 1) == choose_documents(reordered, Sizes(20, 20), 1)


def test_a_source_string_of_two_splits_stays_in_training():
    shared = [Pair("used in every document", f"überall in Dokument {d} benutzt", f"g/{d}") for d in range(100)]
    splits = split_corpus({"g": corpus(100, 3) + shared}, Sizes(30, 30), seed=1)
    assert [pair.source for pair in splits.pairs["train"]].count("used in every document") == 1
    for name in ("valid", "test"):
        assert all(pair.source != "used in every document" for pair in splits.pairs[name])
        assert splits.removed[name]["source elsewhere"] == 1


def test_the_most_frequent_translation_is_kept_and_the_first_of_equals():
    pairs = [
        Pair("a b c", "selten", "d"),
        Pair("a b c", "oft", "e"),
        Pair("d e f", "zuerst", "d"),
        Pair("a b c", "oft", "f"),
        Pair("d e f", "danach", "d"),
    ]
    train = split_corpus({"g": pairs}, Sizes(0, 0), seed=1).pairs["train"]
    assert train == [Pair("a b c", "oft", "e"), Pair("d e f", "zuerst", "d")]


def test_other_translations_stay_in_training_when_asked_for():
    pairs = [Pair("a b c", "eins", "d"), Pair("a b c", "zwei", "d"), Pair("a b c", "eins", "e")]
    train = split_corpus({"g": pairs}, Sizes(0, 0), seed=1, one_target=False).pairs["train"]
    assert train == pairs[:2]


def test_outside_sources_never_enter_training_and_lose_what_training_holds():
    outside = [Pair(f"foreign {i} f{i}", f"fremd {i} g{i}", "o/1") for i in range(5)]
    inside = corpus(50, 3)
    groups = {"g": inside, "o": [*outside, inside[0]._replace(document="o/1")]}
    splits = split_corpus(groups, Sizes(10, 10), seed=1, outside=("o",))
    assert splits.pairs["test-ood"] == outside
    assert all(not pair.document.startswith("o/") for pair in splits.pairs["train"])
    assert splits.removed["test-ood"]["source elsewhere"] == 1


@given(st.lists(st.tuples(sentence, sentence, st.sampled_from("uvwxyz")), max_size=30), st.integers(0, 3))
def test_no_held_out_sentence_is_near_a_training_sentence(rows, seed):
    splits = split_corpus({"g": [Pair(*row) for row in rows]}, Sizes(4, 4), seed).pairs
    for side in ("source", "target"):
        known = [getattr(pair, side) for pair in splits["train"]]
        for name in ("valid", "test"):
            assert not near_by_definition([getattr(pair, side) for pair in splits[name]], known, 0.7)
