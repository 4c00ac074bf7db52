"""Distillation: line i belongs to line i, whatever is filtered, batched, shared among processes or interrupted."""

import fcntl
import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hasten
from hasten import spec as specs
from hasten.data.batch import pair_batch
from hasten.data.tokenizer import Tokenizer
from hasten.errors import UserError
from hasten.training import checkpoint
from hasten.training.distill import DistillSpec, distill, drop_reason
from hasten.training.teachers import CommandTeacher, ModelTeacher

LINES = [f"open the {thing} number {number}" for number in range(12) for thing in ("file", "window", "page", "folder")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_spec) -> str:
    """A model that has learnt these lines a little."""
    directory = tmp_path_factory.mktemp("model")
    spec = tiny_spec("autoregressive", decoder_layers=1)
    tokenizer = Tokenizer.train(LINES, 292)
    batch = pair_batch(
        [(tokenizer.encode(line), tokenizer.encode(line.replace("open the", "close"))) for line in LINES]
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = spec.model.build(tokenizer.vocab_size)
        optimizer = torch.optim.Adam(network.parameters(), 5e-3)
        for _ in range(70):
            term = network.loss(batch, torch.Generator().manual_seed(0))["tokens"]
            optimizer.zero_grad()
            (term.sum / term.count).backward()
            optimizer.step()
    checkpoint.write_run(directory, spec, tokenizer)
    checkpoint.save_weights(directory / checkpoint.WEIGHTS, network.state_dict(), tokenizer)
    return str(directory)


def write_source(folder: Path, lines: list[str]) -> Path:
    path = folder / "train.en"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def command(code: str, *arguments: object) -> str:
    """A teacher: Python code that runs for every `line` and prints."""
    head = "import sys\nsys.stdin.reconfigure(newline='\\n')\nfor line in sys.stdin:\n line = line[:-1]\n "
    program = head + code
    return shlex.join([sys.executable, "-c", program, *map(str, arguments)])


UPPER = "tr a-z A-Z"


# The law: line for line.


def test_line_i_translates_line_i(tmp_path: Path):
    source = write_source(tmp_path, LINES)
    report = distill(CommandTeacher(UPPER), source, tmp_path / "out", DistillSpec(shard_lines=7))
    assert (tmp_path / "out").read_text(encoding="utf-8") == "".join(line.upper() + "\n" for line in LINES)
    assert report["counts"] == {"kept": len(LINES)}


def test_a_dropped_pair_leaves_an_empty_line_in_its_place(tmp_path: Path):
    lines = ["one two", "", "  ", "three", " ".join(["w"] * 9), "x y", "many", "spin"]
    answers = {"one two": "eins zwei", "three": "", "x y": "x y", "many": "a b c d", "spin": "ha ha ha ha ha ha"}
    teacher = CommandTeacher(command(f"print({answers!r}.get(line, 'unasked ' * 50))"))
    spec = DistillSpec(max_tokens=8, max_ratio=3)
    report = distill(teacher, write_source(tmp_path, lines), tmp_path / "out", spec)
    assert (tmp_path / "out").read_text(encoding="utf-8") == "eins zwei\n" + "\n" * 7
    assert report["counts"] == {"kept": 1, "empty source": 2, "length ratio": 2, "copy": 1, "empty translation": 1,
                                "long source": 1}  # fmt: skip
    assert sum(report["counts"].values()) == len(lines)
    assert json.loads((tmp_path / "out.report.json").read_text(encoding="utf-8")) == report


def test_a_translation_is_one_line_whatever_the_teacher_says(tmp_path: Path):
    teacher = CommandTeacher(command("sys.stdout.write(' ' + line.upper().replace(' ', '\\r') + ' \\r\\n')"))
    distill(teacher, write_source(tmp_path, ["ab cd", "ef"]), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"AB CD\nEF\n"


def test_any_character_passes(tmp_path: Path):
    lines = ["naïve façade", "日本 語", "a\u2028b c", "\U0001f600 smile", "tab\there", "a\x85b"]
    distill(CommandTeacher("sed s/^/T/"), write_source(tmp_path, lines), tmp_path / "out")
    assert (tmp_path / "out").read_text(encoding="utf-8").split("\n") == ["T" + line for line in lines] + [""]


def test_gzipped_sources_are_read(tmp_path: Path):
    (tmp_path / "train.en.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    distill(CommandTeacher(UPPER), tmp_path / "train.en.gz", tmp_path / "out")
    assert (tmp_path / "out").read_text(encoding="utf-8") == "ONE\nTWO\n"


def test_what_is_written_is_what_training_reads(tmp_path: Path):
    from hasten.training.prepare import read_distilled

    out = tmp_path / "out"
    distill(CommandTeacher(UPPER), write_source(tmp_path, ["one", "", "two\u2028three", "", ""]), out)
    assert read_distilled(specs.DataSpec(path="", distilled=str(out)), 5) == ["ONE", "", "TWO\u2028THREE", "", ""]


# The filters.


@given(
    st.text("ab ", max_size=8), st.text("ab ", max_size=8), st.sampled_from([1.0, 2.0, 3.0]), st.integers(1, 5),
    st.booleans(),
)  # fmt: skip
def test_a_kept_pair_passes_every_filter(source: str, target: str, ratio: float, longest: int, copies: bool):
    source, target = source.strip(), target.strip()
    lengths = len(source.split()), len(target.split())
    spec = DistillSpec(max_ratio=ratio, max_tokens=longest, keep_copies=copies)
    fine = (
        min(lengths) > 0
        and max(lengths) <= longest
        and lengths[0] / lengths[1] <= ratio
        and lengths[1] / lengths[0] <= ratio
        and (copies or source != target)
    )
    assert (drop_reason(source, target, *lengths, spec) is None) == fine


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("laugh", "ha ha ha ha ha ha", "repetition"),
        ("wait", "warten Sie, warten Sie, warten Sie, warten Sie, warten Sie, bis", "repetition"),
        ("s", "ssssssssss", "repetition"),
        ("very, very good", "sehr, sehr, sehr gut", None),
        ("-------------------- cut", "-------------------- abschneiden", None),
        ("1000000000000", "1 000000000000", None),
    ],
)
def test_endless_repetition_is_dropped_unless_the_source_repeats(source: str, target: str, reason: str | None):
    assert drop_reason(source, target, 1, 1, DistillSpec()) == reason


@pytest.mark.parametrize(
    "wrong",
    [{"max_ratio": 0.5}, {"max_tokens": 0}, {"shard_lines": 0}, {"limit": 0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_impossible_settings_are_refused(wrong: dict):
    with pytest.raises(UserError, match="must be at least 1"):
        DistillSpec(**wrong)


# A model as the teacher.


def keep_all(shard_lines: int) -> DistillSpec:
    return DistillSpec(max_ratio=1000, max_tokens=1000, shard_lines=shard_lines)


def test_a_model_teaches_what_it_translates(model: str, tmp_path: Path):
    lines = LINES[:10]
    report = distill(ModelTeacher(model, beam=2), write_source(tmp_path, lines), tmp_path / "out", keep_all(4))
    expected = hasten.load(model).translate(lines, beam=2)
    written = (tmp_path / "out").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(written) == len(lines)
    assert report["counts"]["kept"] == sum(map(bool, written)) > 5
    assert all(line in ("", said) for line, said in zip(written, expected, strict=True))
    assert report["settings"]["unit"] == "pieces"
    assert report["teacher"]["beam"] == 2
    assert len(str(report["teacher"]["weights sha256"])) == 64


@pytest.mark.parametrize(("shard_lines", "batch_tokens", "workers"), [(5, 30, 1), (9, 64, 2)])
def test_shards_batches_and_workers_change_nothing(
    model: str, tmp_path: Path, shard_lines: int, batch_tokens: int, workers: int
):
    source = write_source(tmp_path, LINES[4:24])
    plain = distill(ModelTeacher(model, beam=1), source, tmp_path / "plain", keep_all(1000))
    assert plain["counts"]["kept"] > 10
    teacher = ModelTeacher(model, beam=1, batch_tokens=batch_tokens)
    distill(teacher, source, tmp_path / "other", keep_all(shard_lines), workers=workers)
    assert (tmp_path / "other").read_bytes() == (tmp_path / "plain").read_bytes()


def test_pieces_of_a_model_measure_what_a_command_says(model: str, tmp_path: Path):
    teacher = CommandTeacher(UPPER, tokenizer=model)
    report = distill(
        teacher, write_source(tmp_path, ["open the file number 3"]), tmp_path / "out", DistillSpec(max_tokens=5)
    )
    assert report["counts"] == {"long source": 1}
    assert report["settings"]["unit"] == "pieces"


# Interruption.


def start(folder: Path, teacher: str, *options: str) -> subprocess.Popen[str]:
    """`hasten distill` of train.en in another process."""
    code = "from hasten.cli import main; main()"
    arguments = ["distill", "--src", "train.en", "--out", "out", "--teacher-command", teacher, "--shard-lines", "4"]
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments, *options],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def lines_done(folder: Path) -> int:
    try:
        return json.loads((folder / "out.progress.json").read_text(encoding="utf-8"))["done"]
    except FileNotFoundError:
        return 0


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def slow_teacher() -> str:
    """Slow while the file `slow` exists; leaves the number of its worker process in `workers`."""
    return "echo $PPID >> workers; [ -e slow ] && sleep 0.2; tr a-z A-Z"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path, workers: int):
    write_source(tmp_path, LINES)
    (tmp_path / "slow").touch()
    process = start(tmp_path, slow_teacher(), "--workers", str(workers))
    wait_until(lambda: lines_done(tmp_path) >= 8)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    started = {int(number) for number in (tmp_path / "workers").read_text(encoding="utf-8").split()}
    wait_until(lambda: not any(is_running(worker) for worker in started))
    assert not (tmp_path / "out").exists()
    done = lines_done(tmp_path)
    assert 8 <= done < len(LINES)
    with (tmp_path / "out.partial").open("ab") as file:
        file.write(b"half a shard of a kill between two writ")
    (tmp_path / "slow").unlink()
    (tmp_path / "workers").unlink()

    stdout, stderr = (process := start(tmp_path, slow_teacher(), "--workers", "1")).communicate()
    assert process.returncode == 0, stderr
    assert f"going on after line {done} of {len(LINES)}" in stderr
    translated = (tmp_path / "workers").read_text(encoding="utf-8").split().count(str(process.pid))
    assert translated == (len(LINES) - done) // 4
    distill(CommandTeacher(UPPER), tmp_path / "train.en", tmp_path / "whole")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert f"{len(LINES)}  100.0%  kept" in stdout
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out", "out.report.json"]


class Kill(BaseException):
    """The end of the process, seen from within."""


@pytest.mark.parametrize("step", range(15))
def test_a_kill_before_any_change_on_disk_loses_nothing(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch):
    source = write_source(tmp_path, LINES[:10])
    distill(CommandTeacher("sed s/e//"), source, tmp_path / "whole", DistillSpec(shard_lines=3))
    calls = Counter()

    def dying(change):
        def call(*arguments):
            calls["all"] += 1
            if calls["all"] > step:
                raise Kill
            return change(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying(os.replace))
        patch.setattr(os, "fsync", dying(os.fsync))
        patch.setattr(Path, "unlink", dying(Path.unlink))
        with pytest.raises(Kill):
            distill(CommandTeacher("sed s/e//"), source, tmp_path / "out", DistillSpec(shard_lines=3))
    distill(CommandTeacher("sed s/e//"), source, tmp_path / "out", DistillSpec(shard_lines=3))
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    reports = [json.loads((tmp_path / f"{name}.report.json").read_text(encoding="utf-8")) for name in ("out", "whole")]
    assert reports[0]["counts"] == reports[1]["counts"]


def interrupted(tmp_path: Path, teacher: CommandTeacher | ModelTeacher, spec: DistillSpec) -> Path:
    """A source whose distillation stopped after the first shard."""
    source = write_source(tmp_path, LINES)
    with pytest.raises(Kill):
        distill(teacher, source, tmp_path / "out", spec, observe=stop)
    return source


def stop(progress) -> None:
    if progress.done:
        raise Kill


def test_unfinished_work_of_another_kind_is_not_mixed_in(model: str, tmp_path: Path):
    teacher, spec = ModelTeacher(model, beam=2), DistillSpec(shard_lines=20)
    source = interrupted(tmp_path, teacher, spec)
    before = (tmp_path / "out.partial").read_bytes()
    for other, changed, said in [
        (ModelTeacher(model, beam=3), spec, "another teacher (beam 2, now 3)"),
        (CommandTeacher(UPPER), spec, "another teacher (command None, now tr a-z A-Z)"),
        (teacher, DistillSpec(shard_lines=20, max_ratio=2), "another settings (max_ratio 3.0, now 2)"),
        (teacher, DistillSpec(shard_lines=20, limit=30), "another source"),
    ]:
        with pytest.raises(UserError, match="give --force to start again") as failure:
            distill(other, source, tmp_path / "out", changed)
        assert said in str(failure.value)
    write_source(tmp_path, [*LINES[:-1], "other"])
    with pytest.raises(UserError, match="another source"):
        distill(teacher, source, tmp_path / "out", spec)
    assert (tmp_path / "out.partial").read_bytes() == before


def test_force_starts_again(tmp_path: Path):
    source = interrupted(tmp_path, CommandTeacher(UPPER), DistillSpec(shard_lines=20))
    distill(CommandTeacher("sed s/^/T/"), source, tmp_path / "out", force=True)
    assert (tmp_path / "out").read_text(encoding="utf-8") == "".join(f"T{line}\n" for line in LINES)


def test_a_finished_file_is_not_written_over(tmp_path: Path):
    source = write_source(tmp_path, LINES)
    (tmp_path / "out").write_text("precious", encoding="utf-8")
    with pytest.raises(UserError, match="exists; give another --out, or --force"):
        distill(CommandTeacher(UPPER), source, tmp_path / "out")
    assert (tmp_path / "out").read_text(encoding="utf-8") == "precious"
    distill(CommandTeacher(UPPER), source, tmp_path / "out", force=True)
    assert (tmp_path / "out").read_text(encoding="utf-8").startswith("OPEN")


def test_force_keeps_the_old_file_until_the_new_one_is_whole(tmp_path: Path):
    source = interrupted(tmp_path, CommandTeacher("sed s/^/T/"), DistillSpec(shard_lines=20))
    (tmp_path / "out").write_text("precious", encoding="utf-8")
    with pytest.raises(UserError, match="ended with code 3"):
        distill(CommandTeacher("exit 3"), source, tmp_path / "out", force=True)
    assert (tmp_path / "out").read_text(encoding="utf-8") == "precious"
    with pytest.raises(Kill):
        distill(CommandTeacher(UPPER), source, tmp_path / "out", DistillSpec(shard_lines=20), force=True, observe=stop)
    assert (tmp_path / "out").read_text(encoding="utf-8") == "precious"
    distill(CommandTeacher(UPPER), source, tmp_path / "out", DistillSpec(shard_lines=20))  # goes on without force
    assert (tmp_path / "out").read_text(encoding="utf-8").startswith("OPEN")


@pytest.mark.parametrize("damage", ["short", "json", "gone"])
def test_damaged_unfinished_work_is_an_error_that_tells_the_way_out(tmp_path: Path, damage: str):
    source = interrupted(tmp_path, CommandTeacher(UPPER), DistillSpec(shard_lines=20))
    if damage == "short":
        os.truncate(tmp_path / "out.partial", 100)
    elif damage == "gone":
        (tmp_path / "out.partial").unlink()
    else:
        (tmp_path / "out.progress.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="give --force to start again"):
        distill(CommandTeacher(UPPER), source, tmp_path / "out", DistillSpec(shard_lines=20))


def test_two_runs_do_not_write_the_same_file(tmp_path: Path):
    source = write_source(tmp_path, LINES)
    with (tmp_path / "out.partial").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is at work"):
            distill(CommandTeacher(UPPER), source, tmp_path / "out")


# Teachers that fail.


class Changing(CommandTeacher):
    """A teacher that somebody trains meanwhile."""

    def identity(self):
        return {"asked": time.monotonic_ns()}


def test_a_teacher_that_changes_while_it_is_loaded_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="changed while it was loaded"):
        distill(Changing(UPPER), write_source(tmp_path, LINES), tmp_path / "out")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        ("head -n 1", "gave 1 lines for 20; it must write exactly one line"),
        ("echo no such model >&2; exit 3", "ended with code 3: no such model"),
        ("printf '\\377\\n'", "invalid UTF-8"),
    ],
)
def test_a_teacher_command_that_fails_is_told_in_one_line(tmp_path: Path, teacher: str, said: str, workers: int):
    with pytest.raises(UserError, match="--teacher-command") as failure:
        distill(CommandTeacher(teacher), write_source(tmp_path, LINES), tmp_path / "out",
                DistillSpec(shard_lines=20), workers=workers)  # fmt: skip
    assert said in str(failure.value)
    assert not (tmp_path / "out").exists()


def test_the_death_of_a_worker_is_an_error_and_no_hang(tmp_path: Path):
    teacher = CommandTeacher("kill -9 $PPID")
    with pytest.raises(UserError, match=r"a worker process ended unexpectedly \(exit code -9"):
        distill(teacher, write_source(tmp_path, LINES), tmp_path / "out", DistillSpec(shard_lines=4), workers=2)


def test_progress_counts_lines_and_time(tmp_path: Path):
    seen = []
    source = write_source(tmp_path, LINES)
    distill(CommandTeacher(UPPER), source, tmp_path / "out", DistillSpec(shard_lines=20), observe=seen.append)
    assert [progress.done for progress in seen] == [0, 20, 40, 48]
    assert all(progress.lines == 48 for progress in seen)
    assert seen[-1].seconds_left == 0
    assert seen[-1].lines_per_second > 0
