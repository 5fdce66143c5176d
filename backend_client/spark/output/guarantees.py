"""
Guarantees of a query's output, and which sinks can keep them.

The state is exactly once whatever is chosen.
"""

from __future__ import annotations

from backend_client.settings import EXACT
from backend_client.spark.output.outputs import FunctionPlan, OutputPlan
from backend_client.spark.output.spark_sinks import BatchFunction, ForeachRows
from storage.errors import InvalidInputError

AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE = "at-most-once", "at-least-once", "exactly-once"
GUARANTEES = (AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE)


def check_guarantee(name: str) -> str:
    """Return the guarantee of this name; `InvalidInputError` if there is none."""
    found = str(name).lower().replace("_", "-")
    if found not in GUARANTEES:
        raise InvalidInputError(f"guarantee {name!r} is unknown; use one of {', '.join(GUARANTEES)}")
    return found


def function_plan(
    function: BatchFunction | ForeachRows,
    guarantee: str | None,
    abandoned: frozenset[str],
    *,
    writes_once: bool,
    numbers_batches: bool,
    skips_batches: bool,
    failover: str,
) -> OutputPlan:
    """
    Return the output of a query whose batches a function writes.

    Args:
        function: The function.
        guarantee: The guarantee that the user asked for; None for the most that the function can keep.
        abandoned: See `outputs.closed_sinks`.
        writes_once: Whether the function skips a batch that it has written before, as Spark's file sinks do.
        numbers_batches: Whether it is one of Spark's sinks, which know batches by their ids.
        skips_batches: Whether it leaves out a batch whose id it has seen.
        failover: The query's failover mode.

    Raises:
        InvalidInputError: The function cannot keep the guarantee, or not in this failover mode.
    """
    if guarantee == EXACTLY_ONCE and not writes_once:
        raise InvalidInputError(
            "guarantee='exactly-once' needs a sink that writes once or publishes what a checkpoint holds: a file "
            "format, format('kafka'), or sink(…) with KafkaSink, PostgresSink, ParquetSink, DeltaSink or your own; "
            "foreachBatch, foreach and Spark's other sinks are 'at-least-once' or 'at-most-once'"
        )
    if skips_batches and guarantee != AT_MOST_ONCE and failover != EXACT:
        raise InvalidInputError(
            f"failover={failover!r} is not possible with a sink of Spark that leaves out batches that it has seen: one "
            "that is executed again may have rows that waited the first time, and their output would be lost. Use "
            "sink(…) with ParquetSink or another one, guarantee('at-most-once'), or failover='exact'"
        )
    return FunctionPlan(function, guarantee == AT_MOST_ONCE, abandoned, numbers_batches)
