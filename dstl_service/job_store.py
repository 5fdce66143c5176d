"""
A job's objects: ``job.json``, epochs and manifests, kept with create-if-absent alone.

How an older driver is kept out (I4): a new owner first claims the next epoch, then puts a *fence* at the place of the
next manifest. If that place is taken, the older driver was quicker: its checkpoint stands, and the fence moves one on.
Once the fence is there, every later write of the older driver collides with it. No clock and no lock takes part.

Blocking I/O; the service calls it in threads. One instance per job and service.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dstl_service.known_indexes import KnownIndexes
from dstl_service.manifest import (
    Manifest,
    ManifestKind,
    StateView,
    decode_manifest,
    encode_manifest,
    state_up_to,
    with_segments,
)
from dstl_service.registry_format import (
    decode_epoch,
    decode_job,
    encode_epoch,
    encode_job,
    epoch_key,
    manifest_key,
    manifest_prefix,
    number_of,
    place_of,
)
from dstl_service.savepoints import SavepointStore
from dstl_service.wire import CheckpointRef
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, CorruptDataError, FencedError, InvalidInputError, NotFoundError
from storage.model import KEY_GROUP_MAX, ObjectInfo
from storage.object_store import ObjectStore, exists

MAX_PARALLELISM_DEFAULT = 128
_MANIFESTS_CACHED = 64
_VIEWS_CACHED = 4
_BASES_KNOWN = 50_000  # a day at two checkpoints a second, in some megabytes


class JobStore:
    """Reads and writes what belongs to one job, below ``<base>/<job>/``."""

    def __init__(self, store: ObjectStore, job: str, clock: Clock, ids: IdSource) -> None:
        self._store = store
        self._job = job
        self._clock = clock
        self._ids = ids
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[int, int], Manifest] = OrderedDict()
        self._views: OrderedDict[CheckpointRef, StateView] = OrderedDict()
        self.savepoints = SavepointStore(store, job)
        self.indexes = KnownIndexes(store)
        self._bases: OrderedDict[CheckpointRef, CheckpointRef | None] = OrderedDict()
        self._epoch_seen = 0
        self.job_uid = ""
        self.max_parallelism = 0

    def open(self, max_parallelism: int | None) -> None:
        """
        Create the job or read what was fixed when it was created.

        Raises:
            InvalidInputError: `max_parallelism` is out of bounds or differs from the stored one, which never changes.
            CorruptDataError: ``job.json`` cannot be read.
        """
        wanted = MAX_PARALLELISM_DEFAULT if max_parallelism is None else max_parallelism
        if not 1 <= wanted <= KEY_GROUP_MAX + 1:
            raise InvalidInputError(f"max_parallelism must be within 1..{KEY_GROUP_MAX + 1}, it is {wanted}")
        key = f"{self._job}/job.json"
        uid = self._ids.unique_id()
        try:
            self._store.put(key, encode_job(uid, wanted), if_absent=True)
        except ConflictError:
            uid, wanted = decode_job(self._store.get(key), key)
        if max_parallelism is not None and wanted != max_parallelism:
            raise InvalidInputError(
                f"job {self._job!r} was created with max_parallelism {wanted}, not "
                f"{max_parallelism}; it is fixed for the life of a job: leave the option out, or name another job"
            )
        self.job_uid, self.max_parallelism = uid, wanted

    def exists(self) -> bool:
        """Say whether the job was ever created."""
        return exists(self._store, f"{self._job}/job.json")

    def forget(self) -> None:
        """Keep nothing in memory of what is stored; it is read again when it is needed."""
        with self._lock:
            for kept in (self._cache, self._views, self._bases):
                kept.clear()

    def claim(self, owner: str, back_to: int | None = None) -> tuple[int, Manifest | None]:
        """
        Take the job over: return the new epoch and the manifest to go on from (None: none was ever completed).

        Args:
            owner: Who takes it, for people who read the epoch's object.
            back_to: Id of the checkpoint to which the job is going to be set back, see `dstl_service.rewind`.

        Raises:
            FencedError: A newer epoch began meanwhile.
        """
        epoch, hint = self._claim_epoch(owner, back_to)
        while True:
            latest, behind = self._latest(hint)
            self.check_still_newest(epoch)
            # Where the older owner writes next, behind the fences of those that completed nothing. After the job was
            # set back, there are fences further on, which are for others.
            next_id = latest.id + 1 if latest else 0
            generation = max((generation for there, generation in behind if there == next_id), default=-1) + 1
            fence = self.fence(next_id, generation, epoch)
            try:
                self._store.put(self._key(next_id, generation), encode_manifest(fence), if_absent=True)
            except ConflictError:
                continue
            return epoch, latest

    def fence(self, checkpoint_id: int, generation: int, epoch: int) -> Manifest:
        """Return what keeps older epochs from a manifest's place."""
        return Manifest(
            kind=ManifestKind.FENCE,
            job_uid=self.job_uid,
            id=checkpoint_id,
            generation=generation,
            uid=self._ids.unique_id(),
            epoch=epoch,
            created_ms=self._clock.now_ms(),
        )

    def give_up(self, refs: Sequence[CheckpointRef], epoch: int) -> None:
        """
        Put fences in the place of checkpoints that the job was set back from, the newest first.

        Who repeats the request that made one of them, because its answer was lost, is fenced (I4). A process that dies
        in between leaves a chain that is whole.
        """
        for ref in sorted(refs, key=lambda ref: (ref.id, ref.generation), reverse=True):
            self._store.put(
                self._key(ref.id, ref.generation), encode_manifest(self.fence(ref.id, ref.generation, epoch))
            )
        self.forget()

    def create(self, manifest: Manifest) -> tuple[Manifest, int]:
        """
        Make a checkpoint exist; return it with the generation it got, and the size of its object.

        A repeated call with the same `uid` returns what the first one made: a response that was lost is no conflict.

        Raises:
            FencedError: A newer epoch has begun.
            ConflictError: This epoch completed the checkpoint already, with another uid. The fence of a newer epoch
                stands behind that one, so it could not stop a second (I4).
        """
        generation = manifest.generation
        while True:
            candidate = replace(manifest, generation=generation)
            data = encode_manifest(candidate)
            try:
                self._store.put(self._key(manifest.id, generation), data, if_absent=True)
            except ConflictError:
                places = list(self._places(manifest.id))
                for number in places:
                    self._forget_place(CheckpointRef(manifest.id, number, ""))  # it may have been given up since
                    there = self.load(manifest.id, number)
                    if there.epoch > manifest.epoch:
                        raise FencedError(
                            f"job {self._job!r} was taken over by epoch {there.epoch}; this query runs as epoch "
                            f"{manifest.epoch} and must stop",
                            epoch=manifest.epoch,
                            newer_epoch=there.epoch,
                        ) from None
                    if there.uid == manifest.uid:
                        return there, len(data)
                    if there.kind is not ManifestKind.FENCE and there.epoch == manifest.epoch:
                        raise ConflictError(
                            f"this query completed checkpoint {manifest.id} already, as {there.ref.to_text()}",
                            epoch=manifest.epoch,
                        ) from None
                generation = places[-1] + 1
                continue
            self._remember(candidate)
            return candidate, len(data)

    def find(self, checkpoint_id: int, uid: str) -> Manifest | None:
        """Return the checkpoint of this id and uid, whatever its generation, or None."""
        for generation in self._places(checkpoint_id):
            manifest = self.load(checkpoint_id, generation)
            if manifest.uid == uid and manifest.kind is not ManifestKind.FENCE:
                return manifest
        return None

    def newest_of(self, checkpoint_id: int) -> Manifest | None:
        """Return the newest generation of a checkpoint, or None."""
        self._newest_epoch()
        for generation in reversed(self._places(checkpoint_id)):
            manifest = self.load(checkpoint_id, generation)
            if manifest.kind is not ManifestKind.FENCE:
                return manifest
        return None

    def load(self, checkpoint_id: int, generation: int) -> Manifest:
        """
        Return one manifest, from memory if it was seen before: manifests never change.

        Raises:
            NotFoundError: There is none at this place.
            CorruptDataError: It cannot be read, or belongs to another job.
        """
        with self._lock:
            cached = self._cache.get((checkpoint_id, generation))
            if cached is not None:
                self._cache.move_to_end((checkpoint_id, generation))
                return cached
        key = self._key(checkpoint_id, generation)
        manifest = decode_manifest(self._store.get(key), key)
        if self.job_uid and manifest.job_uid != self.job_uid:
            raise CorruptDataError(f"manifest {key} belongs to another job's life ({manifest.job_uid})", object_key=key)
        self._remember(manifest)
        return manifest

    def remembered(self, ref: CheckpointRef) -> Manifest | None:
        """Return the manifest that `ref` names if it is in memory. Never waits."""
        with self._lock:
            manifest = self._cache.get((ref.id, ref.generation))
        return manifest if manifest is not None and manifest.ref == ref else None

    def resolve(self, ref: CheckpointRef) -> Manifest:
        """
        Return the manifest that `ref` names.

        Raises:
            NotFoundError: There is none, or one with another uid stands in its place.
        """
        manifest = self.load(ref.id, ref.generation)
        if manifest.uid != ref.uid:
            self._forget_place(ref)  # what was there may have been given up since
            manifest = self.load(ref.id, ref.generation)
        if manifest.uid != ref.uid or manifest.kind is ManifestKind.FENCE:
            raise NotFoundError(f"job {self._job!r} has no checkpoint {ref.to_text()}", job=self._job)
        return manifest

    def chain(self, ref: CheckpointRef) -> Iterator[Manifest]:
        """
        Yield the manifests from `ref` back to the job's first checkpoint, newest first, one read each.

        Raises:
            NotFoundError: The next one was subsumed and deleted, or never existed.
        """
        try:
            manifest = self.resolve(ref)
        except NotFoundError:
            savepoint = next((found for _, found in self.savepoints.all() if found.ref == ref), None)
            if savepoint is None:
                raise
            manifest = savepoint
        yield manifest
        while manifest.base is not None:
            manifest = self.resolve(manifest.base)
            yield manifest

    def stored_chain(self, ref: CheckpointRef) -> Iterator[Manifest]:
        """Yield the manifests from `ref` back to the oldest that is stored, newest first."""
        try:
            yield from self.chain(ref)
        except NotFoundError:
            return

    def state(self, ref: CheckpointRef) -> StateView:
        """
        Return all that a checkpoint's state consists of; in a running job from what the one before consists of.

        Raises:
            NotFoundError: There is no such checkpoint.
            CorruptDataError: Its chain cannot be read back to a complete manifest.
        """
        newest_first: list[Manifest] = []
        view: StateView | None = None
        for manifest in self.stored_chain(ref):
            with self._lock:
                view = self._views.get(manifest.ref)
            if view is not None:
                break
            newest_first.append(manifest)
            if manifest.kind is ManifestKind.COMPLETE:
                break
        if view is None and not newest_first:
            raise NotFoundError(f"job {self._job!r} has no checkpoint {ref.to_text()}", job=self._job)
        view = state_up_to(newest_first) if view is None else with_segments(view, newest_first)
        with self._lock:
            self._views[ref] = view
            while len(self._views) > _VIEWS_CACHED:
                self._views.popitem(last=False)
        return view

    def make_savepoint(self, name: str, checkpoint_id: int | None) -> Manifest:
        """
        Keep a checkpoint under a name, without an id the newest; see `dstl_service.savepoints.SavepointStore.create`.

        Raises:
            NotFoundError: There is no such checkpoint, or it was subsumed meanwhile.
            ConflictError: The name is taken by another checkpoint.
        """
        manifest = self.newest() if checkpoint_id is None else self.newest_of(checkpoint_id)
        if manifest is None:
            raise NotFoundError(
                f"job {self._job!r} has no checkpoint{'' if checkpoint_id is None else f' {checkpoint_id}'} that a "
                "savepoint could keep; `dstl checkpoints` lists what is retained",
                job=self._job,
            )
        is_delta = manifest.kind is ManifestKind.DELTA and manifest.base is not None
        before = self.state(manifest.base) if is_delta and manifest.base is not None else None
        return self.savepoints.create(name, manifest, before)

    def delete_manifests(self, refs: Sequence[CheckpointRef]) -> None:
        """
        Delete manifests that no retained checkpoint needs; their objects must still be there.

        The newest goes first: a process that dies in between leaves no manifest whose chain breaks off.
        """
        newest_first = sorted(refs, key=lambda ref: (ref.id, ref.generation), reverse=True)
        self._store.delete([self._key(ref.id, ref.generation) for ref in newest_first])
        for ref in refs:
            self._forget_place(ref)

    def is_stored(self, ref: CheckpointRef) -> bool:
        """Say whether a manifest is still there, whatever this process remembers of it."""
        return exists(self._store, self._key(ref.id, ref.generation))

    def is_ancestor(self, older: CheckpointRef, ref: CheckpointRef) -> bool:
        """
        Tell whether a checkpoint lies on the way from `ref` back to the first; both being one counts.

        Raises:
            NotFoundError: That cannot be told: a manifest in between is deleted, and this process never saw it.
        """
        step: CheckpointRef | None = ref
        while step is not None and step.id > older.id:
            with self._lock:
                known, before = step in self._bases, self._bases.get(step)
            step = before if known else self.resolve(step).base
        return step == older

    def newest(self) -> Manifest | None:
        """Return the newest checkpoint, or None."""
        return self.frontier()[0]

    def frontier(self) -> tuple[Manifest | None, int]:
        """Return the newest checkpoint, and the epoch that may complete the next one: no older one can (I4)."""
        latest, behind = self._latest(self._hint_of(self._newest_epoch()))
        epochs = [self.load(*place).epoch for place in behind]
        return latest, max([latest.epoch if latest else 0, *epochs])

    def manifests(self) -> Iterator[Manifest]:
        """Yield all manifests but fences, by id and generation."""
        self._newest_epoch()
        for place in self._listing(""):
            manifest = self.load(*place)
            if manifest.kind is not ManifestKind.FENCE:
                yield manifest

    def completed(self) -> Iterator[Manifest]:
        """Yield all checkpoints by id; of several generations of one id only the newest."""
        newest: Manifest | None = None
        for manifest in self.manifests():
            if newest is not None and newest.id != manifest.id:
                yield newest
            newest = manifest
        if newest is not None:
            yield newest

    def subsumed(self, oldest_kept: CheckpointRef) -> Iterator[tuple[CheckpointRef, ObjectInfo]]:
        """
        Yield all manifests with a lower id than `oldest_kept`: no retained checkpoint needs them.

        Fences stay for ever: a driver that was paused for long would find its place free, and believe it owns the job
        (I4).
        """
        for info in self._store.list(f"{self._job}/checkpoints/"):
            place = place_of(info.key)
            if place[0] >= oldest_kept.id:
                return
            try:
                is_fence = self.load(*place).kind is ManifestKind.FENCE
            except NotFoundError:  # deleted meanwhile
                continue
            if not is_fence:
                yield CheckpointRef(*place, ""), info

    def _claim_epoch(self, owner: str, back_to: int | None) -> tuple[int, int]:
        while True:
            newest = self._newest_epoch()
            latest, _ = self._latest(self._hint_of(newest))
            latest_id = latest.id if latest else 0
            if back_to is not None:
                latest_id = min(latest_id, back_to)
            record = encode_epoch(newest + 1, owner, self._ids.unique_id(), self._clock.now_ms(), latest_id)
            try:
                self._store.put(epoch_key(self._job, newest + 1), record, if_absent=True)
            except ConflictError:
                continue
            return newest + 1, latest_id

    def _newest_epoch(self) -> int:
        """Return the number of the newest epoch; 0 if there is none. What was remembered before it may be given up."""
        newest = max((number_of(info.key) for info in self._store.list(f"{self._job}/epochs/")), default=0)
        if newest != self._epoch_seen:
            self.forget()
            self._epoch_seen = newest
        return newest

    def _hint_of(self, epoch: int) -> int:
        """Return a checkpoint id that was reached when an epoch began."""
        if not epoch:
            return 0
        key = epoch_key(self._job, epoch)
        return decode_epoch(self._store.get(key), key)

    def check_still_newest(self, epoch: int) -> None:
        """
        Refuse an owner that was overtaken while it claimed, or since.

        A claim calls it after it has listed the manifests: a newer owner that fences later collides at the same place.
        Without this, a late fence behind the newer owner's checkpoint would let the older one go on from it (I4).
        """
        for info in self._store.list(f"{self._job}/epochs/", start_after=epoch_key(self._job, epoch)):
            raise FencedError(
                f"job {self._job!r} was taken over by epoch {number_of(info.key)} while epoch {epoch} was at it",
                epoch=epoch,
                newer_epoch=number_of(info.key),
            )

    def _latest(self, hint: int) -> tuple[Manifest | None, list[tuple[int, int]]]:
        """Return the newest checkpoint with an id of at least `hint`, and the places behind it, which fences have."""
        places = sorted(self._listing(manifest_prefix(self._job, hint)))
        for number in range(len(places) - 1, -1, -1):
            manifest = self.load(*places[number])
            if manifest.kind is not ManifestKind.FENCE:
                return manifest, places[number + 1 :]
        # An epoch that began while the job was set back may name a checkpoint that was given up then.
        return self._latest(0) if hint else (None, places)

    def _listing(self, start_after: str) -> Iterator[tuple[int, int]]:
        for info in self._store.list(f"{self._job}/checkpoints/", start_after=start_after):
            yield place_of(info.key)

    def _places(self, checkpoint_id: int) -> list[int]:
        return sorted(place_of(info.key)[1] for info in self._store.list(manifest_prefix(self._job, checkpoint_id)))

    def _key(self, checkpoint_id: int, generation: int) -> str:
        return manifest_key(self._job, checkpoint_id, generation)

    def _forget_place(self, ref: CheckpointRef) -> None:
        with self._lock:
            self._cache.pop((ref.id, ref.generation), None)

    def _remember(self, manifest: Manifest) -> None:
        with self._lock:
            if manifest.kind is not ManifestKind.FENCE:
                self._bases[manifest.ref] = manifest.base
                while len(self._bases) > _BASES_KNOWN:
                    self._bases.popitem(last=False)
            self._cache[manifest.id, manifest.generation] = manifest
            while len(self._cache) > _MANIFESTS_CACHED:
                self._cache.popitem(last=False)
