"""What README and tutorial tell the reader to type is run, in order, in one folder a document.

An HTML comment in front of a block says how it is run:
    <!-- not run: REASON -->                 the block is left out
    <!-- run with: KEY=VALUE KEY=VALUE -->   added to its lines that train, export or time, so that they are short
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from hasten.data.text import TextFiles, build_text_corpus

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "docs/tutorial.md",
    "docs/longformer-bigbird.md",
    "docs/mechanisms.md",
    "docs/attention-linear.md",
    "docs/nat.md",
    "docs/refinement.md",
    "docs/mask-predict.md",
    "docs/dag.md",
    "docs/sharing.md",
    "docs/exact.md",
    "docs/pronunciation.md",
    "docs/runtime.md",
    "docs/import.md",
    "docs/fertility.md",
    "docs/shortlist.md",
)
LONG = ("hasten train", "hasten share train", "hasten export", "hasten bench decode")
FENCE = re.compile(
    r"(?:<!-- (?P<how>not run|run with): (?P<what>[^\n]+?) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S
)


class Block(NamedTuple):
    document: str
    line: int
    language: str
    code: str
    skipped: str
    overrides: str


def read_blocks(document: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        if match["language"] not in ("bash", "console", "python"):
            continue
        how = {match["how"]: match["what"]}
        line = text.count("\n", 0, match.start("code"))
        found.append(
            Block(document, line, match["language"], match["code"], how.get("not run", ""), how.get("run with", ""))
        )
    return found


BLOCKS = [block for document in DOCUMENTS for block in read_blocks(document)]


def shell_script(block: Block) -> str:
    """The commands of a block: all lines of `bash`, those after "$ " of `console`."""
    lines = block.code.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return "\n".join(f"{line} {block.overrides}" if line.startswith(LONG) else line for line in lines)


def write_small_corpus(folder: Path) -> None:
    """mine.en and mine.de: 600 pairs of a small regular language."""
    things = {"file": "Datei", "window": "Fenster", "page": "Seite", "picture": "Bild", "folder": "Ordner"}
    verbs = {"open": "öffnen", "close": "schließen", "save": "speichern", "print": "drucken"}
    pairs = [
        (f"{verb.capitalize()} {thing} number {number}", f"{ding} Nummer {number} {tun}")
        for number in range(30)
        for thing, ding in things.items()
        for verb, tun in verbs.items()
    ]
    for column, language in enumerate(("en", "de")):
        (folder / f"mine.{language}").write_text("".join(f"{pair[column]}\n" for pair in pairs), encoding="utf-8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder a document, as a reader's own: the configurations, a small text, and a corpus of it in data/en-de."""
    made = {}
    for document in DOCUMENTS:
        folder = made[document] = tmp_path_factory.mktemp(Path(document).stem)
        shutil.copytree(ROOT / "configs", folder / "configs")
        write_small_corpus(folder)
        files = TextFiles(folder / "mine.en", folder / "mine.de")
        build_text_corpus(files, folder / "data" / "en-de", ("en", "de"))
    return made


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.document}:{block.line}")
def test_what_the_reader_is_told_to_type_works(block: Block, folders: dict[str, Path]) -> None:
    if block.skipped:
        pytest.skip(block.skipped)
    command = (
        [sys.executable, "-c", block.code]
        if block.language == "python"
        else ["bash", "-euo", "pipefail", "-c", shell_script(block)]
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=folders[block.document],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{block.document}:{block.line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_most_blocks_of_a_document_are_run(document: str) -> None:
    blocks = read_blocks(document)
    assert sum(not block.skipped for block in blocks) > len(blocks) / 2


@pytest.mark.parametrize("document", [*DOCUMENTS, "CONTRIBUTING.md", "docs/index.md", "docs/architecture.md"])
def test_links_within_the_repository_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text) + re.findall(r'src="(?!https?:)([^"]+)"', text)
    missing = [target for target in targets if not (ROOT / document).parent.joinpath(target).exists()]
    assert not missing
