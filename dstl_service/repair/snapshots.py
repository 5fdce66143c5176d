"""
Verifies the stored snapshots of tables (I10): each file is read once, however many snapshots share it.

The checksum in an index shows that an object is unchanged since it was stored. Only the checksums that RocksDB wrote
into the file itself show that it was sound when it was stored. Blocking I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from dstl_service.formats.materialization_index import SnapshotFile, piece_offsets, read_index, read_piece
from dstl_service.materialization.table_file_check import check_table_file
from dstl_service.repair.scan import damage
from storage.checksum import checksum128
from storage.errors import CorruptDataError, NotFoundError
from storage.model import MaterializationHandle
from storage.object_store import ObjectReader, ObjectStore


def check_snapshots(store: ObjectReader, handles: Iterable[MaterializationHandle]) -> Iterator[tuple[int, str | None]]:
    """
    Yield for each unreadable index, and for each file, the number of sound bytes read and the problem, or None.

    A damaged file hides no other one, and is reported once; its bytes do not count.

    Raises:
        UnavailableError: The store does not answer.
    """
    verified: set[tuple[str, int, str]] = set()
    for handle in handles:
        try:
            index = read_index(store, handle)
        except CorruptDataError as error:
            yield 0, error.message
            continue
        names = {file.name for file in index.files}
        for file in index.files:
            content = (file.object_key, file.size_bytes, file.checksum)
            if content not in verified:
                verified.add(content)
                yield _check_file(store, file, names)


class StoredSnapshots:
    """
    Tells whether a job's snapshots are there, without reading their files: a table may have hundreds of gigabytes.

    One listing for all snapshots, which may be old: a file is missing, or of another size, if a request for it says so.

    Args:
        store: Holds the job.
        job: Its name.
    """

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store = store
        self._job = job
        self._listed: dict[str, int] | None = None
        self._problems: dict[MaterializationHandle, str | None] = {}

    def problem_of(self, handle: MaterializationHandle) -> str | None:
        """
        Return why a snapshot cannot be restored: an unreadable index, a file missing or of another size; or None.

        Raises:
            NewerFormatError: A newer version wrote the index.
        """
        if handle not in self._problems:
            self._problems[handle] = self._look_at(handle)
        return self._problems[handle]

    def _look_at(self, handle: MaterializationHandle) -> str | None:
        try:
            index = read_index(self._store, handle)
        except CorruptDataError as error:
            return damage(error)
        return next((problem for file in index.files if (problem := self._problem_of_file(file))), None)

    def _problem_of_file(self, file: SnapshotFile) -> str | None:
        if self._listed is None:
            self._listed = {info.key: info.size_bytes for info in self._store.list(f"{self._job}/materialized/")}
        if self._listed.get(file.object_key) == file.size_bytes:
            return None
        try:
            size_bytes = self._store.head(file.object_key).size_bytes
        except NotFoundError:
            return f"object {file.object_key} of a materialization is missing"
        if size_bytes == file.size_bytes:
            return None
        return f"object {file.object_key} of a materialization has {size_bytes} bytes, not {file.size_bytes}"


def _check_file(store: ObjectReader, file: SnapshotFile, names: Collection[str]) -> tuple[int, str | None]:
    try:
        data = b"".join(read_piece(store, file, offset) for offset in piece_offsets(file))
    except CorruptDataError as error:
        return 0, error.message
    if checksum128(data) != file.checksum:
        return 0, f"object {file.object_key} is damaged: its checksum does not match"
    try:
        check_table_file(file.name, data, names)
    except CorruptDataError as error:
        return 0, f"object {file.object_key} was stored from a damaged table: {error.message}"
    return file.size_bytes, None
