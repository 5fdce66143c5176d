"""
A job's manifests and fences: sequences to which owners append (see `dstl_service.formats.keys.Place`).

Nothing is ever overwritten. An owner writes after the last entry that it saw, with create-if-absent: if another writer
was quicker, the place is taken. Only checkpoints are deleted, long after others were appended. Fences stay for ever,
since a freed place would admit an owner that was paused before it (I4). Only the last entry
at one id of a branch can be a checkpoint, so accumulated fences need not be read. Blocking I/O.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from dstl_service.formats.keys import Place, branch_prefix, manifests_prefix, place_key, place_of, place_prefix
from dstl_service.formats.manifest import Manifest, ManifestKind, decode_manifest, encode_manifest
from dstl_service.registry.lives import LifeFolder
from dstl_service.wire import CheckpointRef
from storage.errors import CorruptDataError, NotFoundError, UnavailableError
from storage.model import ObjectInfo
from storage.object_store import ObjectStore

_MANIFESTS_CACHED = 64
_BYTES_CACHED = 16 << 20
"""
Most encoded bytes of cached manifests, the newest one aside: a manifest of a thousand tables has megabytes, and takes
about six times as much memory.
"""
_LOOKS_MAX = 5


@dataclass(frozen=True, slots=True)
class Stand:
    """
    Where a branch ends.

    Args:
        branch: The branch.
        latest: Its newest checkpoint, or None.
        last: The last entry, a fence or the newest checkpoint; None if the branch is empty.
    """

    branch: int
    latest: Manifest | None
    last: Manifest | None

    @property
    def epoch(self) -> int:
        """The epoch that may write next: no older one can (I4)."""
        return self.last.epoch if self.last else 0

    @property
    def next_place(self) -> Place:
        """The place to write next."""
        if self.last is None:
            return Place(self.branch, 0, 0)
        return place_of_manifest(self.last).next(is_fence=self.last.kind is ManifestKind.FENCE)


class ManifestLog:
    """Reads and appends to ``checkpoints/`` in the folder of a job's life; thread-safe."""

    def __init__(self, store: ObjectStore, folder: LifeFolder) -> None:
        self.job_uid = ""
        """
        Set when known; every manifest read must carry it.

        No running process can violate that, however long it was paused: the manifests of another life lie elsewhere
        (`dstl_service.registry.lives`). Only copying objects by hand or replacing ``job.json`` can.
        """
        self._store = store
        self._folder = folder
        self._lock = threading.Lock()
        self._cache: OrderedDict[Place, tuple[Manifest, int]] = OrderedDict()  # with its encoded size
        self._loads: dict[Place, Future[Manifest]] = {}

    def forget(self) -> None:
        """Clear the cache; loads begun before this call do not fill it either."""
        with self._lock:
            self._cache.clear()
            self._loads.clear()

    def append(self, manifest: Manifest) -> int:
        """
        Write a manifest at its place; return the size of its object in bytes.

        Raises:
            ConflictError: The place is taken.
        """
        data = encode_manifest(manifest)
        self._store.put(place_key(self._folder.path, place_of_manifest(manifest)), data, if_absent=True)
        with self._lock:
            self._keep(place_of_manifest(manifest), manifest, len(data))
        return len(data)

    def delete(self, refs: Sequence[CheckpointRef]) -> None:
        """Delete manifests, the last first: a process that dies in between leaves none with a broken chain."""
        places = sorted((Place.of(ref.id, ref.generation) for ref in refs), reverse=True)
        self._store.delete([place_key(self._folder.path, place) for place in places])
        with self._lock:
            for place in places:
                self._cache.pop(place, None)

    def load(self, place: Place) -> Manifest:
        """
        Return the manifest at a place, from the cache if it is there; concurrent calls share one request.

        Raises:
            NotFoundError: The place is free.
            CorruptDataError: The manifest cannot be read, or is of another place or job.
        """
        with self._lock:
            cached = self._cache.get(place)
            if cached is not None:
                self._cache.move_to_end(place)
                return cached[0]
            running = self._loads.get(place)
            mine: Future[Manifest] = Future()
            if running is None:
                self._loads[place] = mine
        return self._fetch(place, mine) if running is None else running.result()

    def find(self, place: Place) -> Manifest | None:
        """Return the manifest at a place, or None if there is none."""
        try:
            return self.load(place)
        except NotFoundError:
            return None

    def load_anew(self, place: Place) -> Manifest:
        """Return the manifest at a place, read from the store: a cached one may be deleted."""
        with self._lock:
            self._cache.pop(place, None)
        return self.load(place)

    def remembered(self, place: Place) -> Manifest | None:
        """Return the manifest at a place if it is cached. Never blocks."""
        with self._lock:
            cached = self._cache.get(place)
        return None if cached is None else cached[0]

    def places(self, branch: int, first: Place | None = None) -> list[Place]:
        """Return the taken places of a branch, from `first` on."""
        prefix = branch_prefix(self._folder.path, branch)
        found: list[Place] = []
        for info in self._store.list(prefix, start_after=_in_front_of(self._folder.path, first) if first else ""):
            place = place_of(info.key)
            if place.branch != branch:  # other branches sort after branch 0
                break
            found.append(place)
        return found

    def first_of(self, branch: int) -> Place | None:
        """Return the first taken place in the branch of a rewind, or None."""
        infos = self._store.list(branch_prefix(self._folder.path, branch))
        return next((place_of(info.key) for info in infos), None)

    def last_at(self, branch: int, checkpoint_id: int, first: Place | None = None) -> Place | None:
        """Return the last taken place at an id, from `first` on, or None; only there a checkpoint can lie."""
        after = _in_front_of(self._folder.path, first) if first else ""
        infos = self._store.list(place_prefix(self._folder.path, branch, checkpoint_id), start_after=after)
        return max((place_of(info.key) for info in infos), default=None)

    def last_places(self, first: Place | None = None) -> Iterator[tuple[Place, ObjectInfo]]:
        """Yield the last place of each id in each branch, from `first` on: where checkpoints can lie."""
        before: tuple[Place, ObjectInfo] | None = None
        after = _in_front_of(self._folder.path, first) if first else ""
        for info in self._store.list(manifests_prefix(self._folder.path), start_after=after):
            place = place_of(info.key)
            if before is not None and before[0][:2] != place[:2]:
                yield before
            before = place, info
        if before is not None:
            yield before

    def stand(
        self, branch: int, latest: Place | None = None, tail: Place | None = None, taken: Sequence[Place] = ()
    ) -> Stand:
        """
        Return where a branch ends.

        Args:
            branch: The branch.
            latest: The newest checkpoint that was seen, up to `tail`.
            tail: The place at which the listing starts.
            taken: Places known to be taken that a mounted file system's listing may not show yet.

        Raises:
            UnavailableError: Manifests were deleted while they were read, five times in a row.
        """
        for _ in range(_LOOKS_MAX):
            try:
                return self._look(branch, latest, tail, taken)
            except NotFoundError:  # deleted since, so a newer one exists
                latest = tail = None
        raise UnavailableError(f"the manifests of job {self._folder.job!r} change faster than they can be read; retry")

    def beyond(self, stand: Stand) -> Stand:
        """Return where a branch ends even if `stand` is from a stale listing; one more request if it is not."""
        while stand.last is not None and (following := self.find(stand.next_place)) is not None:
            latest = stand.latest if following.kind is ManifestKind.FENCE else following
            stand = Stand(stand.branch, latest, following)
        return stand

    def _look(self, branch: int, latest: Place | None, tail: Place | None, taken: Sequence[Place]) -> Stand:
        places = sorted({*self.places(branch, tail), *taken})
        last = self.load(places[-1]) if places else None
        for place in reversed(places):
            manifest = self.load(place)
            if manifest.kind is not ManifestKind.FENCE:
                return Stand(branch, manifest, last)
        return Stand(branch, self.load(latest) if latest else None, last)

    def _fetch(self, place: Place, mine: Future[Manifest]) -> Manifest:
        """Read a manifest for all waiting callers."""
        key = place_key(self._folder.path, place)
        try:
            data = self._store.get(key)
            manifest = decode_manifest(data, key)
            if place_of_manifest(manifest) != place:
                raise CorruptDataError(f"manifest {key} is a copy of {manifest.ref.to_text()}", object_key=key)
            if self.job_uid and manifest.job_uid != self.job_uid:
                raise CorruptDataError(
                    f"manifest {key} is of a job of uid {manifest.job_uid}, but {self._folder.path}/job.json says "
                    f"{self.job_uid}: no service writes that, so one of the two was copied or replaced by hand. "
                    "If job.json is the wrong one, restore the right one; else move the manifest out of the folder, "
                    "and run `dstl fsck` to find others",
                    object_key=key,
                )
        except BaseException as error:
            with self._lock:
                self._end(place, mine)
            mine.set_exception(error)
            raise
        with self._lock:
            if self._end(place, mine):
                self._keep(place, manifest, len(data))
        mine.set_result(manifest)
        return manifest

    def _end(self, place: Place, mine: Future[Manifest]) -> bool:
        """End a load; return whether its result may be cached: not if `forget` ran meanwhile."""
        if self._loads.get(place) is not mine:
            return False
        del self._loads[place]
        return True

    def _keep(self, place: Place, manifest: Manifest, size_bytes: int) -> None:
        self._cache[place] = (manifest, size_bytes)
        kept_bytes = sum(size for _, size in self._cache.values())
        while len(self._cache) > 1 and (len(self._cache) > _MANIFESTS_CACHED or kept_bytes > _BYTES_CACHED):
            kept_bytes -= self._cache.popitem(last=False)[1][1]


def place_of_manifest(manifest: Manifest) -> Place:
    """Return where a manifest lies."""
    return Place.of(manifest.id, manifest.generation)


def _in_front_of(folder: str, place: Place) -> str:
    """Return a key that sorts after all earlier places and before this one."""
    return place_key(folder, place)[:-1]
