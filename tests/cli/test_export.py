import sys

import pytest
import torch

from hasten import cli
from hasten.data.tokenizer import Tokenizer
from hasten.export import certificate
from hasten.export.certificate import sentences
from hasten.models.autoregressive import AutoregressiveSpec
from hasten.models.ctc import CTCSpec
from hasten.spec import DataSpec, RunSpec
from hasten.training.checkpoint import WEIGHTS, save_weights, write_run


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer.train(sentences(), 400)
    autoregressive = AutoregressiveSpec(d_model=16, n_heads=2, d_ff=16, encoder_layers=1, decoder_layers=1)
    for name, spec in (("ar", autoregressive), ("ctc", CTCSpec(d_model=16, n_heads=2, d_ff=16))):
        torch.manual_seed(1)
        write_run(root / name, RunSpec(model=spec, data=DataSpec(path="nowhere")), tokenizer)
        save_weights(root / name / WEIGHTS, spec.build(400).state_dict(), tokenizer)
    return root


def call(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["hasten", "export", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    captured = capsys.readouterr()
    code = stopped.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def test_export_prints_its_certificate(models, tmp_path, monkeypatch, capsys):
    out = tmp_path / "ct2"
    arguments = ("--to", "ctranslate2", "--model", str(models / "ar"), "--out", str(out), "--sentences", "12")
    code, said, _ = call(monkeypatch, capsys, *arguments)
    assert code == 0
    assert said.startswith("certified: 12 sentences")
    assert (out / "model.bin").exists()
    code, _, err = call(monkeypatch, capsys, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert "--force" in err
    code, said, _ = call(monkeypatch, capsys, *arguments, "--force", "--quantization", "int8")
    assert code == 0
    assert "int8: " in said
    assert "of 12 outputs are those of float32" in said


def test_int8_in_onnx_is_calibrated_on_the_lines_that_are_given(models, tmp_path, monkeypatch, capsys):
    out, lines = tmp_path / "onnx", tmp_path / "lines.txt"
    lines.write_text("Open the door.\n\nClose it!\n")
    arguments = ("--to", "onnx", "--model", str(models / "ctc"), "--int8", "--out", str(out), "--sentences", "3")
    graphs = []
    for more in ((), ("--calibrate", str(lines)), ("--calibrate", str(lines))):
        code, _, err = call(monkeypatch, capsys, *arguments, *more, "--force")
        assert code in (0, 1), err  # what these weights, hardly trained, lose is not asked here
        graphs.append((out / "encoder.onnx").read_bytes())
    assert graphs[0] != graphs[1]
    assert graphs[1] == graphs[2]
    lines.write_text("\n\n")
    code, _, err = call(monkeypatch, capsys, *arguments, "--calibrate", str(lines), "--force")
    assert (code, err.count("\n")) == (2, 1)
    assert "has no line with text" in err
    code, _, err = call(monkeypatch, capsys, "--model", "x", "--out", str(out), "--calibrate", str(lines))
    assert (code, err.count("\n")) == (2, 1)
    assert "--calibrate is for --to onnx --int8 only" in err


def test_a_difference_is_exit_1_and_names_the_sentence(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(certificate, "TOLERANCE", -1.0)
    lines = tmp_path / "lines.txt"
    lines.write_text("\nOpen the door.\n")
    code, said, _ = call(
        monkeypatch, capsys, *("--model", str(models / "ar"), "--out", str(tmp_path / "ct2"), "--certify", str(lines))
    )
    assert code == 1
    assert said.startswith("NOT certified: sentence 1 'Open the door.'")
    assert (tmp_path / "ct2" / "model.bin").exists()


def test_a_model_that_the_target_cannot_hold_is_one_line(models, tmp_path, monkeypatch, capsys):
    code, said, err = call(monkeypatch, capsys, "--model", str(models / "ctc"), "--out", str(tmp_path / "ct2"))
    assert (code, said, err.count("\n")) == (2, "", 1)
    assert "CTranslate2 holds autoregressive Transformers" in err
    assert not (tmp_path / "ct2").exists()


def test_a_missing_engine_is_one_line(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    code, _, err = call(monkeypatch, capsys, "--model", str(models / "ar"), "--out", str(tmp_path / "ct2"))
    assert code == 2
    assert "hasten[export]" in err
