"""The page and the JSON of `make report`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.report.reading import Found
from tools.report.sections import Section
from tools.reporting.about import as_text
from tools.reporting.figures import write_text
from tools.reporting.page import HtmlReport

_STATES = {True: "all goals hold", False: "goals missed"}


def write_report(folder: Path, sections: Sequence[Section], found: Mapping[str, Found], progress: str = "") -> None:
    """
    Write ``report.html`` and ``report.json``.

    Args:
        folder: Where they are written.
        sections: The page's.
        found: What there is of each of their targets.
        progress: What is being run meanwhile, in words.
    """
    targets = [target for section in sections for target in section.targets]
    measured = [found[target] for target in targets if found[target].rows is not None]
    held, goals = (
        (sum(numbers) for numbers in zip(*(one.goals for one in measured), strict=True)) if measured else (0, 0)
    )
    summary = f"{len(measured)} of {len(targets)} commands have left figures; {held} of {goals} goals hold."
    page = HtmlReport("Measurements", f"{summary} {progress}".rstrip())
    page.add_table(["Command", "State", "Goals that hold", "Begun"], [_line(found[target]) for target in targets])
    for section in sections:
        page.add_heading(section.title)
        page.add_text(section.text)
        for target in section.targets:
            _add(page, found[target])
    page.write(folder / "report.html")
    write_text(folder / "report.json", json.dumps(_rows(measured), indent=2) + "\n")


def _line(found: Found) -> list[object]:
    command = f"make {found.target}" if found.about is None else found.about["command"]
    if found.rows is None:
        return [command, found.problem or "has not run", "", ""]
    held, goals = found.goals
    state = _STATES[held == goals] if goals else "measured"
    begun = "" if found.about is None else found.about["begun"][:16].replace("T", " ")
    return [command, state, f"{held} of {goals}" if goals else "none set", begun]


def _add(page: HtmlReport, found: Found) -> None:
    page.add_subheading(found.target)
    if found.rows is None:
        page.add_note(found.problem or f"Nothing yet: make {found.target} fills this.")
        return
    for history in found.histories:
        page.add_plot(history.svg())
    page.add_stored_figures([(row.name, row.value, row.unit, row.goal, row.holds) for row in found.rows])
    page.add_note(
        "The versions and the machine of this run are not recorded." if found.about is None else as_text(found.about)
    )


def _rows(measured: Sequence[Found]) -> list[dict[str, Any]]:
    """Return all figures as a report has them, each with its target, command and time."""
    return [
        {
            **asdict(row),
            "target": found.target,
            "command": None if found.about is None else found.about["command"],
            "begun": None if found.about is None else found.about["begun"],
        }
        for found in measured
        for row in found.rows or ()
    ]
