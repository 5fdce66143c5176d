"""Leftovers of a query on the driver's disk and executors: none that grow with its batches, none after its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from backend_client import ChangelogStateBackend
from tests.e2e.support import OUTPUT, Totals, expected_output, random_input, read_input, write_input
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

FILES = random_input(seed=90, batches=3, rows=40, keys=8)
LARGE = b"x" * (3 << 20)


class LargeTotals(Totals):
    """`Totals` with a process-local model of some megabytes, and a broadcast of its user."""

    def __init__(self, spark: SparkSession) -> None:
        super().__init__()
        self.model = LARGE
        self.ones = spark.sparkContext.broadcast({"one": 1})

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        assert len(self.model) == len(LARGE)
        for row in super().handleInputRows(key, rows, timerValues):
            yield Row(k=row.k, n=row.n * self.ones.value["one"], s=row.s)


def broadcast_files(spark: SparkSession) -> set[str]:
    """Return the files of broadcasts on the driver's disk."""
    return {path.name for path in Path(spark.sparkContext._temp_dir).iterdir()}


@pytest.mark.parametrize("sink", ["foreachBatch", "foreach"])
def test_large_functions_are_shipped_once(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path, sink: str
) -> None:
    """However many batches run, a large processor, step or function is one file, deleted with its query."""
    model, out = LARGE, tmp_path / "out"
    out.mkdir()
    write_input(tmp_path / "in", FILES)

    def same(frames: Any) -> Iterator[Any]:
        assert len(model) == len(LARGE)
        yield from frames

    def write(row: Row) -> None:
        assert len(model) == len(LARGE)
        with (out / f"{row.k}-{row.n}").open("x") as file:
            file.write(str(row.s))

    def collect(batch: DataFrame, batch_id: int) -> None:
        seen.append(sorted((tuple(row) for row in batch.collect()), key=repr))
        files.append(len(broadcast_files(spark) - before))

    seen: list[Any] = []
    files: list[int] = []
    stream = read_input(spark, tmp_path / "in").groupBy("k")
    result = make_backend().transform_with_state(stream, LargeTotals(spark), OUTPUT, "Update", "None")
    before = broadcast_files(spark)
    result = result.mapInPandas(same, OUTPUT).mapInArrow(func=same, schema=OUTPUT)
    writer = result.writeStream.option("checkpointLocation", str(tmp_path / "chk")).trigger(availableNow=True)

    query = (writer.foreachBatch(collect) if sink == "foreachBatch" else writer.foreach(write)).start()
    query.awaitTermination()

    expected = list(expected_output(FILES).values())
    if sink == "foreachBatch":
        assert seen == expected
        assert files == [2, 2, 2]  # of the processor and of the steps
    else:
        assert {path.name for path in out.iterdir()} == {f"{k}-{n}" for rows in expected for k, n, _ in rows}
    # Files of other tests' queries may be deleted meanwhile.
    wait_until(lambda: broadcast_files(spark) <= before, what="the deletion of the query's shipments")
