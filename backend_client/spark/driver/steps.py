"""The stateless steps of a query: applied to the rows of a batch, and sent to tasks."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame

from backend_client.spark.driver.sinks import BatchFunction, ForeachRows
from backend_client.spark.private.batch_clock import at_batch_time
from backend_client.spark.query import Query, Step
from backend_client.spark.shipping import Shipments


def apply_steps(steps: Sequence[Step], frame: DataFrame, offsets: str) -> DataFrame:
    """Return a batch's rows behind some steps, with the batch's time where they ask for the current one."""
    for step in steps:
        frame = step(frame)
    return at_batch_time(frame, offsets) if steps else frame


def check_shippable(query: Query, function: BatchFunction | ForeachRows, shipments: Shipments) -> None:
    """
    Pack what is sent to tasks, so that what cannot be is found before the job is taken over.

    Raises:
        InvalidInputError: It cannot be sent.
    """
    for operator in query.operators:
        shipments.parcel(operator.processor)
        shipped_steps(operator.steps, shipments)
    shipped_steps(query.steps, shipments)
    if isinstance(function, ForeachRows):
        function.shipped(shipments)


def shipped_steps(steps: Sequence[Step], shipments: Shipments) -> tuple[Step, ...]:
    """Return the steps with their functions as Spark ships them."""
    return tuple(step.with_function(shipments.function) for step in steps)
