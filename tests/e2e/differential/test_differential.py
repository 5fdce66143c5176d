"""
Programs on Spark's own operator and on this backend: the same text, the same input, equal outputs.

Steps: Hypothesis draws a history - rows, batches, restarts, a parallelism for each run, lost tables and commits - and a
query runs it on both engines, here with tables that are materialized all the time. Every plan of `PLANS` is in a query.

A failure means that a program behaves differently here than on Spark; the smallest history that shows it is printed.
DSTL_DIFFERENTIAL_EXAMPLES sets the number of histories of each query, DSTL_DIFFERENTIAL_SEED repeats a run,
DSTL_DIFFERENTIAL_REPORT names a file for the figures; ``make differential`` is the long form.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from tests.e2e.differential.engines import Engines
from tests.e2e.differential.history import History, histories
from tests.e2e.differential.plans import PLANS, QUERIES, Query

EXAMPLES = int(os.environ.get("DSTL_DIFFERENTIAL_EXAMPLES", "1"))
SEED = os.environ.get("DSTL_DIFFERENTIAL_SEED")

pytestmark = [pytest.mark.spark]


@pytest.fixture(scope="module")
def engines(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, module_dir: Path) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("differential")

    def make_backend(job: str, parallelism: int) -> ChangelogStateBackend:
        return ChangelogStateBackend(
            f"file://{folder / 'store'}", job=job, local_dir=str(module_dir), parallelism=parallelism
        )

    yield Engines(spark, folder, make_backend, module_dir)


@pytest.fixture(scope="module")
def module_dir() -> Any:
    import tempfile, shutil
    from tests.e2e.conftest import stop
    folder = Path(tempfile.mkdtemp(prefix="dstl-"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("ENABLED", "true"), ("INTERVAL_S", "1"), ("LOG_RATIO", "0"), ("LOG_FLOOR_BYTES", "1")):
            patch.setenv(f"DSTL_MATERIALIZATION_{name}", value)
        yield folder
    for pid_file in folder.glob("service-*.pid"):
        stop(int(pid_file.read_text(encoding="utf-8")))
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("query", QUERIES, ids=[query.name for query in QUERIES])
def test_plans_behave_as_on_spark(engines: Engines, query: Query) -> None:
    """I14: the same rows give the same output over restarts, rescaling, lost tables and lost commits."""

    before = engines.mismatches

    @settings(max_examples=EXAMPLES, derandomize=SEED is None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)
    @given(histories(query.runs))
    def check(history: History) -> None:
        if history.rows < 8 and engines.mismatches == before:
            reject()
        engines.compare(query, history)

    check()
