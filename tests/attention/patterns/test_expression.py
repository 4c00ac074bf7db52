"""Patterns as text: what is read, and what is refused with one line."""

import pytest

from hasten.attention.patterns import Blocks, Causal, Global, Local, Pattern, RandomBlocks, Strided, parse
from hasten.errors import UserError


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("Local(64)", Local(64, 64)),
        ("  Local( 64 , 0 )  ", Local(64, 0)),
        ("Local(left=3, right=1, dilation=2)", Local(3, 1, 2)),
        ("Local(64) | Global(first=2)", Local(64) | Global(first=2)),
        ("Local(1) | Strided(4) & Causal()", Local(1) | (Strided(4) & Causal())),
        ("(Local(1) | Strided(4)) & Causal()", (Local(1) | Strided(4)) & Causal()),
        (
            "Blocks(8, 1, 1) | RandomBlocks(2, block=8, ends=True)",
            Blocks(8, 1, 1) | RandomBlocks(2, block=8, ends=True),
        ),
    ],
)
def test_an_expression_is_read_and_written(text: str, pattern: Pattern):
    assert parse(text) == pattern
    assert parse(str(pattern)) == pattern


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Locl(64)", "no shape is called Locl; did you mean Local"),
        ("Qwerty(64)", "no shape is called Qwerty; known are Local, Blocks"),
        ("Local", "Local needs brackets"),
        ("Local(64", "cannot read the pattern"),
        ("", "cannot read the pattern"),
        ("Local(64) + Local(2)", "is no shape; unite shapes by | and restrict them by &"),
        ("~Local(64)", "is no shape"),
        ("3", "is no shape"),
        ("Local()", "left"),
        ("Local(1, 2, 3, 4)", "Local takes 3 values, got 4"),
        ("Local(64, width=3)", "Local has no width; it has left, right, dilation"),
        ("Local(1, left=2)", "left"),
        ("Local(-3)", "left is -3; give a whole number from 0"),
        ("Local(2.5)", "2.5 in Local; values are whole numbers"),
        ("Local('a')", "whole numbers"),
        ("Local(True)", "left is True"),
        ("Local(2, dilation=0)", "dilation is 0"),
        ("Local(99999999999999)", "left is 99999999999999"),
        ("Blocks(0)", "block is 0"),
        ("Summary(4, 5)", "width 5 is more than block 4"),
        ("Global()", "say which tokens"),
        ("Global(first=2, rows=3)", "rows is 3"),
        ("RandomBlocks(0)", "blocks is 0"),
        ("Local(x)", "whole numbers"),
        ("Local(*[1])", "whole numbers"),
        ("Local(**{})", "takes no"),
        ("__import__('os').system('true')", "is no shape"),
        ("Local(1) | " * 500 + "Local(1)", "characters"),
        ("(" * 500 + "Local(1)" + ")" * 500, "cannot read the pattern"),
        ("Local(1)\x00", "cannot read the pattern"),
        ("Local(1)\n| Global(first=1)", "cannot read the pattern"),
    ],
)
def test_what_is_no_pattern_is_refused_in_one_line(text: str, message: str):
    with pytest.raises(UserError) as caught:
        parse(text)
    assert message in " ".join(str(caught.value).split())
