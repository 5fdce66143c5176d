"""
Stores a snapshot: hashes its files, uploads those that the store lacks, and writes the index around them.

Order of writing (I11): the index first, so that the garbage collector knows the files as soon as they exist; then the
files; then the index again, so that it is young when it is handed over. A file counts as stored without an upload if a
materialization of the checkpoint's state names it, or if this process stored it a short time ago.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dstl_service.job_store import JobStore
from dstl_service.materialization_index import (
    MaterializationIndex,
    SnapshotFile,
    encode_index,
    file_key,
    index_key,
    read_index,
)
from dstl_service.materialization_policy import MaterializationSettings
from dstl_service.snapshot_folder import FoundFile, SnapshotFolder
from dstl_service.wire import CheckpointRef
from storage.checksum import checksum128
from storage.clock import Clock, IdSource
from storage.errors import CorruptDataError, DstlError, UnavailableError
from storage.model import KeyGroupRange, MaterializationHandle
from storage.object_store import ObjectStore
from storage.retry_policy import is_retryable

_T = TypeVar("_T")
_RETRY_DELAY_S = 0.5


@dataclass(frozen=True, slots=True)
class TableId:
    """Whose table it is."""

    job: str
    operator: str
    key_groups: KeyGroupRange


@dataclass(slots=True)
class KnownFiles:
    """What one process knows of a table's files from earlier snapshots: a cache."""

    checksums: dict[tuple[int, ...], str] = field(default_factory=dict)
    """By a file's identity; hard links of one file share it. Of the files of the last snapshot only."""
    stored_ms: dict[str, int] = field(default_factory=dict)
    """By object key: when this process stored it, on the monotonic clock."""


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot that is stored, and what it cost."""

    handle: MaterializationHandle
    uploaded_bytes: int
    reused_bytes: int


class Throttle:
    """Spreads bytes over time; without a limit it lets all through. No clock: the caller says the time, and waits."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_ms = 0.0

    def delay_ms(self, size_bytes: int, now_ms: int) -> float:
        """Return how long to wait before sending so many bytes; they count as sent."""
        if not self._bytes_per_s:
            return 0.0
        begin_ms = max(float(now_ms), self._free_ms)
        self._free_ms = begin_ms + size_bytes * 1000 / self._bytes_per_s
        return begin_ms - now_ms


class SnapshotUploader:
    """
    Stores snapshots of all tables of a host.

    Args:
        settings: How fast, and how often an upload is tried.
        store: Where snapshots go.
        clock: For delays.
        ids: Names materializations.
        executor: Runs blocking calls; one that hangs must not take a thread from others.
        refresh_ms: The index of an unfinished snapshot is written again after this time; well below the age at which
            the garbage collector takes what nobody names.
    """

    def __init__(
        self,
        settings: MaterializationSettings,
        store: ObjectStore,
        clock: Clock,
        ids: IdSource,
        executor: Executor,
        refresh_ms: int,
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._ids = ids
        self._executor = executor
        self._refresh_ms = refresh_ms
        self._throttle = Throttle(settings.bandwidth_bytes_per_s)
        self._slots = asyncio.Semaphore(settings.threads)

    async def store(
        self, table: TableId, jobs: JobStore, version: CheckpointRef, folder: SnapshotFolder, known: KnownFiles
    ) -> StoredSnapshot:
        """
        Store the snapshot of a table that stood at `version`.

        Raises:
            DstlError: It is not stored as a whole; nothing names what is.
        """
        parent = await self._in_thread(_parent, self._store, jobs, table, version)
        found = {file.name: file for file in await self._in_thread(folder.files)}
        # A table's next snapshot shares files with this one; what is not in this one never comes again.
        here = {file.identity for file in found.values()}
        known.checksums = {identity: checksum for identity, checksum in known.checksums.items() if identity in here}
        files = [await self._named(table, folder, file, known) for file in found.values()]
        in_parent = {file.object_key for file in parent.files} if parent is not None else set()
        fresh_ms = self._clock.monotonic_ms() - self._refresh_ms
        known.stored_ms = {key: put_ms for key, put_ms in known.stored_ms.items() if put_ms > fresh_ms}
        missing = {
            file.object_key: file
            for file in files
            if file.object_key not in in_parent and file.object_key not in known.stored_ms
        }
        index = MaterializationIndex(
            job_uid=jobs.job_uid,
            operator=table.operator,
            key_groups=table.key_groups,
            version=version,
            uid=self._ids.unique_id(),
            parents=(parent.uid,) if parent is not None and in_parent & {file.object_key for file in files} else (),
            files=tuple(files),
        )
        await self._put_index(table, index)
        refreshing = asyncio.get_running_loop().create_task(self._refresh(table, index))
        uploads = [
            asyncio.get_running_loop().create_task(self._upload(folder, found[file.name], file, known))
            for file in missing.values()
        ]
        try:
            await asyncio.gather(*uploads)
        finally:
            for task in (refreshing, *uploads):
                task.cancel()
            await asyncio.gather(refreshing, *uploads, return_exceptions=True)
        await self._put_index(table, index)
        uploaded = sum(file.size_bytes for file in missing.values())
        return StoredSnapshot(index.handle(table.job), uploaded, index.size_bytes - uploaded)

    async def _named(self, table: TableId, folder: SnapshotFolder, file: FoundFile, known: KnownFiles) -> SnapshotFile:
        """Return how a file is called in the store; only files that are new here are read for it."""
        checksum = known.checksums.get(file.identity)
        if checksum is None:
            async with self._slots:
                checksum = await self._in_thread(lambda: checksum128(folder.read(file)))
            if file.name.endswith(".sst"):  # the others may be written in place
                known.checksums[file.identity] = checksum
        key = file_key(table.job, table.operator, table.key_groups, file.name, checksum, file.size_bytes)
        return SnapshotFile(file.name, key, file.size_bytes, checksum)

    async def _upload(self, folder: SnapshotFolder, found: FoundFile, file: SnapshotFile, known: KnownFiles) -> None:
        async with self._slots:
            await asyncio.sleep(self._throttle.delay_ms(file.size_bytes, self._clock.monotonic_ms()) / 1000)
            attempt = 1
            while True:
                try:
                    await self._in_thread(self._put_file, folder, found, file)
                except Exception as error:
                    if attempt >= self._settings.upload_attempts_max or not is_retryable(error):
                        raise
                    await asyncio.sleep(_RETRY_DELAY_S * attempt)
                    attempt += 1
                else:
                    known.stored_ms[file.object_key] = self._clock.monotonic_ms()
                    return

    def _put_file(self, folder: SnapshotFolder, found: FoundFile, file: SnapshotFile) -> None:
        data = folder.read(found)
        if checksum128(data) != file.checksum:
            raise UnavailableError(f"file {file.name} of snapshot {folder.path} has changed")
        self._store.put(file.object_key, data)

    async def _refresh(self, table: TableId, index: MaterializationIndex) -> None:
        while True:
            await asyncio.sleep(self._refresh_ms / 1000)
            try:
                await self._put_index(table, index)
            except DstlError:  # there is time for more tries; the last writing of the index must succeed
                continue

    async def _put_index(self, table: TableId, index: MaterializationIndex) -> None:
        key = index_key(table.job, index.operator, index.key_groups, index.uid)
        await self._in_thread(self._store.put, key, encode_index(index))

    async def _in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)


def _parent(store: ObjectStore, jobs: JobStore, table: TableId, version: CheckpointRef) -> MaterializationIndex | None:
    """Return the materialization of the same table that the checkpoint's state has, or None."""
    found: Iterable[MaterializationHandle] = jobs.state(version).materializations
    for handle in found:
        if (handle.operator, handle.key_groups) == (table.operator, table.key_groups):
            try:
                return read_index(store, handle)
            except CorruptDataError:  # it cannot be built upon; the new one replaces it
                return None
    return None
