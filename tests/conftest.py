"""What every test shares: the shapes written in signatures are enforced, in the files that have any."""

import inspect
import os
import sys
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

# Side by side, each worker keeps to one core: threads of two that wait for each other are many times slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine is no failure; a test that must be quick says so itself.
hypothesis.settings.register_profile("any-machine", deadline=None)
hypothesis.settings.load_profile("any-machine")

SOURCE = Path(__file__).parent.parent / "src"
# Only files with shapes: in the others, of which some are called a thousand times a test, there is nothing to check.
CHECKED = tuple(
    ".".join(file.relative_to(SOURCE).with_suffix("").parts)
    for part in ("attention", "decoding", "models", "nn")
    for file in sorted((SOURCE / "hasten" / part).rglob("*.py"))
    if "jaxtyping" in file.read_text(encoding="utf-8")
)
jaxtyping.install_import_hook(CHECKED, "beartype.beartype")


def pytest_configure() -> None:
    """Seeds only for what is there: `torch.manual_seed` writes down the stack for each device that is not."""
    import torch

    if not torch.cuda.is_available():
        torch.manual_seed = torch.default_generator.manual_seed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch):
    """The code as users run it: torch's compilers cannot trace the shape checks."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    modules = [module for name, module in sys.modules.items() if name.startswith(CHECKED)]
    for checked in {value for module in modules for value in vars(module).values() if isinstance(value, type)}:
        for name, method in list(vars(checked).items()):
            if inspect.isfunction(method) and hasattr(method, "__wrapped__"):
                monkeypatch.setattr(checked, name, method.__wrapped__)


@pytest.fixture(scope="session")
def words() -> list[str]:
    """Lines of a made-up language with a few hundred words."""
    import random

    draw = random.Random(0)
    syllables = ["ka", "mo", "ti", "re", "lun", "sch", "ö", "ä", "er", "en", "ing", "do", "fi", "pe", "zu"]
    words = ["".join(draw.choices(syllables, k=draw.randint(2, 4))) for _ in range(300)]
    return [" ".join(draw.choices(words, k=draw.randint(1, 9))) + draw.choice([".", "!", "?", ""]) for _ in range(400)]


@pytest.fixture(scope="session")
def tokenizer(words: list[str]):
    """400 pieces learnt from `words`."""
    from hasten.data.tokenizer import Tokenizer

    return Tokenizer.train(words, 400)


@pytest.fixture(scope="session")
def tiny_spec():
    """The spec of a very small model of a kind."""
    from hasten import spec as specs

    def make(kind: str, **options):
        depth = {"ctc": {"refiner_layers": 1}}.get(kind, {"decoder_layers": 1})
        if kind == "dag":  # before it has learnt anything, lookahead goes straight to the end
            depth |= {"upsample": 3, "decoding": {"method": "greedy"}}
        small = {"d_model": 32, "d_ff": 64, "n_heads": 4, "encoder_layers": 1, **depth, **options}
        return specs.parse({"data": {"path": "nowhere"}, "model": {"kind": kind, **small}}, "tests")

    return make


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, tokenizer, tiny_spec):
    """The run directory of a very small model of a kind with random weights; not to be changed."""
    import torch

    from hasten.training import checkpoint

    made = {}

    def make(kind: str):
        if kind not in made:
            directory = made[kind] = tmp_path_factory.mktemp(kind)
            spec = tiny_spec(kind)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = spec.model.build(tokenizer.vocab_size)
            checkpoint.write_run(directory, spec, tokenizer)
            checkpoint.save_weights(directory / checkpoint.WEIGHTS, model.state_dict(), tokenizer)
        return made[kind]

    return make
