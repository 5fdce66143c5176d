"""
How Spark moves rows to their partitions, and in which order they arrive.

A failure means that a processor sees a key twice in a batch, or the rows of two keys as one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from backend_client import ChangelogStateBackend
from backend_client.batch_time import TimeMode
from backend_client.columnar import Aggregate, Count, Sum
from backend_client.key_group_sql import order_expression
from backend_client.spark.driver.placement import place
from backend_client.spark.event_time import DELAY_KEY
from backend_client.spark.query import Operator
from loadtest.bench.processors import PandasTotals, Totals
from tests.e2e.support import Collected, run_to_end

pytestmark = pytest.mark.spark
KEYS = ([1, None], [None, 1], [1], [2])
"""The first three have one hash, because it skips nulls."""


def test_late_rows_lie_before_all_others(spark: SparkSession) -> None:
    """Late rows come first, then each key once."""
    time = F.expr("timestamp_millis(pmod(hash(id), 90) * 1000)").alias("t", metadata={DELAY_KEY: 0})
    rows = spark.range(3_000).select(F.expr("cast(id % 100 as int) as k"), time)
    operator = Operator(
        name="op",
        processor=Totals(),
        key_columns=("k",),
        input_schema=rows.schema,
        output_schema=StructType(),
        states={},
        parallelism=None,
        steps=(),
        time_mode=TimeMode.EVENT,
    )
    placed = place(operator, rows, 3, 128, None, 29_000).frame()

    found = placed.select(F.spark_partition_id().alias("part"), "__dstl_order", "k", F.unix_millis("t").alias("t"))
    partitions = [list(group) for _, group in groupby(found.collect(), key=lambda row: row.part)]
    assert len(partitions) == 3
    keys = []
    for partition in partitions:
        is_late = [row.t <= 29_000 for row in partition]
        assert is_late == [row["__dstl_order"] < 0 for row in partition] == sorted(is_late, reverse=True)
        on_time = partition[sum(is_late) :]
        assert [row["__dstl_order"] for row in on_time] == sorted(row["__dstl_order"] for row in on_time)
        keys += [key for key, _ in groupby(on_time, key=lambda row: row.k)]
    assert sorted(keys) == list(range(100))


class Calls(Totals):
    """Counts rows and calls per key."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        """Count."""
        n, calls = self.totals.get() or (0, 0.0)
        self.totals.update((n + sum(1 for _ in rows), calls + 1))
        yield Row(k=key[0], n=self.totals.get()[0], s=self.totals.get()[1])


class PandasCalls(PandasTotals):
    """The same with frames."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Count."""
        n, calls = self._totals.get() or (0, 0.0)
        self._totals.update((n + sum(len(part) for part in rows), calls + 1))
        n, calls = self._totals.get()
        yield pd.DataFrame({"k": [list(key[0])], "n": [n], "s": [calls]})


def counted(backend: ChangelogStateBackend, grouped: Any, api: str) -> Any:
    """Return the number of rows per key, and of calls if any."""
    output = "k array<int>, n long, s double"
    if api == "rows":
        return backend.transform_with_state(grouped, Calls(), output, "Update", "None")
    if api == "pandas":
        return backend.transform_with_state_in_pandas(grouped, PandasCalls(), output, "Update", "None")
    return backend.transform_columns(grouped, Aggregate(Count(name="n"), Sum("one", name="s")))


@pytest.mark.parametrize("api", ["rows", "pandas", "columns"])
def test_keys_with_one_hash_are_kept_apart(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path, api: str
) -> None:
    """Keys with equal Spark hashes are each seen once per batch, with all their rows."""
    session = spark.newSession()
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    counts = {str(key): 500 + 7 * number for number, key in enumerate(KEYS)}
    rows = [(key, at) for key in KEYS for at in range(counts[str(key)])]
    frame = session.createDataFrame(rows, "k array<int>, at int").orderBy("at").coalesce(1)
    assert frame.selectExpr(order_expression(["k"], 128)).distinct().count() == 2
    for _ in range(2):
        frame.write.mode("append").parquet(str(tmp_path / "in"))
    stream = session.readStream.schema(frame.schema).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    collected = Collected()
    grouped = stream.withColumn("one", F.lit(1.0)).groupBy("k")
    run_to_end(counted(make_backend(), grouped, api).writeStream, tmp_path / "chk", collected)

    assert sorted(collected.batches) == [0, 1]
    for number, batch in collected.batches.items():
        times = number + 1
        sums = {key: float(times * n) if api == "columns" else float(times) for key, n in counts.items()}
        assert sorted((str(k), n, s) for k, n, s in batch) == sorted((k, times * n, sums[k]) for k, n in counts.items())
