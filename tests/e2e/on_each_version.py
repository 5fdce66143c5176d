"""The query of the short tests on older minor versions of Spark, see `tools.test_versions`; the suite has others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from tests.e2e.support import (
    OUTPUT,
    Collected,
    Totals,
    expected_output,
    random_input,
    read_input,
    run_to_end,
    write_input,
)
from tests.e2e.test_install import PandasTotals

pytestmark = pytest.mark.e2e


def test_query_goes_on(spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path) -> None:
    """I14: operators of both APIs go on at another parallelism, and give what plain Python gives."""
    files, collected = random_input(seed=2, batches=3, rows=60, keys=12), Collected()
    for upto, parallelism in ((2, 2), (3, 3)):
        write_input(tmp_path / "in", files[:upto])
        stream = read_input(spark, tmp_path / "in")
        with make_backend(parallelism=parallelism).install(spark):
            totals: Any = stream.groupBy("k").transformWithState(Totals(), OUTPUT, "Update", "None")
            keys = totals.selectExpr("k", "s as v").groupBy("k")
            result = keys.transformWithStateInPandas(PandasTotals(), OUTPUT, "Update", "None")
        run_to_end(result.writeStream.queryName("totals"), tmp_path / "chk", collected)

    sums = [[(key, total) for key, _, total in rows] for rows in expected_output(files).values()]
    assert collected.batches == expected_output(sums)
