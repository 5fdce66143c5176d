"""
Pathway: a count and a sum per key, from files of CSV to a file of CSV; state is persisted every second.

It updates its result once per batch of its own, not per event. Two threads in one process.
"""

from __future__ import annotations

import os
import time

import pathway as pw
from progress import Progress

FOLDER = os.environ["PEER_FOLDER"]


class Event(pw.Schema):
    """A line of the input."""

    k: int
    v: float


def main() -> None:
    """Run to the end of the input."""
    progress = Progress(FOLDER)
    events = pw.io.csv.read(f"{FOLDER}/in", schema=Event, mode="static")
    totals = events.groupby(pw.this.k).reduce(pw.this.k, n=pw.reducers.count(), s=pw.reducers.sum(pw.this.v))
    os.makedirs(f"{FOLDER}/out", exist_ok=True)
    pw.io.csv.write(totals, f"{FOLDER}/out/{time.time_ns()}.csv")
    backend = pw.persistence.Backend.filesystem(f"{FOLDER}/state")
    config = pw.persistence.Config(backend, snapshot_interval_ms=1_000)
    pw.run(persistence_config=config, monitoring_level=pw.MonitoringLevel.NONE)
    progress.add(int(os.environ["PEER_EVENTS"]))
    progress.end()


main()
