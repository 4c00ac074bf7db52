from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hasten.data.tokenizer import SPECIAL_IDS, UNK, Tokenizer
from hasten.errors import UserError

unicode_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
strange_characters = "aé 0\x00\t\n\r\v\f\x1c\x85\u2028\u2029\u00a0\u2581\ue000em<>/sx\u0301\u2047\ufeff\ufffd😀"
nasty = st.text(st.sampled_from(strange_characters))


@pytest.fixture(scope="module")
def mixed(words: list[str]) -> Tokenizer:
    """A tokenizer whose training text held what it must later tell apart."""
    strange = ["a ▁ b", "\ue000e \ue000m", "<s> and </s> <0x41>", "tab\tand\x00nul", "  two  spaces  "] * 5
    return Tokenizer.train(words + strange, 430)


@given(unicode_text)
@example("")
@example(" ")
@example("  leading, trailing  and   repeated  ")
@example("\x00")
@example("\u2581")
@example(" \u2581 \u2581\u2581")
@example("\ue000")
@example("\ue000e\ue000m\ue000\u2581")
@example("<s></s><pad><unk><mask><blank><placeholder>")
@example("<0x41> <0x0A>")
@example("👩‍👩‍👧 e\u0301 \U0010ffff\ufeff\ufffd\u2047")
@example("a\nb\r\nc\td")
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back_exactly(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(nasty)
@settings(max_examples=300, deadline=None)
def test_text_of_markers_and_escapes_comes_back_exactly(mixed: Tokenizer, text: str):
    assert mixed.decode(mixed.encode(text)) == text


@given(st.one_of(unicode_text, nasty))
@settings(max_examples=200, deadline=None)
def test_no_text_becomes_a_special_id(mixed: Tokenizer, text: str):
    assert not set(mixed.encode(text)) & set(SPECIAL_IDS)


def test_a_long_text_comes_back_exactly(tokenizer: Tokenizer):
    assert tokenizer.decode(tokenizer.encode("x" * 100_000)) == "x" * 100_000


def test_special_ids_are_not_text(tokenizer: Tokenizer):
    ids = tokenizer.encode("kamo")
    assert tokenizer.decode([*SPECIAL_IDS, *ids, *SPECIAL_IDS]) == "kamo"
    assert tokenizer.decode(SPECIAL_IDS) == ""


def test_the_first_word_looks_like_every_other(tokenizer: Tokenizer):
    once = tokenizer.encode("kamo")
    assert tokenizer.encode("kamo kamo") == once + once


def test_bytes_that_are_no_utf8_become_replacement_characters(tokenizer: Tokenizer):
    half = tokenizer.encode("\U0001f600")[:-1]
    assert "\ufffd" in tokenizer.decode(half)


def test_every_id_can_be_decoded(tokenizer: Tokenizer):
    texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    assert all(texts[i] == "" for i in SPECIAL_IDS)
    assert len(tokenizer.pieces()) == tokenizer.vocab_size == 400
    assert tokenizer.pieces()[UNK] == "<unk>"


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer):
    with pytest.raises(UserError, match="lone surrogate"):
        tokenizer.encode("a\ud800b")


def test_saving_keeps_ids_and_fingerprint(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path / "t.model")
    loaded = Tokenizer.load(tmp_path / "t.model")
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode("kamo ti 12 ö") == tokenizer.encode("kamo ti 12 ö")


def test_learning_twice_gives_the_same_tokenizer(words: list[str], tokenizer: Tokenizer):
    assert Tokenizer.train(words, 400).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("lines", "vocab_size", "reason"),
    [
        (["kamo ti"] * 9, 264, "at least 265"),
        (["kamo ti"] * 9, 5000, "vocab_size can be at most"),
        ([chr(0x4E00 + i) * 3 for i in range(300)], 300, "vocab_size must be at least"),
        ([], 400, "empty"),
        (["", ""], 400, "empty"),
        (["a\ud800b"] * 9, 400, "lone surrogate"),
    ],
)
def test_text_that_teaches_no_tokenizer_is_one_line(lines: list[str], vocab_size: int, reason: str):
    with pytest.raises(UserError, match=reason) as raised:
        Tokenizer.train(lines, vocab_size)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("damage", [b"", b"\x00\x00", b"not a model", "cut", "cut in half"])
def test_a_damaged_file_is_one_line(tokenizer: Tokenizer, tmp_path: Path, damage: bytes | str):
    path = tmp_path / "t.model"
    tokenizer.save(path)
    whole = path.read_bytes()
    cut = len(whole) // 2 if damage == "cut in half" else -3
    path.write_bytes(damage if isinstance(damage, bytes) else whole[:cut])
    with pytest.raises(UserError, match="tokenizer") as raised:
        Tokenizer.load(path)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_one_line(tmp_path: Path):
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        Tokenizer.load(tmp_path / "none.model")


def test_the_model_of_another_project_is_refused(tmp_path: Path, words: list[str]):
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words), model_writer=model, vocab_size=60, minloglevel=2, hard_vocab_limit=False
    )
    (tmp_path / "t.model").write_bytes(model.getvalue())
    with pytest.raises(UserError, match="special ids"):
        Tokenizer.load(tmp_path / "t.model")
