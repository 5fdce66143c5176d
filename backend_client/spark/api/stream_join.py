"""
Joins of several streams by key, where a row waits for its partners for a limited time; see docs/joins.md.

`join_streams` unions the inputs into one stream with a struct column for each. The processor `StreamJoin` matches their
rows by the rules in `backend_client.join_rules`; this module only keeps the rows: one map state entry per waiting row,
and one timer per key that is not later than the first end of a wait. With ``columnar=True``,
`backend_client.columnar.join.interval_join` does both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, MapType, StringType, StructField, StructType, TimestampType

from backend_client.columnar.join.interval_join import IntervalJoin
from backend_client.join_rules import Life, Side, complete, end_lives
from backend_client.option_checks import micros
from backend_client.spark.api.backend import ChangelogStateBackend
from backend_client.spark.api.plan import StatefulDataFrame
from backend_client.spark.api.zoned import zoned
from backend_client.spark.columns import check_bytewise, quoted
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
    """One of the joined streams: its columns without the keys, and how long its rows wait."""

    name: str
    schema: StructType
    wait_micros: int


class StreamJoin(StatefulProcessor):
    """
    Joins the rows of one key, with ``timeMode="EventTime"``.

    Input columns: the keys, event time, event time in microseconds, then a struct for each of `inputs`, exactly one of
    them not null. Output columns: the same without the microseconds; any of the structs may be null.

    The state of a key: each input's waiting rows, by event time and a number; the next such number; and, for each
    input, when its last row's wait ended.
    """

    def __init__(
        self, inputs: Sequence[JoinInput], how: str, key_schema: StructType, output_names: Sequence[str]
    ) -> None:
        self._inputs = tuple(inputs)
        self._key_schema = key_schema
        count = len(self._inputs)
        self._required = {"inner": set(range(count)), "left": {0}, "full": set()}[how]
        self._new_output = row_factory(output_names)
        self._new_part = [row_factory(part.schema.names) for part in self._inputs]

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        # Values from Arrow have their zone; values read from state, a timer's key included, have none.
        self._zoned_key = zoned(self._key_schema)
        self._zoned = [zoned(part.schema) for part in self._inputs]
        self._handle = handle
        self._waiting = [handle.getMapState(f"input_{part.name}", _PLACE, part.schema) for part in self._inputs]
        self._progress = handle.getValueState("progress", _PROGRESS)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any = None) -> Iterator[Row]:
        """Yield the combinations that new rows complete, and rows without key or time, which have no partners."""
        sides: dict[int, Side] = {}
        first_end: int | None = None
        number, last_ends = self._progress.get() or (0, {})
        for row in rows:
            begin, *parts = row[len(key) + 1 :]
            position = next(at for at, part in enumerate(parts) if part is not None)
            values = tuple(map(parts[position].__getitem__, self._inputs[position].schema.names))
            if begin is None or None in key:  # as in SQL, null equals nothing
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
        """Remove rows whose wait is over; unless the join is inner, yield the combinations that they are part of."""
        progress = self._progress.get()
        if progress is None:
            return
        key = self._zoned_key(key)
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
        """Do nothing: the processor holds no resources."""

    def _read(self, position: int) -> Side:
        convert = self._zoned[position]
        lives = (Life(begin, number, convert(row)) for (begin, number), row in self._waiting[position].iterator())
        return Side.of(self._inputs[position].wait_micros, lives)

    def _wake_at(self, end: int) -> None:
        self._handle.registerTimer(-(-end // 1000))  # in milliseconds, rounded up: a timer never precedes the end

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
    columnar: bool = False,
) -> StatefulDataFrame:
    """
    Join streams: rows with equal keys match if, by event time, none arrives after another one's wait is over.

    Args:
        backend: Keeps the state.
        inputs: Two or more streams, each with a watermark, by the names that they get in the result.
        on: Columns that all inputs have, with the same types.
        wait: How long a row waits for partners, such as "10 minutes"; for all inputs or for each by name.
        how: "inner"; "left" keeps each row of the first input; "full" keeps each row of every input.
        event_time: Result column with the event time at which a row was complete or its wait was over; it carries the
            watermark, for an operator after the join.
        name: Names the operator's state within the job.
        parallelism: Number of partitions; the backend's by default.
        columnar: Keep the rows in columns, which is several times as fast: for inner joins of two streams whose columns
            have simple types, and which stay the same as long as the state does.

    Returns:
        The columns `on`, `event_time`, and for each input a struct of its other columns, null where it has no partner.

    Raises:
        InvalidInputError: An argument is impossible; says what to do.
    """
    keys: list[Any] = list(on) if isinstance(on, Sequence) and not isinstance(on, str) else [on]
    _check_kinds(backend, inputs, keys, columnar)
    if how not in HOW:
        raise InvalidInputError(f"how must be one of {', '.join(HOW)}, not {how!r}")
    if len(inputs) < 2:
        raise InvalidInputError(f"a join needs at least two inputs, this one has {len(inputs)}")
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
    if columnar:
        if how != "inner" or len(parts) > 2:
            raise InvalidInputError("columnar=True joins two inputs with how='inner'; leave it out for other joins")
        waits_us = {part.name: part.wait_micros for part in parts}
        grouped = union.drop(_MICROS_COLUMN).groupBy(*(quoted(key) for key in keys))
        join = IntervalJoin(event_time, waits_us)
        return backend.transform_columns(grouped, join, outputMode="Append", name=name, parallelism=parallelism)
    output = StructType([field for field in union.schema.fields if field.name != _MICROS_COLUMN])
    return backend.transform_with_state(
        union.groupBy(*(quoted(key) for key in keys)),
        StreamJoin(parts, how, StructType([output[key] for key in keys]), output.names),
        output,
        "Append",
        "EventTime",
        eventTimeColumnName=event_time,
        name=name,
        parallelism=parallelism,
    )


def _check_kinds(backend: Any, inputs: Any, keys: Sequence[Any], columnar: Any) -> None:
    """Refuse arguments of other types; Spark's own join has conditions, and a text is true whatever it says."""
    if not isinstance(backend, ChangelogStateBackend):
        raise InvalidInputError(f"a join's first argument is the ChangelogStateBackend, not {type(backend).__name__}")
    if not isinstance(inputs, Mapping):
        raise InvalidInputError(
            f'inputs must name the streams, as in {{"orders": orders, "payments": payments}}, not be a '
            f"{type(inputs).__name__}"
        )
    other = next((key for key in keys if not isinstance(key, str)), None)
    if other is not None:
        raise InvalidInputError(
            f"on must be the name of a column of all inputs or a list of such names, not {other!r}: name equal columns "
            "alike with withColumnRenamed, and put other conditions into where(…) on an inner join's result"
        )
    if not isinstance(columnar, bool):
        raise InvalidInputError(f"columnar must be True or False, not {columnar!r}")


def _as_part(
    frame: DataFrame, position: int, parts: Sequence[JoinInput], keys: Sequence[str], time: str, event_time: str
) -> DataFrame:
    """Return one input's rows in the shape of the union: its columns in its own struct, the other structs null."""
    structs = [F.lit(None).cast(part.schema).alias(part.name) for part in parts]
    own = parts[position]
    structs[position] = F.struct(*(F.col(quoted(field)) for field in own.schema.names)).alias(own.name)
    return frame.select(
        *(F.col(quoted(key)).alias(key, metadata={}) for key in keys),  # only one column may carry the watermark
        F.col(quoted(time)).alias(event_time),
        F.expr(f"unix_micros({quoted(time)})").alias(_MICROS_COLUMN),
        *structs,
    )


def _check_input(label: str, frame: Any, keys: Sequence[str]) -> str:
    """Return the name of an input's watermarked column; refuse an input that cannot be joined."""
    if isinstance(frame, StatefulDataFrame):
        raise InvalidInputError(
            f"input {label!r} is the result of a stateful operator, which cannot be an input of a join: join first and "
            "put the operator after the join, or write its result to a sink and read that as a stream"
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
            f"input {label!r} has {len(timed)} columns with a watermark, it needs exactly one, because waits end by "
            "event time. " + ("Drop all but one" if timed else "Call withWatermark on it")
        )
    if not isinstance(timed[0].dataType, TimestampType):
        raise InvalidInputError(
            f"column {timed[0].name!r} of input {label!r} is the event time and must be a timestamp, not "
            f"{timed[0].dataType.simpleString()}; cast it before withWatermark"
        )
    return timed[0].name


def _check_names(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str) or not name or name.lower() in seen:
            raise InvalidInputError(
                f"the keys, event_time and the inputs' names become columns of the result and must be non-empty and "
                f"distinct; rename {name!r}"
            )
        seen.add(name.lower())


def _check_key_types(inputs: Mapping[str, DataFrame], keys: Sequence[str]) -> None:
    for frame in inputs.values():
        check_bytewise(StructType([frame.schema[key] for key in keys]), "Keys are compared by their bytes")
    for key in keys:
        kinds = {label: frame.schema[key].dataType.simpleString() for label, frame in inputs.items()}
        if len(set(kinds.values())) > 1:
            raise InvalidInputError(
                f"key {key!r} has different types in the inputs, cast it to one type: "
                + ", ".join(f"{kind} in input {label!r}" for label, kind in kinds.items())
            )


def _part_schema(frame: DataFrame, keys: Sequence[str], time: str) -> StructType:
    """Return an input's columns without the keys, and without what may change between runs: metadata, nullability."""
    fields = [field for field in frame.schema.fields if field.name not in keys or field.name == time]
    return StructType([StructField(field.name, field.dataType) for field in fields])


def _waits(
    spark: SparkSession, labels: Sequence[str], wait: str | timedelta | Mapping[str, str | timedelta]
) -> dict[str, int]:
    """Return how many microseconds the rows of each input wait."""
    by_label = wait if isinstance(wait, Mapping) else dict.fromkeys(labels, wait)
    if set(by_label) != set(labels):
        raise InvalidInputError(
            f"wait must be one duration, or name each input and nothing else; the inputs are {', '.join(labels)}"
        )
    return {label: _micros(spark, by_label[label]) for label in labels}


def _micros(spark: SparkSession, wait: str | timedelta) -> int:
    found: Any = wait if isinstance(wait, timedelta) else None
    if isinstance(wait, str):
        with suppress(PySparkException):
            # Without zone: a day has 24 hours, wherever and whenever clocks are set back.
            row = spark.sql(
                "SELECT (timestamp_ntz'1970-01-01' + cast(? AS INTERVAL)) - timestamp_ntz'1970-01-01'", args=[wait]
            ).first()
            found = None if row is None else row[0]
    if found is None or found < timedelta(0):
        raise InvalidInputError(
            f"wait must be a non-negative duration such as '10 minutes', or a timedelta, not {wait!r}"
        )
    return micros("wait", found)
