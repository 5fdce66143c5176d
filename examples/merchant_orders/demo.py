"""
``make demo-cdc``: runs the pipeline, kills parts of it four times, and compares the result with the database.

The connector is killed before it has told the database what is sent, so events are repeated; the job's driver, and
later its Python workers, while a transaction of its output is open; the job's sidecar in the middle of a batch.

Kafka and PostgreSQL must be running: KAFKA_SERVERS and libpq's variables (PGHOST, PGPORT, …) say where; ``python -m
tools.servers.beside`` starts both.

Exit codes: 0 the result is right; 1 it is not or, with ``--strict`` (STRICT=1), a goal is missed; 2 the run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psycopg

from examples.merchant_orders.topics import DEAD_LETTERS, RESULT, SOURCES
from examples.merchant_orders.trial.checks import (
    dead_letter_figures,
    read_chart,
    read_database,
    repeated_events,
    result_figures,
)
from examples.merchant_orders.trial.page import Story, read_totals, write_page
from examples.merchant_orders.trial.processes import DemoError
from examples.merchant_orders.trial.reader import read_topic
from examples.merchant_orders.trial.run import Run
from tools.reporting.figures import Figure, Goal, format_number
from tools.reporting.target import TargetReport, is_set


def evaluate(run: Run, servers: str, page: Path) -> tuple[list[Figure], list[str]]:
    """Write the page, and compare everything with the database; return figures, and what is wrong as text."""
    records, letters = read_topic(servers, RESULT), read_topic(servers, DEAD_LETTERS)
    events = [record for topic in SOURCES for record in read_topic(servers, topic)]
    totals, reasons = read_totals(run.parquet), [letter.headers["reason"] for letter in letters]
    write_page(page, totals, reasons)
    with psycopg.connect() as connection:
        expected = read_database(connection)
    parquet = {
        (total.merchant_id, total.minute): (total.orders, total.amount_cents, total.refunded_cents) for total in totals
    }
    chart = read_chart(page.read_text(encoding="utf-8"))
    compared, found = result_figures(expected, records, parquet, chart)
    transactions = json.loads(run.shop.last_line())
    compared += dead_letter_figures(run.dirty.sent, letters)
    found += [f"{figure.name}: {format_number(figure.value)}" for figure in compared if figure.holds is False]
    figures = [
        *compared,
        Figure("transactions committed", transactions["committed"], "transactions", Goal(">=", 1)),
        Figure("transactions rolled back", transactions.get("rolled back", 0), "transactions"),
        Figure("records in the topics of changes", len(events), "records"),
        Figure("change events that were repeated", repeated_events(events), "events", Goal(">=", 1)),
        Figure("kills survived", run.kills, "kills", Goal("==", 4)),
        Figure("unplanned restarts of the job", run.restarts, "starts", Goal("==", 0)),
        *run.figures,
    ]
    write_page(page, totals, reasons, Story(run.events, figures))
    return figures, found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the change-data pipeline, kill its programs, and compare its result with the database."""
    parser = argparse.ArgumentParser(prog="merchant_orders.demo", description=main.__doc__)
    parser.add_argument("--servers", default=os.environ.get("KAFKA_SERVERS", "localhost:9092"))
    parser.add_argument("--orders", type=int, default=1000 if is_set("SHORT") else 6000, help="(default %(default)s)")
    parser.add_argument("--reports", type=Path, default=Path("reports"), help="folder of the reports")
    parser.add_argument("--timeout-s", type=float, default=400, help="give up after this time (default %(default)s)")
    parser.add_argument("--strict", action="store_true", default=is_set("STRICT"))
    options = parser.parse_args(arguments)
    report = TargetReport("demo-cdc", options.reports, strict=options.strict)
    page = options.reports / "demo-cdc.html"
    work = Path(tempfile.mkdtemp(prefix="dstl-cdc-"))
    run = Run(work, options.servers, options.orders, options.timeout_s)
    try:
        run.play()
        figures, found = evaluate(run, options.servers, page)
    except DemoError as error:
        print(f"the demo failed: {error}\nfiles and logs of the run: {work}")
        return 2
    _print(figures, found)
    print(f"report: {page}")
    is_wrong = any(figure.holds is False for figure in figures)
    if is_wrong:
        print(f"files and logs of the run: {work}")
    else:
        shutil.rmtree(work, ignore_errors=True)
    return report.write(figures) or int(bool(found))


def _print(figures: Sequence[Figure], found: Sequence[str]) -> None:
    for figure in figures:
        mark = {True: "holds", False: "MISSED", None: ""}[figure.holds]
        goal = "" if figure.goal is None else str(figure.goal)
        print(f"{figure.name:46} {format_number(figure.value):>8} {figure.unit:13} {goal:8} {mark}")
    for text in found[:10]:
        print(text)


if __name__ == "__main__":
    # When stopped, it must end its programs: the exception makes `finally` run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
