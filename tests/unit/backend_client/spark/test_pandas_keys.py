"""Keys of the pandas API: the timestamps in them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StringType, StructType, TimestampNTZType, TimestampType

from backend_client.spark.task.pandas_calls import PandasKeys
from backend_client.spark.task.rows import row_factory
from backend_client.state.codec import KeyCodec

SCHEMA = StructType().add("name", StringType()).add("day", TimestampType()).add("wall", TimestampNTZType()).json()


class Keys(StatefulProcessor):
    """Remembers its keys."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self.seen.append(key)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        self.seen.append(key)
        return iter(())

    def close(self) -> None:
        pass


def test_timers_have_the_keys_of_their_rows() -> None:
    """A timestamp is that of the session's clock, in the key of rows and of a timer; one without zone stays."""
    processor, codec = Keys(), KeyCodec(SCHEMA, row_factory)
    keys = PandasKeys(processor, SCHEMA, "Asia/Kolkata")
    wall = dt.datetime(2024, 1, 1, 3)

    for day in (dt.datetime(2023, 12, 31, 18, 30, 0, 5, tzinfo=dt.UTC), None):
        given = ("a", day, wall)
        keys.handleInputRows(given, iter(()), None)
        keys.handleExpiredTimer(key=codec.decode(codec.encode(given)), timerValues=None, expiredTimerInfo=None)

    of_rows, of_timer, nothing_of_rows, nothing_of_timer = processor.seen
    assert of_rows == ("a", pd.Timestamp("2024-01-01 00:00:00.000005"), pd.Timestamp(wall))
    assert tuple(of_timer) == ("a", dt.datetime(2024, 1, 1, 0, 0, 0, 5), wall)
    assert (type(of_timer.day), of_timer.wall, of_timer.asDict()["name"]) == (dt.datetime, wall, "a")
    assert nothing_of_rows[1] is nothing_of_timer[1] is None
