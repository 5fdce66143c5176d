"""Which functions keep which guarantee, and in which failover mode."""

from __future__ import annotations

import pytest
from pyspark.sql.types import StructType

from backend_client.settings import BOUNDED_LOSS, DEFERRED, EXACT
from backend_client.spark.output.guarantees import AT_LEAST_ONCE, AT_MOST_ONCE, EXACTLY_ONCE, function_plan
from backend_client.spark.output.outputs import OutputPlan
from backend_client.spark.output.spark_sinks import SinkRequest, skips_batches
from storage.errors import InvalidInputError


def plan(guarantee: str | None, failover: str, *, skips: bool = True) -> OutputPlan:
    """Return the plan of a sink that writes once by the ids of batches, or that knows none."""
    return function_plan(
        lambda _batch, _id: None,
        guarantee,
        frozenset(),
        writes_once=skips,
        numbers_batches=True,
        skips_batches=skips,
        failover=failover,
    )


@pytest.mark.parametrize("failover", [DEFERRED, BOUNDED_LOSS])
def test_sinks_that_know_batches_by_id_need_exact_batches(failover: str) -> None:
    """
    I14: rows that wait in one execution of a batch and run in the next one are not lost to a sink that has seen its id.

    A sink that is written after the checkpoint never sees a batch twice, and one that knows no ids writes all of them.
    """
    for guarantee in (None, AT_LEAST_ONCE, EXACTLY_ONCE):
        plan(guarantee, EXACT)
        with pytest.raises(InvalidInputError, match=f"failover='{failover}' is not possible with a sink of Spark"):
            plan(guarantee, failover)
    plan(AT_MOST_ONCE, failover)
    plan(None, failover, skips=False)


def test_sinks_of_spark_that_know_batches_by_id() -> None:
    """Files, tables, memory and those of packages do; the others write whatever they are given."""
    formats = ["parquet", "delta", "memory", "kafka", "console", "noop", "Kafka"]
    assert [name for name in formats if skips_batches(SinkRequest(name, StructType()))] == formats[:3]
