"""
Writes reports/sbom.json: the bill of materials of this environment, in CycloneDX format.

Components are the installed distributions, with version, licence, package URL and dependencies; those pinned in
requirements.txt have the hashes by which they were verified.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "reports" / "sbom.json"
PROJECT = "pyspark-dstl"

_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)")


def normal(name: str) -> str:
    """Return a distribution's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[tuple[str, str], list[str]]:
    """Return the hashes of each pinned name and version of a requirements file."""
    found: dict[tuple[str, str], list[str]] = {}
    hashes: list[str] = []
    for line in text.splitlines():
        pin = _PIN.match(line)
        if pin is not None:
            hashes = found[normal(pin["name"]), pin["version"]] = []
        hashes.extend(_HASH.findall(line))
    return found


def bill(pinned: dict[tuple[str, str], list[str]]) -> dict[str, Any]:
    """Return the document."""
    installed = {normal(it.metadata["Name"]): it for it in metadata.distributions()}
    components = [_component(it, pinned) for name, it in sorted(installed.items()) if name != PROJECT]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**_component(installed[PROJECT], {}), "type": "application"}},
        "components": components,
        "dependencies": [
            {"ref": _purl(it), "dependsOn": sorted(_purl(installed[need]) for need in set(_needs(it)) & set(installed))}
            for _, it in sorted(installed.items())
        ],
    }


def _component(it: metadata.Distribution, pinned: dict[tuple[str, str], list[str]]) -> dict[str, Any]:
    purl = _purl(it)
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": normal(it.metadata["Name"]),
        "version": it.version,
        "purl": purl,
    }
    if "License-Expression" in it.metadata:
        component["licenses"] = [{"expression": it.metadata["License-Expression"]}]
    hashes = pinned.get((normal(it.metadata["Name"]), it.version), [])
    if hashes:
        # One per file of the release; the platform decides which one is installed.
        references = [{"alg": "SHA-256", "content": value} for value in hashes]
        component["externalReferences"] = [{"type": "distribution", "url": purl, "hashes": references}]
    return component


def _purl(it: metadata.Distribution) -> str:
    return f"pkg:pypi/{normal(it.metadata['Name'])}@{it.version}"


def _needs(it: metadata.Distribution) -> Iterator[str]:
    for requirement in it.requires or ():
        found = _REQUIREMENT.match(requirement)
        if found is not None and "extra ==" not in requirement:
            yield normal(found[1])


def main() -> int:
    """Write the report."""
    document = bill(pins((ROOT / "requirements.txt").read_text(encoding="utf-8")))
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{REPORT.relative_to(ROOT)}: {len(document['components'])} components\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
