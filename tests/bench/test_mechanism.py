import pytest

from hasten.attention import FullSpec, LocalSpec, PatternSpec
from hasten.bench.mechanism import mechanism, settings, split
from hasten.errors import UserError


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("full", FullSpec()),
        ("local(left=8)", LocalSpec(left=8)),
        ("local( left = 8, right = 0 )", LocalSpec(left=8, right=0)),
        ("Local(8) | Global(first=2)", PatternSpec(pattern="Local(8) | Global(first=2)")),
        ('pattern(pattern="Local(8)", seed=3)', PatternSpec(pattern="Local(8)", seed=3)),
    ],
)
def test_a_mechanism_is_read_as_written(text, spec):
    assert mechanism(text) == spec


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("locl", "'locl' is no mechanism; known: full, .*; did you mean local"),
        ("", "'' is no mechanism"),
        ("local(window=8)", "local has no setting 'window'; it has left, right"),
        ('local(kind="full")', "local has no setting 'kind'"),
        ("local(left=8", "lacks its last bracket"),
        ("local(8)", "settings are written as in TOML"),
        ('local(left="8")', "left: .*got '8'"),
        ("local(left=-1)", "left: .*got -1"),
        ("Local(8", "cannot read the pattern"),
        ("Lokal(8)", "no shape is called Lokal"),
    ],
)
def test_mistakes_are_named(text, problem):
    with pytest.raises(UserError, match=problem):
        mechanism(text)


def test_settings_of_groups_of_heads_are_plain_data():
    spec = mechanism('heads(groups=[{heads=2, attention={kind="local", left=4}}])')
    assert settings(spec)["groups"][0]["attention"]["left"] == 4
    assert settings(FullSpec()) == {"dropout": 0.0}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("full,local", ["full", "local"]),
        (" full , , local(left=8, right=0),", ["full", "local(left=8, right=0)"]),
        ('a(x="),"),b', ['a(x="),")', "b"]),
        ("a([1, {b=2}]),Local(2) | Global(1)", ["a([1, {b=2}])", "Local(2) | Global(1)"]),
        ("", []),
    ],
)
def test_a_list_is_split_outside_brackets_and_quotes(text, parts):
    assert split(text) == parts


@pytest.mark.parametrize("text", ["a(", "a),b", 'a(x="b)'])
def test_a_list_with_open_brackets_is_refused(text):
    with pytest.raises(UserError, match="brackets or quotes do not match"):
        split(text)
