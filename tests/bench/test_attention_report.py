import pytest

from hasten.bench.attention import ratios
from hasten.bench.attention_picture import picture, shortened, spread
from hasten.bench.attention_report import (
    crossover,
    exponent,
    left_out,
    lines,
    markdown,
    plain,
    tables,
)

LENGTHS = (256, 512, 1024, 2048)


def row(label: str, length: int, ms: float | None, skipped: str = "") -> dict:
    times = None if ms is None else {"median": ms, "min": ms}
    return {
        "label": label,
        "engine": "peer" if label.startswith("peer:") else "hasten",
        "length": length,
        "forward_ms": times,
        "training_ms": None if ms is None else {"median": 3 * ms, "min": 3 * ms},
        "peak_mib": {"forward": ms, "training": ms},
        "skipped": {"forward": skipped, "training": skipped} if skipped else None,
        "ratio_to_full": {},
        **{"level": "module", "causal": False, "batch": 1, "heads": 8, "width": 64, "threads": 1, "repeats": 5},
        **{"cpu": "a processor", "cores": 2, "load_before": 0.1, "date": "2026-01-01T00:00:00+00:00"},
        "versions": {"python": "3", "hasten": "0", "torch": "2"},
    }


@pytest.fixture
def rows():
    """Full attention grows with the square, the pattern linearly, the peer stops early."""
    found = []
    for n in LENGTHS:
        late = n > 1024
        group = [
            row("Local(2) | Global(first=1)", n, n / 100),
            row("full", n, n**2 / 60000),
            row("peer:slow", n, None if late else n / 10, "it took long" if late else ""),
        ]
        for one in group:
            one["ratio_to_full"] = ratios(one, group[1])
        found += group
    return found


def test_the_exponent_is_that_of_a_power():
    for power in (0.5, 1.0, 2.0):
        assert exponent([(n, 3 * n**power) for n in LENGTHS]) == pytest.approx(power)
    assert exponent([(256, 1.0)]) is None
    assert exponent([]) is None
    overhead = [(n, 100.0) for n in (16, 32, 64)] + [(n, float(n)) for n in LENGTHS]
    assert exponent(overhead) == pytest.approx(1.0), "only the longest lengths count"


def test_the_crossover_is_where_it_stays_cheaper():
    baseline = [(1, 10.0), (2, 20.0), (4, 40.0), (8, 80.0)]
    assert crossover([(1, 5.0), (2, 25.0), (4, 30.0), (8, 50.0)], baseline) == 4
    assert crossover([(1, 5.0), (2, 15.0)], baseline) == 1
    assert crossover([(4, 30.0), (8, 90.0)], baseline) is None
    assert crossover([(4, 40.0)], baseline) is None
    assert crossover([(8, 50.0), (16, 99.0)], baseline) == 8, "lengths that only one was measured at say nothing"
    assert crossover([], baseline) is None


def test_lines_are_multiples_of_full_attention(rows):
    full, local, slow = lines(rows, "forward")
    assert full == ["full", "1.1", "4.4", "17.5", "69.9", "N^2.00", "–"]
    assert local == ["Local(2) | Global(first=1)", "2.34x", "1.17x", "0.59x", "0.29x", "N^1.00", "1024"]
    assert slow == ["peer:slow", "23.44x", "11.72x", "5.86x", "–", "N^1.00", "not yet"]


def test_without_full_attention_lines_are_plain_numbers(rows):
    local, _ = lines([one for one in rows if one["label"] != "full"], "training")
    assert local == ["Local(2) | Global(first=1)", "7.7", "15.4", "30.7", "61.4", "N^1.00", "–"]


def test_what_was_left_out_is_said_once(rows):
    assert left_out(rows) == ["peer:slow, not at N=2048: it took long"]
    rows = [row("a", n, None, "no") for n in LENGTHS]
    rows[0]["skipped"] = {"forward": "no", "training": "never"}
    assert left_out(rows) == [
        "a, forward, not at N=256: no",
        "a, training, not at N=256: never",
        "a, not at N=512, 1024, 2048: no",
    ]


def test_tables_have_the_same_columns_in_every_line(rows):
    text = markdown(rows)
    counts = [line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")]
    assert counts == [8] * 15
    assert "Local(2) \\| Global(first=1)" in text
    assert "8 heads of width 64" in text
    assert "- peer:slow, not at N=2048: it took long" in text
    assert {len(line.split("\t")) for line in plain(rows).splitlines()} == {8}
    assert [table.row_count for table in tables(rows)] == [3, 3, 3]


@pytest.mark.parametrize("number", [1, 4])
def test_the_picture_is_drawn_for_one_and_for_many_lengths(rows, number, tmp_path):
    picture([one for one in rows if one["length"] in LENGTHS[:number]], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_is_drawn_where_nothing_was_measured(tmp_path):
    picture([row("a", 256, None, "no")], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        ([50.0], [50.0]),
        ([20.0, 40.0], [20.0, 40.0]),
        ([50.0, 50.0], [45.0, 55.0]),
        ([50.0, 52.0, 90.0], [46.0, 56.0, 90.0]),
        ([0.0, 1.0], [5.0, 15.0]),
        ([99.0, 100.0], [85.0, 95.0]),
    ],
)
def test_labels_move_as_little_as_it_takes(places, expected):
    assert spread(places, 10, 0, 100) == pytest.approx(expected)


def test_long_labels_leave_room_for_the_lines():
    assert shortened("linformer(rank=64)") == "linformer(rank=64)"
    cut = shortened('synthesizer(max_length=4096,parts=["factorised_random"])')
    assert len(cut) == 36
    assert cut.endswith("…")
