import json
import sys

import pytest

from hasten import cli
from hasten.data.tokenizer import Tokenizer
from hasten.export.certificate import sentences
from hasten.models.autoregressive import AutoregressiveSpec
from hasten.spec import DataSpec, RunSpec
from hasten.training.checkpoint import WEIGHTS, save_weights, write_run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = Tokenizer.train(sentences(), 400)
    spec = AutoregressiveSpec(d_model=16, n_heads=2, d_ff=16, encoder_layers=1, decoder_layers=1)
    write_run(directory, RunSpec(model=spec, data=DataSpec(path="nowhere")), tokenizer)
    save_weights(directory / WEIGHTS, spec.build(400).state_dict(), tokenizer)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    lines = sentences()
    for side in ("en", "de"):
        (root / f"all.{side}").write_text("\n".join(lines) + "\n")
    files = ["--src", str(root / "all.en"), "--tgt", str(root / "all.de")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hasten", "data", "text", *files, "--out", str(root / "corpus")])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    assert stopped.value.code == 0
    return root / "corpus"


def call(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["hasten", "bench", "decode", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    captured = capsys.readouterr()
    code = stopped.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def test_bench_writes_rows_table_and_picture(model, data, tmp_path, monkeypatch, capsys):
    code, out, err = call(
        monkeypatch,
        capsys,
        *("--models", f"{model},{model}:beam=2", "--data", str(data), "--sentences", "4", "--repeats", "1"),
        *("--threads", "1", "--out", str(tmp_path / "bench")),
    )
    assert code == 0, err
    labels = ["tiny", "tiny:beam=2", "ctranslate2:tiny:float32", "ctranslate2:tiny:int8"]
    labels += ["onnx:tiny:float32", "onnx:tiny:int8"]
    assert [line.split("\t")[0] for line in out.splitlines()[1:]] == labels
    rows = [json.loads(line) for line in (tmp_path / "bench" / "decode.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == labels
    assert rows[0]["quality"]["chrf"] == rows[2]["quality"]["chrf"]
    assert rows[0]["passes"] == rows[2]["passes"] == rows[4]["passes"]
    assert rows[0]["quality"] == rows[4]["quality"]
    assert rows[4]["peak_mib"] < rows[0]["peak_mib"]
    assert (tmp_path / "bench" / "decode.png").stat().st_size > 1000
    assert "| tiny:beam=2 | 1 |" in (tmp_path / "bench" / "decode.md").read_text()


def test_a_model_that_the_peer_cannot_hold_runs_without_it(data, tmp_path, tokenizer, tiny_spec, monkeypatch, capsys):
    spec = tiny_spec("autoregressive", decoder_layers=2, decoder_sharing=[1, 1])
    write_run(tmp_path / "shared", spec, tokenizer)
    weights = spec.model.build(tokenizer.vocab_size).state_dict()
    save_weights(tmp_path / "shared" / WEIGHTS, weights, tokenizer)
    options = ("--data", str(data), "--sentences", "2", "--repeats", "1", "--threads", "1")
    code, out, err = call(monkeypatch, capsys, "--models", str(tmp_path / "shared"), *options)
    assert code == 0, err
    assert [line.split("\t")[0] for line in out.splitlines()[1:]] == [
        "shared",
        "onnx:shared:float32",
        "onnx:shared:int8",
    ]
    assert f"no CTranslate2 rows of {tmp_path / 'shared'}: cannot export decoder_sharing" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--models", "x:beam=0"), "beam=0"),
        (("--models", "nobody"), "no model 'nobody'"),
        (("--models", "x", "--threads", "two"), "'two' is not in 1 to 1024"),
        (("--models", "x", "--threads", "9" * 5000), "is not in 1 to 1024"),
        (("--models", "x", "--split", "exam"), "exam"),
    ],
)
def test_mistakes_are_one_line(arguments, problem, data, monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, "--data", str(data), *arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert problem in err.splitlines()[-1]
