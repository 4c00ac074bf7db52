"""A shortlist without PyTorch: the outputs and scores that PyTorch has with it."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import hasten
from hasten.data import shortlist
from hasten.errors import UserError
from hasten.export.onnx import export
from hasten.runtime import load
from hasten.runtime.translator import RuntimeTranslator

pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

LINES = ["kamo ti.", "", "lunsch re, mo!", "ö", "tire tire tire tire tire", "nul \x00 😀 \u2581", "kamo ti."]
KINDS = ("ctc", "autoregressive")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, words, tokenizer):
    """A table, `some`, and one of everything, `all`."""
    folder = tmp_path_factory.mktemp("tables")
    pairs = [(tokenizer.encode(a), tokenizer.encode(b)) for a, b in zip(words[:90], words[90:180], strict=True)]
    shortlist.build(pairs, tokenizer, translations=4, frequent=5).save(folder / "some")
    shortlist.everything(tokenizer).save(folder / "all")
    return folder


@pytest.fixture(scope="module")
def translators(tiny_run):
    """Random weights whose outputs depend on the source."""
    found = {}
    for kind in KINDS:
        found[kind] = hasten.load(tiny_run(kind))
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(3)
            for parameter in found[kind].model.parameters():
                parameter += 0.15 * torch.randn_like(parameter)
    return found


@pytest.fixture(scope="module")
def directories(translators, tmp_path_factory):
    """Of each kind and numbers the directory for ONNX Runtime."""
    out, found = tmp_path_factory.mktemp("onnx"), {}
    for kind, own in translators.items():
        for compute in ("float32", "int8"):
            found[kind, compute] = out / f"{kind}-{compute}"
            limit = own.max_source_tokens
            given = {"max_source_tokens": limit, "compute": compute, "calibration": LINES}
            export(own.model, own.tokenizer, found[kind, compute], **given)
    return found


def compare(found: RuntimeTranslator, expected, lines=LINES) -> None:
    for [ours], [theirs] in zip(found.candidates(lines), expected.candidates(lines), strict=True):
        assert ours.text == theirs.text
        assert ours.score == pytest.approx(theirs.score, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_gives_what_it_gives_in_pytorch(translators, directories, folder, kind):
    whole, listed = (load(directories[kind, "float32"], threads=1, shortlist=s) for s in (None, folder / "some"))
    compare(listed, replace(translators[kind], shortlist=shortlist.Shortlist.load(folder / "some")))
    assert listed.translate(LINES) != whole.translate(LINES), "the list changes something"


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_everything_changes_nothing(directories, folder, kind):
    whole, listed = (load(directories[kind, "float32"], threads=1, shortlist=s) for s in (None, folder / "all"))
    compare(listed, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_everything_changes_little_where_weights_are_bytes(directories, folder, kind):
    """The whole output layer multiplies inputs that are bytes, too, and a list does not."""
    found = []
    for table in (None, folder / "all"):
        peer = load(directories[kind, "int8"], threads=1, shortlist=table)
        rows = peer.engine.decode([peer.tokenizer.encode(line) for line in LINES if line])
        found.append([row.scores[0] for row in rows])
    assert np.allclose(*found, atol=0.02)


@pytest.mark.parametrize("compute", ["float32", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_line_is_said_alone_as_in_any_batch(directories, folder, kind, compute):
    listed = load(directories[kind, compute], threads=1, shortlist=folder / "some")
    alone = [listed.translate([line])[0] for line in LINES]
    for batch_tokens in (1, 30, 1024):
        assert listed.translate(LINES, batch_tokens=batch_tokens) == alone


def test_an_export_without_rows_is_refused_in_one_line(directories, folder, tmp_path):
    for file in directories["ctc", "float32"].iterdir():
        if file.name not in ("rows.onnx", "listed.onnx"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert load(tmp_path).translate(["kamo"])
    with pytest.raises(UserError, match=r"was exported without rows\.onnx, which a shortlist needs; export it again"):
        load(tmp_path, shortlist=folder / "some")


@pytest.mark.parametrize("kind", KINDS)
def test_the_module_takes_a_table_without_torch(directories, folder, kind):
    out = str(directories[kind, "float32"])
    loaded = "print('LOADED', *[name for name in ('torch', 'jaxtyping', 'pydantic') if name in sys.modules])"
    typed = [out, "--shortlist", str(folder / "some")]
    code = f"import sys\nfrom hasten.runtime.__main__ import run\nrun({typed})\n{loaded}"
    data = "".join(line + "\n" for line in LINES).encode()
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True).stdout
    *said, loaded = done.decode().split("\n")[:-1]
    assert loaded == "LOADED"
    assert said == load(out, shortlist=folder / "some").translate(LINES)
