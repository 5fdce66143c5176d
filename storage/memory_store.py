"""Objects in the memory of this process, for tests and experiments. Lost when the process ends."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from storage.clock import Clock, IdSource, SystemClock, SystemIds
from storage.errors import NotFoundError
from storage.model import ObjectInfo
from storage.object_store import (
    PROBE_FOLDER,
    ObjectData,
    check_range_size,
    check_same,
    joined,
    probe,
    validate_key,
    validate_prefix,
    validate_range,
)
from storage.validation import validate_name


class MemoryStore:
    """
    A store in a dict.

    Args:
        name: Part of the URL; two stores of the same name share objects only if `shared_memory_store` made them.
        clock: Source of `modified_ms`.
        ids: Names of probe objects.
    """

    def __init__(self, name: str = "default", *, clock: Clock | None = None, ids: IdSource | None = None) -> None:
        self._name = validate_name("memory store", name)
        self._clock = clock or SystemClock()
        self._ids = ids or SystemIds()
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, int]] = {}

    @property
    def url(self) -> str:
        """The URL with which `open_store` returns this store, if it is a shared one."""
        return f"memory://{self._name}"

    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        """Store the bytes; a copy, unless they are one `bytes` object."""
        validate_key(key)
        content = joined(data)
        with self._lock:
            found = self._objects.get(key)
            if if_absent and found is not None:
                check_same(key, content, found[0])
                return
            self._objects[key] = content, self._clock.now_ms()

    def get(self, key: str) -> bytes:
        """Return the bytes that were put, without a copy."""
        return self._find(key)[0]

    def get_range(self, key: str, offset: int, size: int) -> bytes:
        """Return a slice of the bytes."""
        validate_range(offset, size)
        return check_range_size(key, self._find(key)[0][offset : offset + size], offset, size)

    def head(self, key: str) -> ObjectInfo:
        """Describe an object."""
        content, modified_ms = self._find(key)
        return ObjectInfo(key, len(content), modified_ms)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects that exist at the first iteration and still do when reached."""
        validate_prefix(prefix)
        with self._lock:
            keys = sorted(key for key in self._objects if key.startswith(prefix))
        for key in keys[bisect_right(keys, start_after) :]:
            found = self._objects.get(key)
            if found is not None:
                yield ObjectInfo(key, len(found[0]), found[1])

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        wanted = [validate_key(key) for key in keys]
        with self._lock:
            for key in wanted:
                self._objects.pop(key, None)

    def check_writable(self, folder: str = PROBE_FOLDER) -> None:
        """Try all operations."""
        probe(self, self._ids.unique_id(), folder)

    def close(self) -> None:
        """Do nothing: the objects stay for the other users of the name."""

    def _find(self, key: str) -> tuple[bytes, int]:
        found = self._objects.get(validate_key(key))
        if found is None:
            raise NotFoundError(f"object {key} does not exist", key=key)
        return found


_shared: dict[str, MemoryStore] = {}


def shared_memory_store(name: str) -> MemoryStore:
    """Return the store of this name; all callers of this process get the same one."""
    return _shared.setdefault(name, MemoryStore(name))
