"""
Caches the indexes of one job's materializations: an index never changes while a manifest may name it.

The coordinator reads an index when a checkpoint is to take its snapshot. Its garbage collector reads from the same
cache, so a collection in a running job costs no request for it. Thread-safe; reads block.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from dstl_service.formats.materialization_index import read_index
from dstl_service.wire import CheckpointRef
from storage.model import MaterializationHandle
from storage.object_store import ObjectReader

_KEYS_MAX = 400_000
"""File keys kept in memory: 1,000 tables with 400 files each, about 80 MB."""


@dataclass(frozen=True, slots=True)
class KnownIndex:
    """The part of a `MaterializationIndex` that is needed where its files are not read."""

    job_uid: str
    version: CheckpointRef
    parents: tuple[str, ...]
    file_keys: tuple[str, ...]


class KnownIndexes:
    """
    Reads indexes and keeps the most recently used ones.

    Args:
        store: Holds the indexes.
        keys_max: File keys kept in memory; the newest index stays even if it alone has more.
    """

    def __init__(self, store: ObjectReader, keys_max: int = _KEYS_MAX) -> None:
        self._store = store
        self._keys_max = keys_max
        self._lock = threading.Lock()
        self._known: OrderedDict[MaterializationHandle, KnownIndex] = OrderedDict()
        self._keys = 0

    def knows(self, handle: MaterializationHandle) -> bool:
        """Return whether `read` needs no request."""
        with self._lock:
            return handle in self._known

    def read(self, handle: MaterializationHandle) -> KnownIndex:
        """
        Return the content of the index that a handle points at.

        Raises:
            CorruptDataError: The index is missing, damaged, or of another materialization; names the object.
        """
        with self._lock:
            known = self._known.get(handle)
            if known is not None:
                self._known.move_to_end(handle)
                return known
        index = read_index(self._store, handle)
        known = KnownIndex(index.job_uid, index.version, index.parents, tuple(file.object_key for file in index.files))
        with self._lock:
            if handle not in self._known:
                self._known[handle] = known
                self._keys += len(known.file_keys)
            while self._keys > self._keys_max and len(self._known) > 1:
                _, dropped = self._known.popitem(last=False)
                self._keys -= len(dropped.file_keys)
        return known

    def object_keys_of(self, handles: Iterable[MaterializationHandle]) -> set[str]:
        """
        Return the keys of all objects that these materializations consist of.

        Raises:
            CorruptDataError: An index cannot be read, so the objects it names are unknown: delete nothing.
        """
        named: set[str] = set()
        for handle in handles:
            named.add(handle.index_key)
            named.update(self.read(handle).file_keys)
        return named
