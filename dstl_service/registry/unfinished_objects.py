"""
Change-set objects that a later checkpoint may still name, according to their indexes.

A batch may take hours, with many collections of its job meanwhile. Indexes never change, so those of the objects that
the last collection kept are cached.

The index of an object may be unreadable only for this host: for instance, the object is of a newer version, or the
network damages what is read. Such an object is spared while a checkpoint may name it, whatever it holds. A driver sends
sets for one checkpoint at a time, the one after the newest. So they are never named once that checkpoint, or a newer
epoch's manifest, exists. Thread-safe; reads block.
"""

from __future__ import annotations

from collections.abc import Iterable

from storage.errors import CorruptDataError, NotFoundError
from storage.model import ObjectInfo
from storage.object_store import ObjectReader
from storage.segment_reader import read_index

_OBJECTS_MAX = 50_000
"""Objects that are cached, about 20 MB; each further one costs a request in every collection."""


class UnfinishedObjects:
    """
    Tells unfinished objects from orphans.

    Args:
        store: Holds the objects.
        objects_max: How many are cached.
    """

    def __init__(self, store: ObjectReader, objects_max: int = _OBJECTS_MAX) -> None:
        self._store = store
        self._objects_max = objects_max
        self._known: dict[ObjectInfo, frozenset[tuple[int, int]]] = {}
        self._unreadable: dict[ObjectInfo, tuple[int, int]] = {}
        """Epoch and newest checkpoint at the first failed read."""

    def among(self, objects: Iterable[ObjectInfo], newest_id: int, epoch: int) -> set[ObjectInfo]:
        """
        Return those that hold change sets of a later checkpoint from a driver that may still complete it.

        Args:
            objects: Objects of change sets, listed before the newest checkpoint was read.
            newest_id: Id of the newest checkpoint.
            epoch: The epoch that may complete the next checkpoint: no older one can (I4).
        """
        known, found, stand = self._known, {}, (epoch, newest_id)
        unreadable: dict[ObjectInfo, tuple[int, int]] = {}
        for info in objects:
            held = known[info] if info in known else self._held(info)
            if held is None:
                unreadable[info] = self._unreadable.get(info, stand)
            elif any(checkpoint_id > newest_id and writer >= epoch for checkpoint_id, writer in held):
                found[info] = held
        # Objects collected or named since are not checked again.
        self._known = dict(list(found.items())[: self._objects_max])
        self._unreadable = unreadable
        return found.keys() | {info for info, first_stand in unreadable.items() if first_stand == stand}

    def _held(self, info: ObjectInfo) -> frozenset[tuple[int, int]] | None:
        """Return the (checkpoint id, epoch) pairs of an object's change sets; None if its index cannot be read."""
        try:
            entries = read_index(self._store, info.key, info.size_bytes)
        except (CorruptDataError, NotFoundError):
            return None
        return frozenset((entry.id.checkpoint_id, entry.id.writer.epoch) for entry in entries)
