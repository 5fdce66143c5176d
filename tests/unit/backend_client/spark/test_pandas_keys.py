"""Keys of the pandas API: the timestamps in them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import LongType, StringType, StructType, TimestampNTZType, TimestampType

from backend_client.spark.task.pandas_calls import PandasKeys, pandas_calls
from backend_client.spark.task.pandas_settings import PandasSettings
from backend_client.spark.task.row_calls import RowCalls
from backend_client.spark.task.rows import row_factory
from backend_client.state.codec import KeyCodec

SCHEMA = StructType().add("name", StringType()).add("day", TimestampType()).add("wall", TimestampNTZType()).json()


WINDOW = StructType().add("start", TimestampType()).add("end", TimestampType())
WINDOWS = StructType().add("window", WINDOW).add("rest", StructType().add("window", WINDOW).add("n", LongType())).json()


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


class TimersFirst(Keys):
    """Has the arguments of timers in an order of its own, which Spark allows."""

    def handleExpiredTimer(self, expiredTimerInfo: Any, timerValues: Any, key: Any) -> Iterator[Any]:
        self.seen += [expiredTimerInfo, timerValues, tuple(key)]
        return iter(())


def test_arguments_of_timers_are_passed_by_name() -> None:
    """As on Spark, the order of the method's parameters does not count."""
    processor, codec = TimersFirst(), KeyCodec(SCHEMA, row_factory)
    keys = PandasKeys(processor, SCHEMA, "UTC")
    key = codec.decode(codec.encode(("a", None, None)))

    keys.handleExpiredTimer(key=key, timerValues="times", expiredTimerInfo="timer")

    assert processor.seen == ["timer", "times", ("a", None, None)]


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


def test_windows_in_keys_have_the_session_s_clock() -> None:
    """A window, or another struct, is a dictionary of pandas timestamps, and a row of the same times for a timer."""
    processor, codec = Keys(), KeyCodec(WINDOWS, row_factory)
    keys = PandasKeys(processor, WINDOWS, "Asia/Kolkata")
    start, end = (dt.datetime(2023, 12, 31, 18, minute, tzinfo=dt.UTC) for minute in (30, 40))
    window = {"start": start, "end": end}

    for given in ((window, {"window": window, "n": 5}), (None, {"window": {"start": None, "end": end}, "n": None})):
        keys.handleInputRows(given, iter(()), None)
        stored = codec.decode(codec.encode(given))
        keys.handleExpiredTimer(key=stored, timerValues=None, expiredTimerInfo=None)

    of_rows, of_timer, nothing_of_rows, nothing_of_timer = processor.seen
    shown = {"start": pd.Timestamp("2024-01-01 00:00"), "end": pd.Timestamp("2024-01-01 00:10")}
    assert of_rows == (shown, {"window": shown, "n": 5})
    assert {type(moment) for moment in of_rows[0].values()} == {pd.Timestamp}
    assert of_timer.asDict(recursive=True) == {"window": shown, "rest": {"window": shown, "n": 5}}
    assert {type(moment) for moment in of_timer.window} == {dt.datetime}
    assert nothing_of_rows == (None, {"window": {**shown, "start": None}, "n": None})
    assert tuple(nothing_of_timer) == (None, ((None, shown["end"]), None))


def test_timestamps_without_zone_are_those_of_pandas() -> None:
    """A key with no other timestamps than those without a zone has pandas' timestamps, too."""
    processor, wall = Keys(), dt.datetime(2024, 1, 1, 3)
    schema = StructType().add("wall", TimestampNTZType()).json()
    calls = RowCalls("operator", processor, {}, schema, 1)
    settings = PandasSettings("UTC", by_name=True, safely=True)

    calls, _, _ = pandas_calls(calls, [], 1, ["n"], StructType().add("n", LongType()), settings)
    keys: Any = calls.processor
    keys.handleInputRows((wall,), iter(()), None)

    assert [type(part) for part in processor.seen[0]] == [pd.Timestamp]
    assert processor.seen == [(pd.Timestamp(wall),)]
