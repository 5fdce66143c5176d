"""
Quix Streams: a count and a sum per key, one row per event, from Kafka to Kafka.

State is in RocksDB with a changelog topic; a transaction commits it with rows and offsets every second. Two processes
of one consumer group run this; the starting process ends them when all rows are there.
"""

from __future__ import annotations

import os
import struct
from typing import Any

from progress import Progress
from quixstreams import Application

FOLDER = os.environ["PEER_FOLDER"]
_ROW = struct.Struct(">qd")


def main() -> None:
    """Run until ended by a signal."""
    progress = Progress(FOLDER)
    app = Application(
        os.environ["PEER_BROKERS"],
        consumer_group="totals",
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        commit_interval=1.0,
        state_dir=f"{FOLDER}/state-{os.environ['PEER_NUMBER']}",
        loglevel="WARNING",
    )

    def total(value: bytes, state: Any) -> bytes:
        count, amount = state.get("total", (0, 0.0))
        count, amount = count + 1, amount + struct.unpack(">d", value)[0]
        state.set("total", (count, amount))
        progress.add()
        return _ROW.pack(count, amount)

    events = app.topic("events", key_deserializer="bytes", value_deserializer="bytes")
    rows = app.topic("rows", key_serializer="bytes", value_serializer="bytes")
    app.dataframe(events).apply(total, stateful=True).to_topic(rows)
    app.run()
    progress.end()


main()
