"""Every configuration that ships is one that `hasten train` accepts."""

from pathlib import Path

import pytest

from hasten import spec

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def test_there_are_configurations():
    assert CONFIGS


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_a_configuration_survives_writing_and_reading(config: Path, tmp_path: Path):
    run = spec.load(config)
    (tmp_path / "config.toml").write_text(spec.dump(run), encoding="utf-8")
    assert spec.load(tmp_path / "config.toml") == run


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_a_configuration_builds_its_model(config: Path):
    model = spec.load(config).model.build(vocab_size=300)
    assert model.embedding.weight.shape[0] == 300
