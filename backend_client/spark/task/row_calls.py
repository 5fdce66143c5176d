"""
How a processor of the Row API is called: key by key, with the rows of a key as one lazy iterator.

Timers that the watermark has passed fire before the rows of their key, as in the batch without data that Spark runs for
them; those that are set in this batch and due already fire behind the rows, as in the same batch on Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

from backend_client.batch_time import BatchTime, TimeMode
from backend_client.service.log_writer import LogWriter
from backend_client.spark.task.initial_rows import InitialRows
from backend_client.spark.task.key_visits import KeyVisits, Visit
from backend_client.spark.task.rows import KeyRows, row_factory
from backend_client.spark.task.state_handle import TaskHandle
from backend_client.state.codec import KeyCodec
from backend_client.state.keyed_state import KeyedState
from backend_client.state.timers import Timers, Upcoming
from dstl_service.wire import StateInfo

OUTPUT_ROWS = 10_000

Results = Callable[[tuple[Any, ...], Iterator[Any]], Iterator[Any]]


@dataclass(frozen=True, slots=True)
class Timing:
    """
    The time of an operator in a batch.

    Rows come before timers, as in a batch of Spark's. With `fires_first` the batch stands for one without data, too,
    before it: what is due already fires before the rows of its key.
    """

    mode: TimeMode
    time: BatchTime
    fires_first: bool = False


@dataclass(frozen=True, slots=True)
class RowCalls:
    """
    Calls a processor for the rows of one partition.

    Args:
        operator: Names the operator in errors.
        processor: The user's.
        states: Its variables.
        key_schema: Of the grouping key, Spark's JSON.
        preemptive_bytes: Changes are sent on between two keys from this size on.
        timing: Set unless the time mode is None.
        initial: Set in the batch whose rows have the operator's initial state among them.
        output_max: Outputs are handed on in lists of at most this length.
        upcoming: Told of timers that are due later.
    """

    operator: str
    processor: StatefulProcessor
    states: dict[str, StateInfo]
    key_schema: str
    preemptive_bytes: int
    timing: Timing | None = None
    initial: InitialRows | None = None
    output_max: int = OUTPUT_ROWS
    upcoming: Upcoming = field(default_factory=Upcoming)

    def run(self, grouped: Iterable[KeyRows], state: KeyedState, writer: LogWriter) -> Iterator[list[Any]]:
        """Yield what the processor yields, in lists of at most `output_max`."""
        processor, output_max = self.processor, self.output_max
        handle = TaskHandle(self.operator, self.states, state)
        processor.init(handle)  # type: ignore[arg-type]
        values = TimerValues()
        if self.timing is not None:
            values = TimerValues(self.timing.time.timestamp_ms, self.timing.time.watermark_ms)
        split = None if self.initial is None else self.initial.splitter()

        def of_rows(key: tuple[Any, ...], rows: Iterator[Any]) -> Iterator[Any]:
            inputs: Iterator[Any] | None = rows
            if split is not None:
                inputs = split(rows, lambda row: processor.handleInitialState(key, row, values))
            return iter(()) if inputs is None else iter(processor.handleInputRows(key, inputs, values))

        out: list[Any] = []
        for results in self._results(grouped, state, handle, of_rows, values):
            out.extend(islice(results, output_max - len(out)))
            while len(out) == output_max:
                yield out
                out = list(islice(results, output_max))
            if state.changed_bytes >= self.preemptive_bytes:
                writer.append(state.take_changes(), preemptive=True)
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
        visits = KeyVisits(
            state=state,
            encode=encode_key,
            due_until_ms=until,
            expiring=any(info.ttl_ms is not None for info in self.states.values()),
            upcoming=self.upcoming,
        )

        def fire(encoded: bytes, timestamps: Iterable[int]) -> Iterator[Any]:
            for timestamp_ms in timestamps:
                yield from self.processor.handleExpiredTimer(
                    key=codec.decode(encoded), timerValues=values, expiredTimerInfo=ExpiredTimerInfo(timestamp_ms)
                )
                timers.delete(timestamp_ms)  # also where it was set again meanwhile, as Spark does

        def of_visit(visit: Visit) -> Iterator[Any]:
            if fires_first:
                yield from fire(visit.encoded, visit.due)
            else:
                timers.add_due(visit.due)
            if visit.rows is not None:
                yield from of_rows(visit.key, visit.rows)
            yield from fire(visit.encoded, timers.take_due())
            timers.leave_due()  # what the last ones set and is due already fires in the next batch

        for visit in visits.of(grouped):
            state.key_group, state.key = visit.key_group, visit.encoded
            yield of_visit(visit)
