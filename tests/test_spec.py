"""A description of a run is read strictly, written back equal, and its mistakes are answered in one line."""

import dataclasses
import math
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten import spec as specs
from hasten.errors import UserError
from hasten.fields import Spec
from hasten.models import AutoregressiveSpec, CTCSpec, ModelSpec
from hasten.spec import DataSpec, RunSpec, TokenizerSpec, TrainingSpec
from hasten.spec_errors import kind_of

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))
KINDS = ", ".join(kind_of(spec) for spec in get_args(get_args(ModelSpec)[0]))
SMALLEST = '[data]\npath = "d"\n\n[model]\nkind = "ctc"\n'

# The shape checker of the tests samples the entries of tuples.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str = SMALLEST) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def mistake(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        specs.load(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_smallest_description_has_the_defaults(toml):
    assert specs.load(toml()) == RunSpec(model=CTCSpec(), data=DataSpec(path="d"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_what_is_dumped_loads_equal(config, toml):
    spec = specs.load(config)
    assert specs.load(toml(specs.dump(spec))) == spec


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
# Sections as keywords: specs of models are made outside of the draw, since checking their types draws numbers itself.
runs = st.fixed_dictionaries(
    {
        "model": st.one_of(
            st.fixed_dictionaries({"d_model": st.integers(1, 9), "decoder_layers": st.integers(1, 9)}),
            st.fixed_dictionaries({"upsample": st.integers(1, 5), "glancing_end": st.floats(0, 0.9)}),
        ),
        "data": st.fixed_dictionaries({"path": texts, "distilled": st.none() | texts}),
        "tokenizer": st.fixed_dictionaries({"vocab_size": st.integers(1, 2**40), "from_model": st.none() | texts}),
        "training": st.fixed_dictionaries(
            {
                "learning_rate": st.floats(0, exclude_min=True, allow_infinity=False),
                "seed": st.integers(0, 2**32 - 1),
                "schedule": st.sampled_from(["linear", "inverse_sqrt", "hold_then_linear"]),
                "init_from": st.none() | texts,
            }
        ),
    }
)


def made(sections: dict[str, dict]) -> RunSpec:
    model = CTCSpec if "upsample" in sections["model"] else AutoregressiveSpec
    kinds = {"model": model, "data": DataSpec, "tokenizer": TokenizerSpec, "training": TrainingSpec}
    return RunSpec(**{name: kinds[name](**options) for name, options in sections.items()})


@given(runs)
def test_any_run_survives_dumping(sections):
    spec = made(sections)
    assert specs.parse(specs.tomllib.loads(specs.dump(spec)), "test") == spec


@given(runs, st.data())
def test_overrides_can_say_all_that_a_file_says(sections, data):
    spec = made(sections)
    table = specs.tomllib.loads(specs.dump(spec))
    lines = [f"{section}.{key}={toml_value(value)}" for section, keys in table.items() for key, value in keys.items()]
    overridden: dict = {}
    for line in data.draw(st.permutations(lines)):
        specs._apply(overridden, line)
    assert specs.parse(overridden, "test") == spec


def toml_value(value) -> str:
    import tomli_w

    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").removesuffix("\n")


@given(texts)
def test_an_override_sets_its_key_and_nothing_else(text):
    table = {"data": {"path": "d", "max_tokens": 7}, "training": {"steps": 5}}
    specs._apply(table, f"data.path={text}")
    assert table["data"].keys() == {"path", "max_tokens"}
    assert (table["data"]["max_tokens"], table["training"]) == (7, {"steps": 5})


def test_a_value_that_is_not_toml_is_a_string_as_it_stands():
    for text in ("data/en-de", "a b", "x#y", "2024-runs", "1\nmax_tokens = 3", "7\n[other]"):
        table: dict = {}
        specs._apply(table, f"data.path={text}")
        assert table == {"data": {"path": text}}


def test_overrides_win_and_the_last_of_them_most(toml):
    path = toml(SMALLEST + "[training]\nsteps = 5\n")
    assert specs.load(path, ["training.steps=7"]).training.steps == 7
    assert specs.load(path, ["training.steps=7", " training . steps = 8 "]).training.steps == 8
    assert specs.load(path, ["model.kind=autoregressive"]).model == AutoregressiveSpec()
    found = specs.load(path, ['model.encoder_attention=[{kind = "full", dropout = 0.5}]'])
    assert found.model.encoder_attention[0].dropout == 0.5


@pytest.mark.parametrize("override", ["training.steps", "=5", ".steps=5", "training.=5", "steps=5", "a..b=5", ""])
def test_what_is_no_override_is_answered_with_an_example(override, toml):
    message = mistake(toml(), override)
    assert message.startswith(f"{override!r} is not an override; write section.key=value")


def test_an_override_cannot_enter_a_value(toml):
    assert mistake(toml(), "data.path.x=1") == "'data.path.x=1': path is not a section"


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("trainig.steps=5", "unknown key trainig; did you mean training?"),
        ("training.stpes=5", "unknown key training.stpes; did you mean steps?"),
        ("training.vocab_size=300", "unknown key training.vocab_size; did you mean tokenizer.vocab_size?"),
        ("model.d_modle=5", "unknown key model.d_modle; did you mean d_model?"),
        ("model.decoder_layers=5", "unknown key model.decoder_layers: it is a setting of kind autoregressive"),
        ("data.qqqqqqqq=5", "unknown key data.qqqqqqqq; allowed: distilled, fertilities, max_tokens, path"),
        (
            "model.encoder_attention=[{kind = 'full', droput = 1}]",
            "unknown key model.encoder_attention[0].droput; did you mean dropout?",
        ),
        ("model.kind=ctx", f"model.kind: choose one of {KINDS}; got 'ctx'; did you mean ctc?"),
        (
            "training.schedule=cosine",
            "training.schedule: Input should be 'linear', 'inverse_sqrt' or 'hold_then_linear'",
        ),
        (
            "model.encoder_attention=full",
            "model.encoder_attention: expected a list such as [{ kind = \"full\" }], got 'full'",
        ),
        ("training.steps=0", "training.steps: Input should be greater than 0, got 0"),
        ("training.steps=-3", "training.steps: Input should be greater than 0, got -3"),
        ("training.steps='5'", "training.steps: Input should be a valid integer, got '5'"),
        ("training.steps=5.0", "training.steps: Input should be a valid integer, got 5.0"),
        ("training.steps=true", "training.steps: Input should be a valid integer, got True"),
        ("training.steps=2020-01-01", "training.steps: Input should be a valid integer, got '2020-01-01'"),
        ("training.learning_rate='1e-3'", "training.learning_rate: Input should be a valid number, got '1e-3'"),
        ("training.learning_rate=inf", "training.learning_rate: Input should be less than inf, got inf"),
        ("training.learning_rate=nan", "training.learning_rate: Input should be"),
        ("training.decay=1.0", "training.decay: Input should be less than 1, got 1.0"),
        ("training.seed=4294967296", "training.seed: Input should be less than 4294967296"),
        ("data.path=3", "data.path: Input should be a valid string, got 3"),
        ("model.encoder_layers=1000000", "model.encoder_layers: Input should be"),
        ("model.encoder_attention=5", "model.encoder_attention: expected a list such as"),
        ("model.encoder_sharing=3", "model.encoder_sharing: expected a list such as [1, 1, 3], got 3"),
        (
            "model.encoder_attention=[{kind = 'synthesizer', parts = 'random'}]",
            "model.encoder_attention[0].parts: expected a list such as [\"dense\"], got 'random'",
        ),
        (
            "model.encoder_attention=[{kind = 'heads', groups = 2}]",
            'model.encoder_attention[0].groups: expected a list such as [{ heads = 2, attention = { kind = "full" } }]',
        ),
        (
            "model.encoder_attention=[{kind = 'rfa', sigma = 1e300}]",
            "model.encoder_attention[0].sigma: Input should be less than or equal to",
        ),
        (
            "model.encoder_attention=[{kind = 'lsh', chunk = 1000000000000000000000}]",
            "model.encoder_attention[0].chunk: Input should be less than or equal to",
        ),
    ],
)
def test_a_mistake_is_answered_with_place_and_remedy(override, answer, toml):
    path = toml()
    assert mistake(path, override).startswith(f"{path}: {answer}")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('[model]\nkind = "ctc"\n', "data: this is required"),
        ('[data]\n[model]\nkind = "ctc"\n', "data.path: this is required"),
        ('[data]\npth = "d"\n[model]\nkind = "ctc"\n', "unknown key data.pth; did you mean path?"),
        ('[data]\npath = "d"\n[model]\nd_model = 8\n', f"model.kind: choose one of {KINDS}; got None"),
        ('model = 3\n[data]\npath = "d"\n', "model: Input should be a table, got 3"),
        ('data = "d"\n[model]\nkind = "ctc"\n', "data: Input should be a table, got 'd'"),
    ],
)
def test_a_file_that_lacks_something_is_told_what(text, answer, toml):
    path = toml(text)
    assert mistake(path) == f"{path}: {answer}"


def test_a_file_that_cannot_be_read_is_named(toml, tmp_path):
    assert mistake(tmp_path / "none.toml") == f"cannot read {tmp_path / 'none.toml'}: No such file or directory"
    assert mistake(tmp_path) == f"cannot read {tmp_path}: Is a directory"
    assert mistake(toml("steps = = 5")).startswith(f"{tmp_path / 'run.toml'} is not valid TOML: ")
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    assert "is not valid TOML" in mistake(tmp_path / "run.toml")


@pytest.mark.parametrize("spec", [AutoregressiveSpec, CTCSpec, DataSpec, TokenizerSpec, TrainingSpec, RunSpec])
def test_specs_are_frozen_keyword_only_and_strict(spec):
    assert issubclass(spec, Spec) or spec is RunSpec
    assert spec.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(spec))


def test_numbers_keep_their_last_digit(toml):
    spec = specs.load(toml(), ["training.learning_rate=0.1000000000000000055511151231257827"])
    again = specs.load(toml(specs.dump(spec)))
    assert math.copysign(1, again.training.learning_rate) == 1
    assert again.training.learning_rate == spec.training.learning_rate
