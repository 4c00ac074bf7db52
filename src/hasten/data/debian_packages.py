"""Fetch Debian packages and package-description indexes with apt, in a directory of our own.

Neither root nor the system's package lists are needed: lists and caches lie in the work directory, nothing is
installed, and the machine's own `sources.list` says where to fetch from.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, final
from urllib.parse import unquote

from hasten.errors import UserError

APT_HELPER = "/usr/lib/apt/apt-helper"
ALTERNATIVE = "use `hasten data text` with files of your own instead"
LANGUAGES = ("en", "de", "fr", "es")


class Download(NamedTuple):
    """A package file as the package lists announce it."""

    package: str
    file: str
    size: int
    sha256: str


@final
class Packages:
    """Debian packages reachable from this machine, kept in `directory`."""

    def __init__(self, directory: Path):
        for tool in ("apt-get", "dpkg-deb", APT_HELPER):
            if shutil.which(tool) is None:
                raise UserError(f"{Path(tool).name} not found: this needs Debian or Ubuntu; {ALTERNATIVE}")
        self.directory = directory
        self.lists = directory / "lists"
        self.debs = directory / "deb"
        try:
            for path in (self.lists / "partial", directory / "cache" / "archives" / "partial", self.debs):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{directory}: cannot write there ({error.strerror}); choose another --work") from None

    def update(self) -> None:
        """Fetch the package lists; `UserError` with apt's own reason when a list the corpus needs does not come."""
        result = self._apt("update")
        missing = [language for language in LANGUAGES if not self._indexes(language)]
        if missing:
            raise UserError(f"no package descriptions for {', '.join(missing)}: {_reason(result)}; {ALTERNATIVE}")

    def has_lists(self) -> bool:
        """True when an earlier `update` left the lists of every language."""
        return all(self._indexes(language) for language in LANGUAGES)

    def descriptions(self, language: str) -> str:
        """Text of all Translation indexes of a language."""
        return "\n\n".join(self._read_index(path) for path in self._indexes(language))

    def description_indexes(self, language: str) -> dict[str, str]:
        """SHA-256 of the text of every Translation index of a language, by its name (archive, release, component)."""
        return {
            path.name.split("Translation-")[0] + f"Translation-{language}": hashlib.sha256(
                self._read_index(path).encode()
            ).hexdigest()
            for path in self._indexes(language)
        }

    def packages_index(self) -> str:
        """Text of all Packages indexes."""
        return "\n\n".join(self._read_index(path) for path in sorted(self.lists.glob("*_main_binary-*_Packages*")))

    def locate(self, packages: Sequence[str]) -> dict[str, Download]:
        """What the lists announce for each package; a package they do not know is absent from the answer."""
        result = self._apt("download", "--print-uris", *packages)
        if result.returncode and len(packages) > 1:
            return {name: found for package in packages for name, found in self.locate([package]).items()}
        found = {}
        for line in result.stdout.splitlines():
            match = re.match(r"'[^']*' (\S+) (\d+) SHA256:([0-9a-f]{64})", line)
            if match:
                package = match[1].split("_", 1)[0]
                found[package] = Download(package, match[1], int(match[2]), match[3])
        return found

    def fetch(self, downloads: Sequence[Download]) -> Iterator[Download]:
        """Download what is not here yet, yielding each package as it is complete and its checksum right.

        Finished packages are kept, so an interrupted fetch goes on where it stopped.
        """
        for download in downloads:
            if not self._complete(download):
                result = self._apt("download", download.package, cwd=self.debs)
                if not self._complete(download):
                    raise UserError(
                        f"cannot download {download.package}: {_reason(result)}; "
                        "run the command again to go on, with --refresh if the package lists are old"
                    )
            yield download

    def version(self, download: Download) -> str:
        """Version of a package, from its file name."""
        return unquote(download.file.split("_")[1])

    def read(self, download: Download, suffixes: tuple[str, ...]) -> dict[str, bytes]:
        """Regular files of a package that end in one of the suffixes, by their path."""
        archive = self.debs / download.file
        files = {}
        with subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as unpack:
            assert unpack.stdout is not None
            try:
                with tarfile.open(fileobj=unpack.stdout, mode="r|") as tar:
                    for member in tar:
                        if member.isreg() and member.name.endswith(suffixes):
                            content = tar.extractfile(member)
                            assert content is not None, "a regular member has content"
                            files[member.name.removeprefix("./")] = content.read()
                unpack.stdout.read()
            except tarfile.TarError:
                raise UserError(f"{archive}: damaged package; delete it and run again") from None
        if unpack.returncode:
            raise UserError(f"{archive}: damaged package; delete it and run again")
        return files

    def _complete(self, download: Download) -> bool:
        path = self.debs / download.file
        if not path.is_file() or path.stat().st_size != download.size:
            return False
        return hashlib.sha256(path.read_bytes()).hexdigest() == download.sha256

    def _indexes(self, language: str) -> list[Path]:
        return sorted(self.lists.glob(f"*_main_i18n_Translation-{language}*"))

    def _read_index(self, path: Path) -> str:
        result = subprocess.run([APT_HELPER, "cat-file", str(path)], capture_output=True, check=False)
        if result.returncode:
            raise UserError(f"{path}: unreadable package list; run again with --refresh")
        return result.stdout.decode("utf-8", "replace")

    def _apt(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        options = {
            "Dir::State::lists": str(self.lists.resolve()),
            "Dir::Cache": str((self.directory / "cache").resolve()),
            "Acquire::Languages": ",".join(LANGUAGES),
            "Acquire::Retries": "2",
        }
        if os.geteuid() == 0:
            options["APT::Sandbox::User"] = "root"  # the sandbox user may not enter a directory of ours
        flags = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
        return subprocess.run(
            ["apt-get", "-q", *flags, *arguments],
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


def _reason(result: subprocess.CompletedProcess[str]) -> str:
    """The first complaint of apt, without its prefix."""
    complaint = re.search(r"^[EW]: (.+)", result.stdout, re.M)
    if complaint:
        return " ".join(complaint[1].split())
    return _last_line(result.stdout) or "apt-get gave no reason"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
