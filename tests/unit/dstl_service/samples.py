"""Values that several tests of this package need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from dstl_service.formats.manifest import Manifest, ManifestKind
from dstl_service.registry.job_store import JobStore
from dstl_service.registry.savepoint_register import SavepointRegister
from dstl_service.wire import CheckpointRef, OperatorInfo, StateInfo
from storage.checksum import BytesLike
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.model import ChangeSetId, Segment, SegmentHandle, Writer
from storage.object_store import ObjectData, ObjectStore
from storage.segment_format import encode_object
from storage.testing import FakeClock, FakeIds


def segment(
    sqn: int = 0,
    payload: BytesLike = b"0123456789",
    *,
    checkpoint_id: int = 1,
    partition: int = 0,
    attempt: int = 7,
    operator: str = "op",
) -> Segment:
    """Return a change set of a partition that owns the key groups 10p..10p+9."""
    set_id = ChangeSetId("job", operator, checkpoint_id, Writer(3, attempt), partition, sqn)
    return Segment.of(set_id, KeyGroupRange(10 * partition, 10 * partition + 9), 1, payload)


def handles_of(segments: Sequence[Segment], key: str = "job/segments/host/1.seg") -> list[SegmentHandle]:
    """Return the handles of these sets after they were stored as one object."""
    buffers, entries = encode_object(segments)
    return [SegmentHandle(key, sum(len(buffer) for buffer in buffers), entry) for entry in entries]


def stored(
    store: ObjectStore, segments: Sequence[Segment], key: str = "job/segments/host/1.seg"
) -> list[SegmentHandle]:
    """Store these sets as one object, and return their handles."""
    store.put(key, encode_object(segments)[0])
    return handles_of(segments, key)


def opened(store: ObjectStore, host: int = 0) -> JobStore:
    """Return the job's store as seen by a process that opened the job."""
    jobs = JobStore(store, "job", FakeClock(), FakeIds(host))
    jobs.open(None)
    return jobs


def registered(register: SavepointRegister) -> set[str]:
    """Return the names of the savepoints and pins on the register."""
    now = register.read()
    return {now.title(one) for one in now.objects}


def manifest(
    checkpoint_id: int = 0,
    epoch: int = 1,
    base: CheckpointRef | None = None,
    *,
    uid: str = "",
    job_uid: str = "job-uid",
    segments: Sequence[SegmentHandle] = (),
    earlier: Sequence[SegmentHandle] = (),
    kind: ManifestKind = ManifestKind.DELTA,
) -> Manifest:
    """Return a manifest with one operator."""
    states = {"count": StateInfo(0, "value", "{}", ["[]"]), "seen": StateInfo(1, "map", "{}", ttl_ms=1000)}
    operator = OperatorInfo("op", 2, '{"type":"struct","fields":[]}', states, "EventTime", "Update", "rows")
    return Manifest(
        kind=kind,
        job_uid=job_uid,
        id=checkpoint_id,
        generation=0,
        uid=uid or f"uid-{epoch}-{checkpoint_id}",
        epoch=epoch,
        created_ms=1_700_000_000_000,
        base=base,
        query_id="query",
        offsets='{"batch":"ü"}',
        operators=(operator,),
        segments=tuple(segments),
        earlier=tuple(earlier),
    )


class SteppingStore(MemoryStore):
    """A store in memory that runs a step just before a put or delete, like another process."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[str, str, Callable[[], object]]] = []

    def before_put(self, key_pattern: str, step: Callable[[], object]) -> None:
        """Run `step` once, before the next put of a key of this shell pattern that no earlier step waits for."""
        self._steps.append(("put", key_pattern, step))

    def before_delete(self, key_pattern: str, step: Callable[[], object]) -> None:
        """Run `step` once, before the next delete of such a key."""
        self._steps.append(("delete", key_pattern, step))

    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        """Run the first step that waits for this key, then put."""
        self._step("put", key)
        super().put(key, data, if_absent=if_absent)

    def delete(self, keys: Iterable[str]) -> None:
        """Run the first step that waits for one of these keys, then delete."""
        wanted = tuple(keys)
        for key in wanted:
            self._step("delete", key)
        super().delete(wanted)

    def _step(self, operation: str, key: str) -> None:
        for item in self._steps:
            if item[0] == operation and fnmatchcase(key, item[1]):
                self._steps.remove(item)
                item[2]()
                return
