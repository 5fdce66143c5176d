"""
What the indexes of one job's materializations say, read once: an index never changes while anybody may name it.

The coordinator reads an index when a checkpoint is to take its snapshot, and its garbage collector asks here again, so
a collection in a running job costs no request for it. Safe for threads; reads block.
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
"""Keys of files that are remembered: of 1,000 tables with 400 files each, in some 80 MB."""


@dataclass(frozen=True, slots=True)
class KnownIndex:
    """What counts of a `MaterializationIndex` where its files are not read."""

    job_uid: str
    version: CheckpointRef
    parents: tuple[str, ...]
    file_keys: tuple[str, ...]


class KnownIndexes:
    """
    Reads indexes, and remembers those that were asked for last.

    Args:
        store: Holds them.
        keys_max: How many keys of files are remembered.
    """

    def __init__(self, store: ObjectReader, keys_max: int = _KEYS_MAX) -> None:
        self._store = store
        self._keys_max = keys_max
        self._lock = threading.Lock()
        self._known: OrderedDict[MaterializationHandle, KnownIndex] = OrderedDict()
        self._keys = 0

    def knows(self, handle: MaterializationHandle) -> bool:
        """Say whether `read` would take no request."""
        with self._lock:
            return handle in self._known

    def read(self, handle: MaterializationHandle) -> KnownIndex:
        """
        Return what the index says that a handle points at.

        Raises:
            CorruptDataError: It is missing, damaged, or of another materialization; names the object.
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
            CorruptDataError: An index cannot be read, so nobody knows what it names: delete nothing.
        """
        named: set[str] = set()
        for handle in handles:
            named.add(handle.index_key)
            named.update(self.read(handle).file_keys)
        return named
