"""Plans that are separate programs: several operators, with stateless steps before, between and after them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from tests.e2e.differential.history import CLOCK
from tests.e2e.differential.time_processors import moment_of
from tests.e2e.differential.typed_values import COLUMNS, KEY_COLUMNS, SCHEMA, VALUES


class _Processor(StatefulProcessor):
    def close(self) -> None:
        pass


class Closing(_Processor):
    """Sums the rows of a key until a timer closes it, and emits the sum with that timer's time."""

    def __init__(self, after_s: int) -> None:
        self.after_s = after_s

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.sum = handle.getValueState("sum", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.sum.update(((self.sum.get() or (0,))[0] + row.n,))
            self.handle.registerTimer(moment_of(row) + self.after_s * 1000)
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        moment = datetime.fromtimestamp(expiredTimerInfo.getExpiryTimeInMs() / 1000, UTC)
        yield Row(k=key[0], t=moment, n=(self.sum.get() or (0,))[0])
        self.sum.clear()


def chain(stream: DataFrame, run: int) -> Any:
    """Run two operators with timers: output of the first one's timers is not late for the second."""
    output = "k string, t timestamp, n long"
    grouped = stream.withWatermark("t", "2 seconds").groupBy("k")
    first = grouped.transformWithState(Closing(3), output, "Append", "EventTime", eventTimeColumnName="t")
    regrouped = first.withColumn("k", F.expr("if(k in ('a', 'b'), 'ab', k)")).groupBy("k")
    return regrouped.transformWithState(Closing(5), output, "Append", "EventTime")


def after_window(stream: DataFrame, run: int) -> Any:
    """Run an operator after Spark's own window sums, whose rows are as old as the watermark that ends them."""
    windows = stream.withWatermark("t", "2 seconds").groupBy("k", F.window("t", "5 seconds"))
    sums = windows.agg(F.sum("n").alias("n")).select("k", F.window_time("window").alias("t"), "n")
    return sums.groupBy("k").transformWithState(Closing(3), "k string, t timestamp, n long", "Append", "EventTime")


def after_join(stream: DataFrame, run: int) -> Any:
    """Run an operator after Spark's own outer join, which holds rows back for longer than the watermark does."""
    left = stream.where(f"k = '{CLOCK}' or op % 2 = 0").withWatermark("t", "7 seconds")
    right = stream.where(f"k = '{CLOCK}' or op % 2 = 1").selectExpr("k as other", "n as more", "t as later")
    condition = "k = other and later between t and t + interval 6 seconds"
    joined = left.join(right.withWatermark("later", "2 seconds"), F.expr(condition), "left_outer")
    sums = joined.selectExpr("k", "t", "n + coalesce(more, 100) as n")
    return sums.groupBy("k").transformWithState(Closing(3), "k string, t timestamp, n long", "Append", "EventTime")


COUNTS = "key string, n long, total long"


class Counting(_Processor):
    """
    Counts the rows of a key, and reports the key, row by row.

    Spark calls a processor once for each row whose key contains NaN; these rows still share one state.
    """

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n long, total long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for number in sorted(row.n for row in rows):
            n, total = self.count.get() or (0, 0)
            self.count.update((n + 1, total + number))
            yield Row(key=repr(key), n=n + 1, total=total + number)


def stateless_steps(stream: DataFrame, run: int) -> Any:
    """
    Run two operators with filters, columns and table joins before, between and after them.

    The first one has keys of several columns, with nulls, infinity and NaN.
    """
    static = stream.sparkSession.createDataFrame([("a", "one"), ("b", "two")], "k string, word string")
    floats = F.array(*(F.lit(value) for value in (0.0, -0.1, float("nan"), float("inf"), 1e300)))
    source = stream.withColumn("twice", F.element_at(floats, F.col("n") + 1)).filter(F.col("op") < 6)
    first = source.withColumn("once", F.expr("cast(op % 3 / 3 as float)")).groupBy("twice", source["k"], F.col("once"))
    counts = first.transformWithState(
        statefulProcessor=Counting(), outputStructType=COUNTS, outputMode="Append", timeMode="None"
    )
    between = counts.repartition(3).filter("n > 1").selectExpr("key as k", "total as n")
    second = between.groupBy("k").transformWithState(Counting(), COUNTS, "Append", "None")
    named = second.withColumn("k", F.expr("regexp_extract(key, \"k='(.)'\", 1)"))
    return (
        named.join(static, "k", "left")
        .withColumn("mean", named["total"] / named.n)
        .selectExpr("*", "n > 2 as many")
        .coalesce(1)
    )


class Echo(_Processor):
    """Reports its key, row and state in full, in a list that it reuses, and yields the previous row."""

    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", SCHEMA)
        self.all = handle.getListState("all", SCHEMA)
        self.by_key = handle.getMapState("by_key", "number int, text string, day date, amount decimal(12,3)", SCHEMA)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        seen: list[str] = []
        for row in sorted(rows, key=attrgetter("i")):
            # Rows have maps as pairs; state and output expect dictionaries.
            fields = {name: row[name] for name in COLUMNS}
            fields["lookup"] = None if row.lookup is None else dict(row.lookup)
            values = tuple(fields.values())
            before = self.last.get()
            entry = (row.number, row.text, row.day, row.amount)
            seen[:] = [repr(key), repr(row), repr(before), repr([*self.all.get()])]
            seen += [repr(self.by_key.getValue(entry)), repr(sorted(self.by_key.iterator(), key=repr))]
            self.last.update(values)
            self.all.appendValue(values)
            self.by_key.updateValue(entry, values)
            yield Row(seen=seen, **dict(zip(COLUMNS, before or values, strict=True)))


def types(stream: DataFrame, run: int) -> Any:
    """Pass values of every type, with nulls and extremes, through keys, rows, state and output."""
    numbered = [(number, *values) for number, values in enumerate(VALUES)]
    typed = F.broadcast(stream.sparkSession.createDataFrame(numbered, f"which int, {SCHEMA}"))
    keys = typed.select(F.col("which").alias("of_key"), *(F.col(name).alias(f"key_{name}") for name in KEY_COLUMNS))
    numbers = {"of_key": F.col("n") % len(VALUES), "which": F.col("op") % len(VALUES)}
    rows = stream.withColumns(numbers).join(keys, "of_key").join(typed, "which")
    grouped = rows.select("i", *keys.columns[1:], *COLUMNS).groupBy(*keys.columns[1:])
    return grouped.transformWithState(Echo(), f"seen array<string>, {SCHEMA}", "Update", "None")
