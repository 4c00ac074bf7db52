"""Pictures of patterns: what is drawn is what `allows` says, at any length."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hasten.attention.patterns import survey as survey_module
from hasten.attention.patterns.algebra import Pattern, Scene
from hasten.attention.patterns.expression import parse
from hasten.attention.patterns.picture import Panel, caption, drawing, figure, legend, panels, picture
from hasten.attention.patterns.plan import resolved
from hasten.attention.patterns.survey import Survey, survey
from hasten.errors import UserError

PATTERNS = (
    "Local(3)",
    "Local(2, 0, dilation=3)",
    "Blocks(4, 1, 0)",
    "Strided(5)",
    "Summary(6, 2)",
    "Global(first=2, last=1)",
    "Global(last=3, rows=False)",
    "Everything()",
    "Causal()",
    "Marked()",
    "Marked(rows=False)",
    "RandomBlocks(2, 3)",
    "External(3)",
    "Local(2) | Strided(4) | Global(first=1)",
    "Blocks(4, 1, 1) | Global(first=4, last=4) | RandomBlocks(1, 4, near=1, ends=True)",
    "External(2) | Local(1) | RandomBlocks(1, 3)",
    "Local(4) & Strided(2)",
    "(Local(2) | Marked()) & Causal()",
    "Marked() | Global(first=1) | Summary(5, 1)",
)
MARKED = (3, 11)
each_pattern = pytest.mark.parametrize("text", PATTERNS)


def dense(pattern: Pattern, n_queries: int, n_keys: int, n_heads: int = 1, seed: int = 0) -> Tensor:
    """The definition, (H, T, S)."""
    marked = torch.zeros(1, n_keys, dtype=torch.bool)
    marked[0, [at for at in MARKED if at < n_keys]] = True
    i, j = torch.arange(n_queries) + n_keys - n_queries, torch.arange(n_keys)
    scene = Scene(n_keys, n_heads, seed, marked, n_keys)
    allowed = resolved(pattern).allows(i[None, None, :, None], j[None, None, None, :], scene)
    return allowed[0].expand(n_heads, n_queries, n_keys)


def pooled(allowed: Tensor, cell: int) -> Tensor:
    """Share of true pairs in each cell, (H, R, C)."""
    cells = [[block.float().mean((1, 2)) for block in rows.split(cell, 2)] for rows in allowed.split(cell, 1)]
    return torch.stack([torch.stack(row, -1) for row in cells], 1)


def assert_counted(counted: Survey, allowed: Tensor) -> None:
    heads = counted.shares.shape[1]
    torch.testing.assert_close(counted.shares.sum(0), pooled(allowed, counted.cell)[:heads])
    assert torch.equal(counted.counts, allowed.sum(-1)[:heads])
    assert not counted.sampled
    for head in range(heads):
        keys = allowed[head].sum(-1)
        assert counted.share(head) == pytest.approx(float(allowed[head].float().mean()))
        assert counted.keys_per_query(head) == (int(keys.min()), int(keys.median()), int(keys.max()))


@each_pattern
@pytest.mark.parametrize("points", [64, 7], ids=["pair by pair", "in cells"])
@pytest.mark.parametrize("sizes", [(23, 23), (9, 23), (30, 23)], ids=str)
def test_a_survey_counts_what_is_allowed(text: str, points: int, sizes: tuple[int, int]):
    counted = survey(parse(text), *sizes, n_heads=3, marked=MARKED, seed=4, points=points)
    assert max(counted.shares.shape[2:]) <= points
    assert_counted(counted, dense(parse(text), *sizes, 3, 4))


@pytest.mark.parametrize("text", [text for text in PATTERNS if "last" not in text and "External" not in text])
def test_a_causal_survey_counts_what_is_allowed_causally(text: str):
    counted = survey(parse(text), 20, 23, n_heads=2, marked=MARKED, causal=True, points=9)
    assert_counted(counted, dense(parse(text).causal(), 20, 23, 2))


def test_parts_of_a_union_share_no_pair_and_keep_their_names():
    counted = survey(parse("Local(2) | Strided(4) | Global(first=1)"), 12, 12)
    assert counted.labels == ("Local(2)", "Strided(stride=4)", "Global(first=1)")
    near, far, first = counted.shares[:, 0]
    assert torch.equal(near, dense(parse("Local(2)"), 12, 12)[0].float())
    assert torch.equal(far, (dense(parse("Strided(4)"), 12, 12)[0] & (near == 0)).float())
    assert torch.equal(first, (dense(parse("Global(first=1)"), 12, 12)[0] & (near + far == 0)).float())


def test_external_tokens_keep_their_name_and_shift_the_others():
    counted = survey(parse("Local(1) | External(2)"), 9, 9)
    assert counted.labels == ("External(tokens=2)", "Local(1)")
    assert counted.shares[0, 0, 0].tolist() == [1.0] * 9
    assert counted.shares[1, 0, 2].nonzero()[:, 0].tolist() == [2, 3]


@each_pattern
def test_where_some_queries_stand_for_all_shares_are_near_and_counts_exact(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(survey_module, "_MOST_PAIRS", 4000)
    monkeypatch.setattr(survey_module, "_AT_ONCE", 300)
    counted = survey(parse(text), 200, 200, marked=(3, 150), points=10)
    marked = torch.zeros(1, 200, dtype=torch.bool)
    marked[0, [3, 150]] = True
    at = torch.arange(200)
    allowed = resolved(parse(text)).allows(
        at[None, None, :, None], at[None, None, None, :], Scene(200, 1, 0, marked, 200)
    )
    keys = allowed[0, 0].sum(-1)
    assert set(counted.counts[0].tolist()) <= set(keys.tolist())
    assert counted.share(0) == pytest.approx(float(allowed.float().mean()), rel=0.25, abs=0.02)
    assert (counted.keys_per_query(0)[0], counted.keys_per_query(0)[2]) >= (int(keys.min()), int(keys.min()))


def test_a_long_sequence_is_counted_in_seconds():
    began = time.process_time()
    counted = survey(parse("Local(64) | Global(first=2)"), 100_000, 100_000)
    assert time.process_time() - began < 20
    assert not counted.sampled
    assert counted.keys_per_query(0) == (67, 131, 100_000)
    window, first = 100_000 * 129 - 64 * 65, 4 * 100_000 - 4
    i, j = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
    both = int((((i < 2) | (j < 2)) & ((i - j).abs() <= 64)).sum())
    assert counted.share(0) * 1e10 == pytest.approx(window + first - both, rel=1e-5)


def test_strides_of_a_long_sequence_are_estimated_from_some_queries():
    counted = survey(parse("Strided(300)"), 20_000, 20_000, points=64)
    assert counted.sampled
    assert counted.counts.shape[1] < 5000
    assert counted.share(0) == pytest.approx(1 / 300, rel=0.01)
    assert counted.keys_per_query(0) == (66, 67, 67)


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        ("Marked()", {}, "which tokens are marked"),
        ("Marked()", {"marked": (9,)}, "outside the sequence; positions are 0 to 8"),
        ("Global(last=1)", {"causal": True}, "leave out last"),
        ("External(1) | Local(1)", {"causal": True}, "external tokens read the whole sequence"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn_is_refused(text: str, options: dict, problem: str):
    with pytest.raises(UserError, match=problem):
        survey(parse(text), 9, 9, **options)


def pixels(made, path: Path) -> Tensor:
    """(height, width, 3) of the written file, 0 to 1."""
    from matplotlib.image import imread

    made.savefig(path)
    return torch.from_numpy(imread(path)[..., :3].copy())


def test_a_picture_has_title_axes_legend_and_the_pattern(tmp_path: Path):
    made = picture(parse("Local(1) | Global(first=1)"), 8)
    axes = made.axes[0]
    assert made._suptitle is not None
    assert made._suptitle.get_text() == "Local(1) | Global(first=1)"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query")
    assert "53.1 % of pairs allowed" in axes.get_title("left")
    assert "keys per query: 3 to 8, median 4" in axes.get_title("left")
    texts = [text.get_text() for text in made.legends[0].get_texts()]
    assert texts == ["Local(1)", "Global(first=1)"]
    assert picture(parse("Local(1)"), 8).legends[0].get_texts() == []
    assert made.legends[0].get_title().get_text() == "8 tokens"
    image = torch.as_tensor(axes.images[0].get_array())
    allowed = dense(parse("Local(1) | Global(first=1)"), 8, 8)[0]
    assert torch.equal((image < 1).any(-1), allowed)
    assert len({tuple(image[i, j].tolist()) for i, j in allowed.nonzero().tolist()}) == 2
    assert (pixels(made, tmp_path / "p.png") < 0.5).any()


def test_the_first_query_is_at_the_top_and_the_first_key_at_the_left(tmp_path: Path):
    image = pixels(picture(parse("Local(0, 7) & Blocks(4, 0, 1)"), 8), tmp_path / "p.png")
    dark = (image[..., 0] < 0.2) & (image[..., 2] > 0.5)
    rows, columns = dark.nonzero()[:, 0].float(), dark.nonzero()[:, 1].float()
    assert float(((rows - rows.mean()) * (columns - columns.mean())).mean()) > 0
    # Keys ahead: above the diagonal, which is the upper right.
    assert int(dark[: dark.shape[0] // 2].sum()) > int(dark[dark.shape[0] // 2 :].sum())


def test_cells_are_the_darker_the_more_is_allowed():
    made = picture(parse("Local(100) | Global(first=1)"), 2000)
    grey = torch.as_tensor(made.axes[0].images[0].get_array()).mean(-1)
    assert max(grey.shape) <= 320
    inside, column, outside = grey[150, 150], grey[280, 0], grey[280, 150]
    assert inside < column < outside == 1


def test_heads_that_differ_stand_beside_each_other_and_others_do_not():
    random = parse("RandomBlocks(1, 4)")
    assert [axes.get_title("left").split("\n")[0] for axes in picture(random, 16, n_heads=3).axes] == [
        "head 0",
        "head 1",
        "head 2",
    ]
    assert len(picture(parse("Local(1)"), 16, n_heads=3).axes) == 1
    images = [torch.as_tensor(axes.images[0].get_array()) for axes in picture(random, 64, n_heads=2).axes]
    assert not torch.equal(*images)
    visible = [axes for axes in picture(random, 16, n_heads=6).axes if axes.get_visible()]
    assert len(visible) == 6


def test_groups_of_heads_are_counted_on():
    near, far = survey(parse("Local(1)"), 9, 9), survey(parse("RandomBlocks(1, 3)"), 9, 9, n_heads=2)
    shown = [*panels(near, name="a", n_heads=3), *panels(near, name="b", first=3, n_heads=1)]
    shown += panels(far, name="c", first=4, n_heads=2)
    assert [panel.title for panel in shown] == ["heads 0 to 2: a", "head 3: b", "head 4: c", "head 5: c"]
    assert [panel.title for panel in (*panels(near), *panels(near, n_heads=8))] == ["", "heads 0 to 7"]
    assert len(figure("all", shown).axes) == 4


def test_the_caption_says_what_is_seen():
    assert caption(survey(parse("Local(1)"), 9, 9), causal=True) == "9 tokens, causal"
    some = caption(survey(parse("Local(1)"), 20, 1000, points=100), causal=False)
    assert some.startswith("1,000 keys, 20 queries, the last at the last key; a point is 10 x 10 pairs")


def test_characters_show_every_pair_of_a_short_sequence():
    counted = survey(parse("Local(1) | Global(first=1)"), 5, 5, points=64)
    expected = """
+----------+
|##########|
|######    |
|########  |
|##  ######|
|##    ####|
+----------+
 0        4"""
    assert "\n" + drawing(Panel("", counted, 0), " .:+#") == expected
    assert legend(counted, " .:+#") == "rows: queries, columns: keys; # allowed"


@pytest.mark.parametrize("length", [1, 2, 32, 33, 64, 65, 127, 1000])
def test_characters_fit_in_a_terminal(length: int):
    lines = drawing(Panel("", survey(parse("Local(4)"), length, length, points=64), 0)).splitlines()
    assert len({len(line) for line in lines[:-1]}) == 1
    assert len(lines[0]) <= 66
    assert len(lines) <= 35
    assert lines[1][1] == "█" or length > 500


def test_a_character_tells_how_much_is_allowed():
    def tenth(text: str) -> str:
        return drawing(Panel("", survey(parse(text), 128, 128, points=64), 0), " .:+#").splitlines()[10][21:25]

    assert [tenth(text) for text in ("Strided(1)", "Strided(2)", "Strided(5)", "Summary(4, 2)", "Local(1)")] == [
        "####",
        "::::",
        "....",
        " # #",
        ".   ",
    ]
