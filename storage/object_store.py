"""
The contract of an object store, and the rules that all stores share. No I/O of its own.

Guarantees, which one test suite checks for every store:
1. `put` returns after the store has acknowledged the close; from then on every reader sees the whole object (I5).
2. An object is visible entirely or not at all; of several `put(if_absent=True)` on one key exactly one wins (I3).
3. A repeated `put` of the same bytes succeeds, so a lost response does not look like a conflict (I5, I8).
4. A store raises only errors of storage.errors, and none contains a secret.

Stores may be used by any number of threads at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

from storage.checksum import BytesLike
from storage.errors import (
    ConflictError,
    CorruptDataError,
    DstlError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from storage.model import ObjectInfo
from storage.validation import OBJECT_BYTES_MAX

ObjectData: TypeAlias = BytesLike | Sequence[BytesLike]
"""The bytes of an object: one buffer, or several that are written back to back."""

_COMPARED_BYTES = 8 << 20
"""How much of an object is read at once to see whether it has the bytes to write."""

KEY_CHARS_MAX = 768
"""The longest key; leaves room for a store's prefix below S3's 1024 bytes."""

KEY_PART_CHARS_MAX = 255
"""The longest part of a key; the limit of file systems."""

# ASCII only, so that text order is byte order in every store. A leading dot is kept for a store's own files.
_KEY_PART = re.compile(r"[A-Za-z0-9_=+@,-][A-Za-z0-9._=+@,-]*")
_PREFIX = re.compile(r"[A-Za-z0-9._=+@,/-]*")

PROBE_FOLDER = "probe"
"""The folder of `probe`; `storage.leftovers` deletes what killed processes leave there."""


class ObjectReader(Protocol):
    """The read side of a store; also implemented by caches of a store."""

    @property
    def url(self) -> str:
        """The URL with which `open_store` opens this store. Contains no secret."""

    def get(self, key: str) -> bytes:
        """
        Return all bytes of an object; `NotFoundError` if it does not exist.

        Raises:
            CorruptDataError: It is larger than any object that is read as a whole.
        """

    def get_range(self, key: str, offset: int, size: int) -> bytes:
        """
        Return `size` bytes from `offset` on.

        Raises:
            NotFoundError: The object does not exist.
            CorruptDataError: The object is too short for the range.
        """

    def head(self, key: str) -> ObjectInfo:
        """Describe an object without reading it; `NotFoundError` if it does not exist."""


class ObjectStore(ObjectReader, Protocol):
    """Immutable or overwritten objects under '/'-separated keys, relative to `url`."""

    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        """
        Write an object, and return when the store has acknowledged its close.

        Args:
            key: See `validate_key`.
            data: The bytes; not kept after the call. A conditional object must carry a unique id in its bytes.
            if_absent: Create only. An object with the same bytes counts as success: it is an own PUT whose response was
                lost. Without `if_absent`, an existing object is replaced.

        Raises:
            ConflictError: `if_absent`, and the object exists with other bytes.
            UnavailableError: Not written, or not known to be written; the same call may be repeated.
        """

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """
        Yield the objects whose keys begin with `prefix`, in ascending order of keys; pages load lazily.

        Args:
            prefix: Any beginning of a key, also "" or part of a name.
            start_after: Only keys greater than this one.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing keys are ignored. After an error some may be deleted; repeat the call."""

    def check_writable(self, folder: str = PROBE_FOLDER) -> None:
        """
        Write, create conditionally, read and delete a probe object.

        Args:
            folder: The folder of the object.

        Raises:
            UnavailableError: An operation fails; names the remedy.
            InvalidInputError: The store is set up in a way that could lose data; names the remedy.
        """

    def close(self) -> None:
        """Release connections. Idempotent; other calls may then raise `ClosedError`."""


def validate_key(key: str) -> str:
    """
    Return `key` if it is valid in every store: parts of [A-Za-z0-9._=+@,-], joined by '/', no part with a leading dot.

    Raises:
        InvalidInputError: Empty, absolute, too long, an empty part, "." or "..", or another character.
    """
    parts = key.split("/")
    if len(key) > KEY_CHARS_MAX or not all(
        len(part) <= KEY_PART_CHARS_MAX and _KEY_PART.fullmatch(part) for part in parts
    ):
        raise InvalidInputError(
            f"object key {key[:100]!r} is not allowed; use at most {KEY_CHARS_MAX} characters, parts joined by '/', "
            f"each 1-{KEY_PART_CHARS_MAX} characters of [A-Za-z0-9._=+@,-], the first one not a dot"
        )
    return key


def validate_prefix(prefix: str) -> str:
    """Return `prefix` if a key may begin with it; `InvalidInputError` otherwise."""
    if not _PREFIX.fullmatch(prefix) or any(part.startswith(".") for part in prefix.split("/")):
        raise InvalidInputError(f"{prefix[:100]!r} is not the beginning of any object key")
    return prefix


def validate_range(offset: int, size: int) -> None:
    """Raise `InvalidInputError` for a negative offset or size."""
    if offset < 0 or size < 0:
        raise InvalidInputError(f"offset {offset} and size {size} must not be negative")


def check_range_size(key: str, data: bytes, offset: int, size: int) -> bytes:
    """Return `data` if it has `size` bytes; `CorruptDataError` otherwise."""
    if len(data) != size:
        raise CorruptDataError(
            f"object {key} is damaged: it ends before byte {offset + size}", key=key, offset=offset, size=size
        )
    return data


def check_whole_size(key: str, size_bytes: int) -> int:
    """
    Return the size of an object that is about to be read as a whole.

    Raises:
        CorruptDataError: Nothing that this project reads at once is as large; it would take the process's memory.
    """
    if size_bytes > OBJECT_BYTES_MAX:
        raise CorruptDataError(
            f"object {key} is damaged: it has {size_bytes} bytes, and none of its kind has more than "
            f"{OBJECT_BYTES_MAX}",
            key=key,
        )
    return size_bytes


def buffers_of(data: ObjectData) -> Sequence[memoryview]:
    """Return the bytes to write as flat views, without copying them."""
    buffers = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    return [memoryview(buffer).cast("B") for buffer in buffers]


def joined(data: ObjectData) -> bytes:
    """Return the bytes to write in one piece; copies them unless they are `bytes` already."""
    return data if isinstance(data, bytes) else b"".join(buffers_of(data))


def in_order(listed: Iterable[ObjectInfo], start_after: str) -> Iterator[ObjectInfo]:
    """
    Yield what a server lists.

    Raises:
        UnavailableError: Keys do not ascend after `start_after`, so neither the last object nor the start of the next
            page is known.
    """
    before = start_after
    for info in listed:
        if info.key <= before:
            raise UnavailableError(
                f"the server lists {info.key} after {before}: keys must ascend, as in a general purpose bucket of S3, "
                "and begin after the key that was asked for; use another server or bucket",
                key=info.key,
            )
        before = info.key
        yield info


def exists(store: ObjectReader, key: str) -> bool:
    """Return whether an object with this key exists."""
    try:
        store.head(key)
    except NotFoundError:
        return False
    return True


def is_readable(store: ObjectReader, key: str) -> bool:
    """
    Return whether an object with this key exists, by reading it.

    For small objects where a wrong no would lose data: the answer to a GET distinguishes a missing object from a proxy
    that does not know it; the answer to a HEAD has no body and does not.
    """
    try:
        store.get(key)
    except NotFoundError:
        return False
    except CorruptDataError:  # too large to be read, but there
        return True
    return True


def check_refused_put(store: ObjectStore, key: str, data: ObjectData) -> None:
    """
    Check that the object that refused a conditional put has the same bytes, and so is an own put.

    Raises:
        ConflictError: The object has other bytes.
        UnavailableError: The object no longer exists, so the outcome is unknown; repeat the put.
    """
    try:
        if sum(len(buffer) for buffer in buffers_of(data)) <= _COMPARED_BYTES:
            check_same(key, data, store.get(key))
        else:
            _check_same_pieces(store, key, data)
    except NotFoundError as error:
        raise UnavailableError(f"cannot write {key}: it existed and was then deleted; try again", key=key) from error


def _check_same_pieces(store: ObjectStore, key: str, data: ObjectData) -> None:
    """Compare a large object piece by piece: it may be a file that is larger than this host's memory."""
    view = memoryview(data if isinstance(data, bytearray | memoryview) else joined(data)).cast("B")
    if store.head(key).size_bytes != len(view):
        raise ConflictError(f"object {key} exists with other bytes", key=key)
    for offset in range(0, len(view), _COMPARED_BYTES):
        piece = view[offset : offset + _COMPARED_BYTES]
        check_same(key, piece, store.get_range(key, offset, len(piece)))


def check_same(key: str, data: ObjectData, found: bytes) -> None:
    """Check that a found object has the bytes to write; `ConflictError` otherwise."""
    if joined(data) != found:
        raise ConflictError(f"object {key} exists with other bytes", key=key)


def probe(store: ObjectStore, unique_id: str, folder: str = PROBE_FOLDER) -> None:
    """
    Try all operations that the project relies on: create, refuse to create again, read, replace, delete.

    Args:
        store: The store to try.
        unique_id: Name of the probe object, so that hosts which start together do not collide.
        folder: The object's folder.

    Raises:
        UnavailableError: The store cannot be used; the message says why.
    """
    key = f"{folder}/{unique_id}"
    try:
        store.put(key, b"first", if_absent=True)
        _expect_refusal(store, key)
        if store.get(key) != b"first":
            raise UnavailableError("it returned other bytes than were written")
        store.put(key, b"third")
        store.delete([key])
    except DstlError as error:
        raise UnavailableError(f"store {store.url} cannot be used: {error}", url=store.url) from error


def _expect_refusal(store: ObjectStore, key: str) -> None:
    try:
        store.put(key, b"second", if_absent=True)
    except ConflictError:
        return
    store.delete([key])
    raise UnavailableError("it ignores create-if-absent, on which fencing relies; use a store that has conditional PUT")
