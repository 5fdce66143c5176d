"""
Stores a snapshot: hashes its files, uploads those that its parent does not have, then writes the index.

A file is uploaded only if it is as RocksDB wrote it (`dstl_service.materialization.table_file_check`): a hash of a file
that the local disk had damaged would make it valid state, for which the log is truncated. The very bytes that are
hashed are verified.

The caller has seen a completed manifest that lists the snapshot's uid as under way, so that the garbage collector keeps
all objects put here (I11, see `dstl_service.formats.under_way`). All keys carry the uid, so no deleted key is ever put
again. A file counts as stored without an upload only if a materialization of the checkpoint's state names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeAlias, TypeVar

from dstl_service.formats.materialization_index import (
    MaterializationIndex,
    SnapshotFile,
    encode_index,
    file_key,
    read_index,
)
from dstl_service.formats.under_way import UnderWaySnapshot
from dstl_service.materialization.policy import MaterializationSettings
from dstl_service.materialization.snapshot_folder import FoundFile, SnapshotFolder
from dstl_service.materialization.table_file_check import DamagedFileError, check_table_file
from dstl_service.process.fair_slots import FairSlots
from dstl_service.registry.job_store import JobStore
from dstl_service.restore.table_id import TableId
from dstl_service.uploads.uploader import slots_in_all
from dstl_service.wire import CheckpointRef
from storage.checksum import checksum128
from storage.clock import Clock
from storage.errors import CorruptDataError
from storage.model import MaterializationHandle
from storage.object_store import ObjectStore
from storage.retry_policy import is_retryable

_T = TypeVar("_T")
_RETRY_DELAY_S = 0.5


KnownFiles: TypeAlias = MutableMapping[tuple[int, ...], str]
"""Checksums of a table's files by their identity, which hard links share; only those of the last snapshot."""


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A stored snapshot, with the bytes uploaded and reused."""

    handle: MaterializationHandle
    uploaded_bytes: int
    reused_bytes: int


class BandwidthLimiter:
    """Spreads bytes over time; 0 means no limit. No clock: the caller passes the time, and waits."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_ms = 0.0

    def delay_ms(self, size_bytes: int, now_ms: int) -> float:
        """Return how long to wait before sending `size_bytes`; they count as sent."""
        if not self._bytes_per_s:
            return 0.0
        begin_ms = max(float(now_ms), self._free_ms)
        self._free_ms = begin_ms + size_bytes * 1000 / self._bytes_per_s
        return begin_ms - now_ms


class SnapshotUploader:
    """
    Stores snapshots of all tables of a host.

    Args:
        settings: Bandwidth, threads and attempts.
        store: Receives the snapshots.
        clock: For delays.
        executor: Runs blocking calls; one that hangs must not take a thread from others.
    """

    def __init__(
        self,
        settings: MaterializationSettings,
        store: ObjectStore,
        clock: Clock,
        executor: Executor,
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._executor = executor
        self._bandwidth = BandwidthLimiter(settings.bandwidth_bytes_per_s)
        self._slots = FairSlots(slots_in_all(settings.threads))

    async def store(
        self,
        table: TableId,
        job_store: JobStore,
        snapshot: UnderWaySnapshot,
        base: CheckpointRef,
        folder: SnapshotFolder,
        known: KnownFiles,
    ) -> StoredSnapshot:
        """
        Store a snapshot.

        Args:
            table: The snapshot's table.
            job_store: Its job.
            snapshot: The snapshot, which the checkpoint `base` lists as under way.
            base: A completed checkpoint; files of the table's snapshot in its state are reused.
            folder: Holds the files.
            known: The table's, which is updated.

        Raises:
            DamagedFileError: Not stored, since the local disk has damaged the table.
            DstlError: Not stored completely for another reason. Nothing names the objects already put.
        """
        parent = await self._in_thread(_parent, self._store, job_store, table, base)
        found = {file.name: file for file in await self._in_thread(folder.files)}
        # A table's next snapshot shares files with this one; files not in this one never return.
        here = {file.identity for file in found.values()}
        for identity in known.keys() - here:
            del known[identity]
        shared = {(file.checksum, file.size_bytes): file.object_key for file in parent.files} if parent else {}
        verified = partial(_verified, folder, found, shared)
        files = [await self._named(table, snapshot.uid, verified, file, known, shared) for file in found.values()]
        in_parent = set(shared.values())
        missing = {file.object_key: file for file in files if file.object_key not in in_parent}
        index = MaterializationIndex(
            job_uid=job_store.job_uid,
            operator=table.operator,
            key_groups=table.key_groups,
            version=snapshot.version,
            uid=snapshot.uid,
            parents=(parent.uid,) if parent and any(file.object_key in in_parent for file in files) else (),
            files=tuple(files),
        )
        await self._upload_all(table.job, folder, [(found[file.name], file) for file in missing.values()])
        handle = index.handle(table.job)
        await self._in_thread(partial(self._store.put, handle.index_key, encode_index(index), if_absent=True))
        uploaded = sum(file.size_bytes for file in missing.values())
        return StoredSnapshot(handle, uploaded, index.size_bytes - uploaded)

    async def _upload_all(self, job: str, folder: SnapshotFolder, files: list[tuple[FoundFile, SnapshotFile]]) -> None:
        """Upload files side by side; the first failure ends all of them, and none goes on after the return."""
        uploads = [
            asyncio.get_running_loop().create_task(self._upload(job, folder, found, file)) for found, file in files
        ]
        try:
            await asyncio.gather(*uploads)
        finally:
            for task in uploads:
                task.cancel()
            await asyncio.gather(*uploads, return_exceptions=True)

    async def _named(
        self,
        table: TableId,
        uid: str,
        verified: Callable[[FoundFile], str],
        file: FoundFile,
        known: KnownFiles,
        shared: Mapping[tuple[str, int], str],
    ) -> SnapshotFile:
        """Return a file's entry for the index; only files new to this process are read."""
        checksum = known.get(file.identity)
        if checksum is None:
            async with self._slots.held(table.job):
                checksum = await self._in_thread(verified, file)
            if file.name.endswith(".sst"):  # the others may be written in place
                known[file.identity] = checksum
        own = file_key(table.job, table.operator, table.key_groups, uid, file.name, checksum, file.size_bytes)
        key = shared.get((checksum, file.size_bytes), own)
        return SnapshotFile(file.name, key, file.size_bytes, checksum)

    async def _upload(self, job: str, folder: SnapshotFolder, found: FoundFile, file: SnapshotFile) -> None:
        async with self._slots.held(job):
            await asyncio.sleep(self._bandwidth.delay_ms(file.size_bytes, self._clock.monotonic_ms()) / 1000)
            for attempt in count(1):
                try:
                    await self._in_thread(self._put_file, folder, found, file)
                except Exception as error:
                    if attempt >= self._settings.upload_attempts_max or not is_retryable(error):
                        raise
                    await asyncio.sleep(_RETRY_DELAY_S * attempt)
                else:
                    return

    def _put_file(self, folder: SnapshotFolder, found: FoundFile, file: SnapshotFile) -> None:
        data = folder.read(found)
        if checksum128(data) != file.checksum:
            raise DamagedFileError(f"file {file.name} of snapshot {folder.path} has changed since it was hashed")
        self._store.put(file.object_key, data)

    async def _in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)


def _verified(
    folder: SnapshotFolder, names: Collection[str], stored: Collection[tuple[str, int]], file: FoundFile
) -> str:
    """Return the checksum of a file that is as RocksDB wrote it; content that the parent has is already verified."""
    data = folder.read(file)
    checksum = checksum128(data)
    if (checksum, file.size_bytes) not in stored:
        check_table_file(file.name, data, names)
    return checksum


def _parent(
    store: ObjectStore, job_store: JobStore, table: TableId, base: CheckpointRef
) -> MaterializationIndex | None:
    """Return the same table's materialization in the checkpoint's state, or None."""
    found: Iterable[MaterializationHandle] = job_store.state(base).materializations
    for handle in found:
        if (handle.operator, handle.key_groups) == (table.operator, table.key_groups):
            try:
                return read_index(store, handle)
            except CorruptDataError:  # its files cannot be reused; the new one replaces it
                return None
    return None
