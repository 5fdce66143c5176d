"""
Knows which objects a job's snapshots and savepoints name: neither ever changes, and each is read once.

The coordinator reads an index when a checkpoint is to take its snapshot. Its garbage collector reads from the same
cache, so a collection in a running job costs no request for it. All savepoints are read before each deletion, including
those that no listing shows yet. Thread-safe; reads block.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from dstl_service.formats.manifest import Manifest, decode_manifest, object_keys
from dstl_service.formats.materialization_index import read_index
from dstl_service.registry.lives import LifeFolder
from dstl_service.registry.savepoint_register import PIN, Registered, SavepointRegister, savepoint_objects
from dstl_service.wire import CheckpointInfo, CheckpointRef
from storage.errors import CorruptDataError, NotFoundError, UnavailableError
from storage.model import MaterializationHandle
from storage.object_store import ObjectReader, ObjectStore, is_readable

LOOKS_MAX = 5
_KEYS_MAX = 2_000_000
"""File keys kept in memory: 1,000 tables with 20 files each and a hundred savepoints of them, about 80 MB."""
_SAVED_KEYS_MAX = 400_000
"""Keys and snapshots of savepoints kept in memory: those of 200 savepoints of a thousand tables, about 80 MB."""
_INFO_CHARS_MAX = 8 << 20
"""Characters of what listings show of savepoints, mostly offsets and schemas, kept in memory."""
_FAST = 1
_T = TypeVar("_T")

logger = logging.getLogger("dstl_service")


@dataclass(frozen=True, slots=True)
class KnownIndex:
    """The part of a `MaterializationIndex` that is needed where its files are not read."""

    job_uid: str
    version: CheckpointRef
    parents: tuple[str, ...]
    files: int
    packed_keys: bytes

    @property
    def file_keys(self) -> list[str]:
        """The keys of its files; kept in a fifth of their memory, since they begin alike."""
        return zlib.decompress(self.packed_keys).decode().split("\n") if self.files else []


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
        packed = zlib.compress("\n".join(file.object_key for file in index.files).encode(), _FAST)
        known = KnownIndex(index.job_uid, index.version, index.parents, len(index.files), packed)
        with self._lock:
            if handle not in self._known:
                self._known[handle] = known
                self._keys += known.files
            while self._keys > self._keys_max and len(self._known) > 1:
                _, dropped = self._known.popitem(last=False)
                self._keys -= dropped.files
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


@dataclass(frozen=True, slots=True)
class _Named:
    """The content of a savepoint: object keys, see `object_keys`, and snapshots, whose files their indexes name."""

    object_keys: frozenset[str]
    materializations: tuple[MaterializationHandle, ...]

    def __len__(self) -> int:
        return len(self.object_keys) + len(self.materializations)


class SavepointInfo(NamedTuple):
    """
    The entry of a savepoint in a listing.

    Args:
        checkpoint: The checkpoint that it keeps.
        held_for: The fork that needs it, or empty.
    """

    checkpoint: CheckpointInfo
    held_for: str


class KeptSavepoints:
    """Reads ``savepoints/`` in the folder of a job's life; see `dstl_service.registry.savepoints`."""

    def __init__(self, store: ObjectStore, folder: LifeFolder) -> None:
        self._store = store
        self._folder = folder
        self._job = folder.job
        self.register = SavepointRegister(store, folder)
        self._known: dict[str, _Named] = {}
        self._infos: OrderedDict[str, tuple[SavepointInfo, int]] = OrderedDict()
        self._known_lock = threading.Lock()

    def _for_deletion(
        self, read: Callable[[str], _T], prefix: str = "", *, begin: bool = True
    ) -> tuple[Registered, dict[str, _T]]:
        """
        Return the register, and what is read of all savepoints, or of those of a prefix, by object.

        Those that no listing shows yet are among them.

        A name on the register without its object is left to an administrator. No killed process leaves one: an object
        is put before its name is on the register, never put there once it was deleted, and deleted after its name is
        taken off. So the object was lost or removed by hand, or this host's answer is old. An old answer must not take
        it off the register. A lost file may be brought back from a copy, and is whole as long as its objects are there.

        Raises:
            UnavailableError: A savepoint on the register is not found, or not yet: delete nothing.
        """
        missing = title = ""
        for _ in range(LOOKS_MAX):
            listed = savepoint_objects(self._store, self._folder, prefix)
            now = self.register.read(begin=begin)
            there = sorted(one for one in {*listed, *now.objects} if one.startswith(prefix))
            try:
                return now, {one: read(missing := one) for one in there}
            except NotFoundError:  # deleted since, or copied under a name not listed
                title = now.title(missing)
        raise UnavailableError(
            f"savepoint {title!r} of job {self._job!r} is on the register but not found: if it was just made, retry "
            f"later; if it is lost, `dstl savepoints --delete {title}` takes it off the register",
            job=self._job,
        )

    def registered(self, prefix: str) -> list[tuple[str, Manifest]]:
        """
        Return the savepoints whose names begin with `prefix`, those too that no listing shows yet; no pins.

        Raises:
            UnavailableError: A savepoint on the register is not found, or not yet.
            CorruptDataError: One of them, or the register, cannot be read.
        """
        now, found = self._for_deletion(self._load, prefix, begin=False)
        return [(now.title(one), manifest) for one, manifest in found.items() if PIN not in now.title(one)]

    def object_keys(self) -> set[str]:
        """
        Return the keys of all objects that savepoints name.

        Raises:
            CorruptDataError: A savepoint cannot be read, so what it names is not known: delete nothing.
        """
        return {key for _, named in self._named_by_all() for key in named.object_keys}

    def _named_by_all(self, *, begin: bool = True) -> Iterator[tuple[str, _Named]]:
        """Yield what each savepoint and pin names, with what people call it."""
        now, found = self._for_deletion(self._named_by, begin=begin)
        with self._known_lock:
            for one in self._known.keys() - found.keys():
                del self._known[one]
        return ((now.title(one), named) for one, named in found.items())

    def _named_by(self, one: str) -> _Named:
        """Return what an object names; it is read once, since it never changes, and has megabytes in large jobs."""
        with self._known_lock:
            known = self._known.get(one)
        if known is not None:
            return known
        manifest = self._load(one)
        named = _Named(frozenset(object_keys(manifest)), manifest.materializations)
        with self._known_lock:
            # One of an earlier version is called like its name, which may have been another one's.
            if PIN in one and sum(map(len, self._known.values())) + len(named) <= _SAVED_KEYS_MAX:
                self._known[one] = named
        return named

    def _info_of(self, one: str) -> SavepointInfo:
        """Return what listings show of an object; it is read once, as in `_named_by`."""
        with self._known_lock:
            if (known := self._infos.get(one)) is not None:
                self._infos.move_to_end(one)
                return known[0]
        manifest = self._load(one)
        info = SavepointInfo(manifest.info(), manifest.held_for)
        with self._known_lock:
            if PIN in one:
                self._infos[one] = info, len(repr(info))
            while sum(chars for _, chars in self._infos.values()) > _INFO_CHARS_MAX:
                self._infos.popitem(last=False)
        return info

    def named(self, indexes: KnownIndexes, *, begin: bool = True) -> set[str]:
        """
        Return the keys of all objects that savepoints name, those of their snapshots too.

        A snapshot without its index cannot be restored, so its files are not kept. Such a savepoint was left by a
        process that died before it saw that its checkpoint was gone, or came back with a file system's loss of power.
        It is logged, and keeps the other objects that it names; it must not keep all garbage for ever.

        Args:
            indexes: Reads and caches the indexes of snapshots.
            begin: Whether to create a missing register; see `SavepointRegister.read`.

        Raises:
            UnavailableError: A savepoint on the register is not found, or not yet: delete nothing.
            CorruptDataError: A savepoint, or an index that exists, cannot be read: delete nothing.
        """
        named: set[str] = set()
        for title, kept in self._named_by_all(begin=begin):
            named |= kept.object_keys
            for handle in kept.materializations:
                try:
                    named |= indexes.object_keys_of([handle])
                except CorruptDataError:
                    if is_readable(self._store, handle.index_key):
                        raise
                else:
                    continue
                logger.error(
                    "a savepoint cannot be restored: delete it",
                    extra={"job": self._job, "savepoint": title, "missing": handle.index_key},
                )
        return named

    def _load(self, one: str) -> Manifest:
        key = self._key(one)
        return decode_manifest(self._store.get(key), key)

    def _key(self, one: str) -> str:
        return f"{self._folder.path}/savepoints/{one}.json"
