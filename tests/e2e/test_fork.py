"""
A job that is forked while its query may go on: state, sources and output of the fork.

A failure means that the fork has other state than its parent had, reads rows twice or not at all, or that one of the
two publishes what is the other's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from backend_client import ChangelogStateBackend
from backend_client.sinks.parquet import ParquetSink
from dstl_service.cli import main
from dstl_service.collection.tombstones import Deletions
from storage.clock import SystemClock, SystemIds
from storage.errors import ConflictError, InvalidInputError
from storage.open import open_store
from tests.e2e.support import (
    OUTPUT,
    JobQueries,
    Totals,
    expected_output,
    expected_state,
    read_input,
    stored_totals,
    write_input,
)

pytestmark = pytest.mark.e2e

FILES = [[("a", 1.0), ("b", 2.0)], [("a", 10.0)], [("b", 20.0), ("c", 5.0)], [("a", 100.0)]]


class Queries(JobQueries):
    """The parent's query and that of a fork, over the same files, each with a folder of output."""

    def run(
        self,
        upto: int,
        job: str = "job",
        location: str | None = None,
        own: Callable[[DataFrame], DataFrame] = lambda stream: stream,
        *,
        by_spark: bool = False,
        **options: Any,
    ) -> None:
        """
        Run a job's query, one file per batch, over this many files.

        Args:
            upto: How many files.
            job: The job.
            location: The name of the Spark checkpoint; the job's by default.
            own: An operator of Spark's own before that of the backend.
            by_spark: Whether the output goes to Spark's own file sink.
            options: Settings of the backend.
        """
        write_input(self._folder / "in", FILES[:upto])
        backend = self._make(job, **options)
        result = backend.transform_with_state(
            own(read_input(self._spark, self._folder / "in")).groupBy("k"), Totals(), OUTPUT, "Update", "None"
        )
        out = self.output(job)
        writer = result.writeStream.sink(ParquetSink(f"file://{out}"), slots=1)
        if by_spark:
            writer = result.writeStream.format("parquet").option("path", str(out))
        self.to_end(writer, location or job)

    def published(self, job: str) -> list[tuple[Any, ...]]:
        """Return the records that a job has published, sorted."""
        return sorted(tuple(row.values()) for row in self.records(job))

    def written(self, job: str) -> list[tuple[Any, ...]]:
        """Return the rows that Spark's file sink has written, as Spark reads them, sorted."""
        return sorted(map(tuple, self._spark.read.parquet(str(self._folder / "out" / job)).collect()))

    def totals(self, job: str) -> list[tuple[Any, ...]]:
        """Return a job's stored state."""
        return stored_totals(self.storage, job)


def outputs(first: int, upto: int) -> list[tuple[Any, ...]]:
    """Return the output of the batches from `first` to before `upto`, sorted."""
    return sorted(row for batch, rows in expected_output(FILES).items() if first <= batch < upto for row in rows)


def test_fork_begins_where_its_parent_stood(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """
    I11, I14: a fork at a savepoint has its state, reads what came after it, and publishes the output of just that.

    The parent goes on, and neither publishes what is the other's; the parent is not deleted meanwhile.
    """
    queries = Queries(spark, make_backend, tmp_path)
    queries.run(2)
    assert main(["savepoints", "--storage", queries.storage, "--create", "before", "job"]) == 0
    queries.run(3)
    assert queries.totals("job") == expected_state(FILES[:3])
    fork: dict[str, Any] = {"fork_of": "job", "fork_at": "before"}
    with pytest.raises(InvalidInputError, match="set fork_location"):
        queries.run(3, "fork", **fork)
    fork["fork_location"] = str(queries.location("job"))
    with pytest.raises(InvalidInputError, match="use a new checkpointLocation"):
        queries.run(3, "fork", location="job", **fork)

    with pytest.raises(InvalidInputError, match=r"Spark's own stateful operators \(Deduplicate\) before"):
        queries.run(3, "fork", own=lambda stream: stream.dropDuplicates(["k", "v"]), **fork)

    queries.run(4, "fork", **fork)
    assert queries.totals("fork") == expected_state(FILES)
    queries.run(4, "fork")  # a restart goes on without the settings of the fork
    queries.run(4)
    assert queries.totals("job") == expected_state(FILES)
    assert queries.published("job") == outputs(0, 4)
    assert queries.published("fork") == outputs(2, 4)
    with pytest.raises(ConflictError, match="forks need its objects: fork"):
        Deletions(open_store(queries.storage), SystemClock(), SystemIds()).bury("job", "test", 0)
    assert main(["fsck", "--storage", queries.storage, "fork"]) == 0


def test_output_of_a_fork_is_read_by_spark(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """
    I14: Spark's file sink has all output of a fork; its log begins with 0, or Spark would refuse to read it.

    A fork that is set back to where it began goes on in its own Spark checkpoint, and in no new one.
    """
    queries = Queries(spark, make_backend, tmp_path)
    queries.run(2)
    parent = str(queries.location("job"))
    queries.run(4, "fork", by_spark=True, fork_of="job", fork_location=parent)
    assert queries.written("fork") == outputs(2, 4)
    assert main(["rewind", "--storage", queries.storage, "--checkpoint", "1", "--write", "fork"]) == 0
    with pytest.raises(InvalidInputError, match="Use the checkpointLocation that the fork was started with"):
        queries.run(4, "fork", location="new", by_spark=True, fork_location=parent)
    queries.run(4, "fork", by_spark=True)
    assert queries.totals("fork") == expected_state(FILES)
