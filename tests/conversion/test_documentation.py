"""The examples of the page on conversion are run, and print what the page says."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "convert.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.M | re.S)


def test_the_examples_of_the_page_print_what_it_says():
    pytest.importorskip("transformers")
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert [language for language, _ in blocks].count("python") > 4
    names: dict[str, Any] = {}
    printed = ""
    for language, code in blocks:
        if language == "text":
            assert printed == code
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, str(PAGE), "exec"), names)
        printed = out.getvalue()
