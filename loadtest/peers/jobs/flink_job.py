"""
PyFlink: a count and a sum per key, one row per event, to files that are committed with a checkpoint every second.

State is in RocksDB, with Flink's changelog if PEER_CHANGELOG is 1. Python runs in processes or in threads of the JVM.
A run after a kill goes on from the newest complete checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyflink.common import Configuration, Encoder, Types
from pyflink.datastream import KeyedProcessFunction, RuntimeContext, StreamExecutionEnvironment
from pyflink.datastream.connectors.file_system import FileSink, RollingPolicy
from pyflink.datastream.connectors.number_seq import NumberSequenceSource
from pyflink.datastream.state import ValueStateDescriptor

FOLDER = Path(os.environ["PEER_FOLDER"])
EVENTS, KEYS = int(os.environ["PEER_EVENTS"]), int(os.environ["PEER_KEYS"])


class Totals(KeyedProcessFunction):
    """Counts and sums per key."""

    def open(self, runtime_context: RuntimeContext) -> None:
        from progress import Progress

        kind = Types.TUPLE([Types.LONG(), Types.DOUBLE()])
        self._total = runtime_context.get_state(ValueStateDescriptor("total", kind))
        self._progress = Progress(FOLDER)

    def process_element(self, value: Any, ctx: Any) -> Iterator[str]:
        count, amount = self._total.value() or (0, 0.0)
        count, amount = count + 1, amount + value[1]
        self._total.update((count, amount))
        self._progress.add()
        yield f"{value[0]},{count}"

    def close(self) -> None:
        self._progress.end()


def settings() -> Configuration:
    """Return the settings of the cluster in this process."""
    found = Configuration()
    values = {
        "parallelism.default": "2",
        "restart-strategy.type": "disable",  # an error ends the job instead of being tried for ever
        "python.execution-mode": os.environ["PEER_MODE"],
        "python.executable": os.environ["PEER_PYTHON"],
        "python.client.executable": os.environ["PEER_PYTHON"],
        "state.backend.type": "rocksdb",
        "state.backend.incremental": "true",
        "execution.checkpointing.incremental": "true",
        "execution.checkpointing.interval": "1s",
        "execution.checkpointing.dir": f"file://{FOLDER}/checkpoints",
        "execution.checkpointing.storage": "filesystem",
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        "execution.checkpointing.max-concurrent-checkpoints": "1",
        "rest.address": "127.0.0.1",
        "rest.bind-address": "127.0.0.1",
        "rest.bind-port": os.environ["PEER_PORT"],
        "rest.port": os.environ["PEER_PORT"],
    }
    if os.environ["PEER_CHANGELOG"] == "1":
        values["state.changelog.enabled"] = "true"
        values["state.changelog.storage"] = "filesystem"
        values["state.changelog.dstl.dfs.base-path"] = f"file://{FOLDER}/dstl"
    newest = max((FOLDER / "checkpoints").glob("*/chk-*/_metadata"), key=os.path.getmtime, default=None)
    if newest is not None:
        values["execution.state-recovery.path"] = f"file://{newest.parent}"
        values["execution.state-recovery.claim-mode"] = "CLAIM"  # the changelog refuses Flink's default
    for name, value in values.items():
        found.set_string(name, value)
    return found


def main() -> None:
    """Run to the end of the events."""
    env = StreamExecutionEnvironment.get_execution_environment(settings())
    pair = Types.TUPLE([Types.LONG(), Types.DOUBLE()])
    numbers = env.from_source(NumberSequenceSource(0, EVENTS - 1), _no_watermarks(), "events", Types.LONG())
    events = numbers.map(lambda number: (number * 7919 % KEYS, float(number)), pair)
    rows = events.key_by(lambda event: event[0], Types.LONG()).process(Totals(), Types.STRING())
    sink = FileSink.for_row_format(f"file://{FOLDER}/out", Encoder.simple_string_encoder())
    rows.sink_to(sink.with_rolling_policy(RollingPolicy.on_checkpoint_rolling_policy()).build())
    env.execute("totals")


def _no_watermarks() -> Any:
    from pyflink.common import WatermarkStrategy

    return WatermarkStrategy.no_watermarks()


if __name__ == "__main__":
    main()
