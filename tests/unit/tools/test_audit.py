"""The project's bill of materials, and advisories versus unreachable sources of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools import advisories, bill_of_materials

REPORT = {
    "dependencies": [
        {"name": "sound", "version": "1", "vulns": []},
        {"name": "left-out", "skip_reason": "no version"},
        {"name": "bad", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]},
    ]
}

UNKNOWN = {"dependencies": [{"name": "h11", "skip_reason": "not found"}]}


def program(folder: Path, output: str, code: int) -> list[str]:
    """Return the command of a program that replaces pip-audit."""
    script = folder / "audit.py"
    script.write_text(f"import sys\nsys.stdout.write({output!r})\nsys.stderr.write('no route')\nsys.exit({code})\n")
    return [sys.executable, str(script)]


@pytest.mark.parametrize(
    ("output", "code", "strict", "expected", "text"),
    [
        (json.dumps({"dependencies": []}), 0, True, 0, "0 advisories"),
        (json.dumps(REPORT), 1, False, 1, "bad 2 has PYSEC-1, fixed in 3"),
        (json.dumps(UNKNOWN), 0, False, 0, "1 pins NOT CHECKED"),
        (json.dumps(UNKNOWN), 0, True, 1, "1 pins NOT CHECKED"),
        ("", 1, False, 0, "NOT CHECKED, no source of advisories is reachable: no route"),
        ("", 1, True, 1, "NOT CHECKED"),
    ],
)
def test_advisories_are_distinguished_from_unreachable_sources(
    output: str, code: int, strict: bool, expected: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An advisory fails the check; an unreachable source is reported, and fails only a strict check."""
    assert advisories.check("requirements.txt", program(tmp_path, output, code), strict=strict) == expected
    assert text in capsys.readouterr().out


def test_missing_program_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Without pip-audit nothing is checked, and the output says so."""
    assert advisories.main(["/no/such/program", "requirements.txt"]) == 0
    assert "NOT CHECKED" in capsys.readouterr().out


def test_bill_of_materials_is_whole() -> None:
    """Every distribution is listed once, with its dependencies, and pinned ones with their hashes."""
    pinned = bill_of_materials.pins((bill_of_materials.ROOT / "requirements.txt").read_text(encoding="utf-8"))
    document = bill_of_materials.bill(pinned)
    refs = [component["bom-ref"] for component in document["components"]]
    fastapi = next(component for component in document["components"] if component["name"] == "fastapi")

    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert len(refs) == len(set(refs)) > 50
    assert len(fastapi["externalReferences"][0]["hashes"]) >= 2
    needs = {item["ref"]: item["dependsOn"] for item in document["dependencies"]}
    assert any(ref.startswith("pkg:pypi/starlette@") for ref in needs[fastapi["purl"]])
    assert {ref for refs in needs.values() for ref in refs} <= set(needs)


def test_pins_are_read() -> None:
    """Names, versions and hashes in a requirements file are found, whatever surrounds them."""
    hashes = "".join(f" \\\n    --hash=sha256:{digit * 64}" for digit in "01")
    text = f"# x\nA_b==1.0 ; python_version > '3'{hashes}\nc==2\n"

    assert bill_of_materials.pins(text) == {("a-b", "1.0"): ["0" * 64, "1" * 64], ("c", "2"): []}
