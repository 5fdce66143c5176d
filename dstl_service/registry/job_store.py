"""
A job's objects: ``job.json``, epochs and manifests, kept with create-if-absent alone.

A job is owned by one driver at a time, see `dstl_service.registry.takeover`; its manifests are read by
`dstl_service.registry.manifest_reader`. Blocking I/O; the service calls it in threads. One instance per job and
service.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from dstl_service.formats.keys import JobRecord, Place, decode_job, encode_job, epoch_key
from dstl_service.formats.manifest import Manifest, encode_manifest
from dstl_service.registry.forks import ForkedJob
from dstl_service.registry.hints import read_hint, write_hint
from dstl_service.registry.lives import Lives, life_folder, life_of, record_key
from dstl_service.registry.manifest_log import place_of_manifest
from dstl_service.registry.named_objects import KnownIndexes
from dstl_service.registry.parallelism_requests import ParallelismRequests, WantedParallelism
from dstl_service.registry.unfinished_objects import UnfinishedObjects
from dstl_service.wire import CheckpointInfo, CheckpointRef, ForkOrigin
from storage.checksum import checksum64
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, CorruptDataError, FencedError, InvalidInputError, NotFoundError
from storage.key_groups import check_parallelism
from storage.model import ObjectInfo
from storage.object_store import ObjectStore, exists
from storage.validation import KEY_GROUP_MAX

MAX_PARALLELISM_DEFAULT = 128
_SWEPT_HINT = "swept"
_SWEPT_MIN = 50
"""Ids with nothing but fences that each collection reads before a hint skips them."""


class JobStore(ForkedJob):
    """Reads and writes the objects of one life of a job: the life that is current at the first access."""

    def __init__(self, store: ObjectStore, job: str, clock: Clock, ids: IdSource) -> None:
        super().__init__(store, job, clock, ids)
        self.indexes = KnownIndexes(store)
        self.unfinished = UnfinishedObjects(store)
        self.parallelism_requests = ParallelismRequests(store, self._folder)
        self._swept: Place | None = None

    def open(self, max_parallelism: int | None, origin: ForkOrigin | None = None) -> None:
        """
        Create the job, with `origin` as a fork, or read what was fixed when it was created.

        Raises:
            InvalidInputError: `max_parallelism` is out of bounds or differs from the stored one, which never changes.
            CorruptDataError: ``job.json`` cannot be read, or the end record of an earlier life is lost.
            NotFoundError: This instance was opened before, and the job was deleted since.
        """
        wanted = MAX_PARALLELISM_DEFAULT if max_parallelism is None else max_parallelism
        if not 1 <= wanted <= KEY_GROUP_MAX + 1:
            raise InvalidInputError(f"max_parallelism must be within 1..{KEY_GROUP_MAX + 1}, got {wanted}")
        life, record = self._create_or_read(wanted, origin)
        self._folder.enter(life)
        if max_parallelism is not None and record.max_parallelism != max_parallelism:
            raise InvalidInputError(
                f"job {self._job!r} was created with max_parallelism {record.max_parallelism}, not {max_parallelism}; "
                "it is fixed for the life of a job: omit the option, or have a new job begin with this one's state: "
                f"`dstl fork --max-parallelism {max_parallelism} {self._job} NEW-NAME`"
            )
        self._take(record)

    def open_life(self, life: int) -> None:
        """
        Bind to the job of one life, whether or not that has ended; creates nothing.

        Raises:
            NotFoundError: The life has no ``job.json``.
            CorruptDataError: ``job.json`` cannot be read.
        """
        key = record_key(self._job, life)
        record = decode_job(self._store.get(key), key)
        self._folder.enter(life)
        self._take(record)

    def _take(self, record: JobRecord) -> None:
        self.job_uid = self._log.job_uid = record.uid
        self.max_parallelism, self.origin = record.max_parallelism, record.origin

    def _create_or_read(self, max_parallelism: int, origin: ForkOrigin | None) -> tuple[int, JobRecord]:
        """
        Return the current life, and its ``job.json``.

        Whether the life has ended is checked after the put: a record put into an ended life belongs to no job.
        """
        lives = Lives(self._store, self._job)
        while True:
            life = lives.current()
            key = record_key(self._job, life)
            try:
                record = decode_job(self._store.get(key), key)
            except NotFoundError:
                lives.check_not_lost(life)
                record = JobRecord(self._ids.unique_id(), max_parallelism, origin)
                try:
                    self._store.put(key, encode_job(*record), if_absent=True)
                    self._check_last(lives, life)
                except ConflictError:  # created since
                    continue
            if not lives.has_ended(life):
                return life, record
            self._store.delete([key])

    def _check_last(self, lives: Lives, life: int) -> None:
        """Delete the ``job.json`` just created if a later life exists; see `Lives.check_last`."""
        try:
            lives.check_last(life)
        except CorruptDataError:
            self._store.delete([record_key(self._job, life)])
            raise

    @property
    def life(self) -> int:
        """The number of the life to which this instance is bound; the first access asks the store."""
        return self._folder.life

    def exists(self) -> bool:
        """Return whether a job of this name exists now, whichever was opened."""
        return Lives(self._store, self._job).has_job()

    def has_ended(self) -> bool:
        """Return whether the job was deleted since it was opened: its name is free or another job's. One request."""
        return self._folder.has_ended

    def is_replaced(self) -> bool:
        """Return whether the objects of the job that was opened were deleted by hand: its ``job.json`` is gone."""
        if not self.job_uid:
            return False
        key = record_key(self._job, self._folder.life)
        try:
            return decode_job(self._store.get(key), key).uid != self.job_uid
        except NotFoundError:
            return True

    def enter_life_of(self, epoch: int) -> None:
        """
        Bind to the life of an epoch; called before any other access. Never blocks.

        Raises:
            NotFoundError: This instance is bound to another life: a newer one, or one that has ended.
        """
        self._folder.enter(life_of(epoch))

    def check_not_ended(self) -> None:
        """Raise `NotFoundError` if the job was deleted since it was opened; see `has_ended`."""
        if self.has_ended():
            raise NotFoundError(f"job {self._job!r} was deleted meanwhile; restart the query", job=self._job)

    def has_epoch(self, epoch: int) -> bool:
        """Return whether this epoch has ever begun."""
        return exists(self._store, epoch_key(life_folder(self._job, life_of(epoch)), epoch))

    def create_manifest(self, manifest: Manifest) -> tuple[Manifest, int]:
        """
        Store a checkpoint's manifest; return it with its generation, and the size of its object in bytes.

        A repeated call with the same `uid` returns the first call's manifest: a lost response is not a conflict.

        Raises:
            FencedError: A newer epoch has begun.
            ConflictError: The checkpoint is already complete with another uid. The fence of a newer epoch lies after
                that one, so it could not stop a second (I4).
        """
        place = self._first_place(manifest)
        while True:
            candidate = replace(manifest, generation=place.generation)
            try:
                size_bytes = self._log.append(candidate)
            except ConflictError:
                there = self._last_behind(place, manifest.epoch)
                if there.uid == manifest.uid:
                    return there, len(encode_manifest(there))
                self._check_may_follow(manifest, there)
                place = place_of_manifest(there).next(is_fence=True)
                continue
            self._know(candidate)
            return candidate, size_bytes

    def find(self, checkpoint_id: int, uid: str, base: CheckpointRef | None) -> Manifest | None:
        """Return the checkpoint of this id and uid that follows `base`, whatever its generation, or None."""
        place = self._log.last_at(_branch_of(base), checkpoint_id)
        manifest = self._log.load(place) if place else None
        return manifest if manifest is not None and manifest.uid == uid and not manifest.is_fence else None

    def newest_of(self, checkpoint_id: int) -> Manifest | None:
        """Return the checkpoint of this id on the newest checkpoint's chain, or None."""
        newest = self.newest()
        for manifest in self.stored_chain(newest.ref) if newest else ():
            if manifest.id <= checkpoint_id:
                return manifest if manifest.id == checkpoint_id else None
        return None

    def make_savepoint(self, name: str, checkpoint_id: int | None) -> Manifest:
        """
        Keep a checkpoint under a name, the newest if no id is given; see `SavepointStore.create`.

        Raises:
            NotFoundError: The checkpoint does not exist, or was subsumed meanwhile.
            ConflictError: The name is taken by another checkpoint.
        """
        manifest = self.newest() if checkpoint_id is None else self.newest_of(checkpoint_id)
        if manifest is None:
            raise NotFoundError(
                f"job {self._job!r} has no checkpoint{'' if checkpoint_id is None else f' {checkpoint_id}'} for a "
                "savepoint to keep; `dstl checkpoints` lists the retained ones",
                job=self._job,
            )
        return self.keep(name, manifest)

    def request_parallelism(self, operator: str, parallelism: int) -> tuple[int, dict[str, WantedParallelism]]:
        """
        Request a parallelism for an operator of the running query; return the epoch and all its requests.

        Of two calls at the same time one may be lost.

        Raises:
            NotFoundError: The newest checkpoint has no such operator.
            InvalidInputError: The parallelism is out of bounds.
        """
        latest, epoch = self.frontier()
        names = sorted(info.label for info in latest.operators if info.has_table) if latest else []
        if operator not in names:
            raise NotFoundError(
                f"job {self._job!r} has no operator {operator!r}; its newest checkpoint has: "
                f"{', '.join(names) or 'none'}",
                job=self._job,
            )
        check_parallelism(parallelism, self.max_parallelism)
        request = WantedParallelism(parallelism, self._ids.unique_id())
        wanted = {**self.parallelism_requests.of(epoch), operator: request}
        self.parallelism_requests.put(epoch, wanted)
        return epoch, wanted

    def delete_manifests(self, refs: Sequence[CheckpointRef]) -> None:
        """
        Delete manifests that no retained checkpoint needs; their objects must still be there.

        The newest is deleted first, so a process that dies in between leaves no manifest with a broken chain.
        """
        self._log.delete(refs)
        if self._swept is not None:
            write_hint(self._store, self._folder.path, _SWEPT_HINT, *self._swept, self._uid_number)
            self._swept = None

    def manifests(self) -> Iterator[Manifest]:
        """Yield all stored checkpoints in key order, those of branches that a rewind gave up included."""
        self._newest_epoch()
        for place, _ in self._log.last_places():
            manifest = self.load(place.id, place.generation)
            if not manifest.is_fence:
                yield manifest

    def completed(self) -> Iterator[Manifest]:
        """Yield the newest checkpoint and its stored predecessors, oldest first."""
        newest = self.newest()
        yield from reversed(list(self.stored_chain(newest.ref)) if newest else [])

    def listed(self) -> list[CheckpointInfo]:
        """Return what listings show of `completed`, one manifest at a time in memory: each may take megabytes."""
        newest = self.newest()
        return [manifest.info() for manifest in self.stored_chain(newest.ref)][::-1] if newest else []

    def subsumed(self, kept: Collection[CheckpointRef]) -> Iterator[tuple[CheckpointRef, ObjectInfo]]:
        """
        Yield all stored checkpoints except `kept`, which is not empty, and anything newer than those.

        Checkpoints that a rewind gave up are included.

        Fences stay for ever: without them a driver that was paused for long would find its place free and take itself
        for the owner (I4). A hint skips ids that hold nothing but fences.
        """
        keeping = {Place.of(ref.id, ref.generation) for ref in kept}
        newest = max(keeping)
        passed, oldest = 0, None
        for place, info in self._log.last_places(self._swept_before()):
            if place > newest:
                break
            if place not in keeping:
                manifest = self._log.find(place)
                if manifest is None or manifest.is_fence:
                    passed += oldest is None
                    continue
                yield manifest.ref, info
            oldest = oldest or place
        if passed >= _SWEPT_MIN:
            self._swept = oldest

    def _swept_before(self) -> Place | None:
        """Return the place before which there are only fences, if this job has a hint of it."""
        *place, uid_number = read_hint(self._store, self._folder.path, _SWEPT_HINT) or (0,)
        return Place(*place) if (len(place), uid_number) == (len(Place._fields), self._uid_number) else None

    @property
    def _uid_number(self) -> int:
        """The job's uid as a number, for a hint: a late one may be of the job that was here before a rebuild."""
        return checksum64(self.job_uid.encode())

    def _first_place(self, manifest: Manifest) -> Place:
        """Return the first place to try: after the epoch's own fence if that has the same id, else number 0."""
        place = Place(_branch_of(manifest.base), manifest.id, 0)
        epoch, fence = self._own_fence or (0, place)
        return fence.next(is_fence=True) if epoch == manifest.epoch and fence[:2] == place[:2] else place

    def _last_behind(self, taken: Place, epoch: int) -> Manifest:
        """Return the last manifest at the id of a taken place; of several fences, only the last is read."""
        first = taken
        if taken.number == 0 and (tail := self._tail_of(epoch)) is not None and tail[:2] == taken[:2]:
            first = tail
        place = self._log.last_at(taken.branch, taken.id, first)
        return self._log.load_anew(max(place or first, taken))

    def _tail_of(self, epoch: int) -> Place | None:
        try:
            return self._epochs.load(epoch).tail
        except NotFoundError:
            return None

    def _check_may_follow(self, manifest: Manifest, there: Manifest) -> None:
        """Raise if a checkpoint must not follow the last manifest at its id."""
        if there.epoch > manifest.epoch:
            raise FencedError.taken_over(self._job, manifest.epoch, there.epoch)
        if not there.is_fence:
            raise ConflictError(
                f"checkpoint {manifest.id} is already complete, as {there.ref.to_text()}", epoch=manifest.epoch
            )


def _branch_of(base: CheckpointRef | None) -> int:
    return base.branch if base is not None else 0
