"""A query's stateless steps: applied to a batch's rows, and shipped to tasks."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame

from backend_client.spark.private.current_time import at_batch_time
from backend_client.spark.query import Query, Step
from backend_client.spark.shipping import Shipments


def apply_steps(steps: Sequence[Step], frame: DataFrame, offsets: str) -> DataFrame:
    """Return a batch's rows after the steps; the current time in them is the batch's."""
    for step in steps:
        frame = step(frame)
    return at_batch_time(frame, offsets) if steps else frame


def check_shippable(query: Query, shipments: Shipments) -> None:
    """
    Pickle everything that is shipped to tasks, so that a failure shows before the job is taken over.

    Raises:
        InvalidInputError: A processor or function cannot be pickled.
    """
    for operator in query.operators:
        shipments.parcel(operator.processor)
        shipped_steps(operator.steps, shipments)
    shipped_steps(query.steps, shipments)


def shipped_steps(steps: Sequence[Step], shipments: Shipments) -> tuple[Step, ...]:
    """Return the steps with their functions pickled for shipping."""
    return tuple(step.with_function(shipments.function) for step in steps)
