"""The event time of rows: its column, and the SQL condition for rows up to a moment."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pyspark.sql.types import StructType, TimestampNTZType, TimestampType

from backend_client.spark.columns import quoted
from storage.errors import InvalidInputError

DELAY_KEY = "spark.watermarkDelayMs"


@dataclass(frozen=True, slots=True)
class EventTime:
    """A row's event time as SQL; timestamps without zone are compared as UTC, as in Spark's watermark tracker."""

    sql: str
    has_zone: bool

    def until(self, moment_ms: int) -> str:
        """Return the SQL condition for rows up to a moment, inclusive; it is false for rows without a time."""
        if self.has_zone:
            moment = f"timestamp_millis({moment_ms})"
        else:
            wall_clock = datetime.fromtimestamp(0, UTC).replace(tzinfo=None) + timedelta(milliseconds=moment_ms)
            moment = f"timestamp_ntz'{wall_clock}'"
        return f"coalesce({self.sql} <= {moment}, false)"


def has_watermark(schema: StructType) -> bool:
    """Return whether a column has a watermark."""
    return any(DELAY_KEY in (field.metadata or {}) for field in schema.fields)


def event_time_of(schema: StructType, operator: str) -> EventTime | None:
    """
    Return the event time of an input's rows, or None if it has no watermark.

    Raises:
        InvalidInputError: The input has several columns with a watermark.
    """
    found = [field for field in schema.fields if DELAY_KEY in (field.metadata or {})]
    if len(found) > 1:
        raise InvalidInputError(
            f"the input of operator {operator!r} has several columns with a watermark: "
            f"{', '.join(field.name for field in found)}; drop all but one before groupBy"
        )
    if not found:
        return None
    name, kind = quoted(found[0].name), found[0].dataType
    if isinstance(kind, StructType):  # a window's time is its end
        name, kind = f"{name}.end", kind["end"].dataType
    return EventTime(name, not isinstance(kind, TimestampNTZType))


def mark_event_time(schema: StructType, column: str, source: StructType) -> StructType:
    """
    Return an output schema with `column` marked as event time, with the delay of the input's watermark.

    Raises:
        InvalidInputError: The column does not exist or is not a timestamp.
    """
    if column not in schema.names:
        raise InvalidInputError(
            f"eventTimeColumnName {column!r} is not a column of the output; it has {', '.join(schema.names)}"
        )
    kind = schema[column].dataType
    if not isinstance(kind, (TimestampType, TimestampNTZType)) and not (
        isinstance(kind, StructType) and "end" in kind.names
    ):
        raise InvalidInputError(f"eventTimeColumnName {column!r} must be a timestamp, not {kind.simpleString()}")
    delays = [field.metadata[DELAY_KEY] for field in source.fields if DELAY_KEY in (field.metadata or {})]
    marked = StructType.fromJson(schema.jsonValue())
    field = marked[column]
    field.metadata = {**(field.metadata or {}), DELAY_KEY: max(delays, default=0)}
    return marked
