"""The Python of the workers: the driver's in local mode, and checked for its modules when a query starts."""

from __future__ import annotations

import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from backend_client.spark.start.worker_python import check_worker_python
from storage.errors import InvalidInputError
from tests.e2e.support import OUTPUT, Collected, Totals, read_input, run_to_end, write_input

pytestmark = [pytest.mark.spark, pytest.mark.e2e]

Backends = Callable[..., ChangelogStateBackend]


@pytest.fixture
def python(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None, str], None]:
    """Make the session look as if started with a PYSPARK_PYTHON, or without it."""

    def use(chosen: str | None, found: str) -> None:
        if chosen is None:
            monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
        else:
            monkeypatch.setenv("PYSPARK_PYTHON", chosen)
        monkeypatch.setattr(spark.sparkContext, "pythonExec", found)

    return use


def run(backend: ChangelogStateBackend, spark: SparkSession, tmp_path: Path) -> Collected:
    write_input(tmp_path / "in", [[("a", 1.0)]])
    collected = Collected()
    grouped = read_input(spark, tmp_path / "in").groupBy("k")
    result = backend.transform_with_state(grouped, Totals(), OUTPUT, "Update", "None")
    run_to_end(result.writeStream, tmp_path / "chk", collected)
    return collected


def test_local_mode_takes_the_drivers_python(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, python: Callable[..., None]
) -> None:
    """Without PYSPARK_PYTHON a query in local mode runs, and so does its source of ticks, whatever is on the path."""
    python(None, "/no/such/python3")

    assert run(make_backend(idle_timers=3600.0), spark, tmp_path).batches == {0: [("a", 1, 1.0)]}
    assert spark.sparkContext.pythonExec == sys.executable


def test_python_without_modules_is_refused(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, python: Callable[..., None]
) -> None:
    """An interpreter without the packages is refused when the query starts, with the setting to change."""
    venv.create(tmp_path / "bare", with_pip=False)
    bare = str(tmp_path / "bare/bin/python")
    python(bare, bare)

    with pytest.raises(InvalidInputError, match=r"lacks the modules .*pyarrow.*set PYSPARK_PYTHON") as raised:
        run(make_backend(), spark, tmp_path)

    assert bare in str(raised.value)
    assert not (tmp_path / "chk").exists()


def test_missing_python_is_refused(spark: SparkSession, python: Callable[..., None]) -> None:
    """An interpreter that is missing on the workers is refused, too."""
    python("/no/such/python3", "/no/such/python3")

    with pytest.raises(InvalidInputError, match=r"cannot run tasks: .*no/such/python3.*PYSPARK_PYTHON"):
        check_worker_python(spark)


def test_workers_are_checked_once(
    spark: SparkSession, tmp_path: Path, python: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python that can run tasks is checked once per session, even under another name."""
    linked = tmp_path / "python"
    linked.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    linked.chmod(0o755)
    python(str(linked), str(linked))

    check_worker_python(spark)
    monkeypatch.setattr(type(spark.sparkContext), "parallelize", None)
    check_worker_python(spark)
