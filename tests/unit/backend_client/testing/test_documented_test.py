"""The test of a processor in docs/state-schemas.md runs as printed, with the processor of the README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]


def test_documented_test_runs() -> None:
    """The two documents mean the same processor: its states, their schemas and its rows."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    guide = (ROOT / "docs" / "state-schemas.md").read_text(encoding="utf-8")
    processor = re.search(r"```python\n(.*?)\n\norders = ", readme, re.DOTALL)
    test = re.search(r"```python\n(.*?StateTester.*?)```", guide, re.DOTALL)
    assert processor is not None
    assert test is not None
    names: dict[str, Any] = {"__name__": "__main__"}

    exec(compile(processor[1], "README.md", "exec"), names)
    names["TotalsOfNextYear"] = names["Totals"]
    exec(compile(test[1], "docs/state-schemas.md", "exec"), names)
