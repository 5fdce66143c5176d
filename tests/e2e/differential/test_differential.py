"""
Programs on Spark's own operator and on this backend: the same program, the same input, equal outputs.

Steps: Hypothesis draws a history - rows, batches, restarts, a parallelism for each run, lost tables and commits - and
both engines run it, this one with tables that are materialized all the time. A last history contains all of that,
whatever Hypothesis draws; with one example for each query, it is the only one but for the first query.

A failure means that a program behaves differently here than on Spark; the history that shows it is printed.
DSTL_DIFFERENTIAL_EXAMPLES sets the number of histories drawn per query; from 2 on each plan also runs alone, and
failures are shrunk. DSTL_DIFFERENTIAL_SEED repeats a run, DSTL_REPORTS names a folder for the figures; ``make
differential`` is the long form.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from tests.e2e.conftest import folder_of_sidecars
from tests.e2e.differential.engines import Engines
from tests.e2e.differential.history import History, histories, rich_history
from tests.e2e.differential.plans import PLANS, QUERIES, Query, alone
from tools.reporting.figures import Figure, Goal
from tools.reporting.target import TargetReport

EXAMPLES = int(os.environ.get("DSTL_DIFFERENTIAL_EXAMPLES", "1"))
SEED = os.environ.get("DSTL_DIFFERENTIAL_SEED")
IS_LONG = EXAMPLES > 1
ALONE = [alone(query, plan) for plan, query in PLANS.items() if len(query.plans) > 1] if IS_LONG else []
PLANS_MIN, DRAWN_PLANS_MIN = 25, 8
ROWS_MIN = 12
"""Histories of fewer rows are not worth a query, unless to shrink one that failed."""
RICH_TRIES = 3
"""On a loaded machine checkpoints do not wait for their snapshots, so no history may name one."""

PAGE = Path(__file__).resolve().parents[3] / "docs/switching-over.md"

pytestmark = [pytest.mark.spark]


@pytest.fixture(scope="module")
def engines(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Return both engines; this backend's sidecar requests a snapshot after any change. Writes the report."""
    reports = os.environ.get("DSTL_REPORTS")
    report = TargetReport("differential", Path(reports)) if reports else None
    folder, started = tmp_path_factory.mktemp("differential"), time.monotonic()
    with folder_of_sidecars() as local_dir, pytest.MonkeyPatch.context() as patch:
        for name, value in (("ENABLED", "true"), ("INTERVAL_S", "1"), ("LOG_RATIO", "0"), ("LOG_FLOOR_BYTES", "1")):
            patch.setenv(f"DSTL_MATERIALIZATION_{name}", value)

        def make_backend(job: str, parallelism: int) -> ChangelogStateBackend:
            return ChangelogStateBackend(
                f"file://{folder / 'store'}", job=job, local_dir=str(local_dir), parallelism=parallelism
            )

        engines = Engines(spark, folder, make_backend, local_dir)
        yield engines
    if report is not None:
        assert report.write(figures(engines, time.monotonic() - started)) == 0, "a goal does not hold, see the report"


def figures(engines: Engines, seconds: float) -> list[Figure]:
    """Return the figures of a run."""
    return [
        Figure("plans compared with Spark's operator", len(engines.plans), "plans", Goal(">=", PLANS_MIN)),
        Figure(
            "plans with histories drawn by Hypothesis", len(engines.drawn_plans), "plans", Goal(">=", DRAWN_PLANS_MIN)
        ),
        Figure("histories", engines.histories, "histories"),
        Figure("rows drawn", engines.rows, "rows"),
        Figure("output rows compared", engines.outputs, "rows"),
        Figure("queries with mismatches", len(engines.mismatches), "queries", Goal("==", 0)),
        Figure("run time", round(seconds, 1), "s"),
    ]


@pytest.mark.timeout(300 * EXAMPLES)
@pytest.mark.parametrize("query", [*QUERIES, *ALONE], ids=lambda query: query.name)
def test_plans_behave_as_on_spark(engines: Engines, query: Query) -> None:
    """I14: the same rows give the same output over restarts, rescaling, lost tables and lost commits."""
    drawn_from = int(SEED or random.SystemRandom().randrange(1 << 32)) if IS_LONG else 0
    print(f"DSTL_DIFFERENTIAL_SEED={drawn_from}")

    @seed(drawn_from)
    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.generate, *([Phase.shrink] if IS_LONG else [])],
        suppress_health_check=[HealthCheck.filter_too_much],
        database=None,
    )
    @given(histories(query.runs))
    def check(history: History) -> None:
        if history.rows < ROWS_MIN and query.name not in engines.mismatches:
            reject()
        engines.compare(query, history)

    if IS_LONG or query is QUERIES[0]:
        check()
        engines.drawn_plans |= query.plans.keys()
    for _ in range(RICH_TRIES):
        engines.compare(query, rich_history(query.runs[1]))
        if query.name in engines.materialized:
            break
    assert engines.plans >= query.plans.keys()
    assert query.name in engines.materialized


def test_plans_are_many_and_documented() -> None:
    """The number of plans reaches its goal, and the users' page has exactly one row for each."""
    section = PAGE.read_text(encoding="utf-8").partition("## Comparison with Spark")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `([a-z0-9-]+)` \|", section, re.MULTILINE))

    assert len(PLANS) >= PLANS_MIN
    assert documented == PLANS.keys()
