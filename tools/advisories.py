"""
Asks pip-audit for known advisories about the pinned requirements, and reports if no source is reachable.

An advisory fails the check. An unreachable source does not, unless STRICT=1, since it says nothing about this project.
pip-audit's exit code does not distinguish the two, but only one of them has a report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Finding:
    """A pin with an advisory."""

    name: str
    version: str
    advisory: str
    fixed_in: str


def read_report(report: str) -> tuple[list[Finding], int] | None:
    """
    Return the findings of a pip-audit report, and the number of pins unknown to its source; None without a report.

    A registry mirror answers as if it knew no pin at all, which must not pass for a good result.
    """
    try:
        pins: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, LookupError, TypeError):
        return None
    found = [
        Finding(pin["name"], pin["version"], found["id"], ", ".join(found.get("fix_versions", [])) or "no version yet")
        for pin in pins
        for found in pin.get("vulns", [])
    ]
    return found, sum("skip_reason" in pin for pin in pins)


def check(file: str, command: Sequence[str], *, strict: bool) -> int:
    """Check one requirements file; print what was found and return an exit code."""
    arguments = ["--requirement", file, "--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
    try:
        ended = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        report, why = ended.stdout, ended.stderr.strip().splitlines()[-1:] or [f"it ended with {ended.returncode}"]
    except (OSError, subprocess.TimeoutExpired) as error:
        report, why = "", [str(error)]
    result = read_report(report)
    if result is None:
        sys.stdout.write(f"{file}: NOT CHECKED, no source of advisories is reachable: {why[0]}\n")
        return 1 if strict else 0
    found, unknown = result
    for item in found:
        sys.stdout.write(f"{file}: {item.name} {item.version} has {item.advisory}, fixed in {item.fixed_in}\n")
    if unknown:
        sys.stdout.write(f"{file}: {unknown} pins NOT CHECKED, unknown to the source of advisories\n")
    sys.stdout.write(f"{file}: {len(found)} advisories\n")
    return 1 if found or (unknown and strict) else 0


def main(arguments: Sequence[str]) -> int:
    """Check the files; the first argument is the program."""
    program, *files = arguments
    strict = os.environ.get("STRICT") == "1"
    return max([check(file, [program], strict=strict) for file in files], default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
