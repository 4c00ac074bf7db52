"""From a spec to what can be learnt, with a count for every reason to leave a pair out."""

import dataclasses

import pytest

from hasten import spec as specs
from hasten.data.corpus import Pair, write_corpus
from hasten.errors import UserError
from hasten.training import checkpoint, prepare


def with_data(spec: specs.RunSpec, **data) -> specs.RunSpec:
    return dataclasses.replace(spec, data=dataclasses.replace(spec.data, **data))


@pytest.fixture
def uneven(tmp_path):
    """Fine, empty source, empty target, too long, too many equal neighbours for CTC, at its limit."""
    pairs = [
        ("a b c", "c b a"), ("", "a"), ("a", ""), ("a b c d e f g h a b c d", "a"),
        ("b", "b b b"), ("b", "b d b g"),
    ]  # fmt: skip
    return write_corpus(tmp_path / "uneven", ("up", "down"), {"train": [Pair(*pair, "d") for pair in pairs]}, {})


def test_every_pair_is_kept_or_counted(uneven, run_spec, letters):
    spec = with_data(run_spec("autoregressive"), max_tokens=10)
    task, counts = prepare.make_task(spec, uneven, letters)
    assert counts == {"empty": 2, "longer than data.max_tokens": 1, "kept": 3}
    assert [letters.decode(target) for _, target in task.pairs] == ["c b a", "b b b", "b d b g"]
    assert (task.valid_source, task.valid_target) == ([], [])


def test_pairs_that_ctc_cannot_align_are_counted(uneven, run_spec, letters):
    spec = with_data(run_spec("ctc"), max_tokens=10)
    task, counts = prepare.make_task(spec, uneven, letters)
    assert counts == {"empty": 2, "longer than data.max_tokens": 1, "impossible for this model": 1, "kept": 2}
    assert [letters.decode(target) for _, target in task.pairs] == ["c b a", "b d b g"]
    # Frames: two a source token and two for its end symbol; adjacent equal target tokens need a blank between them.
    assert all(2 * (len(s) + 1) >= len(t) + sum(map(int.__eq__, t, t[1:])) for s, t in task.pairs)


def test_validation_lines_are_those_of_the_corpus(corpus, run_spec, letters):
    task, counts = prepare.make_task(run_spec(), corpus, letters)
    assert (task.valid_source, task.valid_target) == corpus.pairs("valid")
    assert counts == {"kept": 60}


def test_distilled_targets_take_the_place_of_the_references(uneven, run_spec, letters, tmp_path):
    path = tmp_path / "d"
    path.write_bytes(b"a\nb\nc\n\nd\re\n\n")
    task, counts = prepare.make_task(with_data(run_spec(), distilled=str(path)), uneven, letters)
    assert [letters.decode(target) for _, target in task.pairs] == ["a", "c", "d\re"]
    assert counts["empty"] == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\nb\n", r"d has 2 lines, the training split of .* 6; line i must translate line i"),
        (b"", r"d has 0 lines"),
        (b"a\n" * 7, r"d has 7 lines"),
        (b"a\n\xff\n" + b"a\n" * 4, r"d, line 2: invalid UTF-8"),
        (None, r"cannot read data.distilled .*d: No such file or directory; `hasten distill` makes it"),
    ],
)
def test_a_distilled_file_that_does_not_fit_is_refused(content, message, uneven, run_spec, letters, tmp_path):
    path = tmp_path / "d"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare.make_task(with_data(run_spec(), distilled=str(path)), uneven, letters)


def test_a_tokenizer_can_come_from_a_model(corpus, run_spec, tokenizer, tmp_path):
    checkpoint.write_run(tmp_path, run_spec(), tokenizer)
    taken = prepare.make_tokenizer(specs.TokenizerSpec(from_model=str(tmp_path)), corpus)
    assert taken.fingerprint == tokenizer.fingerprint
    with pytest.raises(UserError, match="no model 'nobody'"):
        prepare.make_tokenizer(specs.TokenizerSpec(from_model="nobody"), corpus)


def test_the_same_text_gives_the_same_tokenizer(corpus, letters):
    again = prepare.make_tokenizer(specs.TokenizerSpec(vocab_size=letters.vocab_size), corpus)
    assert again.fingerprint == letters.fingerprint
