"""From a spec to what can be learnt, with a count for every reason to leave a pair out."""

import dataclasses
import hashlib
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from hasten import spec as specs
from hasten.data.corpus import Pair, write_corpus
from hasten.errors import UserError
from hasten.models import Autoregressive, AutoregressiveSpec
from hasten.training import checkpoint, prepare
from hasten.training.loop import Task, train


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


@dataclass(frozen=True, kw_only=True)
class Fertile(AutoregressiveSpec):
    """A model that says it learns from fertilities."""

    needs_fertilities: ClassVar[bool] = True


def fertile(spec: specs.RunSpec, path, **data) -> specs.RunSpec:
    options = {field.name: getattr(spec.model, field.name) for field in dataclasses.fields(AutoregressiveSpec)}
    return with_data(dataclasses.replace(spec, model=Fertile(**options)), fertilities=path and str(path), **data)


@pytest.fixture
def label_file(letters, tmp_path):
    """Writes labels of `uneven`: all comes from the first piece. The longest pair is left out, and its label wrong."""

    def write(changes: dict[int, str]):
        sides = {1: ("a b c", "c b a"), 5: ("b", "b b b"), 6: ("b", "b d b g")}
        lines = {1: "", 2: "", 3: "", 4: "2", 5: "", 6: ""}
        for number, (source, target) in sides.items():
            lines[number] = " ".join(map(str, [len(letters.encode(target)), *[0] * len(letters.encode(source))]))
        path = tmp_path / "f"
        path.write_text("".join(line + "\n" for line in {**lines, **changes}.values()))
        return path

    return write


def test_labels_go_with_the_pairs_that_are_kept(uneven, run_spec, letters, label_file):
    spec = fertile(run_spec(), label_file({}), max_tokens=10)
    task, counts = prepare.make_task(spec, uneven, letters)
    assert counts == {"empty": 2, "longer than data.max_tokens": 1, "kept": 3}
    assert task.fertilities is not None
    for (source, target), label in zip(task.pairs, task.fertilities, strict=True):
        assert label == [len(target)] + [0] * len(source)
    batch = task.batch([2, 0])
    assert batch.fertilities is not None
    assert batch.fertilities.shape == batch.source.shape
    assert batch.fertilities.sum(1).tolist() == [len(task.pairs[2][1]), len(task.pairs[0][1])]


def test_a_pair_without_a_label_is_left_out_and_counted(uneven, run_spec, letters, label_file):
    task, counts = prepare.make_task(fertile(run_spec(), label_file({1: ""}), max_tokens=10), uneven, letters)
    assert counts == {"empty": 2, "longer than data.max_tokens": 1, "without fertilities": 1, "kept": 2}
    assert task.fertilities is not None
    assert len(task.fertilities) == 2
    assert [letters.decode(target) for _, target in task.pairs] == ["b b b", "b d b g"]


@pytest.mark.parametrize(
    ("line", "label", "message"),
    [
        (
            5,
            "0 3 0",
            r"data.fertilities .*f, line 5: 3 fertilities, the source has 1 pieces and its end \(2 are needed\)",
        ),
        (6, "3 0", r"f, line 6: the fertilities sum to 3, the target has 4 pieces; make them with `hasten align`"),
        (2, "x", r"f, line 2: 'x' is no fertility"),
        (6, "4 0\n1", r"f has 7 lines of fertilities, the training split 6 pairs"),
    ],
)
def test_a_label_of_something_else_is_refused(line, label, message, uneven, run_spec, letters, label_file):
    with pytest.raises(UserError, match=message):
        prepare.make_task(fertile(run_spec(), label_file({line: label}), max_tokens=10), uneven, letters)


def test_labels_are_for_those_who_learn_from_them(uneven, run_spec, letters, tmp_path):
    without, useless = fertile(run_spec(), None), with_data(run_spec("ctc"), fertilities="f")
    for spec, message in ((without, "learns from data.fertilities; name a file"), (useless, "'ctc' has no use for")):
        with pytest.raises(UserError, match=message):
            prepare.check(spec)
        with pytest.raises(UserError, match=message):
            prepare.make_task(spec, uneven, letters)
    prepare.check(fertile(run_spec(), tmp_path / "f"))


def test_the_model_sees_the_labels_of_its_batches(uneven, run_spec, letters, label_file, directory, monkeypatch):
    seen, loss = [], Autoregressive.loss

    def watched(model, batch, generator):
        seen.append((batch.fertilities.sum(1) - batch.target_mask.sum(1)).tolist())
        return loss(model, batch, generator)

    monkeypatch.setattr(Autoregressive, "loss", watched)
    spec = fertile(run_spec(steps=2, save_every=2), label_file({}), max_tokens=10)
    train(spec, directory, letters, prepare.make_task(spec, uneven, letters)[0])
    assert seen == [[0, 0, 0]] * 2


def test_runs_know_their_labels_and_older_ones_go_on(uneven, run_spec, letters, label_file):
    labelled = prepare.make_task(fertile(run_spec(), label_file({}), max_tokens=10), uneven, letters)[0]
    plain = prepare.make_task(with_data(run_spec(), max_tokens=10), uneven, letters)[0]
    assert plain.fertilities is None
    assert labelled.pairs == plain.pairs
    assert labelled.fingerprint() != plain.fingerprint()
    assert labelled.fertilities is not None
    other = dataclasses.replace(labelled, fertilities=[label[::-1] for label in labelled.fertilities])
    assert other.fingerprint() != labelled.fingerprint()
    # What runs have saved since before there were labels.
    assert Task([([8, 9], [10])], [], []).fingerprint() == (
        hashlib.sha256(b"".join(n.to_bytes(8, sys.byteorder) for n in (2, 1, 8, 9, 10))).hexdigest()
    )


def test_a_tokenizer_can_come_from_a_model(corpus, run_spec, tokenizer, tmp_path):
    checkpoint.write_run(tmp_path, run_spec(), tokenizer)
    taken = prepare.make_tokenizer(specs.TokenizerSpec(from_model=str(tmp_path)), corpus)
    assert taken.fingerprint == tokenizer.fingerprint
    with pytest.raises(UserError, match="no model 'nobody'"):
        prepare.make_tokenizer(specs.TokenizerSpec(from_model="nobody"), corpus)


def test_the_same_text_gives_the_same_tokenizer(corpus, letters):
    again = prepare.make_tokenizer(specs.TokenizerSpec(vocab_size=letters.vocab_size), corpus)
    assert again.fingerprint == letters.fingerprint


def test_a_run_that_goes_on_elsewhere_is_told_where_its_text_is_looked_for(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    prepare.check_places(specs.DataSpec(path="data"))
    monkeypatch.chdir("elsewhere")
    prepare.check_places(specs.DataSpec(path=str(tmp_path / "data")))
    for name in ("path", "distilled", "fertilities"):
        own = specs.DataSpec(**{"path": str(tmp_path / "data"), name: "data"})
        with pytest.raises(UserError, match=rf"data.{name} data is not below .*; go on from the directory where"):
            prepare.check_places(own)
