"""
Unit tests of processors without a running Spark: the calls of PySpark's ``TwsTester`` on this project's tables.

`TwsTester` keeps Python objects in dictionaries. Here every value is checked against its schema, encoded, logged and
read back, as in a query. State can be checkpointed, and restored with another parallelism or with the next version of
the processor.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self, cast

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.stateful_processor import TimerValues
from pyspark.sql.types import StructType

from backend_client.batch_time import BatchTime, TimeMode
from backend_client.spark.processor_methods import check_methods
from backend_client.spark.task.row_calls import RowCalls, Timing
from backend_client.spark.task.rows import KeyRows, check_row
from backend_client.spark.task.state_handle import TaskHandle, declare_states
from backend_client.state.codec import KeyCodec
from backend_client.state.ddl import parse_schema
from backend_client.state.declared_states import ids_to_delete, merge_states
from backend_client.state.keyed_collections import ListVariable, MapVariable
from backend_client.state.keyed_state import KeyedState, ValueVariable
from backend_client.state.timers import Timers
from backend_client.testing.local_state import LocalState
from dstl_service.wire import StateInfo
from storage.errors import InvalidInputError

if TYPE_CHECKING:
    from pandas import DataFrame

    from backend_client.service.log_writer import LogWriter

_NAME = "StateTester"
_NEVER = 1 << 62
_KEY_TYPES: dict[type, str] = {
    bool: "boolean",
    bytes: "binary",
    Decimal: "decimal(38,18)",
    dt.date: "date",
    dt.datetime: "timestamp",
    float: "double",
    int: "long",
    str: "string",
}


class StateTester:
    """
    Calls a processor for one key at a time, as PySpark's ``TwsTester`` does.

    Each call is a separate batch. A call that raises leaves the state unchanged.

    Args:
        processor: The processor to test; `init` and `close` are called with every batch, as in a query.
        initialStateRow: Pairs of a key and a row for ``handleInitialState``.
        initialStatePandas: Pairs of a key and a pandas DataFrame; not with `initialStateRow`.
        timeMode: "None", "ProcessingTime" or "EventTime".
        outputMode: As in a query; it has no effect here.
        eventTimeExtractor: Returns the event time of a row in ms; required with "EventTime". Late rows are dropped
            before the processor gets them.
        keySchema: Schema of the grouping columns; by default one column of the first key's type. A key of several
            columns is a tuple.
        parallelism: Number of partitions.
        maxParallelism: Number of key groups.

    Raises:
        InvalidInputError: An argument is invalid, or ``init`` asks for an unsupported feature.
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        initialStateRow: Sequence[tuple[Any, Row]] | None = None,
        initialStatePandas: Sequence[tuple[Any, DataFrame]] | None = None,
        timeMode: str = "None",
        outputMode: str = "Append",
        eventTimeExtractor: Callable[[Any], int] | None = None,
        *,
        keySchema: StructType | str | None = None,
        parallelism: int = 1,
        maxParallelism: int = 128,
    ) -> None:
        if initialStateRow is not None and initialStatePandas is not None:
            raise InvalidInputError("initialStateRow and initialStatePandas exclude each other; pass one of them")
        self._mode = TimeMode.of(timeMode)
        if self._mode is TimeMode.EVENT and eventTimeExtractor is None:
            raise InvalidInputError("timeMode 'EventTime' needs eventTimeExtractor=…, to find late rows")
        self._event_time = eventTimeExtractor
        self._watermark_ms = 0
        self.processor = processor
        self._key_schema = None if keySchema is None else _schema(keySchema)
        self._in_pandas = initialStatePandas is not None
        check_methods(_NAME, processor, has_initial_rows=bool(initialStateRow or initialStatePandas))
        self._local = LocalState(parallelism, maxParallelism)
        self._states: dict[str, StateInfo] = {}
        self._take_processor(processor)
        for key, rows in initialStateRow or initialStatePandas or ():
            with self._visit(key) as (parts, handle):
                processor.init(handle)  # type: ignore[arg-type]
                handle.end_init()
                processor.handleInitialState(parts, rows, self._timer_values())
                processor.close()
        self.checkpoint()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the tables; otherwise they are removed with the object."""
        self._local.close()

    def test(self, key: Any, input: Sequence[Row]) -> list[Row]:  # noqa: A002 - TwsTester's name
        """Call ``handleInputRows`` with the rows of a key; return what it yields."""
        self._in_pandas = False
        return self._run(key, filter(self._is_on_time, input))

    def testInPandas(self, key: Any, input: DataFrame) -> DataFrame:  # noqa: A002
        """Do the same as `test` for a processor of the pandas API."""
        self._in_pandas = True
        if self._mode is TimeMode.EVENT:
            input = input[input.apply(self._is_on_time, axis=1)].reset_index(drop=True)  # noqa: A001
        return _concatenated(self._run(key, iter([input])))

    def setProcessingTime(self, currentTimeMs: int) -> list[Row] | DataFrame:
        """Advance the time, in timeMode "ProcessingTime": timers fire, and entries with a TTL expire."""
        self._check_time(TimeMode.PROCESSING, currentTimeMs, self._local.timestamp_ms)
        self._local.timestamp_ms = currentTimeMs
        return self._fire(self._watermark_ms)

    def setWatermark(self, currentWatermarkMs: int) -> list[Row] | DataFrame:
        """Advance the watermark, in timeMode "EventTime": timers fire, and older rows count as late afterwards."""
        self._check_time(TimeMode.EVENT, currentWatermarkMs, self._watermark_ms)
        before, self._watermark_ms = self._watermark_ms, currentWatermarkMs
        return self._fire(before)

    def peekValueState(self, stateName: str, key: Any) -> tuple[Any, ...] | None:
        """Return a key's value, or None."""
        with self._visit(key) as (_, handle):
            return self._value(handle, stateName).get()

    def updateValueState(self, stateName: str, key: Any, value: tuple[Any, ...]) -> None:
        """Set a key's value."""
        with self._visit(key) as (_, handle):
            self._value(handle, stateName).update(value)

    def peekListState(self, stateName: str, key: Any) -> list[tuple[Any, ...]]:
        """Return a key's list; empty without elements."""
        with self._visit(key) as (_, handle):
            return list(self._list(handle, stateName).get())

    def updateListState(self, stateName: str, key: Any, value: list[tuple[Any, ...]]) -> None:
        """Set a key's list."""
        with self._visit(key) as (_, handle):
            self._list(handle, stateName).put(value)

    def peekMapState(self, stateName: str, key: Any) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """Return a key's map; empty without entries."""
        with self._visit(key) as (_, handle):
            return dict(self._map(handle, stateName).iterator())

    def updateMapState(self, stateName: str, key: Any, value: dict[tuple[Any, ...], tuple[Any, ...]]) -> None:
        """Set a key's map."""
        with self._visit(key) as (_, handle):
            variable = self._map(handle, stateName)
            variable.clear()
            for user_key, item in value.items():
                variable.updateValue(user_key, item)

    def deleteState(self, stateName: str, key: Any) -> None:
        """Clear a state for a key."""
        variables: dict[str, Callable[..., Any]] = {"value": self._value, "list": self._list, "map": self._map}
        variable = variables[self._info(stateName).kind]
        with self._visit(key) as (_, handle):
            variable(handle, stateName).clear()

    def checkpoint(self) -> None:
        """Make everything so far survive a `restore`."""
        self._local.checkpoint()
        self._checkpointed, self._checkpointed_watermark_ms = self._states, self._watermark_ms

    def restore(self, parallelism: int | None = None, processor: StatefulProcessor | None = None) -> None:
        """
        Return to the last checkpoint: tables are rebuilt from the log, and no earlier object is used.

        The watermark returns with it; the processing time stays.

        Args:
            parallelism: New number of partitions.
            processor: Another version of the processor; its states may change as over a query's restart.

        Raises:
            InvalidInputError: The change of states is not possible; names the field.
        """
        if processor is not None:  # before anything is lost
            check_methods(_NAME, processor, has_initial_rows=False)
            merge_states(_NAME, self._checkpointed, self._declared(processor)[0])
        self._local.restore(parallelism)
        self._states, self._watermark_ms = self._checkpointed, self._checkpointed_watermark_ms
        if processor is not None:
            self._take_processor(processor)
        else:  # it may be newer than the checkpoint
            self._take_states()

    def _take_processor(self, processor: StatefulProcessor) -> None:
        self._asked_for, self._recreated_states = self._declared(processor)
        self._take_states()
        self.processor = processor

    def _take_states(self) -> None:
        stored = self._states
        self._states = merge_states(_NAME, stored, self._asked_for)
        self._local.delete(ids_to_delete(stored, self._states))

    def _declared(self, processor: StatefulProcessor) -> tuple[dict[str, StateInfo], frozenset[str]]:
        return declare_states(_NAME, processor, _schema, self._mode)

    def _run(self, key: Any, rows: Iterator[Any]) -> list[Any]:
        self._local.delete(ids_to_delete(self._states, self._states, self._recreated_states))
        parts, key_schema = self._key(key)
        state = self._local.at(KeyCodec(key_schema).encode(parts))
        return self._call([KeyRows(state.key_group, parts, rows)], state, self._watermark_ms)

    def _fire(self, previous_watermark_ms: int) -> list[Row] | DataFrame:
        results: list[Any] = []
        if self._key_schema is not None:  # else no key was seen, so there are no timers
            for state in self._local.partitions():
                results += self._call([], state, previous_watermark_ms)
        return _concatenated(results) if self._in_pandas else results

    def _call(self, grouped: Sequence[KeyRows], state: KeyedState, previous_watermark_ms: int) -> list[Any]:
        """Run one batch in one partition."""
        assert self._key_schema is not None
        timing = None
        if self._mode is not TimeMode.NONE:
            timing = Timing(self._mode, self._time(previous_watermark_ms))
        calls = RowCalls(_NAME, self.processor, self._states, self._key_schema.json(), _NEVER, timing)
        writer = cast("LogWriter", None)  # nothing is sent before the end
        results = [row for rows in calls.run(grouped, state, writer) for row in rows]
        for row in () if self._in_pandas else results:
            check_row(row)  # as a query does
        self._local.commit(state)
        return results

    def _is_on_time(self, row: Any) -> bool:
        return self._mode is not TimeMode.EVENT or cast("Any", self._event_time)(row) > self._watermark_ms

    def _check_time(self, mode: TimeMode, given_ms: int, current_ms: int) -> None:
        if self._mode is not mode:
            raise InvalidInputError(
                f"this call needs a StateTester with timeMode {mode.value!r}, not {self._mode.value!r}"
            )
        if given_ms <= current_ms:
            raise InvalidInputError(
                f"time only moves forward: it is already {current_ms} ms, and {given_ms} ms is not later"
            )

    @contextmanager
    def _visit(self, key: Any) -> Iterator[tuple[tuple[Any, ...], TaskHandle]]:
        """Make a key the current one; writes are logged when the context ends without an error."""
        parts, key_schema = self._key(key)
        state = self._local.at(KeyCodec(key_schema).encode(parts))
        handle = TaskHandle(_NAME, self._states, state)
        due_until_ms = self._time(self._watermark_ms).due_until(self._mode)
        if due_until_ms is not None:
            handle.timers = Timers(state, due_until_ms)
        yield parts, handle
        self._local.commit(state)

    def _time(self, previous_watermark_ms: int) -> BatchTime:
        return BatchTime(self._local.timestamp_ms, self._watermark_ms, previous_watermark_ms)

    def _timer_values(self) -> TimerValues:
        timed = self._mode is not TimeMode.NONE
        return TimerValues(self._local.timestamp_ms, self._watermark_ms) if timed else TimerValues()

    def _key(self, key: Any) -> tuple[tuple[Any, ...], str]:
        """Return a key as processors see it, and its schema."""
        parts = key if isinstance(key, tuple) else (key,)
        if self._key_schema is None:
            self._key_schema = _schema_of_key(parts)
        if len(parts) != len(self._key_schema):
            raise InvalidInputError(
                f"the key {key!r} has {len(parts)} columns, the key's schema {len(self._key_schema)}: pass a tuple of "
                "them, and keySchema=… to the tester"
            )
        return parts, self._key_schema.json()

    def _info(self, name: str) -> StateInfo:
        info = self._states.get(name)
        if info is None:
            raise InvalidInputError(f"init declares no state {name!r}; it declares: {', '.join(self._states)}")
        return info

    def _value(self, handle: TaskHandle, name: str) -> ValueVariable:
        self._info(name)
        return handle.getValueState(name, "")

    def _list(self, handle: TaskHandle, name: str) -> ListVariable:
        self._info(name)
        return handle.getListState(name, "")

    def _map(self, handle: TaskHandle, name: str) -> MapVariable:
        self._info(name)
        return handle.getMapState(name, "", "")


def _concatenated(frames: list[DataFrame]) -> DataFrame:
    import pandas as pd

    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _schema(schema: StructType | str) -> StructType:
    return StructType.fromJson(parse_schema(schema)) if isinstance(schema, str) else schema


def _schema_of_key(parts: tuple[Any, ...]) -> StructType:
    fields = []
    for position, part in enumerate(parts):
        kind = _KEY_TYPES.get(type(part))
        if kind is None:
            raise InvalidInputError(
                f"the type of the key column {part!r} cannot be inferred: pass keySchema=… to the StateTester"
            )
        fields.append({"name": f"key_{position}", "type": kind, "nullable": True, "metadata": {}})
    return StructType.fromJson({"type": "struct", "fields": fields})
