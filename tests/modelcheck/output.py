"""
Output for a sink in the model check: the system outside, and a publisher that reads the log as tasks do.

The publisher's code is real, from the service's route to the marker; the connection between them is a call.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

import pyarrow as pa

from backend_client.service.client import ServiceClient
from backend_client.service.output_log import read_output
from backend_client.sinks.protocol import Marker, Sink, Slot, SlotPublisher
from backend_client.sinks.records import change_sets, epoch_of, record_batches
from backend_client.sinks.slot_publishing import LoggedRecords, Target, publish_slot
from dstl_service.http.routes.restore import answer_restore
from dstl_service.http.task_requests import RestoreRequest
from dstl_service.wire import CheckpointRef, decode_frames
from storage.change_set import encode_change_set
from storage.errors import FencedError
from storage.key_groups import KeyGroupRange

if TYPE_CHECKING:
    from tests.modelcheck.cluster import CheckedCluster
    from tests.modelcheck.code_under_check import Process

SINK_NAME = "output"
SLOT_GROUP = KeyGroupRange(0, 0)
_COLUMNS = pa.schema({"record": pa.string()})


@lru_cache(10_000)
def logged_record(checkpoint_id: int, epoch: int) -> bytes:
    """Return the change set with a checkpoint's only record, which names it and its driver's epoch."""
    batch = pa.record_batch({"record": [f"{checkpoint_id}/{epoch}"]}, schema=_COLUMNS)
    ((changes, _),) = change_sets([batch], SLOT_GROUP.first, epoch, 1 << 20)
    return encode_change_set(changes)


def publish(process: Process, job: str, target: Target) -> None:
    """Publish what the sink lacks up to a checkpoint, through the sidecar of a process."""
    slot = Slot(job, "uid", SINK_NAME, SLOT_GROUP.first, _COLUMNS)

    def read(after: CheckpointRef | None) -> Iterator[LoggedRecords]:
        client = cast("ServiceClient", _Client(process))  # all that it is asked for
        found = read_output(client, job, SINK_NAME, SLOT_GROUP.first, after, target.checkpoint, target.newest)
        for checkpoint_id, source, changes in found:
            yield LoggedRecords(epoch_of(changes, source), checkpoint_id, record_batches(changes, source))

    publish_slot(_ModelSink(process.cluster), slot, read, target)


class _Client:
    """Asks a sidecar of the model."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @contextmanager
    def restore(
        self, job: str, operator: str, key_groups: KeyGroupRange, have: str | None, to: str, *, is_output: bool
    ) -> Iterator[Iterator[tuple[dict[str, Any], bytes]]]:
        """Return the frames of an answer."""
        query = {
            "operator": operator,
            "first_key_group": key_groups.first,
            "last_key_group": key_groups.last,
            "to": to,
            "output": str(is_output).lower(),
            **({} if have is None else {"have": have}),
        }
        request = RestoreRequest.parse(job, urlencode(query).encode())
        answer = self._process.do(lambda: answer_restore(self._process.parts, request))
        yield decode_frames(io.BytesIO(bytes(answer.body)))


class _ModelSink(Sink):
    """The first publisher of a slot to publish wins; opening fences nobody. Each access is a turn."""

    def __init__(self, cluster: CheckedCluster) -> None:
        self._cluster = cluster

    def check(self, columns: pa.Schema, slots: Sequence[Slot]) -> None:
        """Do nothing."""

    def open(self, slot: Slot) -> SlotPublisher:
        """Read the marker."""
        self._cluster.scheduler.yield_before("open the sink")
        marker = self._cluster.outside.marker
        self._cluster.scheduler.observe("marker", marker)
        return _ModelPublisher(self._cluster, marker)


class _ModelPublisher(SlotPublisher):
    def __init__(self, cluster: CheckedCluster, marker: Marker | None) -> None:
        self._cluster = cluster
        self._marker = marker

    def last_published(self) -> Marker | None:
        return self._marker

    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        new = [text for batch in records for text in batch.column(0).to_pylist()]
        outside = self._cluster.outside
        self._cluster.scheduler.yield_before(f"publish {', '.join(new) or 'nothing'}")
        if outside.marker != self._marker:
            self._cluster.scheduler.observe("fenced")
            raise FencedError("the slot was published by another publisher")
        outside.records += new
        outside.marker = self._marker = marker
        self._cluster.scheduler.observe("published", marker)
        self._cluster.check_output()
        return len(new)

    def close(self) -> None:
        pass
