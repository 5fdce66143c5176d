"""Snapshots without RocksDB: folders with files of the right names, and materializations that are already stored."""

from __future__ import annotations

from pathlib import Path

from dstl_service.formats.materialization_index import (
    MaterializationIndex,
    SnapshotFile,
    encode_index,
    file_key,
    index_key,
)
from dstl_service.wire import CheckpointRef
from storage.checksum import checksum128
from storage.key_groups import KeyGroupRange
from storage.model import MaterializationHandle
from storage.object_store import ObjectStore
from tests.rocksdb_files import CURRENT, MANIFEST, sst_file

GROUPS = KeyGroupRange(0, 127)
FILES = {
    "000008.sst": sst_file(b"first" * 10),
    "000009.sst": sst_file(b"second" * 10),
    "MANIFEST-000005": MANIFEST,
    "CURRENT": CURRENT,
}


def snapshot_folder(folder: Path, **changed: bytes) -> Path:
    """Create a folder that looks like a snapshot; the names in `changed` are SST files with the given only block."""
    folder.mkdir()
    new = {f"{name.strip('_')}.sst": sst_file(data) for name, data in changed.items()}
    for name, data in {**FILES, **new}.items():
        (folder / name).write_bytes(data)
    return folder


def index_of(
    version: CheckpointRef,
    *,
    uid: str = "uid",
    job_uid: str = "job-uid",
    parents: tuple[str, ...] = (),
    files: dict[str, bytes] = FILES,
    key_groups: KeyGroupRange = GROUPS,
) -> MaterializationIndex:
    """Return the index of a snapshot with these files."""
    named = []
    for name, data in files.items():
        checksum = checksum128(data)
        named.append(
            SnapshotFile(name, file_key("job", "op", key_groups, uid, name, checksum, len(data)), len(data), checksum)
        )
    return MaterializationIndex(job_uid, "op", key_groups, version, uid, parents, tuple(named))


def store_snapshot(
    store: ObjectStore, index: MaterializationIndex, files: dict[str, bytes] = FILES
) -> MaterializationHandle:
    """Store a snapshot's files and its index."""
    for file in index.files:
        store.put(file.object_key, files[file.name])
    store.put(index_key("job", index.operator, index.key_groups, index.uid), encode_index(index))
    return index.handle("job")
