import json

import pytest

from hasten.bench.contestant import Contestant
from hasten.bench.decode import ParityError, Plan, check_parity, percentile, run, write_rows
from hasten.bench.report import COLUMNS, cells, legend, markdown, picture, plain, read_rows
from hasten.bench.worker import HastenDecoder
from hasten.errors import UserError
from hasten.export.certificate import sentences

LINES = sentences()[:10]


@pytest.fixture(scope="module")
def rows(models):
    contestants = [Contestant(str(models["ar"])), Contestant(str(models["ar"]), beam=2), Contestant(str(models["ctc"]))]
    return run(Plan(contestants, LINES, LINES, "en-en test", threads=(1,), repeats=1))


def test_every_contestant_gets_a_row_with_plausible_numbers(rows):
    assert [row["label"] for row in rows] == ["ar", "ar:beam=2", "ctc"]
    for row in rows:
        assert 0 < row["latency_ms"]["median"] <= row["latency_ms"]["p95"]
        assert row["sentences_per_second"] > 0
        assert row["peak_mib"] > 50
        assert row["parameters"] > 1000
        assert len(row["fingerprint"]) == 16
        assert (row["threads"], row["sentences"], row["tokenisation"]) == (1, 10, "included")
        assert {"cpu", "cores", "versions", "date"} <= row.keys()


def test_passes_are_counted_where_the_loop_counts_them(rows):
    greedy, beam, one_pass = rows
    assert greedy["passes"] > 2
    assert beam["passes"] is None
    assert one_pass["passes"] == 1


def test_rows_survive_their_file(rows, tmp_path):
    write_rows(rows, tmp_path / "rows.jsonl")
    assert read_rows(tmp_path / "rows.jsonl") == rows
    (tmp_path / "rows.jsonl").write_text("{")
    with pytest.raises(UserError, match="not a results file"):
        read_rows(tmp_path / "rows.jsonl")


def test_tables_show_every_column_of_every_row(rows):
    assert all(len(cells(row)) == len(COLUMNS) for row in rows)
    lines = markdown(rows).splitlines()
    assert len([line for line in lines if line.startswith("|")]) == 2 + len(rows)
    assert {line.count("|") for line in lines if line.startswith("|")} == {len(COLUMNS) + 1}
    assert "tokenisation included" in lines[-1]
    assert len(plain(rows).splitlines()) == 1 + len(rows)


def test_the_picture_is_drawn_for_one_and_for_two_panels(rows, tmp_path):
    picture(rows, tmp_path / "one.png")
    picture([*rows, *({**row, "threads": 2} for row in rows)], tmp_path / "two.png")
    for name in ("one.png", "two.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_legend_names_what_is_there_and_nothing_else(rows):
    named = lambda rows: [line.get_label() for line in legend(rows)]  # noqa: E731
    slow, onnx = {**rows[0], "engine": "hasten", "passes": 9.5, "beam": 1}, {**rows[0], "engine": "onnx", "beam": 1}
    assert named([slow]) == ["PyTorch"]
    assert named([onnx, {**slow, "passes": 1}]) == ["PyTorch, one pass", "ONNX Runtime"]
    assert named([{**slow, "beam": 5}]) == ["PyTorch", "beam search"]


def test_a_decoder_that_depends_on_its_batch_is_not_timed():
    class Fickle:
        contestant = Contestant("fickle")

        def ask(self, what, lines=()):
            assert what == "ids"
            return {"ids": [[len(lines), i] for i, _ in enumerate(lines)]}

    with pytest.raises(ParityError, match=r"fickle says .* nothing is timed"):
        check_parity(Fickle(), LINES[:3])  # type: ignore[arg-type]


def test_a_worker_passes_a_users_mistake_on():
    with pytest.raises(UserError, match=r"nobody: .*no model"):
        run(Plan([Contestant("nobody")], LINES, LINES, "x", threads=(1,)))


def test_ids_of_a_batch_are_those_of_single_sentences(models):
    decoder = HastenDecoder(Contestant(str(models["ar"])), threads=1)
    assert decoder.outputs(LINES) == [decoder.outputs([line])[0] for line in LINES]


def test_a_draft_changes_the_passes_and_nothing_else(models):
    greedy = HastenDecoder(Contestant(str(models["ar"])), threads=1)
    drafted = HastenDecoder(Contestant(str(models["ar"]), draft=str(models["ctc"])), threads=1)
    outputs = drafted.outputs(LINES[:2])
    assert [ids for ids, _ in outputs] == [ids for ids, _ in greedy.outputs(LINES[:2])]
    assert drafted.translate(LINES[:1]) == greedy.translate(LINES[:1])


def test_a_draft_for_a_model_that_checks_none_is_refused_in_one_line(models):
    with pytest.raises(UserError, match="CTC models check no drafts; an autoregressive model does"):
        HastenDecoder(Contestant(str(models["ctc"]), draft=str(models["ar"])), threads=1)


@pytest.mark.parametrize(
    ("values", "share", "expected"), [([3.0], 0.95, 3.0), (range(1, 101), 0.95, 95), (range(1, 21), 0.95, 19)]
)
def test_percentile_is_the_smallest_value_that_covers_the_share(values, share, expected):
    assert percentile(list(values), share) == expected


def test_peak_memory_is_that_of_the_worker_alone(rows):
    assert len({row["peak_mib"] for row in rows}) > 1, json.dumps([row["peak_mib"] for row in rows])
