"""
Kills processes at named steps of publishing.

An *order* is a file that names a step and a victim. The process that reaches the step first takes the file, by renaming
it, and kills the victim: itself (a Python worker), or the driver with its JVM, while it goes on as a zombie.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from backend_client.sinks.protocol import Marker, Sink, Slot, SlotPublisher

DRIVER_STEPS = ("logged", "completed")
"""After the output is in the log; after the checkpoint exists, before anything is published."""
SINK_STEPS = ("opening", "opened", "marker read", "publishing", "all read", "published")
"""In a task: before and after a slot is opened, after its marker is read, after the first and the last batch of its
records, and after they are published, before the driver knows."""
WORKER, DRIVER = "worker", "driver"


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders in a folder that all processes of one host see."""

    folder: str

    def give(self, step: str, victim: str) -> Path:
        """Order a kill; return the file that exists once it is done."""
        order, hidden = self._order, self._order.with_suffix(".new")
        hidden.write_text(json.dumps({"step": step, "victim": victim}), encoding="utf-8")
        hidden.rename(order)
        return self._done(step, victim)

    def withdraw(self) -> None:
        """Withdraw an order that no process has taken."""
        self._order.unlink(missing_ok=True)

    def reach(self, step: str) -> None:
        """Kill the victim if this step is ordered."""
        try:
            order = json.loads(self._order.read_text(encoding="utf-8"))
            if order["step"] != step:
                return
            self._order.rename(self._order.with_suffix(f".{os.getpid()}"))
        except FileNotFoundError:
            return
        self._done(step, order["victim"]).touch()
        victims = self.pids() if order["victim"] == DRIVER else [os.getpid()]
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def announce(self, pids: Sequence[int]) -> None:
        """Say which processes are the driver."""
        path = Path(self.folder, "driver")
        path.with_suffix(".new").write_text(json.dumps(list(pids)), encoding="utf-8")
        path.with_suffix(".new").rename(path)

    def pids(self) -> list[int]:
        """Return the driver's processes."""
        found: list[int] = json.loads(Path(self.folder, "driver").read_text(encoding="utf-8"))
        return found

    @property
    def _order(self) -> Path:
        return Path(self.folder, "order")

    def _done(self, step: str, victim: str) -> Path:
        return Path(self.folder, f"done-{step.replace(' ', '-')}-{victim}")


@dataclass(frozen=True, slots=True)
class KillingSink(Sink):
    """Publishes to another sink, and reaches the steps on the way."""

    sink: Sink
    orders: Orders

    def check(self, columns: pa.Schema, slots: Sequence[Slot]) -> None:
        """Check the sink."""
        self.sink.check(columns, slots)

    def open(self, slot: Slot) -> SlotPublisher:
        """Open the sink's slot."""
        self.orders.reach("opening")
        publisher = self.sink.open(slot)
        self.orders.reach("opened")
        return _KillingPublisher(publisher, self.orders)


class _KillingPublisher(SlotPublisher):
    def __init__(self, publisher: SlotPublisher, orders: Orders) -> None:
        self._publisher = publisher
        self._orders = orders

    def last_published(self) -> Marker | None:
        """Return the sink's marker."""
        marker = self._publisher.last_published()
        self._orders.reach("marker read")
        return marker

    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        """Publish to the sink."""
        count = self._publisher.publish(self._watched(records), marker)
        self._orders.reach("published")
        return count

    def close(self) -> None:
        """Close the sink's publisher."""
        self._publisher.close()

    def _watched(self, records: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        is_first = True
        for batch in records:
            yield batch
            if is_first:
                self._orders.reach("publishing")
                is_first = False
        self._orders.reach("all read")
