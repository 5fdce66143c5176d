"""
``make report``: one page of all measurements, ``reports/report.html``, from what the other commands have left.

With RUN it runs commands first, one after the other, and writes the page again after each: RUN=bench-tails,load runs
these, RUN=missing all that have left no report. SHORT=1 and the like go on to them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.report.page import write_report
from tools.report.reading import read_target
from tools.report.sections import sections
from tools.reporting.target import REPORTS, TARGETS

MISSING = "missing"
_BAR = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and write the page; return 1 if a command failed."""
    parser = argparse.ArgumentParser(description="Write one page of all measurements.")
    parser.add_argument("--run", default=os.environ.get("RUN", ""), help=f"targets to run first, or {MISSING} (RUN)")
    parser.add_argument("--reports", type=Path, default=REPORTS, help="folder of the reports")
    options = parser.parse_args(arguments)
    wanted = _wanted(options.run, options.reports, parser)
    failed = []
    begun_s = time.monotonic()
    for number, target in enumerate(wanted):
        progress = f"{_bar(number, len(wanted))} make {target}, after {time.monotonic() - begun_s:.0f} s"
        print(progress, flush=True)
        _write(options.reports, f"Running command {number + 1} of {len(wanted)}: make {target}.")
        if subprocess.run(["make", target], check=False).returncode:
            failed.append(target)
    if wanted:
        print(f"{_bar(len(wanted), len(wanted))} done in {time.monotonic() - begun_s:.0f} s", flush=True)
    _write(options.reports, f"Failed: {', '.join(failed)}." if failed else "")
    print(f"{options.reports / 'report.html'} and {options.reports / 'report.json'} are written")
    return int(bool(failed))


def _wanted(text: str, folder: Path, parser: argparse.ArgumentParser) -> list[str]:
    if text == MISSING:
        return [target for target in TARGETS if read_target(folder, target).rows is None]
    wanted = [name for name in text.split(",") if name]
    if unknown := sorted(set(wanted) - set(TARGETS)):
        parser.error(f"unknown: {', '.join(unknown)}; choose {MISSING}, or from {', '.join(TARGETS)}")
    return wanted


def _write(folder: Path, progress: str) -> None:
    write_report(folder, sections(), {target: read_target(folder, target) for target in TARGETS}, progress)


def _bar(done: int, total: int) -> str:
    filled = _BAR * done // total
    return f"[{'#' * filled}{'.' * (_BAR - filled)}] {done} of {total}"


if __name__ == "__main__":
    sys.exit(main())
