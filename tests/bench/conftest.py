from pathlib import Path

import pytest
import torch

from hasten.data.tokenizer import Tokenizer
from hasten.export.certificate import sentences
from hasten.models.autoregressive import AutoregressiveSpec
from hasten.models.ctc import CTCSpec
from hasten.spec import DataSpec, RunSpec
from hasten.training.checkpoint import WEIGHTS, save_weights, write_run


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Directories of a tiny autoregressive and a tiny CTC model with random weights."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer.train(sentences(), 400)
    specs = {
        "ar": AutoregressiveSpec(d_model=16, n_heads=2, d_ff=16, encoder_layers=1, decoder_layers=1),
        "ctc": CTCSpec(d_model=16, n_heads=2, d_ff=16),
    }
    for name, spec in specs.items():
        torch.manual_seed(1)
        weights = spec.build(tokenizer.vocab_size).state_dict()
        write_run(root / name, RunSpec(model=spec, data=DataSpec(path="nowhere")), tokenizer)
        save_weights(root / name / WEIGHTS, weights, tokenizer)
    return {name: root / name for name in specs}
