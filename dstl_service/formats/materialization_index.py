"""
The index of a materialization: the object that names the files of one snapshot.

All objects of a snapshot carry its uid in their keys, so that no other snapshot ever writes them:
``<job>/materialized/<operator>/<key groups>/<uid>=<checksum>-<size>.sst`` (``.meta`` for RocksDB's small files), and
``<uid>.json``, the index, which is written once, after the last file. Until a manifest names the materialization, the
under-way list protects these objects (`dstl_service.formats.under_way`). A file of an earlier snapshot is reused by its
key, and only if one of `parents` names it: materializations in the state that the new one enters. A checkpoint takes
the new one only while its state still has all parents (I11).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dstl_service.formats.checksummed_json import reading, seal, unseal
from dstl_service.wire import CheckpointRef
from storage.checksum import checksum128
from storage.errors import CorruptDataError, InvalidInputError, NotFoundError
from storage.key_groups import KeyGroupRange
from storage.model import MaterializationHandle
from storage.object_store import ObjectReader
from storage.validation import validate_name

FORMAT = 1
FILE_BYTES_MAX = 2**40
CHUNK_BYTES = 4 << 20
_NAME = re.compile(r"[0-9]{6,20}\.sst|MANIFEST-[0-9]{6,20}|CURRENT")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_FILE_KEY = re.compile(rf"[/=]({_CHECKSUM.pattern})-([0-9]{{1,15}})\.(?:sst|meta)\Z")


def is_table_file(name: str) -> bool:
    """Return whether a file of this name belongs to a snapshot; these files suffice for RocksDB to open the table."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """
    One file of a snapshot.

    Args:
        name: RocksDB's name for it.
        object_key: Key of the object with its bytes.
        size_bytes: Its length.
        checksum: XXH3-128 of its bytes as 32 hexadecimal digits.
    """

    name: str
    object_key: str
    size_bytes: int
    checksum: str

    def __post_init__(self) -> None:
        if not is_table_file(self.name):
            raise InvalidInputError(f"{self.name[:100]!r} is not a file name of a table's snapshot")
        if not _CHECKSUM.fullmatch(self.checksum):
            raise InvalidInputError(f"{self.checksum[:100]!r} is not a checksum of 32 hexadecimal digits")
        if type(self.size_bytes) is not int or not 0 <= self.size_bytes <= FILE_BYTES_MAX:
            raise InvalidInputError(f"file {self.name} has an invalid size of {self.size_bytes!r} bytes")


@dataclass(frozen=True, slots=True)
class MaterializationIndex:
    """
    The content of one materialization.

    Args:
        job_uid: Uid of the job's life that it belongs to.
        operator: The table's operator.
        key_groups: The table's key groups.
        version: The checkpoint of the table's content.
        uid: The materialization's own id.
        parents: Materializations that the state must still have when this one enters it.
        files: All files of the snapshot.
    """

    job_uid: str
    operator: str
    key_groups: KeyGroupRange
    version: CheckpointRef
    uid: str
    parents: tuple[str, ...]
    files: tuple[SnapshotFile, ...]

    @property
    def size_bytes(self) -> int:
        """Total size of all files."""
        return sum(file.size_bytes for file in self.files)

    def handle(self, job: str) -> MaterializationHandle:
        """Return the handle that manifests hold."""
        return MaterializationHandle(
            operator=self.operator,
            key_groups=self.key_groups,
            checkpoint_id=self.version.id,
            uid=self.uid,
            index_key=index_key(job, self.operator, self.key_groups, self.uid),
            size_bytes=self.size_bytes,
        )


def materialization_folder(job: str, operator: str, key_groups: KeyGroupRange) -> str:
    """Return the key prefix of all objects of a table's snapshots."""
    return f"{job}/materialized/{operator}/{key_groups.to_text()}/"


def index_key(job: str, operator: str, key_groups: KeyGroupRange, uid: str) -> str:
    """Return the key of an index."""
    return f"{materialization_folder(job, operator, key_groups)}{validate_name('materialization', uid)}.json"


def file_key(
    job: str, operator: str, key_groups: KeyGroupRange, uid: str, name: str, checksum: str, size_bytes: int
) -> str:
    """Return the key of a file's object; within one snapshot equal content has an equal key."""
    kind = "sst" if name.endswith(".sst") else "meta"
    return f"{materialization_folder(job, operator, key_groups)}{uid}={checksum}-{size_bytes}.{kind}"


def matches_key(key: str, data: bytes) -> bool:
    """Return whether bytes match the checksum in an object's key; true for keys without one. Table files have one."""
    return size_in_key(key) is None or matches_checksum(key, checksum128(data))


def size_in_key(key: str) -> int | None:
    """Return the size that a table file's key holds; None for other keys."""
    named = _FILE_KEY.search(key)
    return int(named[2]) if named is not None else None


def matches_checksum(key: str, checksum: str) -> bool:
    """Return whether a table file's key holds this checksum; see `storage.checksum.checksum128`."""
    named = _FILE_KEY.search(key)
    return named is not None and checksum == named[1]


def encode_index(index: MaterializationIndex) -> bytes:
    """Return the object's bytes; see `dstl_service.formats.checksummed_json`."""
    document = {
        "format": FORMAT,
        "job_uid": index.job_uid,
        "operator": index.operator,
        "key_groups": index.key_groups.to_text(),
        "version": index.version.to_text(),
        "uid": index.uid,
        "parents": index.parents,
        "files": [
            {"name": file.name, "object": file.object_key, "size": file.size_bytes, "checksum": file.checksum}
            for file in index.files
        ],
    }
    return seal("materialization", document)


def decode_index(data: bytes, object_key: str) -> MaterializationIndex:
    """
    Read an index.

    Raises:
        NewerFormatError: A newer version wrote it; names the object, and says what to do.
        CorruptDataError: The object is damaged; names the object.
    """
    with reading(f"materialization index {object_key}", object_key=object_key):
        return _from_dict(unseal("materialization", data, FORMAT, object_key))


def read_index(store: ObjectReader, handle: MaterializationHandle) -> MaterializationIndex:
    """
    Read the index that a handle points at.

    Raises:
        CorruptDataError: The index is missing, damaged, or of another materialization; names the object.
    """
    try:
        data = store.get(handle.index_key)
    except NotFoundError:
        raise CorruptDataError(
            f"materialization index {handle.index_key} is missing; run `dstl fsck`", object_key=handle.index_key
        ) from None
    index = decode_index(data, handle.index_key)
    found = (index.operator, index.key_groups, index.version.id, index.uid, index.size_bytes)
    if found != (handle.operator, handle.key_groups, handle.checkpoint_id, handle.uid, handle.size_bytes):
        raise CorruptDataError(
            f"{handle.index_key} is the index of another materialization", object_key=handle.index_key
        )
    return index


def find_index(
    store: ObjectReader, job: str, operator: str, key_groups: KeyGroupRange, uid: str
) -> MaterializationIndex | None:
    """Return an under-way snapshot's index, which proves that its files exist; None if missing or unreadable."""
    key = index_key(job, operator, key_groups, uid)
    try:
        return decode_index(store.get(key), key)
    except (NotFoundError, CorruptDataError):
        return None


def piece_offsets(file: SnapshotFile) -> range:
    """Return where the pieces of a file begin in which it is read; an empty file has one empty piece."""
    return range(0, max(1, file.size_bytes), CHUNK_BYTES)


def read_piece(store: ObjectReader, file: SnapshotFile, offset: int) -> bytes:
    """
    Read the piece of a file that begins at `offset`; the caller verifies the checksum.

    Raises:
        CorruptDataError: The object is missing or too short; names it.
    """
    try:
        return store.get_range(file.object_key, offset, min(CHUNK_BYTES, file.size_bytes - offset))
    except NotFoundError:
        raise CorruptDataError(
            f"object {file.object_key} of a materialization is missing; run `dstl fsck`", object_key=file.object_key
        ) from None


def _from_dict(document: dict[str, Any]) -> MaterializationIndex:
    return MaterializationIndex(
        job_uid=document["job_uid"],
        operator=validate_name("operator", document["operator"]),
        key_groups=KeyGroupRange.parse(document["key_groups"]),
        version=CheckpointRef.parse(document["version"]),
        uid=validate_name("materialization", document["uid"]),
        parents=tuple(validate_name("materialization", uid) for uid in document["parents"]),
        files=tuple(
            SnapshotFile(file["name"], file["object"], file["size"], file["checksum"]) for file in document["files"]
        ),
    )
