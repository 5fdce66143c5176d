"""
``python -m loadtest.attack``: runs all cases against real service processes and prints a table of the groups.

Writes ``reports/attack.json`` and, with the service's state after each case, ``reports/attack-cases.json``. SHORT=1
omits slow cases that differ little from another one, STRICT=1 fails on any miss, ``--only`` selects groups by a part of
their names.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from loadtest.attack.harness.case import Case, Result, judge
from loadtest.attack.harness.other_user import IS_ROOT
from loadtest.attack.harness.target import Attacked
from loadtest.attack.peers import hung, links, slow, users
from loadtest.attack.requests import bodies, forged, forks, pages, paths, smuggling, tokens, values
from tools.reporting.figures import Figure, Goal
from tools.reporting.target import TargetReport, is_set

ROOT = Path(__file__).resolve().parents[2]
CASES_MIN = 150

_Stage = Callable[[Path], Iterator[Result]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite, or a part of it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of groups")
    only = parser.parse_args(arguments).only
    report, started = TargetReport("attack", ROOT / "reports"), time.monotonic()
    results = list(run(only, is_short=is_set("SHORT")))
    if not results:  # nothing that ran is nothing that held
        parser.error(f"no group of cases has {only!r} in its name")
    found = figures(results, time.monotonic() - started, is_whole=not only)
    exit_code = report.write(found)
    details = json.dumps([_row(result) for result in results], indent=1)
    (ROOT / "reports/attack-cases.json").write_text(details + "\n", encoding="utf-8")
    _print(results)
    return exit_code


def run(only: str = "", *, is_short: bool = False) -> Iterator[Result]:
    """Yield the results of the cases, service by service."""

    def wanted(cases: Sequence[Case]) -> list[Case]:
        return [case for case in cases if only in case.group and (case.is_short or not is_short)]

    opened = [*smuggling.cases(), *paths.cases(), *values.cases(), *pages.cases(), *forged.cases(), *forks.cases()]
    opened += bodies.cases()
    opened, of_users = wanted(opened), wanted(users.cases())
    guarded, peers = wanted([*tokens.cases(), *hung.cases()]), wanted(hung.of_known_peers())
    many, waiting, crowded = wanted(slow.alone()), wanted(slow.together()), wanted(slow.out_of_files())
    shaking, linked = wanted(slow.of_handshakes()), wanted(links.cases())
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        folder = Path(name)
        if opened or of_users:
            with Attacked(folder / "open") as target:
                yield from _each(opened, target)
                yield from _together(of_users, target, workers=3)
        if guarded:
            with Attacked(folder / "guarded", token=True) as target:
                yield from _each(guarded, target)
        if peers:
            with Attacked(folder / "peers", hung.KNOWN, token=True) as target:
                yield from _each(peers, target)
        if many:
            with Attacked(folder / "many", slow.SETTINGS, token=True) as target:
                yield from _together(waiting, target, workers=max(1, len(waiting)))
                yield from _each(many, target)
        if crowded:
            limit = f"ulimit -n {slow.FILES_MAX}"
            with Attacked(folder / "files", slow.SETTINGS, token=True, limit=limit) as target:
                yield from _each(crowded, target)
        if shaking:
            limit = f"ulimit -n {slow.FILES_MAX}"
            with Attacked(folder / "tls", slow.SETTINGS, token=True, limit=limit, tls=True) as target:
                yield from _each(shaking, target)
        if linked:
            with Attacked(folder / "links", unix=True) as target:
                yield from _each(linked, target)


def _each(cases: Sequence[Case], target: Attacked) -> Iterator[Result]:
    for case in cases:
        yield judge(case, target)


def _together(cases: Sequence[Case], target: Attacked, *, workers: int) -> list[Result]:
    """Run cases in parallel, since they wait; their cost for the service is measured for all together."""
    if not cases:
        return []
    target.begin()

    def one(case: Case) -> Result:
        started = time.monotonic()
        try:
            found = case.run(target)
        except Exception as error:  # noqa: BLE001 - after any error the case did not hold
            found = f"{type(error).__name__}: {error}"
        return Result(case, time.monotonic() - started, target.state(case.known), [found] if found else [])

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(one, cases))
    whole = judge(Case(cases[0].group, "after all of these", lambda _: None), target)
    return [*results, replace(whole, state=results[-1].state)]


def figures(results: Sequence[Result], seconds: float, *, is_whole: bool) -> list[Figure]:
    """Return the figures of the results."""
    found = [Figure("cases", len(results), "cases", Goal(">=", CASES_MIN) if is_whole else None)]
    for group in dict.fromkeys(result.case.group for result in results):
        missed = sum(1 for result in results if result.case.group == group and result.misses)
        found.append(Figure(f"{group}: cases missed", missed, "cases", Goal("==", 0)))
    if results:
        states = [result.state for result in results]
        found += [
            Figure("greatest growth of memory", max(state.rss_growth_bytes for state in states) / 2**20, "MiB"),
            Figure("slowest batch of another job", max(state.neighbour_ms_max for state in states), "ms"),
            Figure("failed batches of other jobs", sum(state.neighbour_errors for state in states), "batches"),
            Figure("objects of no known job", sum(len(state.stored) for state in states), "objects", Goal("==", 0)),
        ]
    return [*found, Figure("run time", round(seconds, 1), "s")]


def _row(result: Result) -> dict[str, object]:
    return {
        "group": result.case.group,
        "name": result.case.name,
        "held": not result.misses,
        "misses": result.misses,
        "seconds": round(result.seconds, 3),
        "rss_growth_bytes": result.state.rss_growth_bytes,
        "neighbour_ms_max": round(result.state.neighbour_ms_max, 1),
        "neighbour_errors": result.state.neighbour_errors,
        "stored": list(result.state.stored[:20]),
    }


def _print(results: Sequence[Result]) -> None:
    line = "{:<28} {:>5} {:>5} {:>6} {:>11} {:>10} {:>7} {:>6}\n"
    sys.stdout.write(line.format("group", "cases", "held", "missed", "memory MiB", "beside ms", "objects", "s"))
    for group in dict.fromkeys(result.case.group for result in results):
        of_group = [result for result in results if result.case.group == group]
        missed = sum(1 for result in of_group if result.misses)
        sys.stdout.write(
            line.format(
                group,
                len(of_group),
                len(of_group) - missed,
                missed,
                max(result.state.rss_growth_bytes for result in of_group) >> 20,
                f"{max(result.state.neighbour_ms_max for result in of_group):.0f}",
                sum(len(result.state.stored) for result in of_group),
                f"{sum(result.seconds for result in of_group):.0f}",
            )
        )
    for result in results:
        for miss in result.misses:
            sys.stdout.write(f"missed: {result.case.group}: {result.case.name}: {miss}\n")
    if not IS_ROOT:
        sys.stdout.write(f"{users.GROUP}: not run: only root can act as two users\n")


if __name__ == "__main__":
    sys.exit(main())
