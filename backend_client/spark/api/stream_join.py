"""
Joins of several streams per key, where a row waits for its partners for a limited time; see docs/joins.md.

`join_streams` makes one stream of the inputs, a struct column for each, and lets the processor `StreamJoin` find what
belongs together. The rules are those of `backend_client.join_rules`; here is only how rows are kept: an entry of a map
state for each row that waits, and for each key a timer not later than the first end of a row's waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, MapType, StringType, StructField, StructType, TimestampType

from backend_client.join_rules import Life, Side, complete, end_lives
from backend_client.spark.api.backend import ChangelogStateBackend
from backend_client.spark.api.plan import StatefulDataFrame
from backend_client.spark.columns import quoted
from backend_client.spark.event_time import DELAY_KEY
from backend_client.spark.task.rows import row_factory
from storage.errors import InvalidInputError

HOW = ("inner", "left", "full")

_MICROS_COLUMN = "__dstl_micros"
_PLACE = StructType([StructField("begin", LongType(), False), StructField("number", LongType(), False)])
_PROGRESS = StructType(
    [StructField("next_number", LongType()), StructField("last_ends", MapType(StringType(), LongType()))]
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class JoinInput:
    """One of the streams that are joined: its columns but the keys, and how long its rows wait."""

    name: str
    schema: StructType
    wait_micros: int


class StreamJoin(StatefulProcessor):
    """
    Joins the rows of one key, with ``timeMode="EventTime"``.

    Input columns: the keys, event time, event time in microseconds, then a struct for each of `inputs`, of which one is
    not null. Output columns: the same without the microseconds, with any of the structs null.

    The state of a key: the rows of each input that wait, by event time and a number; the next such number, and when
    the last row of each input ended.
    """

    def __init__(self, inputs: Sequence[JoinInput], how: str, output_names: Sequence[str]) -> None:
        self._inputs = tuple(inputs)
        count = len(self._inputs)
        self._required = {"inner": set(range(count)), "left": {0}, "full": set()}[how]
        self._new_output = row_factory(output_names)
        self._new_part = [row_factory(part.schema.names) for part in self._inputs]

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self._handle = handle
        self._waiting = [handle.getMapState(f"input_{part.name}", _PLACE, part.schema) for part in self._inputs]
        self._progress = handle.getValueState("progress", _PROGRESS)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any = None) -> Iterator[Row]:
        """Yield the complete combinations that new rows make, and rows without key or time, which have no partners."""
        sides: dict[int, Side] = {}
        first_end: int | None = None
        number, last_ends = self._progress.get() or (0, {})
        for row in rows:
            begin, *parts = row[len(key) + 1 :]
            position = next(at for at, part in enumerate(parts) if part is not None)
            values = tuple(map(parts[position].__getitem__, self._inputs[position].schema.names))
            if begin is None or None in key:  # as in SQL, nothing equals null
                if self._required <= {position}:
                    yield self._output(key, begin, {position: values})
                continue
            new = Life(begin, number, values)
            number += 1
            self._waiting[position].updateValue((begin, new.number), values)
            if position in sides:
                sides[position].add(new)
            for at in range(len(parts)):
                if at != position and at not in sides:
                    sides[at] = self._read(at)
            wait = self._inputs[position].wait_micros
            others = [None if at == position else sides[at] for at in range(len(parts))]
            for combination in complete(others, new, wait):
                newest = max(life.begin for life in combination)
                yield self._output(key, newest, {at: life.row for at, life in enumerate(combination)})
            first_end = begin + wait if first_end is None else min(first_end, begin + wait)
        if first_end is not None:
            self._progress.update((number, last_ends))
            self._wake_at(first_end)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        """Remove the rows whose waiting is over and, unless the join is an inner one, yield what they are part of."""
        progress = self._progress.get()
        if progress is None:
            return
        until = timerValues.getCurrentWatermarkInMs() * 1000
        number, last_ends = progress
        sides = [self._read(at) for at in range(len(self._inputs))]
        for waiting, side in zip(self._waiting, sides, strict=True):
            for life in side.ended(until):
                waiting.removeKey((life.begin, life.number))
        names = [part.name for part in self._inputs]
        ends = [last_ends.get(name) for name in names]
        for combination in end_lives(sides, until, ends, self._required):
            rows = {at: life for at, life in enumerate(combination) if life is not None}
            end = min(life.begin + sides[at].wait for at, life in rows.items())
            yield self._output(key, end, {at: life.row for at, life in rows.items()})
        left = [side.lives[0].begin + side.wait for side in sides if side.lives]
        if left:
            known = {name: end for name, end in zip(names, ends, strict=True) if end is not None}
            self._progress.update((number, known))
            self._wake_at(min(left))
        else:
            self._progress.clear()

    def close(self) -> None:
        """Hold nothing that has to be closed."""

    def _read(self, position: int) -> Side:
        lives = (Life(begin, number, row) for (begin, number), row in self._waiting[position].iterator())
        return Side.of(self._inputs[position].wait_micros, lives)

    def _wake_at(self, end: int) -> None:
        self._handle.registerTimer(-(-end // 1000))  # timers are in milliseconds, and not before the end

    def _output(self, key: Any, micros: int | None, rows: Mapping[int, Any]) -> Row:
        moment = None if micros is None else _EPOCH + timedelta(microseconds=micros)
        parts = (make(rows[at]) if at in rows else None for at, make in enumerate(self._new_part))
        return self._new_output((*key, moment, *parts))


def join_streams(
    backend: ChangelogStateBackend,
    inputs: Mapping[str, DataFrame],
    *,
    on: str | Sequence[str],
    wait: str | timedelta | Mapping[str, str | timedelta],
    how: str = "inner",
    event_time: str = "event_time",
    name: str = "join",
    parallelism: int | None = None,
) -> StatefulDataFrame:
    """
    Join streams: rows of equal keys meet if none comes, by event time, after the waiting of another one is over.

    Args:
        backend: Keeps the state.
        inputs: Two or more streams with a watermark each, by the names that they get in the result.
        on: Columns of all inputs, of the same types.
        wait: How long a row waits for partners, such as "10 minutes"; for all inputs or for each by name.
        how: "inner"; "left" keeps each row of the first input; "full" keeps each row of every input.
        event_time: Column of the result with the moment at which a row was complete or its waiting over; it has the
            watermark, for an operator behind the join.
        name: Names the operator's state within the job.
        parallelism: Number of partitions; by default the backend's.

    Returns:
        The columns `on`, `event_time`, and for each input a struct of its other columns, null where it has no partner.

    Raises:
        InvalidInputError: An argument is impossible; says what to do.
    """
    keys = [on] if isinstance(on, str) else list(on)
    if how not in HOW:
        raise InvalidInputError(f"how must be one of {', '.join(HOW)}, it is {how!r}")
    if len(inputs) < 2:
        raise InvalidInputError(f"a join has at least two inputs, this one has {len(inputs)}")
    times = {label: _check_input(label, frame, keys) for label, frame in inputs.items()}
    _check_names([*keys, event_time, *inputs])
    _check_key_types(inputs, keys)
    waits = _waits(next(iter(inputs.values())).sparkSession, list(inputs), wait)
    parts = [JoinInput(label, _part_schema(frame, keys, times[label]), waits[label]) for label, frame in inputs.items()]
    union = reduce(
        DataFrame.union,
        (
            _as_part(frame, position, parts, keys, times[label], event_time)
            for position, (label, frame) in enumerate(inputs.items())
        ),
    )
    output = StructType([field for field in union.schema.fields if field.name != _MICROS_COLUMN])
    return backend.transform_with_state(
        union.groupBy(*(quoted(key) for key in keys)),
        StreamJoin(parts, how, output.names),
        output,
        "Append",
        "EventTime",
        eventTimeColumnName=event_time,
        name=name,
        parallelism=parallelism,
    )


def _as_part(
    frame: DataFrame, position: int, parts: Sequence[JoinInput], keys: Sequence[str], time: str, event_time: str
) -> DataFrame:
    """Return the rows of the input at `position` as rows of all inputs: its own columns in its struct, else nulls."""
    structs = [F.lit(None).cast(part.schema).alias(part.name) for part in parts]
    own = parts[position]
    structs[position] = F.struct(*(F.col(quoted(field)) for field in own.schema.names)).alias(own.name)
    return frame.select(
        *(F.col(quoted(key)).alias(key, metadata={}) for key in keys),  # one column alone has the watermark
        F.col(quoted(time)).alias(event_time),
        F.expr(f"unix_micros({quoted(time)})").alias(_MICROS_COLUMN),
        *structs,
    )


def _check_input(label: str, frame: Any, keys: Sequence[str]) -> str:
    """Return the name of an input's column with a watermark; refuse an input that cannot be joined."""
    if isinstance(frame, StatefulDataFrame):
        raise InvalidInputError(
            f"input {label!r} is the result of a stateful operator, which can be no input of a join: join first, and "
            "put the other operator behind the join; or write its result out and read it as a stream"
        )
    if not isinstance(frame, DataFrame) or not frame.isStreaming:
        raise InvalidInputError(
            f"input {label!r} is not a stream; join static data with .join(…) on an input or on the result"
        )
    missing = [key for key in keys if key not in frame.columns]
    if missing or not keys:
        raise InvalidInputError(
            f"on must name columns of all inputs; input {label!r} has no {', '.join(map(repr, missing)) or 'keys'}, "
            f"it has {', '.join(frame.columns)}"
        )
    timed = [field for field in frame.schema.fields if DELAY_KEY in field.metadata]
    if len(timed) != 1:
        raise InvalidInputError(
            f"input {label!r} has {len(timed)} columns with a watermark, it needs one: waiting ends by event time. "
            + ("Drop all but one" if timed else "Call withWatermark on it")
        )
    if not isinstance(timed[0].dataType, TimestampType):
        raise InvalidInputError(
            f"column {timed[0].name!r} of input {label!r} is the event time, and so must be a timestamp, not "
            f"{timed[0].dataType.simpleString()}; cast it before withWatermark"
        )
    return timed[0].name


def _check_names(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str) or not name or name.lower() in seen:
            raise InvalidInputError(
                f"keys, event_time and the names of inputs are columns of the result, each with a name of its own; "
                f"rename {name!r}"
            )
        seen.add(name.lower())


def _check_key_types(inputs: Mapping[str, DataFrame], keys: Sequence[str]) -> None:
    for key in keys:
        kinds = {label: frame.schema[key].dataType.simpleString() for label, frame in inputs.items()}
        if len(set(kinds.values())) > 1:
            raise InvalidInputError(
                f"key {key!r} has several types, cast it to one: "
                + ", ".join(f"{kind} in input {label!r}" for label, kind in kinds.items())
            )


def _part_schema(frame: DataFrame, keys: Sequence[str], time: str) -> StructType:
    """Return an input's columns but the keys, without what may change while the state stays: metadata, nullability."""
    fields = [field for field in frame.schema.fields if field.name not in keys or field.name == time]
    return StructType([StructField(field.name, field.dataType) for field in fields])


def _waits(
    spark: SparkSession, labels: Sequence[str], wait: str | timedelta | Mapping[str, str | timedelta]
) -> dict[str, int]:
    """Return how many microseconds the rows of each input wait."""
    by_label = wait if isinstance(wait, Mapping) else dict.fromkeys(labels, wait)
    if set(by_label) != set(labels):
        raise InvalidInputError(
            f"wait must name all inputs and nothing else, or be one duration for all; inputs are {', '.join(labels)}"
        )
    return {label: _micros(spark, by_label[label]) for label in labels}


def _micros(spark: SparkSession, wait: str | timedelta) -> int:
    micros: int | None = None
    if isinstance(wait, timedelta):
        micros = wait // timedelta(microseconds=1)
    else:
        try:
            row = spark.sql("SELECT unix_micros(timestamp_micros(0) + cast(? AS INTERVAL))", args=[wait]).first()
            micros = None if row is None else row[0]
        except PySparkException:
            micros = None
    if micros is None or micros < 0:
        raise InvalidInputError(
            f"wait must be a duration like '10 minutes' or a timedelta, not negative; it is {wait!r}"
        )
    return micros
