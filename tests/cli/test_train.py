"""hasten train as a user meets it: what it prints, what it refuses, and that Ctrl-C loses nothing."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import hasten
from hasten.cli import main
from hasten.cli.progress import clock
from hasten.data.corpus import Pair, write_corpus

CONFIG = """
[data]
path = "corpus"
[tokenizer]
vocab_size = 275
[model]
kind = "{kind}"
d_model = 16
n_heads = 2
d_ff = 32
encoder_layers = 1
[training]
steps = 6
batch_tokens = 150
warmup = 2
save_every = 3
average = 2
validate_every = 3
validate_sentences = 2
precision = "float32"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a corpus and two configurations, which is where the user stands."""
    draw = random.Random(1)
    lines = [" ".join(draw.choices("abcdefgh", k=draw.randint(2, 7))) for _ in range(65)]
    pairs = [Pair(line, line[::-1], "d") for line in lines]
    write_corpus(tmp_path / "corpus", ("up", "down"), {"train": pairs[:60], "valid": pairs[60:]}, {})
    (tmp_path / "ar.toml").write_text(CONFIG.format(kind="autoregressive"))
    (tmp_path / "ctc.toml").write_text(CONFIG.format(kind="ctc"))
    monkeypatch.chdir(tmp_path)
    # The memory setting is the process's and lasts: not for the other tests.
    monkeypatch.setattr("hasten.training.memory.keep_freed_memory", lambda: True)
    return tmp_path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call the command line in this process: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hasten", "train", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return call


@pytest.fixture
def refused(run):
    """The one line that answers a mistake."""

    def call(*arguments: str) -> str:
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err.removeprefix("error: ").rstrip("\n")

    return call


@pytest.mark.parametrize("kind", ["ar", "ctc"])
def test_a_run_leaves_a_directory_that_loads_anywhere(kind, run, folder, tmp_path_factory):
    code, out, err = run(f"{kind}.toml", "--out", "made")
    assert (code, out) == (0, "made\n")
    assert err.startswith("training pairs: 60 kept\n")
    moved = (folder / "made").rename(tmp_path_factory.mktemp("elsewhere") / "moved")
    assert len(hasten.load(moved).translate(["a b c", ""])) == 2
    assert {path.name for path in moved.iterdir()} == {
        "config.toml", "tokenizer.model", "model.safetensors", "metrics.jsonl", "README.md", "state", "recent",
    }  # fmt: skip
    card = (moved / "README.md").read_text()
    assert f"Kind `{'autoregressive' if kind == 'ar' else 'ctc'}`, up to down" in card
    assert "60 training pairs" in card
    assert "validation (2 sentences, last weights, greedy): BLEU" in card


def test_the_run_directory_has_the_name_of_the_configuration(run, folder):
    assert run("ar.toml", "training.steps=1")[1] == "runs/ar\n"
    assert (folder / "runs" / "ar" / "model.safetensors").exists()


def test_without_a_terminal_progress_is_plain_lines(run, monkeypatch):
    monkeypatch.setattr("hasten.cli.progress._SECONDS_BETWEEN_LINES", 0.0)
    err = run("ar.toml")[2]
    lines = err.splitlines()
    assert "\x1b" not in err
    assert "\r" not in err
    assert [line.split("  ")[0] for line in lines if "/6" in line] == [f"step {i}/6" for i in range(1, 7)]
    assert all("tokens/s" in line and line.endswith(" left") for line in lines if "/6" in line)
    assert sum(line.startswith("step 3  valid_bleu") for line in lines) == 1


def test_left_time_counts_hours_beyond_a_day():
    assert [clock(0), clock(61.4), clock(3600 * 30 + 62)] == ["0:00:00", "0:01:01", "30:01:02"]


def test_an_existing_run_is_written_over_only_by_force(run, refused, folder):
    run("ar.toml", "--out", "x", "training.steps=1")
    before = (folder / "x" / "model.safetensors").read_bytes()
    assert refused("ar.toml", "--out", "x") == (
        "x holds a run; give --resume to go on with it or --force to write over it"
    )
    assert (folder / "x" / "model.safetensors").read_bytes() == before
    assert run("ar.toml", "--out", "x", "training.steps=2", "--force")[0] == 0
    assert (folder / "x" / "model.safetensors").read_bytes() != before


def test_a_new_run_that_cannot_start_does_not_cost_the_old_one(run, refused, folder):
    run("ar.toml", "--out", "x", "training.steps=1")
    files = {path: path.read_bytes() for path in (folder / "x").rglob("*") if path.is_file()}
    refused("ar.toml", "--out", "x", "--force", "model.n_heads=3")
    assert run("ar.toml", "--out", "x", "--force", "data.max_tokens=1")[0] == 2
    refused("ar.toml", "--out", "x", "--force", "training.init_from=nobody")
    assert {path: path.read_bytes() for path in (folder / "x").rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["none.toml"], "cannot read none.toml: No such file or directory"),
        (["ar.toml", "training.stpes=5"], "ar.toml: unknown key training.stpes; did you mean steps?"),
        (["ar.toml", "model.d_modle=5"], "ar.toml: unknown key model.d_modle; did you mean d_model?"),
        (["ar.toml", "model.upsample=5"], "ar.toml: unknown key model.upsample: it is a setting of kind ctc"),
        (["ar.toml", "model.kind=rnn"], "ar.toml: model.kind: choose one of autoregressive, ctc, "),
        (["ar.toml", "model.kind=nat"], "a model of kind 'nat' learns from data.fertilities"),
        (["ar.toml", "training.steps=many"], "ar.toml: training.steps: Input should be a valid integer, got 'many'"),
        (["ar.toml", "training.steps=0"], "ar.toml: training.steps: Input should be greater than 0, got 0"),
        (["ar.toml", "steps=5"], "'steps=5' is not an override; write section.key=value"),
        (["ar.toml", "model.n_heads=3"], "d_model 16 cannot be cut into 3 heads"),
        (
            ["ar.toml", "model.encoder_attention=[{kind='full'}, {kind='full'}]"],
            "encoder attention has 2 entries; give 1 for all layers or 1, one per layer",
        ),
        (["ar.toml", "data.path=nowhere"], "nowhere: no such directory; build one with `hasten data"),
        (["ar.toml", "data.path=points"], "points: kind 'points', expected 'parallel-text'"),
        (["ar.toml", "data.distilled=short"], "data.distilled short has 1 lines, the training split of corpus 60"),
        (["ar.toml", "tokenizer.vocab_size=100"], "vocab_size 100 is too small"),
        (["ar.toml", "tokenizer.vocab_size=9000"], "cannot learn 9000 pieces from this text: it has too few"),
        (["ar.toml", "tokenizer.from_model=nobody"], "no model 'nobody'"),
        (["ar.toml", "data.max_tokens=1"], "no training pairs are left after filtering"),
        (["ar.toml", "--resume"], "runs/ar holds no saved state to resume from; start without --resume"),
        (["ar.toml", "--out", "corpus"], "corpus holds something other than a run; choose another --out"),
        (["ar.toml", "--out", "short/run"], "cannot write a run to short/run: Not a directory"),
        (["ar.toml", "--threads", "0"], "Invalid value for '--threads'"),
        (["ar.toml", "--quick"], "No such option"),
        ([], "Missing argument 'config'"),
    ],
)
def test_a_mistake_costs_one_line(arguments, answer, run, folder):
    (folder / "points").mkdir()
    (folder / "points" / "manifest.json").write_text('{"kind": "points"}')
    (folder / "short").write_text("a\n")
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith(f"error: {answer}")
    assert len(err.splitlines()) <= 2
    assert not (folder / "runs").exists()


def test_a_loss_that_explodes_is_one_line(run):
    code, _, err = run("ar.toml", "training.learning_rate=1e30", "training.warmup=0", "training.save_every=1")
    assert code == 2
    assert err.splitlines()[-1].startswith("error: at step ")
    assert "lower training.learning_rate" in err


def test_resume_says_what_changed_and_refuses_what_must_not(run, refused, folder):
    run("ar.toml", "--out", "x", "training.steps=3")
    config = (folder / "x" / "config.toml").read_bytes()
    message = "x has TokenizerSpec(vocab_size=275, from_model=None), this configuration TokenizerSpec(vocab_size=276"
    code, _, err = run("ar.toml", "--out", "x", "--resume", "tokenizer.vocab_size=276")
    assert (code, err.splitlines()[-1][: len(message) + 7]) == (2, "error: " + message)
    code, _, err = run("ar.toml", "--out", "x", "--resume", "model.d_ff=64")
    assert code == 2
    assert "feed_forward.inner.bias has shape (32,), the model of config.toml needs (64,)" in err
    code, _, err = run("ar.toml", "--out", "x", "--resume", "data.max_tokens=9")
    assert code == 2
    assert "the training pairs are not those that x began with" in err
    assert (folder / "x" / "config.toml").read_bytes() == config
    code, out, err = run("ar.toml", "--out", "x", "--resume")
    assert (code, out) == (0, "x\n")
    assert "resumed_at 3  training.steps 3 -> 6\n" in err


def test_tensorboard_is_written_when_asked(run, folder):
    assert run("ar.toml", "--out", "x", "--tensorboard", "training.steps=3")[0] == 0
    (events,) = (folder / "x" / "tensorboard").iterdir()
    assert b"valid_bleu" in events.read_bytes()
    assert run("ar.toml", "--out", "y", "training.steps=1")[0] == 0
    assert not (folder / "y" / "tensorboard").exists()


def test_missing_tensorboard_is_said_before_anything_is_trained(refused, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    assert refused("ar.toml", "--tensorboard") == (
        "tensorboard is not installed; run: pip install 'hasten[tensorboard]'"
    )
    assert not (folder / "runs").exists()


def test_help_gives_an_example(run):
    code, out, _ = run("--help")
    assert code == 0
    assert "Example: hasten train configs/en-de-teacher.toml" in " ".join(out.split())


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "hasten", "train", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, stdout=-1, stderr=-1)


def wait_for(path: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_exits_with_130_and_the_run_goes_on(number, run, folder):
    process = started(folder, "ar.toml", "--out", "x", "training.steps=100000", "training.validate_sentences=0")
    wait_for(folder / "x" / "state")
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    stopped = json.loads((folder / "x" / "state" / "state.json").read_text())["step"]
    assert err.splitlines()[-1] == f"stopped and saved at step {stopped}; go on with --resume"
    assert load_file(folder / "x" / "model.safetensors")
    assert run("ar.toml", "--out", "x", "--resume", f"training.steps={stopped + 2}")[:2] == (0, "x\n")
    assert json.loads((folder / "x" / "state" / "state.json").read_text())["step"] == stopped + 2


def test_a_run_is_not_made_shorter_than_it_is(run, folder):
    run("ar.toml", "--out", "x")
    code, _, err = run("ar.toml", "--out", "x", "--resume", "training.steps=4")
    assert code == 2
    assert "training.steps is 4, but x has made 6 already" in err
    assert "steps = 6" in (folder / "x" / "config.toml").read_text()


def test_going_on_and_writing_over_exclude_each_other(run, refused):
    run("ar.toml", "--out", "x")
    assert "leave out one of them" in refused("ar.toml", "--out", "x", "--resume", "--force")


def test_two_runs_do_not_share_a_directory(run, refused, folder):
    from hasten.training import checkpoint

    with checkpoint.held(folder / "x"):
        assert refused("ar.toml", "--out", "x").startswith("another process trains in x")
    assert not (folder / "x").exists()
    assert run("ar.toml", "--out", "x")[0] == 0


@pytest.mark.parametrize("line", ["nonsense", "[1]", "\udcff"])
def test_a_damaged_row_of_metrics_is_named(run, folder, line: str):
    run("ar.toml", "--out", "x")
    path = folder / "x" / "metrics.jsonl"
    path.write_bytes(line.encode("utf-8", "surrogateescape") + b"\n" + path.read_bytes())
    code, _, err = run("ar.toml", "--out", "x", "--resume", "training.steps=7")
    assert code == 2
    assert err.splitlines()[-1].startswith("error: x/metrics.jsonl, line 1: ")


@pytest.mark.parametrize("width", [2_000_000, 4_000_000_000])
def test_a_model_that_no_machine_holds_is_one_line(refused, width: int):
    assert refused("ar.toml", f"model.d_model={width}").startswith("[model]")


def test_a_warm_up_longer_than_the_run_is_told(run):
    assert "warning: the run ends before" in run("ar.toml", "training.warmup=6")[2]
    assert "warning" not in run("ctc.toml", "training.warmup=5")[2]
