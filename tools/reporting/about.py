"""The origin of a report: the command, the time, the versions and the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_OPTIONS = ("SHORT", "ONLY", "STRICT", "WORKLOAD", "SHAPE", "STORE", "RATE", "DURATION", "SLOTS", "SEED")
"""Variables that make targets read and that change what is measured."""
_PACKAGES = ("pyspark-dstl", "pyspark", "pyarrow", "rocksdict", "uvicorn", "boto3", "confluent-kafka")


def about(target: str) -> dict[str, Any]:
    """Return the command of a make target, the time, the versions and the machine, as JSON has them."""
    options = [f"{name}={value}" for name in _OPTIONS if (value := os.environ.get(name))]
    return {
        "command": " ".join(["make", target, *options]),
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, where they are installed."""
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """Return processor, cores, memory and kernel."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
    }


def as_text(found: Mapping[str, Any]) -> str:
    """Return what `about` returned in one line."""
    machine_text = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    versions_text = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    took = f", took {found['took_s']:.0f} s" if "took_s" in found else ""
    return f"{found['command']}, begun {found['begun']}{took}. {versions_text}. {machine_text}."


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
