"""The table: what is in a list, and what a file of one must be."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from hasten.data import shortlist
from hasten.data.lexicon import expected_links
from hasten.data.shortlist import Shortlist
from hasten.data.tokenizer import EOS, SPECIAL_IDS, Tokenizer
from hasten.errors import UserError


@pytest.fixture(scope="module")
def pairs(words, tokenizer) -> list[tuple[list[int], list[int]]]:
    return [(tokenizer.encode(a), tokenizer.encode(b)) for a, b in zip(words[:60], words[60:120], strict=True)]


def test_a_list_has_the_best_of_each_piece_the_frequent_the_special_and_the_source_itself(pairs, tokenizer):
    table = shortlist.build(pairs, tokenizer, translations=3, frequent=4, rounds=2)
    links = list(zip(*(part.tolist() for part in expected_links(pairs, tokenizer.vocab_size, 2)), strict=True))
    said = [piece for _, target in pairs for piece in target]
    often = sorted(set(said), key=lambda piece: (-said.count(piece), piece))[:4]
    for source, _ in [*pairs[:20], ([], [])]:
        expected = {*SPECIAL_IDS, *often, *source}
        for piece in [*source, EOS]:
            own = sorted((-count, t) for s, t, count in links if s == piece)
            expected |= {t for _, t in own[:3]}
        assert table.ids(source).tolist() == sorted(expected)


def test_a_file_gives_the_table_back_and_equal_tables_are_equal_bytes(pairs, tokenizer, tmp_path: Path):
    table = shortlist.build(pairs, tokenizer, translations=5)
    table.save(tmp_path / "a")
    found = Shortlist.load(tmp_path / "a")
    found.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert found.fingerprint == tokenizer.fingerprint
    for source, _ in pairs[:10]:
        assert np.array_equal(found.ids(source), table.ids(source))


def test_a_table_of_everything_lists_everything(tokenizer):
    assert shortlist.everything(tokenizer).ids([9]).tolist() == list(range(tokenizer.vocab_size))


def test_a_table_of_another_tokenizer_is_refused(pairs, tokenizer, words):
    table = shortlist.build(pairs, tokenizer)
    with pytest.raises(UserError, match=r"x\.npz is for another tokenizer than the model's: make one"):
        table.check(Tokenizer.train(words, 390), "x.npz")


def test_a_table_with_more_or_fewer_pieces_than_its_tokenizer_is_refused(pairs, tokenizer, tmp_path: Path):
    table = shortlist.build(pairs, tokenizer)
    fewer = {"offsets": table.offsets[:101], "targets": table.targets[:0], "common": np.arange(7)}
    fewer["offsets"] = np.zeros(101, dtype=np.int64)
    more = {"offsets": np.append(table.offsets, table.offsets[-1:])}
    for changes in (fewer, more):
        with pytest.raises(
            UserError, match=rf"x is damaged: it has (100|401) pieces, its tokenizer {tokenizer.vocab_size}"
        ):
            Shortlist.load(saved(tmp_path / "x", table, **changes)).check(tokenizer, "x")


def test_a_file_is_a_table_or_one_clear_error_whatever_happened_to_its_bytes(pairs, tokenizer, tmp_path: Path):
    path = tmp_path / "x"
    shortlist.build(pairs, tokenizer).save(path)
    good, generator, refused = path.read_bytes(), np.random.default_rng(1), 0
    directory = good.index(b"PK\x01\x02")
    changed = [(6, 1), (8, 99), (directory + 8, 1), (directory + 10, 99), (directory + 6, 79)]
    changed += [(int(i), int(generator.integers(256))) for i in generator.integers(len(good), size=150)]
    for place, value in changed:
        data = bytearray(good)
        data[place] = value
        path.write_bytes(data)
        try:
            Shortlist.load(path)
        except UserError:
            refused += 1
    assert refused > 30
    header = b"{'descr': '<i4', 'fortran_order': False, 'shape': (1000000000000000,), }".ljust(117) + b"\n"
    for bad in (header, b"((((".ljust(117) + b"\n"):
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:
            archive.writestr("format.npy", b"\x93NUMPY\x01\x00" + len(bad).to_bytes(2, "little") + bad + b"\x01" * 64)
        path.write_bytes(data.getvalue())
        with pytest.raises(UserError, match="no shortlist, or damaged"):
            Shortlist.load(path)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_a_table_that_cannot_be_written_leaves_the_old_one(pairs, tokenizer, tmp_path: Path, monkeypatch, kind):
    (tmp_path / "x").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    write = Path.write_bytes

    def fail(path: Path, data: bytes) -> int:
        write(path, data[:9])
        raise kind(28, "No space left on device")

    table = shortlist.build(pairs, tokenizer)
    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(UserError if kind is OSError else kind, match="No space left"):
        table.save(tmp_path / "x")
    monkeypatch.setattr(Path, "write_bytes", write)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["link", "x"]
    assert (tmp_path / "x").read_bytes() == b"old"
    table.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert Shortlist.load(tmp_path / "x").fingerprint == table.fingerprint


def test_coverage_counts_pieces_and_whole_targets(pairs, tokenizer):
    table = shortlist.build(pairs, tokenizer, translations=2, frequent=3)
    found = shortlist.coverage(table, pairs)
    lists = [{*table.ids(source).tolist()} for source, _ in pairs]
    targets = [target for _, target in pairs]
    hits = [[piece in own for piece in target] for own, target in zip(lists, targets, strict=True)]
    assert found.pieces == pytest.approx(sum(map(sum, hits)) / sum(map(len, hits)))
    assert found.sentences == pytest.approx(sum(map(all, hits)) / len(hits))
    assert found.size == pytest.approx(sum(map(len, lists)) / len(lists))
    assert 0 < found.sentences < found.pieces < 1


def saved(path: Path, table: Shortlist, **changes) -> Path:
    arrays = {
        "format": np.array(1),
        "fingerprint": np.frombuffer(table.fingerprint.encode(), dtype=np.uint8),
        "common": table.common,
        "offsets": table.offsets,
        "targets": table.targets,
    }
    with path.open("wb") as file:
        np.savez(file, **{name: value for name, value in (arrays | changes).items() if value is not None})
    return path


def test_what_is_no_table_is_refused_in_one_line(pairs, tokenizer, tmp_path: Path):
    table, path = shortlist.build(pairs, tokenizer), tmp_path / "x"
    assert np.array_equal(Shortlist.load(saved(path, table)).targets, table.targets)
    damaged = (
        {"targets": table.targets + 400},
        {"targets": table.targets - 400},
        {"targets": table.targets[:-1]},
        {"targets": table.targets.astype(object)},
        {"targets": np.zeros((2, 2), dtype=np.int64)},
        {"common": table.common[3:]},
        {"offsets": table.offsets[::-1].copy()},
        {"offsets": None},
        {"offsets": np.array(3)},
        {"offsets": np.full(len(table.offsets), np.nan)},
        {"targets": table.targets.astype(complex)},
        {"targets": table.targets.astype(str)},
        {"format": np.array("x")},
        {"format": np.array(np.inf)},
        {"fingerprint": np.array([255], dtype=np.uint8)},
    )
    for changes in damaged:
        with pytest.raises(UserError, match="no shortlist, or damaged; make it again with `hasten shortlist`") as error:
            Shortlist.load(saved(path, table, **changes))
        assert "\n" not in str(error.value)
    for content in (b"", b"x" * 100, path.read_bytes()[:200]):
        path.write_bytes(content)
        with pytest.raises(UserError, match="no shortlist, or damaged"):
            Shortlist.load(path)
    with pytest.raises(UserError, match="has format 2, this hasten reads 1"):
        Shortlist.load(saved(path, table, format=np.array(2)))
    with pytest.raises(UserError, match="cannot read the shortlist"):
        Shortlist.load(tmp_path / "nowhere")
