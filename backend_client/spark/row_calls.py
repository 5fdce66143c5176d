"""How a processor of the Row API is called: key by key, with the rows of a key as one lazy iterator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.stateful_processor import TimerValues

from backend_client.codec import KeyCodec
from backend_client.keyed_state import KeyedState
from backend_client.log_writer import LogWriter
from backend_client.spark.processor import TaskHandle
from backend_client.spark.rows import GroupedRows
from dstl_service.wire import StateInfo

OUTPUT_ROWS = 10_000


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
        output_max: Outputs are handed on in lists of at most this length.
    """

    operator: str
    processor: StatefulProcessor
    states: dict[str, StateInfo]
    key_schema: str
    preemptive_bytes: int
    output_max: int = OUTPUT_ROWS

    def run(self, grouped: GroupedRows, state: KeyedState, writer: LogWriter) -> Iterator[list[Any]]:
        """Yield what the processor yields, in lists of at most `output_max`."""
        processor, output_max = self.processor, self.output_max
        processor.init(TaskHandle(self.operator, self.states, state))  # type: ignore[arg-type]
        encode_key = KeyCodec(self.key_schema).encode
        timers = TimerValues()
        out: list[Any] = []
        for key_group, key, rows in grouped:
            state.key_group, state.key = key_group, encode_key(key)
            results = iter(processor.handleInputRows(key, rows, timers))
            out.extend(islice(results, output_max - len(out)))
            while len(out) == output_max:
                yield out
                out = list(islice(results, output_max))
            if state.changed_bytes >= self.preemptive_bytes:
                writer.append(state.take_changes(), preemptive=True)
        processor.close()
        if out:
            yield out
