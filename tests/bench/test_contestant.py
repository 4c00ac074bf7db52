import pytest

from hasten.bench.contestant import Contestant, parse, parse_all
from hasten.errors import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("en-de-ctc", Contestant("en-de-ctc")),
        ("runs/teacher:beam=4", Contestant("runs/teacher", beam=4)),
        ("ctranslate2:en-de-teacher", Contestant("en-de-teacher", "ctranslate2")),
        ("ctranslate2:en-de-teacher:int8:beam=5", Contestant("en-de-teacher", "ctranslate2", "int8", 5)),
        ("onnx:en-de-ctc:int8", Contestant("en-de-ctc", "onnx", "int8")),
        ("a:iterations=4:adaptive=false", Contestant("a", decoding=("iterations=4", "adaptive=false"))),
        ("a:beam=9:rescorer=en-de-teacher", Contestant("a", beam=9, rescorer="en-de-teacher")),
        ("a:draft=en-de-ctc", Contestant("a", draft="en-de-ctc")),
    ],
)
def test_a_contestant_is_read_as_written(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a:beam=4",
        "ctranslate2:a:int8",
        "onnx:a:float32",
        "ctranslate2:a:float32:beam=2",
        "a:x=4:y=1",
        "a:beam=2:rescorer=b:x=1",
        "a:draft=b",
    ],
)
def test_a_label_is_what_was_written(text):
    assert parse(text).label == text


@pytest.mark.parametrize(
    "text",
    [
        "a:beam=0",
        "a:beam=x",
        "a:int8",
        "a:greedy",
        "ctranslate2:a:int4",
        ":beam=4",
        "a:beam=²",
        "a:=4",
        "a:x=",
        "ctranslate2:a:x=1",
        "onnx:a:beam=2",
        "a:rescorer=b",
        "a:beam=2:draft=b",
        "ctranslate2:a:draft=b",
        "a:beam=" + "9" * 5000,
        "a:beam=4:beam=5",
        "a:iterations=4:iterations=5",
        "a:beam=2:rescorer=b:rescorer=c",
        "ctranslate2:a:int8:float32",
    ],
)
def test_other_options_are_refused(text):
    with pytest.raises(UserError, match="--models"):
        parse(text)


def test_a_path_is_labelled_by_its_last_part_unless_that_is_ambiguous():
    assert [entry.label for entry in parse_all("runs/one/,runs/two")] == ["one", "two"]
    assert [entry.label for entry in parse_all("old/x,new/x")] == ["old/x", "new/x"]


@pytest.mark.parametrize(("text", "problem"), [("", "empty"), (" , ", "empty"), ("a,b,a", "a stands there more than")])
def test_no_model_or_a_model_twice_is_refused(text, problem):
    with pytest.raises(UserError, match=problem):
        parse_all(text)
