"""
Calls a processor of the Row API: key by key, with a key's rows as one lazy iterator.

With `Timing.fires_first`, stored timers that are already due fire before the rows of their key, as in the batch without
data that Spark runs for them. All other due timers fire after the rows, as in Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

from backend_client.batch_time import BatchTime, TimeMode
from backend_client.portions import Portion
from backend_client.service.log_writer import LogWriter
from backend_client.spark.task.initial_rows import InitialRows
from backend_client.spark.task.key_visits import Visit, key_visits
from backend_client.spark.task.rows import KeyRows, row_factory
from backend_client.spark.task.state_handle import TaskHandle
from backend_client.state.codec import KeyCodec
from backend_client.state.keyed_state import KeyedState
from backend_client.state.timers import Timers, Upcoming
from dstl_service.wire import StateInfo
from storage.errors import InvalidInputError

Results = Callable[[tuple[Any, ...], Iterator[Any]], Iterator[Any]]


@dataclass(frozen=True, slots=True)
class Timing:
    """
    An operator's time in a batch.

    Timers fire after the rows, as in a Spark batch. With `fires_first` the batch also stands for an earlier one without
    data: stored timers that are due fire before the rows of their key.
    """

    mode: TimeMode
    time: BatchTime
    fires_first: bool = False


@dataclass(frozen=True, slots=True)
class RowCalls:
    """
    Calls a processor for the rows of one partition.

    Args:
        operator: The operator's name, for errors.
        processor: The user's processor.
        states: Its state variables.
        key_schema: The grouping key's schema, as Spark's JSON.
        preemptive_bytes: Changes of at least this size are sent between two keys.
        timing: Set unless the time mode is None.
        initial: Set in the batch whose rows include the operator's initial state.
        portion: The length of the output lists; the caller that converts them measures them.
        take: Takes what the processor yields, one by one: it may change the same object and yield it again.
        upcoming: Records timers that are due later.
    """

    operator: str
    processor: StatefulProcessor
    states: dict[str, StateInfo]
    key_schema: str
    preemptive_bytes: int
    timing: Timing | None = None
    initial: InitialRows | None = None
    portion: Portion = field(default_factory=Portion)
    take: Callable[[Iterator[Any]], Iterator[Any]] = iter
    upcoming: Upcoming = field(default_factory=Upcoming)

    def run(self, grouped: Iterable[KeyRows], state: KeyedState, writer: LogWriter) -> Iterator[list[Any]]:
        """Yield what the processor yields, in lists of `portion`'s length."""
        processor, portion = self.processor, self.portion
        handle = TaskHandle(self.operator, self.states, state)
        state.leave_key()
        processor.init(handle)  # type: ignore[arg-type]
        handle.end_init()
        values = TimerValues()
        if self.timing is not None:
            values = TimerValues(self.timing.time.timestamp_ms, self.timing.time.watermark_ms)
        split = None if self.initial is None else self.initial.splitter()

        def of_rows(key: tuple[Any, ...], rows: Iterator[Any]) -> Iterator[Any]:
            inputs: Iterator[Any] | None = rows
            if split is not None:
                inputs = split(rows, lambda row: processor.handleInitialState(key, row, values))
            if inputs is None:
                return iter(())
            return _yielded(processor.handleInputRows(key, inputs, values), "handleInputRows")

        out: list[Any] = []
        for results in map(self.take, self._results(grouped, state, handle, of_rows, values)):
            out.extend(islice(results, portion.count - len(out)))
            while len(out) == portion.count:
                yield out
                out = list(islice(results, portion.count))
            if state.changed_bytes >= self.preemptive_bytes:
                writer.append(state.take_changes(), preemptive=True)
        state.leave_key()
        processor.close()
        if out:
            yield out

    def _results(
        self, grouped: Iterable[KeyRows], state: KeyedState, handle: TaskHandle, of_rows: Results, values: TimerValues
    ) -> Iterator[Iterator[Any]]:
        """Yield what the processor yields for each key, with that key as the current one."""
        codec = KeyCodec(self.key_schema, row_factory)
        encode_key = codec.encode
        if self.timing is None:
            for key_group, key, rows in grouped:
                state.key_group, state.key = key_group, encode_key(key)
                yield of_rows(key, rows)
            return
        mode, time = self.timing.mode, self.timing.time
        until = time.due_until(mode)
        assert until is not None
        timers = handle.timers = Timers(state, until, self.upcoming)
        fires_first = self.timing.fires_first
        expiring = any(info.ttl_ms is not None for info in self.states.values())

        def fire(encoded: bytes, timestamps: Iterable[int]) -> Iterator[Any]:
            for timestamp_ms in timestamps:
                results = self.processor.handleExpiredTimer(
                    key=codec.decode(encoded), timerValues=values, expiredTimerInfo=ExpiredTimerInfo(timestamp_ms)
                )
                yield from _yielded(results, "handleExpiredTimer")
                timers.delete(timestamp_ms)  # even if it was set again meanwhile, as in Spark

        def of_visit(visit: Visit) -> Iterator[Any]:
            if fires_first:
                yield from fire(visit.encoded, visit.due)
            else:
                timers.add_due(visit.due)
            if visit.rows is not None:
                yield from of_rows(visit.key, visit.rows)
            yield from fire(visit.encoded, timers.take_due())
            timers.leave_due()  # timers that these set and that are already due fire in the next batch

        for visit in key_visits(grouped, state, encode_key, until, expiring=expiring, upcoming=self.upcoming):
            state.key_group, state.key = visit.key_group, visit.encoded
            yield of_visit(visit)


def _yielded(results: Iterable[Any] | None, method: str) -> Iterator[Any]:
    """Return an iterator over what a method of the processor returned; one that never yields returns None."""
    if results is None:
        raise InvalidInputError(
            f"{method} returned None: have it yield its results, or return iter(()) where it has none"
        )
    return iter(results)
