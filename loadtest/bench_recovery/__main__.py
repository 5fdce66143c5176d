"""
``make bench-recovery``: how long output stops when an executor is lost, and what is missing afterwards.

A standalone cluster of four hosts, each a network namespace with a local folder and a sidecar of its own, and an S3
server. A query with large state runs once for each column: the modes of failover with and without standbys, Spark's
own operator on the same stream and state, and a stop and start of the whole query on empty local disks. In each an
executor is lost in three ways at random moments: a task of it fails, its process is killed, its host is cut off.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from loadtest.bench_recovery.hosts import running_hosts
from loadtest.bench_recovery.observed import wrong_rows
from loadtest.bench_recovery.plan import COLUMNS, FULL, HOST, RESTART, SHORT, WAYS
from loadtest.bench_recovery.report import compared, figures_of, histories, write_page
from loadtest.bench_recovery.running import ColumnRun, run_column
from tools.reporting.figures import Figure
from tools.reporting.target import TargetReport, is_set
from tools.servers.network import why_no_network

_PAGE = Path("reports/bench-recovery.html")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write ``reports/bench-recovery.json`` and the page; return the exit code."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes are ended
    size = SHORT if options.short else FULL
    given = {name: getattr(options, name) for name in ("keys", "losses", "trigger_s")}
    size = replace(size, **{name: value for name, value in given.items() if value is not None})
    columns = [column for column in COLUMNS if column.name in options.columns]
    ways = [*options.ways]
    if HOST in ways and (reason := why_no_network()) is not None:
        print(f"left out: {HOST}; {reason}. The hosts are addresses of this machine.", flush=True)
        ways.remove(HOST)
    print(f"seed {options.seed}", flush=True)
    report = TargetReport("bench-recovery", strict=options.strict)
    runs: list[ColumnRun] = []
    figures: list[Figure] = []
    counts: dict[bool, dict[int, int]] = {True: {}, False: {}}
    exit_code = 0
    with _folder(options.folder) as folder, running_hosts(folder) as hosts:
        for column in columns:
            chosen = tuple(way for way in column.ways if way in (*ways, RESTART))
            run = run_column(hosts, column, size, chosen, random.Random(options.seed))
            wrong = wrong_rows(run.observed.outputs, counts[column.is_ours])
            figures += figures_of(run, wrong, is_short=options.short)
            runs.append(run)
            exit_code = report.write([*figures, *compared(runs, is_short=options.short)], histories(runs))
    figures += compared(runs, is_short=options.short)
    for figure in figures:
        value = "-" if figure.value is None else f"{figure.value:,.2f}"
        print(f"{figure.name:75} {value:>12} {figure.unit:6} {figure.goal or ''}")
    write_page(histories(runs), figures, size, _PAGE)
    return exit_code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how long the output stops when an executor is lost.")
    names = [column.name for column in COLUMNS]
    parser.add_argument(
        "--short", action="store_true", default=is_set("SHORT"), help="little state, one loss (SHORT=1)"
    )
    parser.add_argument("--strict", action="store_true", default=is_set("STRICT"), help="fail if a goal is missed")
    parser.add_argument("--columns", type=_some_of(names), default=names, help=f"some of {','.join(names)}")
    parser.add_argument("--ways", type=_some_of(WAYS), default=[*WAYS], help=f"some of {','.join(WAYS)}")
    parser.add_argument("--keys", type=int, help="keys of the state")
    parser.add_argument("--trigger", type=float, dest="trigger_s", help="seconds between two batches' starts")
    parser.add_argument("--losses", type=int, help="losses of each column and way")
    parser.add_argument("--folder", type=Path, help="an empty folder for all files, which stay there")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of the moments of the losses")
    return parser.parse_args(arguments)


def _folder(chosen: Path | None) -> AbstractContextManager[Path]:
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        return nullcontext(chosen.resolve())
    return _temporary()


@contextmanager
def _temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dstl-r-", ignore_cleanup_errors=True) as place:
        yield Path(place)


def _some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of some of these names, with commas between them."""

    def chosen(text: str) -> list[str]:
        found = text.split(",")
        if unknown := sorted(set(found) - set(names)):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(names)}")
        return found

    return chosen


if __name__ == "__main__":
    sys.exit(main())
