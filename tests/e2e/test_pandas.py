"""
The frames of the pandas API on Spark's own operator and on this backend. For state and timers see `differential`.

A failure means that a program behaves differently here than on Spark.
"""

from __future__ import annotations

import datetime as dt
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

# Columns of every type, derived from a number; `maybe` and `flag` are null for some keys, and never for others.
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
    "window(timestamp_seconds(1700000000.25 + v), '10 seconds') as span",
    "null as nothing",
)


class Looks(StatefulProcessor):
    """Reports all visible properties of a key and its frames."""

    def init(self, handle: Any) -> None:
        self.seen = handle.getValueState("seen", "n long, last timestamp, most double")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        frames = list(rows)
        frame = frames[0].sort_values("v", ignore_index=True)
        seen = self.seen.get()
        # NumPy and pandas scalars from a frame.
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
    """A list and a map of values from frames; its output has every type, and sometimes an empty frame."""

    OUTPUT = (
        "k string, n int, top double, at timestamp, day date, tags array<string>, pair struct<a:int,b:string>, "
        "money decimal(10,2), ok boolean, raw binary, gap interval day to second, "
        "seen timestamp, whole int"
    )

    def init(self, handle: Any) -> None:
        self.items = handle.getListState("items", "v double, tags array<string>")
        self.best = handle.getMapState("best", "even boolean", "v double, n long")
        self.buffer = bytearray()

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in rows:
            self.items.appendList([(v, [str(v)]) for v in frame["v"]])
            for even, part in frame.groupby("even"):
                top, n = self.best.getValue((even,)) or (-1.0, 0)
                self.best.updateValue((even,), (max(top, part["v"].max()), n + part["v"].count()))
        items = sorted(item[0] for item in self.items.get())
        best = sorted((key[0], *value) for key, value in self.best.iterator())
        self.buffer[:] = str(key).encode()
        yield pd.DataFrame()
        yield pd.DataFrame(
            {
                "raw": [None if len(items) % 2 else self.buffer],
                "seen": pd.Series([dt.datetime(2020, 6, 1, 12)], dtype=object),
                "whole": pd.array([len(items) > 3], dtype="boolean"),
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
    """Yields frames with numbers as column names, and several of them per key."""

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


@pytest.fixture
def both(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> Iterator[Callable[..., tuple[Collected, Collected]]]:
    """Run a processor over runs of two batches and of one, on Spark's own operator, then on this backend."""
    settings = {
        "spark.sql.streaming.stateStore.providerClass": PROVIDER,
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ROWS_PER_ARROW_BATCH),
        "spark.sql.session.timeZone": ZONE,
    }
    before = {name: str(spark.conf.get(name)) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)

    def run(
        processor: Any, output: str, key: list[str], files: Any, columns: Any = TYPED
    ) -> tuple[Collected, Collected]:
        theirs, ours = Collected(), Collected()
        for upto in (2, 3):
            write_input(tmp_path / "in", files[:upto])
            stream: DataFrame = read_input(spark, tmp_path / "in").selectExpr(*columns)
            native = stream.groupBy(*key).transformWithStateInPandas(processor(), output, "Update", "None")
            run_to_end(native.writeStream.outputMode("update"), tmp_path / "theirs", theirs)
            result = make_backend(parallelism=upto).transform_with_state_in_pandas(
                stream.groupBy(*key), processor(), output, "Update", "None"
            )
            run_to_end(result.writeStream, tmp_path / "ours", ours)
        assert sorted(ours.batches) == [0, 1, 2]
        return theirs, ours

    yield run
    for name, value in before.items():
        spark.conf.set(name, value)


@pytest.mark.parametrize("key", [["k", "ts", "day", "whole"], ["k", "wall", "span"]])
def test_frames_and_keys_look_as_on_spark(both: Callable[..., Any], key: list[str]) -> None:
    """I14: columns, types, index, values and keys equal those of Spark's frames, for every type, with nulls."""
    files = [[(k, float(3 * batch + n)) for k in ("a", "b", None) for n in range(2)] for batch in range(3)]

    theirs, ours = both(Looks, "k string, look string", key, files)

    assert ours.batches == theirs.batches


def test_collections_and_output_types(both: Callable[..., Any]) -> None:
    """I14: list and map state accept values from frames; output columns of every type arrive as on Spark."""
    files = [[(k, float(n % (batch + 2))) for k in ("a", "b", "c") for n in range(batch + 1)] for batch in range(3)]

    theirs, ours = both(Collections, Collections.OUTPUT, ["k"], files)

    assert ours.batches == theirs.batches


def test_big_keys_come_in_chunks(both: Callable[..., Any]) -> None:
    """A key of many Arrow batches is one call with several frames; numeric column names select columns by position."""
    files = [[(k, float(n)) for k in ("a", "b") for n in range(10 * batch + 1)] for batch in range(3)]

    theirs, ours = both(ByPosition, "k string, v double", ["k"], files, ("k", "v"))

    assert ours.batches == theirs.batches
