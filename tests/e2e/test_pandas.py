"""
The pandas API on Spark's own operator and on this backend: the same processors, rows and restarts.

A failure means that a program behaves differently here than on Spark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend
from tests.e2e.support import Collected, read_input, run_to_end, write_input

pytestmark = pytest.mark.spark

PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
ROWS_PER_ARROW_BATCH = 7
ZONE = "America/New_York"

# Columns of every type, made of a number; `maybe` and `flag` are null for some keys, and never for others.
TYPED = (
    "k",
    "v",
    "cast(v as byte) as tiny",
    "cast(v as int) as whole",
    "cast(v as float) as small",
    "cast(v as decimal(10, 2)) as money",
    "if(k = 'a', null, v) as maybe",
    "cast(v % 2 = 0 as boolean) as even",
    "if(k = 'b', null, v % 2 = 0) as flag",
    "concat('é', cast(v as string)) as `with space`",
    "if(v % 3 = 0, null, cast(v as string)) as text",
    "timestamp_seconds(1700000000.25 + v) as ts",
    "if(v % 2 = 0, null, timestamp_seconds(v)) as nulls",
    "timestamp_ntz'2020-01-02 03:04:05.123456' as wall",
    "date_add(date'2020-01-01', cast(v as int)) as day",
    "cast(k as binary) as bytes",
    "array(v, null) as items",
    "struct(k, array(cast(v as int)) as inner) as pair",
    "map(coalesce(k, '-'), cast(v as int)) as named",
    "make_dt_interval(cast(v as int)) as gap",
    "null as nothing",
)


class Looks(StatefulProcessor):
    """Tells all that can be seen of a key and its frames."""

    def init(self, handle: Any) -> None:
        self.seen = handle.getValueState("seen", "n long, last timestamp, most double")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        frames = list(rows)
        frame = frames[0].sort_values("v", ignore_index=True)
        seen = self.seen.get()
        # Scalars of NumPy and pandas, as they come out of a frame.
        self.seen.update((np.int64(len(frame)) + (seen[0] if seen else 0), frame["ts"].max(), frame["small"].max()))
        look = {
            "key": [repr(part) for part in key],
            "columns": [[name, str(kind)] for name, kind in frame.dtypes.items()],
            "index": repr(frames[0].index),
            "values": [[repr(value) for value in row] for row in frame.itertuples(index=False, name=None)],
            "seen": repr(seen),
        }
        yield pd.DataFrame({"look": [json.dumps(look)], "k": [str(key[0])], "extra": [1]})

    def close(self) -> None:
        pass


class Collections(StatefulProcessor):
    """A list and a map of what the frames bring; its output has every type, and an empty frame now and then."""

    OUTPUT = (
        "k string, n int, top double, at timestamp, day date, tags array<string>, pair struct<a:int,b:string>, "
        "money decimal(10,2), ok boolean, raw binary, gap interval day to second"
    )

    def init(self, handle: Any) -> None:
        self.items = handle.getListState("items", "v double, tags array<string>")
        self.best = handle.getMapState("best", "even boolean", "v double, n long")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in rows:
            self.items.appendList([(v, [str(v)]) for v in frame["v"]])
            for even, part in frame.groupby("even"):
                top, n = self.best.getValue((even,)) or (-1.0, 0)
                self.best.updateValue((even,), (max(top, part["v"].max()), n + part["v"].count()))
        items = sorted(item[0] for item in self.items.get())
        best = sorted((key[0], *value) for key, value in self.best.iterator())
        yield pd.DataFrame()
        yield pd.DataFrame(
            {
                "raw": [None if len(items) % 2 else b"\x00\xff"],
                "n": pd.Series([len(items)], dtype="int64"),
                "top": [max(items)],
                "at": [pd.Timestamp("2020-06-01 12:00:00.5")],
                "day": [pd.Timestamp("2020-06-01").date()],
                "tags": [[str(item) for item in items]],
                "pair": [{"a": len(best), "b": str(best)}],
                "money": [None],
                "ok": [True if len(items) > 3 else None],
                "gap": [pd.Timedelta(days=1, seconds=len(items))],
                "k": [key[0]],
            }
        )

    def close(self) -> None:
        pass


class ByPosition(StatefulProcessor):
    """Yields frames whose columns have numbers for names, and several of them per key."""

    def init(self, handle: Any) -> None:
        self.calls = handle.getValueState("calls", "n int")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        calls = (self.calls.get() or (0,))[0] + 1
        self.calls.update((calls,))
        lengths = []
        for frame in rows:
            lengths.append(len(frame))
            frame["v"] += 0.5  # a frame is the processor's own
            yield pd.DataFrame([[key[0], value] for value in frame["v"]])
        assert max(lengths) <= ROWS_PER_ARROW_BATCH
        yield pd.DataFrame([[f"{key[0]} call {calls}", sum(lengths)]], columns=["k", "v"])
        yield pd.DataFrame({"k": pd.Categorical([key[0]]), "v": [None]})

    def close(self) -> None:
        pass


class Alarms(StatefulProcessor):
    """Sets a timer five seconds behind each key's newest row, and yields a frame when it fires."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.newest = handle.getValueState("newest", "v double")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        newest = max(frame["ts"].max() for frame in rows)
        self.newest.update((newest.timestamp(),))
        self.handle.registerTimer(int(newest.tz_localize(ZONE).timestamp() * 1000) + 5_000)
        yield pd.DataFrame({"k": [key[0]], "what": [f"rows until {newest}"]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        what = f"{key!r} expired at {expiredTimerInfo.getExpiryTimeInMs()} behind {self.newest.get()}"
        self.newest.clear()
        yield pd.DataFrame({"what": [what], "k": [key[0]]})

    def close(self) -> None:
        pass


@pytest.fixture
def both(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> Iterator[Callable[..., tuple[Collected, Collected]]]:
    """Run a processor over two runs of two batches on Spark's own operator, then on this backend."""
    settings = {
        "spark.sql.streaming.stateStore.providerClass": PROVIDER,
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ROWS_PER_ARROW_BATCH),
        "spark.sql.session.timeZone": ZONE,
    }
    before = {name: str(spark.conf.get(name)) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)

    def run(
        processor: Any,
        output: str,
        key: list[str],
        files: Any,
        columns: Any = TYPED,
        watermark: str | None = None,
        initial: Any = None,
    ) -> tuple[Collected, Collected]:
        theirs, ours = Collected(), Collected()
        for upto in (2, 4):
            write_input(tmp_path / "in", files[:upto])
            stream: DataFrame = read_input(spark, tmp_path / "in").selectExpr(*columns)
            mode = "None" if watermark is None else "EventTime"
            if watermark is not None:
                stream = stream.withWatermark(watermark, "2 seconds")
            states = None
            if initial is not None:
                states = spark.createDataFrame(initial, "id string, start long").groupBy("id")
            native = stream.groupBy(*key).transformWithStateInPandas(processor(), output, "Update", mode, states)
            run_to_end(native.writeStream.outputMode("update"), tmp_path / "theirs", theirs)
            result = make_backend(parallelism=upto).transform_with_state_in_pandas(
                stream.groupBy(*key), processor(), output, "Update", mode, states
            )
            run_to_end(result.writeStream, tmp_path / "ours", ours)
        assert sorted(ours.batches) == [0, 1, 2, 3]
        return theirs, ours

    yield run
    for name, value in before.items():
        spark.conf.set(name, value)


def test_frames_and_keys_look_as_on_spark(both: Callable[..., Any]) -> None:
    """Columns, types, index, values and keys are those of Spark's frames, for every type, with nulls (I14)."""
    files = [[(k, float(3 * batch + n)) for k in ("a", "b", None) for n in range(2)] for batch in range(4)]

    theirs, ours = both(Looks, "k string, look string", ["k", "ts", "day", "whole"], files)

    assert ours.batches == theirs.batches


def test_collections_and_output_types(both: Callable[..., Any]) -> None:
    """List and map state take what frames hold; output columns of every type arrive as on Spark (I14)."""
    files = [[(k, float(n % (batch + 2))) for k in ("a", "b", "c") for n in range(batch + 1)] for batch in range(4)]

    theirs, ours = both(Collections, Collections.OUTPUT, ["k"], files)

    assert ours.batches == theirs.batches


def test_big_keys_come_in_chunks(both: Callable[..., Any]) -> None:
    """A key of many Arrow batches is one call with several frames; output goes by position where names are numbers."""
    files = [[(k, float(n)) for k in ("a", "b") for n in range(10 * batch + 1)] for batch in range(4)]

    theirs, ours = both(ByPosition, "k string, v double", ["k"], files, ("k", "v"))

    assert ours.batches == theirs.batches


class Begins(StatefulProcessor):
    """Counts rows, beginning with what the initial state says."""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "n long, told string")

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: Any) -> None:
        n, told = self.total.get() or (0, "")
        told += repr(sorted(zip(initialState["id"], initialState["start"], strict=True)))
        self.total.update((n + initialState["start"].sum(), f"{told} {dict(initialState.dtypes.astype(str))}"))

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        n, told = self.total.get() or (0, "")
        for frame in rows:
            n += len(frame)
            told += f" {dict(frame.dtypes.astype(str))}" if told.count("{") < 2 else ""
        self.total.update((n, told))
        yield pd.DataFrame({"k": [key[0]], "n": [n], "told": [told]})

    def close(self) -> None:
        pass


def test_initial_state_comes_as_frames(both: Callable[..., Any]) -> None:
    """The rows of the initial state come before the input's, as frames with their own columns and types (I14)."""
    files = [[("a", 1.0), ("b", 1.0)], [("d", 1.0), ("a", 2.0)], [("a", 3.0)], [("c", 4.0)]]
    initial = [("a", 10), ("c", 20), ("a", 5)]

    theirs, ours = both(
        Begins, "k string, n long, told string", ["k"], files, ("k", "cast(v as int) as v"), initial=initial
    )

    assert ours.batches == theirs.batches


def test_timers_fire_with_frames(both: Callable[..., Any]) -> None:
    """Event-time timers of the pandas API fire for the same keys with the same state as on Spark (I14)."""
    files = [[("a", 0.0), ("b", 1.0)], [("a", 10.0)], [("c", 20.0), ("a", 21.0)], [("c", 40.0)]]

    theirs, ours = both(Alarms, "k string, what string", ["k"], files, ("k", "timestamp_seconds(v) as ts"), "ts")

    def outputs(collected: Collected) -> set[Any]:
        return {row for rows in collected.batches.values() for row in rows}

    # Behind the last rows, Spark fires those until 38 s in a batch without data; here they wait for the next batch.
    last = {row for row in outputs(theirs) if " 25000 " in row[1] or " 26000 " in row[1]}
    assert len(last) == 2
    assert outputs(ours) == outputs(theirs) - last
    assert any("expired" in row[1] for row in outputs(ours))
