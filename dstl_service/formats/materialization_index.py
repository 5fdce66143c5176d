"""
The index of a materialization: the object that names the files of one snapshot.

All objects of a snapshot carry its uid in their keys, so that no other one ever writes them:
``<job>/materialized/<operator>/<key groups>/<uid>=<checksum>-<size>.sst`` (``.meta`` for RocksDB's small files), and
``<uid>.json``, the index, which is written once, behind the last file. Until a manifest names the materialization, the
list of what is under way keeps all that (`dstl_service.formats.under_way`).
A file of an earlier snapshot is used again by its key, and only if a materialization of the checkpoint that is being
replaced names it: one of `parents`. A checkpoint takes the new one only while its state still has all parents (I11).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dstl_service.formats.checksummed_json import seal, unseal
from dstl_service.wire import CheckpointRef
from storage.checksum import checksum128
from storage.errors import CorruptDataError, DstlError, InvalidInputError, NotFoundError
from storage.model import KeyGroupRange, MaterializationHandle, validate_name
from storage.object_store import ObjectReader

FORMAT = 1
FILE_BYTES_MAX = 2**40
CHUNK_BYTES = 4 << 20
_NAME = re.compile(r"[0-9]{6,20}\.sst|MANIFEST-[0-9]{6,20}|CURRENT")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_FILE_KEY = re.compile(rf"[/=]({_CHECKSUM.pattern})-[0-9]+\.(?:sst|meta)\Z")


def is_table_file(name: str) -> bool:
    """Tell whether a file of this name belongs to a snapshot; RocksDB opens a table that has these alone."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """
    One file of a snapshot.

    Args:
        name: RocksDB's name for it.
        object_key: Where its bytes are.
        size_bytes: Its length.
        checksum: XXH3-128 of its bytes as 32 hexadecimal digits.
    """

    name: str
    object_key: str
    size_bytes: int
    checksum: str

    def __post_init__(self) -> None:
        if not is_table_file(self.name):
            raise InvalidInputError(f"{self.name[:100]!r} is no file of a table's snapshot")
        if not _CHECKSUM.fullmatch(self.checksum):
            raise InvalidInputError(f"{self.checksum[:100]!r} is no checksum of 32 hexadecimal digits")
        if type(self.size_bytes) is not int or not 0 <= self.size_bytes <= FILE_BYTES_MAX:
            raise InvalidInputError(f"file {self.name} cannot have {self.size_bytes!r} bytes")


@dataclass(frozen=True, slots=True)
class MaterializationIndex:
    """
    What one materialization consists of.

    Args:
        job_uid: The life of the job that it belongs to.
        operator: Whose table it is.
        key_groups: What the table holds.
        version: The checkpoint at which the table stood.
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
        """Size of all files together."""
        return sum(file.size_bytes for file in self.files)

    def handle(self, job: str) -> MaterializationHandle:
        """Return the pointer that manifests hold."""
        return MaterializationHandle(
            operator=self.operator,
            key_groups=self.key_groups,
            checkpoint_id=self.version.id,
            uid=self.uid,
            index_key=index_key(job, self.operator, self.key_groups, self.uid),
            size_bytes=self.size_bytes,
        )


def materialization_folder(job: str, operator: str, key_groups: KeyGroupRange) -> str:
    """Return what the keys of all objects of a table's snapshots begin with."""
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
    """Say whether bytes may be those of an object, as far as its key tells: those of tables' files hold a checksum."""
    return not is_named_by_content(key) or matches_checksum(key, checksum128(data))


def is_named_by_content(key: str) -> bool:
    """Say whether an object's key holds a checksum of its bytes: it is a table's file."""
    return _FILE_KEY.search(key) is not None


def matches_checksum(key: str, checksum: str) -> bool:
    """Say whether the checksum in a table's file's key is this one, see `storage.checksum.checksum128`."""
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
        CorruptDataError: Any byte differs from what was written; names the object.
    """
    try:
        return _from_dict(unseal("materialization", data, FORMAT))
    except (ValueError, LookupError, TypeError, DstlError) as error:
        raise CorruptDataError(
            f"materialization index {object_key} cannot be read: {error}", object_key=object_key
        ) from error


def read_index(store: ObjectReader, handle: MaterializationHandle) -> MaterializationIndex:
    """
    Read the index that a handle points at.

    Raises:
        CorruptDataError: It is missing, damaged, or of another materialization; names the object.
    """
    try:
        data = store.get(handle.index_key)
    except NotFoundError:
        raise CorruptDataError(
            f"materialization index {handle.index_key} is missing", object_key=handle.index_key
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
    """Return the index of a snapshot that is under way if it is there, so that all files are; None if it is not."""
    key = index_key(job, operator, key_groups, uid)
    try:
        return decode_index(store.get(key), key)
    except (NotFoundError, CorruptDataError):
        return None


def read_file(store: ObjectReader, file: SnapshotFile) -> Iterator[tuple[int, bytes]]:
    """
    Yield a file's bytes with their offsets, at least one piece; whoever takes them in compares the checksum.

    Raises:
        CorruptDataError: The object is missing or too short; names it.
    """
    offset = 0
    while True:
        size = min(CHUNK_BYTES, file.size_bytes - offset)
        try:
            yield offset, store.get_range(file.object_key, offset, size)
        except NotFoundError:
            raise CorruptDataError(
                f"object {file.object_key} named by a materialization is missing", object_key=file.object_key
            ) from None
        offset += size
        if offset >= file.size_bytes:
            return


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
