"""
Types on which Spark's own operator fails. All others are compared with it in `differential`.

A failure means that a processor sees or writes other values than its input.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import ArrayType, LongType, StructField, StructType

from storage.errors import InvalidInputError
from tests.e2e.differential.programs import Echo
from tests.e2e.differential.typed_values import SCHEMA, VALUES
from tests.e2e.support import Collected, run_to_end

pytestmark = pytest.mark.spark


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """Return two files, one per batch, with one row per key, of which one is all null."""
    schema = f"k string, i int, {SCHEMA}"
    folder = tmp_path / "in"
    for number in range(2):
        shift = VALUES[number:] + VALUES[:number]
        rows = [("k", at, *values) for at, values in enumerate(shift)]
        spark.createDataFrame(rows, schema).coalesce(1).write.mode("append").parquet(str(folder))
        (written,) = folder.glob("part-0*.parquet")
        path = written.rename(folder / f"part-done-{number}.parquet")
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))


def test_keys_may_hold_arrays(stream: DataFrame, make_backend: Any, tmp_path: Path) -> None:
    """Arrays and structs of arrays are valid keys: each row finds the state of its equals."""
    ours = Collected()
    frame = make_backend().transform_with_state(
        stream.groupBy("pair", "list"), Echo(), f"seen array<string>, {SCHEMA}", "Update", "None"
    )
    run_to_end(frame.writeStream, tmp_path / "ours", ours)

    assert {row[0][2] for row in ours.batches[0]} == {"None"}
    assert [row[1:] for row in ours.batches[1]] == [row[1:] for row in ours.batches[0]]
    assert "None" not in {row[0][2] for row in ours.batches[1]}


def test_variant_is_refused(spark: SparkSession, make_backend: Any, tmp_path: Path) -> None:
    """A state that cannot hold its type is refused before the query starts, with the field's name."""

    class Variants(Echo):
        def init(self, handle: Any) -> None:
            self.last = handle.getValueState("last", "name string, what variant")

    (tmp_path / "in").mkdir()
    rows = spark.readStream.schema("k string").json(str(tmp_path / "in"))
    with pytest.raises(InvalidInputError, match=r"last\.what: state cannot hold the type variant"):
        make_backend().transform_with_state(rows.groupBy("k"), Variants(), "k string", "Update", "None")


def test_output_has_nulls_that_its_schema_denies(stream: DataFrame, make_backend: Any, tmp_path: Path) -> None:
    """As on Spark, a processor may yield them at any depth, and a condition of a later step finds them."""

    class Nulls(Echo):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            yield from (Row(n=None, parts=[1, None], inner=Row(x=None)) for _ in rows)

    inner = StructType([StructField("x", LongType(), False)])
    fields = {"n": LongType(), "parts": ArrayType(LongType(), False), "inner": inner}
    output = StructType([StructField(name, kind, False) for name, kind in fields.items()])
    ours = Collected()
    rows = make_backend().transform_with_state(stream.groupBy("k"), Nulls(), output, "Update", "None")
    found = rows.where("n is null and inner.x is null and exists(parts, part -> part is null)")
    run_to_end(found.writeStream, tmp_path / "ours", ours)

    assert [len(batch) for batch in ours.batches.values()] == [3, 3]
