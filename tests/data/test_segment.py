from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.data.segment import segment


def at_most(n: int):
    return lambda text: len(text) <= n


def test_a_text_that_fits_stays_whole():
    assert segment("One. Two. Three.", at_most(100)) == ["One. Two. Three."]
    assert segment("  ", at_most(1)) == []


def test_sentences_stay_apart_even_where_two_would_fit():
    assert segment("One. Two! Three? Four.", at_most(12)) == ["One.", "Two!", "Three?", "Four."]
    assert segment('He said "No." She left.', at_most(15)) == ['He said "No."', "She left."]
    assert segment("一。二！三", at_most(2)) == ["一。", "二！", "三"]


def test_a_number_or_a_name_with_a_dot_is_no_end():
    assert segment("See hasten.org 3.14 now and then", at_most(20)) == ["See hasten.org 3.14", "now and then"]


def test_a_long_sentence_is_cut_after_clauses_then_between_words():
    assert segment("aaa bbb, ccc; ddd, eee fff", at_most(14)) == ["aaa bbb, ccc;", "ddd, eee fff"]
    assert segment("aaa bbb ccc ddd", at_most(7)) == ["aaa bbb", "ccc ddd"]
    assert segment("aaa bbb ccc, d", at_most(8)) == ["aaa bbb", "ccc,", "d"]


def test_a_long_word_is_cut_anywhere():
    assert segment("abcdefgh ij", at_most(3)) == ["abc", "def", "gh", "ij"]


def test_line_breaks_within_a_text_end_sentences():
    assert segment("aaa\fbbb\u2028ccc\rddd", at_most(8)) == ["aaa", "bbb", "ccc", "ddd"]


@given(st.text(st.sampled_from("ab.,;! \n\t。、ö")), st.integers(1, 12))
@settings(max_examples=500, deadline=None)
def test_every_part_fits_and_nothing_but_white_space_is_lost(text: str, most: int):
    parts = segment(text, at_most(most))
    assert all(0 < len(part) <= most or part == text.strip() for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())


@given(st.lists(st.sampled_from(["a", "bb", "ccc", "dddd"]), min_size=1, max_size=60), st.integers(4, 20))
@settings(max_examples=200, deadline=None)
def test_words_are_packed_as_tightly_as_one_by_one(words: list[str], most: int):
    expected, line = [], ""
    for word in words:
        longer = f"{line} {word}".strip()
        if len(longer) > most:
            expected.append(line)
            longer = word
        line = longer
    assert segment(" ".join(words), at_most(most)) == [*expected, line]


def test_a_very_long_text_takes_few_questions():
    asked = []

    def fits(text: str) -> bool:
        asked.append(len(text))
        return len(text) <= 2000

    parts = segment("word " * 20_000, fits)
    assert len(parts) == 50
    assert sum(asked) < 30 * 100_000
