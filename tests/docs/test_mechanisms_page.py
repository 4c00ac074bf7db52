"""The table of kinds says of each what its traits say."""

import re
from pathlib import Path

import pytest

from hasten.attention import ATTENTIONS, Place, Traits
from hasten.bench.mechanism import mechanism
from hasten.spec_errors import kind_of

PAGE = (Path(__file__).parents[2] / "docs" / "mechanisms.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("<!-- kinds -->")[2].partition("<!-- /kinds -->")[0]
ROWS = {
    row[0].strip("`"): row for row in (re.split(r"\s*\|\s*", line)[1:-1] for line in TABLE.splitlines()[3:] if line)
}


def traits(text: str) -> Traits:
    return mechanism(text).at(Place(n_heads=4, d_head=8)).build().traits


def decodes(own: Traits) -> bool:
    return own.causal == "strict" and own.step


def test_every_kind_has_a_row():
    assert set(ROWS) == {kind_of(spec) for spec in ATTENTIONS}


@pytest.mark.parametrize("kind", [kind for kind in ROWS if kind not in ("pattern", "heads")])
def test_the_table_tells_what_the_traits_tell(kind):
    _, _, _, decoder, memory, _ = ROWS[kind]
    assert decodes(traits(kind)) is (decoder == "yes" or decoder.startswith("without"))
    assert traits(kind).cross is (memory == "yes" or memory.startswith("without"))


@pytest.mark.parametrize(
    ("text", "able"),
    [
        ("lsh(strict=true)", True),
        ("routing(strict=true)", True),
        ("bigbird(last=false)", True),
        ("sinkhorn(cut=2)", False),
    ],
)
def test_settings_that_the_table_names_make_a_decoder_or_none(text, able):
    assert decodes(traits(text)) is able


def test_settings_that_the_table_names_read_no_memory():
    assert not traits("compressed(local=4)").cross
    assert not traits('synthesizer(parts=["random"])').cross
