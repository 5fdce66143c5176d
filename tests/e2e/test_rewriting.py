"""
Forks with another number of key groups: their first start rewrites the state.

A failure means that a key is looked for under a key group where its state is not, that output is missing or twice, or
that a rewriting that was cut off has left something behind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from backend_client import ChangelogStateBackend
from backend_client.columnar import Aggregate, Count, Sum, tumbling
from backend_client.service.job_session import JobSession
from backend_client.sinks.parquet import ParquetSink
from backend_client.state.codec import KeyCodec
from backend_client.state.key_hash import KeyHash, key_group_of
from storage.errors import InvalidInputError, UnavailableError
from tests.e2e.support import JobQueries, read_input, stored_state

pytestmark = pytest.mark.e2e

HOUR_MS = 3_600_000
YEAR_MS = 365 * 24 * HOUR_MS
"""Ends are rounded to a part of the time to live, so that the batches of all runs have the same ones."""
BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
INPUT = "k string, d decimal(20,2), at timestamp, v long"


class Everything(StatefulProcessor):
    """Keeps a value, a list, a map, states that end in a year, and timers for the next batch and for later."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n long")
        self.values = handle.getListState("values", "v long")
        self.seen = handle.getMapState("seen", "v long", "n long")
        self.brief = handle.getValueState("brief", "v long", YEAR_MS)
        self.briefs = handle.getListState("briefs", "v long", YEAR_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before, last = self.brief.get(), BEGIN
        for row in rows:
            self.count.update(((self.count.get() or (0,))[0] + 1,))
            self.values.appendValue((row.v,))
            self.briefs.appendValue((row.v,))
            self.seen.updateValue((row.v % 3,), ((self.seen.getValue((row.v % 3,)) or (0,))[0] + 1,))
            self.brief.update((row.v,))
            last = row.at
        now_ms = timerValues.getCurrentProcessingTimeInMs()
        for moment_ms in (now_ms + 1, now_ms + HOUR_MS):
            self.handle.registerTimer(moment_ms)
        yield self._told(key, last, ["row", before and before[0]])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield self._told(key, BEGIN, ["timer", len(list(self.handle.listTimers()))])

    def close(self) -> None:
        pass

    def _told(self, key: Any, at: Any, what: list[Any]) -> Row:
        lists = [sorted(v for (v,) in state.get()) for state in (self.values, self.briefs)]
        told = [*what, self.count.get(), *lists, sorted(self.seen.iterator())]
        return Row(k=key[0], at=at, n=(self.count.get() or (0,))[0], text=json.dumps(told))


def write_rows(folder: Path, files: int) -> None:
    """Write one JSON file per batch, with rows of keys that come again in some of the later ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        path = folder / f"{number:05d}.json"
        lines = []
        for key in range(number % 3, 40, 1 + number % 2):
            at = (BEGIN + timedelta(seconds=10 * number)).isoformat()
            row = {"k": None if key == 7 else f"k{key}", "d": f"{key}.50", "at": at, "v": key + number}
            lines.append(json.dumps(row))
        path.write_text("\n".join(lines), encoding="utf-8")
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


class Queries(JobQueries):
    """The queries of a job and its forks over the same files, each with a folder of output."""

    def run(self, files: int, job: str, **options: Any) -> None:
        """Run a job's query over this many files, one per batch."""
        write_rows(self._folder / "in", files)
        backend = self._make(job, **options)
        stream = read_input(self._spark, self._folder / "in", INPUT).withWatermark("at", "5 seconds")
        told = backend.transform_with_state(
            stream.groupBy("k", "d"),
            Everything(),
            "k string, at timestamp, n long, text string",
            "Update",
            "ProcessingTime",
            name="everything",
        )
        by_text = told.withColumn("size", F.length("text") % 5).groupBy("size", "k")
        windows = Aggregate(Count(name="rows"), Sum("n", name="sum"), windows=tumbling("at", timedelta(seconds=20)))
        result = backend.transform_columns(by_text, windows, outputMode="Update", name="windows")
        self.to_end(result.writeStream.sink(ParquetSink(f"file://{self.output(job)}"), slots=1), job)

    def published(self, *jobs: str) -> list[str]:
        """Return the records that jobs have published, sorted."""
        return sorted(repr(row) for job in jobs for row in self.records(job))

    def state(self, job: str, table: str) -> dict[bytes, bytes]:
        """Return a table's stored state, by the table keys without their key groups."""
        return {key[2:]: value for key, value in stored_state(self.storage, job, table).items()}


def test_state_is_rewritten(
    spark: SparkSession,
    make_backend: Callable[..., ChangelogStateBackend],
    tmp_path: Path,
    always_materialized: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """
    I14: 8 -> 24 -> 5 key groups: state and output are those of an undisturbed run, with each output once.

    A start that is cut off before its rewriting is a checkpoint is repeated. The parents are as they were.
    """
    queries = Queries(spark, make_backend, tmp_path)
    queries.run(2, "job", max_parallelism=8, parallelism=3)
    with pytest.raises(InvalidInputError, match="`dstl fork --max-parallelism 24 job NEW-NAME`"):
        queries.run(2, "job", max_parallelism=24)
    assert queries.dstl("fork", "--max-parallelism", "24", "job", "wide") == 0
    assert "rewrites the state from 8 key groups to 24" in capsys.readouterr().out
    wide: dict[str, Any] = {"parallelism": 5, "fork_location": str(queries.location("job"))}
    with pytest.raises(InvalidInputError, match="`dstl fork --max-parallelism 8 wide NEW-NAME`"):
        queries.run(2, "wide", max_parallelism=8, **wide)
    with monkeypatch.context() as patch:
        patch.setattr(JobSession, "complete", cut_off)
        with pytest.raises(UnavailableError, match="cut off"):
            queries.run(2, "wide", **wide)
    assert queries.state("wide", "everything.2") == {}
    assert queries.dstl("rewind", "--checkpoint", "1", "wide") == 2
    assert "in its 8 key groups: start the query once" in capsys.readouterr().err

    queries.run(2, "wide", **wide)  # no file is new: the rewriting alone
    for table in ("everything", "windows"):
        assert queries.state("wide", f"{table}.2") == queries.state("job", table) != {}
    assert {key[:2] for key in stored_state(queries.storage, "wide", "everything.2")} > {b"\0\x08", b"\0\x17"}
    queries.run(4, "wide", max_parallelism=24, parallelism=7)

    narrow: dict[str, Any] = {"fork_of": "wide", "fork_location": str(queries.location("wide"))}
    queries.run(6, "narrow", max_parallelism=5, parallelism=4, **narrow)

    queries.run(6, "whole", max_parallelism=8)
    assert queries.published("job", "wide", "narrow") == queries.published("whole")
    assert len(queries.state("narrow", "everything.3")) == len(queries.state("whole", "everything"))
    assert queries.state("narrow", "windows.3") == queries.state("whole", "windows")
    assert [queries.dstl("fsck", job) for job in ("job", "wide", "narrow")] == [0, 0, 0]
    capsys.readouterr()
    assert queries.dstl("gc", "--delete", "--age-min-s", "0", "wide") == 0
    assert "wide/segments/" in capsys.readouterr().out  # of the start that was cut off
    assert queries.dstl("fsck", "wide") == 0


def cut_off(*_: Any) -> None:
    raise UnavailableError("cut off by the test")


KEYS: dict[str, list[Any]] = {
    "b boolean": [True, False],
    "i tinyint": [-128, 0, 127],
    "i smallint": [-32768, 300],
    "i int": [-(2**31), -1, 0, 2**31 - 1],
    "l bigint": [-(2**63), -1, 0, 1, 2**63 - 1],
    "f float": [0.0, -0.0, 1.5, -3.25e-20, float("nan"), float("inf")],
    "d double": [0.0, -0.0, 0.1, -1e300, float("nan"), float("-inf")],
    "s string": ["", "a", "abcd", "abcde", "Ä-ß-€-\U0001f600", "x" * 100],
    "s varchar(9)": ["", "abc"],
    "y binary": [b"", b"\xff", b"\x80\x81\x82", b"\0" * 4, bytes(range(200, 256))],
    "m decimal(18,4)": ["0.0000", "-99999999999999.9999", "12.5"],
    "m decimal(38,10)": ["0", "-0.0000000128", "0.0000000127", "-9999999999999999999999999999.9999999999", "12.5"],
    "t date": ["1582-10-04", "1969-12-31", "1970-01-01", "9999-12-31"],
    "t timestamp": ["1800-02-03 04:05:06.789012", "1969-12-31 23:59:59.999999", "2024-06-01 12:00:00"],
    "t timestamp_ntz": ["0001-01-01 00:00:00", "2024-03-31 02:30:00.000001"],
}
KINDS = [(at, name.split(" ", 1)[1]) for at, name in enumerate(KEYS)]
NESTED = (
    "array(1, null, -3)",
    "array(array('x', null), null, array(), array('yz'))",
    "array(0.0d, -0.0d, double('nan'), null)",
    "named_struct('x', cast(null as int), 'y', named_struct('z', 't', 'w', cast(-1.5 as decimal(20,3))))",
    "interval '3 04:05:06.7' day to second",
    "cast(null as void)",
)


def test_hash_is_that_of_spark(spark: SparkSession) -> None:
    """I14: the key group that is computed from a key's stored bytes is Spark's own, for each type and for nulls."""
    texts = [[*map(_text, values), None] for values in KEYS.values()]
    rows = [tuple(row) for row in zip_longest(*texts)]
    columns = [
        (f"c{at}", kind, f"unhex(c{at})" if kind == "binary" else f"cast(c{at} as {kind})") for at, kind in KINDS
    ]
    frame = spark.createDataFrame(rows, ", ".join(f"{name} string" for name, _, _ in columns))
    compare_keys(frame.selectExpr(*(f"{expression} as {name}" for name, _, expression in columns)))
    nested = ", ".join(f"{column} as n{at}" for at, column in enumerate((*NESTED, "cast(null as array<int>)")))
    compare_keys(spark.sql(f"select {nested}"))


def _text(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def compare_keys(frame: DataFrame) -> None:
    """Compare the hashes of each column's values, and of whole rows, with those that Spark computes."""
    names = frame.columns
    keys = [*([name] for name in names), [*names, names[0]]]
    hashes = [f"hash({', '.join(f'`{name}`' for name in key)})" for key in keys]
    for row in frame.selectExpr("*", *hashes, f"pmod({hashes[-1]}, 32767)").collect():
        for key, expected in zip(keys, row[len(names) :], strict=False):
            schema = StructType([frame.schema[name] for name in key]).json()
            stored = KeyCodec(schema).encode(tuple(row[name] for name in key))
            found, hashed = KeyHash(schema).first(stored + b"and more")
            assert found == stored
            assert hashed == expected & 0xFFFFFFFF, (key, [row[name] for name in key])
        assert key_group_of(row[-2] & 0xFFFFFFFF, 32767) == row[-1]
