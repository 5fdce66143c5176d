"""Surveys a job's segment objects, for a rebuild of its registry. Blocking I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from dstl_service.formats.checkpoint_record import CheckpointRecord, decode_record, is_note
from dstl_service.repair.fsck import check_object
from dstl_service.repair.manifests import state_of
from dstl_service.repair.plan import CheckpointCandidate, RecoveryPlan, choose
from dstl_service.repair.scan import Registry, damage
from dstl_service.repair.snapshots import StoredSnapshots
from storage.errors import CorruptDataError, NotFoundError
from storage.model import ChangeSetId, MaterializationHandle, ObjectInfo, SegmentHandle
from storage.object_store import ObjectStore
from storage.segment_reader import read_index, read_payload

_READ_AT_ONCE = 16


class Survey:
    """The content of a job's segment objects by their indexes; payloads and snapshots are verified when chosen."""

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store = store
        self._job = job
        self._verified: set[str] = set()
        self._snapshots = StoredSnapshots(store, job)
        self._damaged_snapshots: dict[str, str] = {}
        self.objects: list[ObjectInfo] = []
        self.stored: dict[ChangeSetId, list[SegmentHandle]] = {}
        self.records: list[tuple[CheckpointRecord, SegmentHandle, int]] = []
        self.problems: list[str] = []

    def read(self) -> None:
        """Read all indexes, and the checkpoint records in notes."""
        self.objects = list(self._store.list(f"{self._job}/segments/"))
        with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
            for info, (handles, records, problems) in zip(
                self.objects, threads.map(self._read_object, self.objects), strict=True
            ):
                for handle in handles:
                    self.stored.setdefault(handle.entry.id, []).append(handle)
                self.records += [(record, handle, info.modified_ms) for record, handle in records]
                self.problems += problems

    def read_named(self, candidates: Iterable[CheckpointCandidate]) -> None:
        """Read the indexes of those objects of other jobs that candidates of a fork name."""
        logs = (one.start.log for one in candidates if one.start is not None and one.forked_from is not None)
        sets = {handle.object_key: handle.object_size_bytes for log in logs for handle in log}
        foreign = [key for key in sets if not key.startswith(f"{self._job}/")]
        with ThreadPoolExecutor(_READ_AT_ONCE) as threads:
            for entries in threads.map(lambda key: self._read_foreign(key, sets[key]), foreign):
                for handle in entries:
                    self.stored.setdefault(handle.entry.id, []).append(handle)

    def choose_verified(
        self, candidates: Sequence[CheckpointCandidate], registry: Registry, up_to: int | None
    ) -> RecoveryPlan:
        """Choose, verify every chosen object, and choose again without the damaged ones, until all are sound."""
        while True:
            plan = choose(candidates, registry, self.stored, self._damaged_snapshots, up_to)
            if not plan.path:
                return plan
            handles_of: dict[str, list[SegmentHandle]] = {}
            state = state_of(plan, self.stored)
            for handle in state.log:
                if handle.object_key not in self._verified:
                    handles_of.setdefault(handle.object_key, []).append(handle)
            damaged = {key for key, handles in handles_of.items() if not self._verify(key, handles)}
            if self._are_whole(state.materializations) and not damaged:
                return plan
            for handles in self.stored.values():
                handles[:] = [handle for handle in handles if handle.object_key not in damaged]

    def _read_object(
        self, info: ObjectInfo
    ) -> tuple[list[SegmentHandle], list[tuple[CheckpointRecord, SegmentHandle]], list[str]]:
        try:
            entries = read_index(self._store, info.key, info.size_bytes)
        except (CorruptDataError, NotFoundError) as error:
            return [], [], [error.message]
        handles, records, problems = [], [], []
        for entry in entries:
            handle = SegmentHandle(info.key, info.size_bytes, entry)
            if entry.id.job != self._job:
                problems.append(f"object {info.key} holds a segment of job {entry.id.job!r}")
            elif not is_note(entry.id):
                handles.append(handle)
            else:
                try:
                    records.append((decode_record(read_payload(self._store, handle), info.key), handle))
                except CorruptDataError as error:
                    problems.append(damage(error))
                except NotFoundError as error:
                    problems.append(error.message)
        return handles, records, problems

    def _read_foreign(self, key: str, size_bytes: int) -> list[SegmentHandle]:
        try:
            return [SegmentHandle(key, size_bytes, entry) for entry in read_index(self._store, key, size_bytes)]
        except (CorruptDataError, NotFoundError) as error:
            self.problems.append(error.message)
            return []

    def _verify(self, key: str, handles: Sequence[SegmentHandle]) -> bool:
        try:
            check_object(self._store, key, handles)
        except CorruptDataError as error:
            self.problems.append(error.message)
            return False
        self._verified.add(key)
        return True

    def _are_whole(self, handles: Iterable[MaterializationHandle]) -> bool:
        found = {handle.index_key: problem for handle in handles if (problem := self._snapshots.problem_of(handle))}
        self._damaged_snapshots |= found
        self.problems += dict.fromkeys(found.values())  # snapshots may share a file
        return not found
