"""A job in a store, built step by step: objects, checkpoints, and time that advances explicitly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dstl_service.collection.garbage_collector import GarbageReport, collect_garbage
from dstl_service.collection.retention import CHECKPOINTS_MAX
from dstl_service.formats.manifest import Manifest, ManifestKind
from dstl_service.registry.job_store import JobStore
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.model import ChangeSetId, Segment, SegmentHandle, Writer
from storage.object_store import ObjectStore
from storage.segment_format import encode_object
from storage.testing import FakeClock, FakeIds


class JobHistory:
    """A job with a clock of its own, whose checkpoints and orphans are created step by step."""

    def __init__(self, store: ObjectStore | None = None, host: int = 0) -> None:
        self.clock = FakeClock(1_000_000_000)
        self.ids = FakeIds(host)
        self.store = store or MemoryStore(clock=self.clock, ids=self.ids)
        self.jobs = JobStore(self.store, "job", self.clock, self.ids)
        self.jobs.open(None)
        self.epoch, self.newest = self.jobs.claim("test")

    def object(self, checkpoint_id: int) -> SegmentHandle:
        """Store a segment object that no manifest names yet."""
        set_id = ChangeSetId("job", "op", checkpoint_id, Writer(self.epoch, 1), 0, 0)
        buffers, entries = encode_object([Segment.of(set_id, KeyGroupRange(0, 127), 1, b"payload")])
        key = f"job/segments/host/{self.ids.unique_id()}.seg"
        self.store.put(key, buffers)
        return SegmentHandle(key, sum(map(len, buffers)), entries[0])

    def complete(self, *handles: SegmentHandle, kind: ManifestKind = ManifestKind.DELTA, **changes: Any) -> None:
        """Complete the next checkpoint with these handles; `changes` are other fields of its manifest."""
        base = self.newest
        earlier = () if base is None or kind is ManifestKind.DELTA else (*base.earlier, *base.segments)
        self.newest, _ = self.jobs.create_manifest(
            Manifest(
                kind=kind,
                job_uid=self.jobs.job_uid,
                id=base.id + 1 if base else 0,
                generation=0,
                uid=self.ids.unique_id(),
                epoch=self.epoch,
                created_ms=0,
                base=base.ref if base else None,
                segments=handles,
                earlier=earlier,
                **changes,
            )
        )

    def compact(self, base: SegmentHandle, *handles: SegmentHandle) -> None:
        """Complete the next checkpoint with these handles, on a base that replaces all earlier ones."""
        assert self.newest is not None
        self.newest, _ = self.jobs.create_manifest(
            replace(
                self.newest,
                kind=ManifestKind.COMPLETE,
                id=self.newest.id + 1,
                generation=0,
                uid=self.ids.unique_id(),
                epoch=self.epoch,
                base=self.newest.ref,
                segments=handles,
                earlier=(base,),
            )
        )

    def collect(self, *, dry_run: bool = False, checkpoints_max: int = CHECKPOINTS_MAX) -> GarbageReport:
        """Collect garbage."""
        return collect_garbage(
            self.store, self.jobs, "job", self.clock, dry_run=dry_run, checkpoints_max=checkpoints_max
        )

    def stored(self) -> set[str]:
        """Return the stored segment objects."""
        return {info.key for info in self.store.list("job/segments/")}
