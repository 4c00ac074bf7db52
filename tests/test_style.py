"""Promises about the source as a whole."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import typer

SOURCE = Path(__file__).parents[1] / "src" / "hasten"
MODULES = sorted(SOURCE.rglob("*.py"))
HEAVY = (
    "torch",
    "numpy",
    "sentencepiece",
    "matplotlib",
    "pydantic",
    "accelerate",
    "sacrebleu",
    "huggingface_hub",
    "transformers",
)
IDS = [str(module.relative_to(SOURCE)) for module in MODULES]


def test_the_command_line_starts_without_heavy_imports():
    code = f"import sys, hasten, hasten.cli; print(*[name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom hasten.cli import main\nsys.argv = ['hasten', '--help']\n"
        f"try:\n    main()\nfinally:\n    print('LOADED', *[name for name in {HEAVY} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "LOADED"


def test_the_help_of_every_verb_gives_an_example():
    from hasten.cli import app

    def without_example(command, name: str) -> list[str]:
        if inner := getattr(command, "commands", None):
            return [lacking for verb, one in inner.items() for lacking in without_example(one, f"{name} {verb}")]
        return [] if f"Example: {name}" in (command.help or "") else [name]

    assert without_example(typer.main.get_command(app), "hasten") == []


@pytest.mark.parametrize("module", MODULES, ids=IDS)
def test_a_file_is_one_idea(module: Path):
    assert len(module.read_text(encoding="utf-8").splitlines()) <= 420
    assert module.stem not in {"utils", "helpers", "common", "misc"}


@pytest.mark.parametrize("module", MODULES, ids=IDS)
def test_a_public_call_names_its_arguments(module: Path):
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            assert node.args.kwarg is None, f"{node.name} takes **{node.args.kwarg.arg}"


@pytest.mark.parametrize("module", MODULES, ids=IDS)
def test_every_field_of_a_spec_is_documented(module: Path):
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef) or not node.name.endswith("Spec"):
            continue
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            # a field that is itself a spec is described by its class
            if isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.annotation).endswith("Spec"):
                assert is_text(following), f"{node.name}.{ast.unparse(statement.target)} has no docstring"


def is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_every_error_for_users_is_one_line_and_a_value_error():
    from hasten import errors

    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert all(issubclass(value, ValueError) and value.__doc__ for value in classes)
    assert "\n" not in str(errors.MissingExtra("ctranslate2", "export"))
