"""How a snapshot is stored: what is written, in which order, and what is not written again."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstl_service.formats.manifest import ManifestKind
from dstl_service.formats.materialization_index import read_index
from dstl_service.formats.under_way import UnderWaySnapshot, uid_in_key
from dstl_service.materialization import snapshot_uploader
from dstl_service.materialization.policy import MaterializationSettings
from dstl_service.materialization.snapshot_folder import SnapshotFolder
from dstl_service.materialization.snapshot_uploader import (
    BandwidthLimiter,
    KnownFiles,
    SnapshotUploader,
    StoredSnapshot,
)
from dstl_service.materialization.table_file_check import DamagedFileError, check_table_file
from dstl_service.registry.job_store import JobStore
from dstl_service.restore.table_id import TableId
from dstl_service.wire import CheckpointRef
from storage.errors import DstlError, InvalidInputError, UnavailableError
from storage.memory_store import MemoryStore
from storage.testing import FakeClock, FakeIds, Fault, FaultKind, FaultyStore, RecordingStore
from tests.rocksdb_files import sst_file
from tests.unit.dstl_service.samples import manifest, opened
from tests.unit.dstl_service.snapshots import FILES, GROUPS, index_of, snapshot_folder, store_snapshot

TABLE = TableId("job", "op", GROUPS)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let retries follow at once."""
    monkeypatch.setattr(snapshot_uploader, "_RETRY_DELAY_S", 0.0)
    return iter(())


class Host:
    """A sidecar's uploader, and a job with one checkpoint."""

    def __init__(self, **settings: Any) -> None:
        self.faulty = FaultyStore(MemoryStore())
        self.store = RecordingStore(self.faulty)
        self.jobs: JobStore = opened(self.store)
        self.clock = FakeClock()
        self.ids = FakeIds(7)
        self.known: KnownFiles = {}
        self.version: CheckpointRef = self.complete()
        self.settings = MaterializationSettings(**settings)

    def complete(self, *uids: str, base: CheckpointRef | None = None) -> CheckpointRef:
        """Complete a checkpoint whose state has these materializations, which are stored with the usual files."""
        handles = [
            store_snapshot(self.store, index_of(base, uid=uid, job_uid=self.jobs.job_uid)) for uid in uids if base
        ]
        checkpoint = manifest(
            base.id + 1 if base else 0, 1, base, job_uid=self.jobs.job_uid, kind=ManifestKind.COMPLETE
        )
        created, _ = self.jobs.create_manifest(replace(checkpoint, materializations=tuple(handles)))
        return created.ref

    def upload(self, path: Path) -> StoredSnapshot:
        """Store a snapshot; on return no thread works on it any more, even if it failed."""

        async def run(threads: ThreadPoolExecutor) -> StoredSnapshot:
            uploader = SnapshotUploader(self.settings, self.store, self.clock, threads)
            snapshot = UnderWaySnapshot("op", GROUPS, self.version, self.ids.unique_id())
            folder = SnapshotFolder.open(str(path), None)
            try:
                return await uploader.store(TABLE, self.jobs, snapshot, self.version, folder, self.known)
            finally:
                folder.close()

        self.store.clear()
        with ThreadPoolExecutor(4) as threads:
            return asyncio.run(run(threads))


def lose(monkeypatch: pytest.MonkeyPatch, place: str, name: str, code: int) -> None:
    """Let the disk fail when a file is opened, or when the opened file is read."""
    error = OSError(code, os.strerror(code))
    real_open, real_fdopen = os.open, os.fdopen

    def failing_open(path: Any, *args: Any, **options: Any) -> int:
        if place == "os.open" and path == name:
            raise error
        return real_open(path, *args, **options)

    def failing_fdopen(fd: int, *args: Any, **options: Any) -> Any:
        if place == "os.fdopen" and os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) == name:
            os.close(fd)
            raise error
        return real_fdopen(fd, *args, **options)

    monkeypatch.setattr(os, "open", failing_open)
    monkeypatch.setattr(os, "fdopen", failing_fdopen)


def test_index_is_written_once_after_the_files(tmp_path: Path) -> None:
    """I11: the index follows the last file, and names all of them; what is stored of it is whole."""
    host = Host()
    stored = host.upload(snapshot_folder(tmp_path / "s"))
    puts = host.store.keys("put")

    assert [key.endswith(".json") for key in puts] == [*[False] * len(FILES), True]
    index = read_index(host.store, stored.handle)
    assert {file.object_key for file in index.files} == set(puts[:-1])
    assert {file.name: host.store.get(file.object_key) for file in index.files} == FILES
    assert (index.version, index.parents, index.job_uid) == (host.version, (), host.jobs.job_uid)
    assert stored.uploaded_bytes == stored.handle.size_bytes == sum(map(len, FILES.values()))


def test_no_key_is_put_by_two_snapshots(tmp_path: Path) -> None:
    """I11: all keys carry the snapshot's uid, so a name that a collector deletes is never used again."""
    host = Host()
    uids = [host.upload(snapshot_folder(tmp_path / name)).handle.uid for name in ("first", "second")]
    first = set(host.store.keys("put"))
    host.upload(snapshot_folder(tmp_path / "third"))

    assert len(set(uids)) == 2
    assert {uid_in_key(key) for key in first} == {uids[1]}
    assert first.isdisjoint(host.store.keys("put"))


def test_files_of_the_state_are_not_uploaded_again(tmp_path: Path) -> None:
    """Files of a materialization in the checkpoint's state are only named, and that materialization is the parent."""
    host = Host()
    host.version = host.complete("before", base=host.version)
    stored = host.upload(snapshot_folder(tmp_path / "s", _000011=b"new"))

    assert host.store.count("put", "*.sst") == 1
    assert (stored.uploaded_bytes, stored.reused_bytes) == (len(sst_file(b"new")), sum(map(len, FILES.values())))
    assert read_index(host.store, stored.handle).parents == ("before",)


def test_damaged_parent_is_replaced(tmp_path: Path) -> None:
    """A materialization whose index is damaged is no parent: everything is stored again."""
    host = Host()
    host.version = host.complete("before", base=host.version)
    host.store.put(next(iter(host.store.keys("put", "*before.json"))), b"damaged")
    stored = host.upload(snapshot_folder(tmp_path / "s"))

    assert host.store.count("put", "*.sst") == 2
    assert read_index(host.store, stored.handle).parents == ()


def test_failed_attempts_are_repeated(tmp_path: Path) -> None:
    """I6: an upload that fails with a transient error is retried, as often as the settings say."""
    host = Host(upload_attempts_max=3)
    host.faulty.inject(Fault("put", FaultKind.FAIL_BEFORE, "*.sst", times=2))
    host.upload(snapshot_folder(tmp_path / "s"))

    host.faulty.inject(Fault("put", FaultKind.FAIL_BEFORE, "*.sst", times=None))
    with pytest.raises(UnavailableError):
        host.upload(snapshot_folder(tmp_path / "other", _000011=b"new"))
    assert max(Counter(host.store.keys("put", "*.sst")).values()) == 3
    assert host.store.count("put", "*.json") == 0


def test_lasting_error_is_not_repeated(tmp_path: Path) -> None:
    """A permanent error ends the snapshot at once."""
    host = Host()
    host.faulty.inject(Fault("put", FaultKind.FAIL_BEFORE, "*.meta", times=None, error=lambda: InvalidInputError("no")))
    with pytest.raises(InvalidInputError):
        host.upload(snapshot_folder(tmp_path / "s"))
    assert host.store.count("put", "*.meta") <= 2


def test_known_files_are_not_read_again(tmp_path: Path) -> None:
    """A file of an earlier snapshot, recognised by its hard link, is not hashed again."""
    host = Host()
    path = snapshot_folder(tmp_path / "s")
    host.upload(path)
    sums = dict(host.known)
    assert len(sums) == 2
    # A wrong sum in the memory shows that it is used instead of reading.
    host.known = dict.fromkeys(sums, "0" * 32)
    with pytest.raises(DamagedFileError, match="changed"):
        host.upload(path)


def test_damaged_file_is_not_stored(tmp_path: Path) -> None:
    """I10: a file that differs from what RocksDB wrote ends the snapshot before anything is put."""
    host = Host()
    for name in FILES:
        path = snapshot_folder(tmp_path / f"of {name}")
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 4
        (path / name).write_bytes(data)

        with pytest.raises(DamagedFileError, match=name):
            host.upload(path)
        assert host.store.count("put") == 0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *((code, DamagedFileError) for code in (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA)),
        *((code, UnavailableError) for code in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM, errno.ESTALE)),
    ],
)
@pytest.mark.parametrize("place", ["os.open", "os.fdopen"])
def test_file_that_the_disk_has_lost_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: int, kind: type[DstlError]
) -> None:
    """I10: an error of the disk when a file is opened or read is damage; a transient one is not."""
    host = Host()
    path = snapshot_folder(tmp_path / "s")
    host.upload(path)
    host.known = {}

    with monkeypatch.context() as patch:
        lose(patch, place, "000009.sst", code)
        with pytest.raises(kind, match=f"000009.sst.*{os.strerror(code)}") as raised:
            host.upload(path)

    assert type(raised.value) is kind
    assert host.store.count("put") == 0


def test_file_that_the_disk_loses_on_the_way_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I10: a file that was verified and then cannot be read to be stored is damage too; no index names it."""
    host = Host()
    verify = check_table_file

    def verify_and_lose(name: str, data: bytes, names: Collection[str]) -> None:
        verify(name, data, names)
        if name == "MANIFEST-000005":  # the last of them
            lose(monkeypatch, "os.fdopen", "000009.sst", errno.EIO)

    monkeypatch.setattr(snapshot_uploader, "check_table_file", verify_and_lose)
    with pytest.raises(DamagedFileError, match=r"000009\.sst"):
        host.upload(snapshot_folder(tmp_path / "s"))

    assert host.store.count("put", "*.json") == 0


def test_file_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the state or an earlier snapshot has is not verified again."""
    verified: list[str] = []
    monkeypatch.setattr(snapshot_uploader, "check_table_file", lambda name, *_: verified.append(name))
    host = Host()
    host.version = host.complete("before", base=host.version)
    path = snapshot_folder(tmp_path / "s", _000011=b"new")
    host.upload(path)
    host.upload(path)

    assert verified == ["000011.sst"]


def test_files_that_went_are_forgotten(tmp_path: Path) -> None:
    """However many snapshots a table has had, only the files of the last one are remembered."""
    host = Host()
    host.upload(snapshot_folder(tmp_path / "first", _000011=b"of the first"))
    before = dict(host.known)
    host.upload(snapshot_folder(tmp_path / "second", _000012=b"of the second"))

    assert len(host.known) == len(before) == 3
    assert not host.known.keys() & before.keys()


def test_throttle_spreads_bytes() -> None:
    """Each upload waits until earlier ones would be done at the limit; unused time is not saved up."""
    limiter = BandwidthLimiter(1000)

    assert [limiter.delay_ms(500, 0) for _ in range(3)] == [0, 500, 1000]
    assert limiter.delay_ms(500, 10_000) == 0
    assert limiter.delay_ms(1, 10_000) == 500
    assert [BandwidthLimiter(0).delay_ms(10**9, 0) for _ in range(2)] == [0, 0]
