"""What a measurement was made on."""

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("hasten", "torch", "ctranslate2", "onnxruntime", "sentencepiece", "sacrebleu")


def machine() -> dict[str, Any]:
    """CPU model, cores that this process may use, load, memory, versions and date, for a line of results."""
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **_versions()},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
