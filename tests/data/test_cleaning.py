"""Cleaning of strings and the reasons for which a pair is left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.data.cleaning import PairFilter, clean, split_aligned, split_sentences, strip_accelerators


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        ("  Open\nthe\tfile ", "Open the file"),
        ("Press <b>Enter</b>, then <a href='x'>go</a>", "Press Enter, then go"),
        ("if x < 5 and y > 3", "if x < 5 and y > 3"),
        ("a &lt;b&gt; &amp; c&#39;s", "a <b> & c's"),
        ("see &copying and AT&T", "see &copying and AT&T"),
        ("“quoted” ‘so’ „und so“ …", '"quoted" \'so\' "und so" ...'),
        ("un\u00a0: deux\u202f; soft\u00adware", "un : deux ; software"),
        ("• a bullet –", "a bullet"),
        ("see B<bold I<both>>", "see bold both"),
        ("one\\ntwo", "one two"),
    ],
)
def test_clean_leaves_plain_text(raw, cleaned):
    assert clean(raw) == cleaned


@given(st.text())
def test_a_cleaned_string_has_no_line_break_and_no_outer_space(text):
    cleaned = clean(text)
    assert cleaned == cleaned.strip()
    assert len(cleaned.splitlines()) <= 1


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("_Open File", "Datei _öffnen", ("Open File", "Datei öffnen")),
        ("E&xport", "&Exportieren", ("Export", "Exportieren")),
        ("~Print...", "Drucken~...", ("Print...", "Drucken~...")),
        ("Use AT&T codes", "AT&T-Codes von AT&T nutzen", ("Use AT&T codes", "AT&T-Codes von AT&T nutzen")),
        ("set file_name to", "file_name setzen", ("set file_name to", "file_name setzen")),
        ("a &lt; b", "a &lt; b ", ("a &lt; b", "a &lt; b ")),
        ("__init__ and _x", "so _y", ("__init__ and _x", "so y")),
    ],
)
def test_accelerators_go_and_names_stay(source, target, expected):
    shared_word_kept = strip_accelerators(source, target)
    assert shared_word_kept[0] == expected[0]


def test_sentences_join_back_to_the_paragraph():
    text = 'He said "Stop." Then he left! Why? 3 reasons.'
    assert split_sentences(text) == ['He said "Stop."', "Then he left!", "Why?", "3 reasons."]
    assert " ".join(split_sentences(text)) == text


@given(st.text(alphabet='aB1.!? "»'))
def test_splitting_loses_nothing_but_space(text):
    assert "".join(split_sentences(text)).replace(" ", "") == text.replace(" ", "")


def test_abbreviations_before_small_letters_do_not_split():
    assert split_sentences("Use e.g. the menu.") == ["Use e.g. the menu."]


def test_paragraphs_split_only_when_both_sides_agree():
    assert split_aligned("One. Two.", "Eins. Zwei.") == [("One.", "Eins."), ("Two.", "Zwei.")]
    assert split_aligned("One. Two.", "Eins und zwei.") == [("One. Two.", "Eins und zwei.")]


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("Open the selected file", "Die gewählte Datei öffnen", None),
        ("Open file", "Datei öffnen bitte", "short"),
        ("Open the file", "1 2 3", "short"),
        (" ".join(["word"] * 41), " ".join(["Wort"] * 41), "long"),
        ("one two three" + " ." * 60, "eins zwei drei", "long"),
        ("Open The File", "open the file", "untranslated"),
        ("open the file menu now", "jetzt open the file menu", "untranslated"),
        ("Delete %s from disk", "Von der Platte löschen", "placeholders differ"),
        ("Delete %s from disk", "%s von der Platte löschen", None),
        ("see http://a.example for more", "mehr dazu steht dort", "addresses differ"),
        ("Open the selected file", "Die gewählte Datei in dem Ordner nun sofort hier und jetzt öffnen", "length ratio"),
        ("a = 1 + 2; b = 3 * 4; c", "a = 1 + 2; b = 3 * 4; d", "few letters"),
    ],
)
def test_a_pair_is_left_out_for_the_first_rule_it_breaks(source, target, reason):
    assert PairFilter().reason(source, target) == reason


@given(st.text(), st.text())
def test_every_pair_of_strings_gets_an_answer(source, target):
    reason = PairFilter().reason(clean(source), clean(target))
    assert reason is None or isinstance(reason, str)


def test_limits_are_the_callers_to_set():
    assert PairFilter(min_words=1).reason("Open", "Öffnen") is None
    assert PairFilter(max_words=3).reason("Open the selected file", "Die gewählte Datei öffnen") == "long"
