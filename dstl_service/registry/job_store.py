"""
A job's objects: ``job.json``, epochs and manifests, kept with create-if-absent alone.

How an older driver is kept out (I4): a new owner first claims the next epoch, then puts a *fence* at the place of the
next manifest. If that place is taken, the older driver was quicker: its checkpoint stands, and the fence moves one on.
The claim ends when its fence is what lies last. From then on every later write of the older driver collides with it.
No clock and no lock takes part.

How a job is set back: the epoch's record names what to, so that is decided with the epoch, and a new branch of
manifests begins (`registry_format.Place`). First a fence ends the branch before, then what the job is set back to is
written as the first manifest of the new one. Each of these steps can be done again by anyone, whoever died or pauses:
who claims next, sets the job back next, or collects garbage does what is left. So of two that do it at once, one wins
each put, and the other goes on from what it finds. What lies behind the target in the branch before is never touched:
it is no longer part of the job because no newer manifest leads to it, and retention deletes it.

Blocking I/O; the service calls it in threads. One instance per job and service.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from dstl_service.formats.checkpoint_record import note_of_rewind
from dstl_service.formats.keys import EpochRecord, Place, Rewind, decode_job, encode_job, epoch_key, manifest_key
from dstl_service.formats.manifest import (
    Manifest,
    ManifestKind,
    StateView,
    encode_manifest,
    state_up_to,
    with_segments,
)
from dstl_service.formats.under_way import NOTHING
from dstl_service.registry.epochs import EpochStore
from dstl_service.registry.hints import read_hint, write_hint
from dstl_service.registry.known_indexes import KnownIndexes
from dstl_service.registry.lives import LifeFolder, Lives, life_folder, life_of, record_key
from dstl_service.registry.manifest_log import ManifestLog, Stand, place_of_manifest
from dstl_service.registry.savepoints import SavepointStore
from dstl_service.registry.unfinished_objects import UnfinishedObjects
from dstl_service.wire import CheckpointRef
from storage.checksum import checksum64
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, CorruptDataError, FencedError, InvalidInputError, NotFoundError
from storage.model import KEY_GROUP_MAX, ObjectInfo, SegmentHandle
from storage.object_store import ObjectStore, exists
from storage.segment_format import encode_object

MAX_PARALLELISM_DEFAULT = 128
_VIEWS_CACHED = 4
_BASES_KNOWN = 50_000  # a day at two checkpoints a second, in some megabytes
_SWEPT_HINT = "swept"
_SWEPT_MIN = 50
"""So many ids with nothing but fences are looked at by each collection before a hint leads past them."""


class JobStore:
    """Reads and writes what belongs to one life of a job: the current one when it is first asked for anything."""

    def __init__(self, store: ObjectStore, job: str, clock: Clock, ids: IdSource) -> None:
        self._store = store
        self._job = job
        self._clock = clock
        self._ids = ids
        self._lock = threading.Lock()
        self._folder = LifeFolder(store, job)
        self._epochs = EpochStore(store, self._folder)
        self._log = ManifestLog(store, self._folder)
        self._views: OrderedDict[CheckpointRef, StateView] = OrderedDict()
        self.savepoints = SavepointStore(store, self._folder)
        self.indexes = KnownIndexes(store)
        self.unfinished = UnfinishedObjects(store)
        self._bases: OrderedDict[CheckpointRef, CheckpointRef | None] = OrderedDict()
        self._epoch_seen = 0
        self._own_fence: tuple[int, Place] | None = None
        self._swept: Place | None = None
        self.job_uid = ""
        self.max_parallelism = 0

    def open(self, max_parallelism: int | None) -> None:
        """
        Create the job or read what was fixed when it was created.

        Raises:
            InvalidInputError: `max_parallelism` is out of bounds or differs from the stored one, which never changes.
            CorruptDataError: ``job.json`` cannot be read.
            NotFoundError: This was opened before, and the job was deleted since.
        """
        wanted = MAX_PARALLELISM_DEFAULT if max_parallelism is None else max_parallelism
        if not 1 <= wanted <= KEY_GROUP_MAX + 1:
            raise InvalidInputError(f"max_parallelism must be within 1..{KEY_GROUP_MAX + 1}, it is {wanted}")
        life, uid, wanted = self._create_or_read(wanted)
        self._folder.enter(life)
        if max_parallelism is not None and wanted != max_parallelism:
            raise InvalidInputError(
                f"job {self._job!r} was created with max_parallelism {wanted}, not "
                f"{max_parallelism}; it is fixed for the life of a job: leave the option out, or name another job"
            )
        self.job_uid = self._log.job_uid = uid
        self.max_parallelism = wanted

    def _create_or_read(self, max_parallelism: int) -> tuple[int, str, int]:
        """
        Return the current life, and what its ``job.json`` says.

        That the life has not ended is asked behind it: a record that was put for one that had is nobody's.
        """
        lives = Lives(self._store, self._job)
        while True:
            life, uid, wanted = lives.current(), self._ids.unique_id(), max_parallelism
            key = record_key(self._job, life)
            try:
                self._store.put(key, encode_job(uid, wanted), if_absent=True)
            except ConflictError:
                try:
                    uid, wanted = decode_job(self._store.get(key), key)
                except NotFoundError:  # deleted since, so that life has ended
                    continue
            if not lives.has_ended(life):
                return life, uid, wanted
            self._store.delete([key])

    def exists(self) -> bool:
        """Say whether there is a job of this name now, whichever was opened."""
        return Lives(self._store, self._job).has_job()

    def has_ended(self) -> bool:
        """Say whether the job was deleted since it was opened: its name is free, or another job's. One request."""
        return self._folder.has_ended

    def enter_life_of(self, epoch: int) -> None:
        """
        Go by the life of an epoch from now on, before anything else is asked for. Never waits.

        Raises:
            NotFoundError: This is of another life already, which is a newer one, or has ended.
        """
        self._folder.enter(life_of(epoch))

    def check_not_ended(self) -> None:
        """Raise `NotFoundError` if the job was deleted since it was opened; see `has_ended`."""
        if self.has_ended():
            raise NotFoundError(f"job {self._job!r} was deleted meanwhile; start the query anew", job=self._job)

    def has_epoch(self, epoch: int) -> bool:
        """Say whether this epoch has ever begun."""
        return exists(self._store, epoch_key(life_folder(self._job, life_of(epoch)), epoch))

    def forget(self) -> None:
        """Keep nothing in memory of what is stored; it is read again when it is needed."""
        self._log.forget()
        with self._lock:
            self._views.clear()
            self._bases.clear()

    def claim(self, owner: str) -> tuple[int, Manifest | None]:
        """
        Take the job over: return the new epoch and the manifest to go on from (None: none was ever completed).

        What a rewind left undone is done first.

        Raises:
            FencedError: A newer epoch began meanwhile.
            CorruptDataError: Epochs are lost: manifests are of a newer one than there are.
        """
        record = self._begin_epoch(owner, None)
        stand, fence = self._end_branch(record, record.branch, record.latest, record.tail)
        self.check_still_newest(record.epoch)
        self._own_fence = record.epoch, fence
        return record.epoch, stand.latest

    def begin_rewind(self, owner: str, savepoint: str, target: int) -> EpochRecord:
        """
        Decide that the job is set back to what a savepoint holds; `finish_rewind` does it, or whoever comes next.

        Args:
            owner: Who does it, for people.
            savepoint: Holds a checkpoint's manifest; is deleted when that is the job's newest.
            target: The checkpoint's id.
        """
        return self._begin_epoch(owner, (savepoint, target))

    def finish_rewind(self, record: EpochRecord) -> Manifest:
        """
        Return the first manifest of a rewind's branch, doing what is left to be done until it is there.

        Raises:
            NotFoundError: The savepoint that holds the target was deleted by hand.
        """
        assert record.rewind is not None
        if (first := self._first_of_branch(record)) is not None:
            return first
        try:
            parent, _ = self._end_branch(record, record.rewind.parent, record.latest, record.tail)
            if parent.latest is None:
                raise NotFoundError(f"job {self._job!r} has nothing left of what it is set back from", job=self._job)
            self.keep(before_rewind(parent.latest.ref), parent.latest)
            target = self._target_of(record.rewind)
            restored = self._restored(target, record, parent.latest.ref)
            self._log.append(replace(restored, note=self._noted(restored)))
        except (NotFoundError, ConflictError, CorruptDataError):
            # Another one has done it, and the job went on so far that what this one wanted to read is deleted.
            if self._first_of_branch(record) is None:
                raise
        return self.finish_rewind(record)

    def settled_epoch(self) -> int:
        """
        Return the newest epoch's number; a rewind that was begun is done before.

        Who is going to delete asks this first, then reads what is named, and asks `has_newer_epoch` before it deletes
        objects. A rewind to something that was not named then pins it by a savepoint, begins an epoch, and lets the
        savepoint go at its end: so who deletes sees the one, or the other (I11).
        """
        record = self._newest_epoch()
        if record is None:
            return self._epochs.first - 1
        if record.rewind is not None:
            self.finish_rewind(record)
        return record.epoch

    def has_newer_epoch(self, epoch: int) -> bool:
        """Say whether another epoch began since; one request."""
        return self._epochs.has_newer(epoch)

    def check_still_newest(self, epoch: int) -> None:
        """Raise `FencedError` if another epoch began since."""
        self._epochs.check_newest(epoch)

    def create(self, manifest: Manifest) -> tuple[Manifest, int]:
        """
        Make a checkpoint exist; return it with the generation it got, and the size of its object.

        A repeated call with the same `uid` returns what the first one made: a response that was lost is no conflict.

        Raises:
            FencedError: A newer epoch has begun.
            ConflictError: The checkpoint is completed already, with another uid. The fence of a newer epoch
                stands behind that one, so it could not stop a second (I4).
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
                place = place_of_manifest(there).behind(is_fence=True)
                continue
            self._know(candidate)
            return candidate, size_bytes

    def find(self, checkpoint_id: int, uid: str, base: CheckpointRef | None) -> Manifest | None:
        """Return the checkpoint of this id and uid that follows `base`, whatever its generation, or None."""
        place = self._log.last_at(_branch_of(base), checkpoint_id)
        manifest = self._log.load(place) if place else None
        return manifest if manifest is not None and manifest.uid == uid and _is_checkpoint(manifest) else None

    def newest_of(self, checkpoint_id: int) -> Manifest | None:
        """Return the checkpoint of this id that the newest one goes back to, or None."""
        newest = self.newest()
        for manifest in self.stored_chain(newest.ref) if newest else ():
            if manifest.id <= checkpoint_id:
                return manifest if manifest.id == checkpoint_id else None
        return None

    def load(self, checkpoint_id: int, generation: int) -> Manifest:
        """
        Return one manifest, from memory if it was seen before: manifests never change.

        Raises:
            NotFoundError: There is none at this place.
            CorruptDataError: It cannot be read, or belongs to another job.
        """
        manifest = self._log.load(Place.of(checkpoint_id, generation))
        if self.job_uid and manifest.job_uid != self.job_uid:
            raise CorruptDataError(
                f"manifest {manifest.ref.to_text()} of job {self._job!r} is of a job of uid {manifest.job_uid}, not "
                f"{self.job_uid}; `dstl fsck` names its object",
                job=self._job,
            )
        self._know(manifest)
        return manifest

    def remembered(self, ref: CheckpointRef) -> Manifest | None:
        """Return the manifest that `ref` names if it is in memory. Never waits."""
        manifest = self._log.remembered(Place.of(ref.id, ref.generation))
        return manifest if manifest is not None and manifest.ref == ref else None

    def resolve(self, ref: CheckpointRef) -> Manifest:
        """
        Return the manifest that `ref` names.

        Raises:
            NotFoundError: There is none, or one with another uid stands in its place.
        """
        manifest = self.load(ref.id, ref.generation)
        if manifest.uid != ref.uid:
            manifest = self._log.load_anew(Place.of(ref.id, ref.generation))
        if manifest.uid != ref.uid or not _is_checkpoint(manifest):
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
        Keep a checkpoint under a name, without an id the newest; see `SavepointStore.create`.

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
        return self.keep(name, manifest)

    def keep(self, name: str, manifest: Manifest) -> Manifest:
        """Keep a checkpoint under a name; see `dstl_service.registry.savepoints.SavepointStore.create`."""
        base = manifest.base if manifest.kind is ManifestKind.DELTA else None
        before = self.state(base) if base is not None else None
        return self.savepoints.create(name, manifest, before, self._ids.unique_id())

    def delete_manifests(self, refs: Sequence[CheckpointRef]) -> None:
        """
        Delete manifests that no retained checkpoint needs; their objects must still be there.

        The newest goes first: a process that dies in between leaves no manifest whose chain breaks off.
        """
        self._log.delete(refs)
        if self._swept is not None:
            write_hint(self._store, self._folder.path, _SWEPT_HINT, *self._swept, self._uid_number)
            self._swept = None

    def is_stored(self, ref: CheckpointRef) -> bool:
        """Say whether a manifest is still there, whatever this process remembers of it."""
        return exists(self._store, manifest_key(self._folder.path, ref.id, ref.generation))

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
        stand = self._stand(self._newest_epoch())
        return stand.latest, stand.epoch

    def manifests(self) -> Iterator[Manifest]:
        """Yield all checkpoints that are stored, also those that the job was set back from, as they were written."""
        self._newest_epoch()
        for place, _ in self._log.last_places():
            manifest = self.load(place.id, place.generation)
            if _is_checkpoint(manifest):
                yield manifest

    def completed(self) -> Iterator[Manifest]:
        """Yield the newest checkpoint and those before it as far as they are stored, oldest first."""
        newest = self.newest()
        yield from reversed(list(self.stored_chain(newest.ref)) if newest else [])

    def subsumed(self, kept: Collection[CheckpointRef]) -> Iterator[tuple[CheckpointRef, ObjectInfo]]:
        """
        Yield all stored checkpoints but those to keep, of which there is one, and what is newer.

        What the job was set back from is among them.

        Fences stay for ever: a driver that was paused for long would find its place free, and believe it owns the job
        (I4). Where only fences are left, a hint leads past them.
        """
        keeping = {Place.of(ref.id, ref.generation) for ref in kept}
        newest = max(keeping)
        passed, oldest = 0, None
        for place, info in self._log.last_places(self._swept_before()):
            if place > newest:
                break
            if place not in keeping:
                manifest = self._log.find(place)
                if manifest is None or not _is_checkpoint(manifest):
                    passed += oldest is None
                    continue
                yield manifest.ref, info
            oldest = oldest or place
        if passed >= _SWEPT_MIN:
            self._swept = oldest

    def _swept_before(self) -> Place | None:
        """Return the place in front of which there are only fences, if this job has a hint of that."""
        *place, uid_number = read_hint(self._store, self._folder.path, _SWEPT_HINT) or (0,)
        return Place(*place) if (len(place), uid_number) == (len(Place._fields), self._uid_number) else None

    @property
    def _uid_number(self) -> int:
        """The job's uid as a number, for a hint; one of the job that was here before a rebuild may come late."""
        return checksum64(self.job_uid.encode())

    def _begin_epoch(self, owner: str, back_to: tuple[str, int] | None) -> EpochRecord:
        """Claim the next epoch; what an unfinished rewind left to be done is done before it."""
        while True:
            newest = self._newest_epoch()
            if newest is not None and newest.rewind is not None:
                self.finish_rewind(newest)
            stand = self._stand(newest)
            epoch = newest.epoch + 1 if newest else self._epochs.first
            record = EpochRecord(
                epoch=epoch,
                owner=owner,
                uid=self._ids.unique_id(),
                began_ms=self._clock.now_ms(),
                branch=epoch if back_to else stand.branch,
                latest=place_of_manifest(stand.latest) if stand.latest else None,
                tail=place_of_manifest(stand.last) if stand.last else None,
                rewind=Rewind(*back_to, stand.branch) if back_to else None,
            )
            if self._epochs.begin(record):
                if newest is not None and newest.rewind is not None:
                    self.savepoints.discard(newest.rewind.savepoint)
                return record

    def _end_branch(
        self, record: EpochRecord, branch: int, latest: Place | None, tail: Place | None
    ) -> tuple[Stand, Place]:
        """
        Put an epoch's fence where a branch ends; return where that is, and the fence's place.

        It is there when it lies last. A put alone does not show that: the place may have been one of a checkpoint
        that the older driver completed, retained for a while, and deleted, while this call was paused.
        """
        taken: list[Place] = []
        while True:
            stand = self._log.stand(branch, latest, tail, taken)
            if stand.last is not None and stand.epoch >= record.epoch:
                if stand.epoch > record.epoch:
                    self.check_still_newest(record.epoch)
                    raise CorruptDataError(
                        f"epochs of job {self._job!r} are lost: manifests tell of epoch {stand.epoch}; "
                        "`dstl fsck --rebuild` brings them back",
                        job=self._job,
                    )
                if stand.last.kind is ManifestKind.FENCE:
                    return stand, place_of_manifest(stand.last)
            if record.rewind is None:
                self.check_still_newest(record.epoch)
            taken.append(stand.next_place)
            with suppress(ConflictError):
                self._log.append(self._fence(stand.next_place, record.epoch))

    def _fence(self, place: Place, epoch: int) -> Manifest:
        """Return what keeps older epochs from a manifest's place."""
        return Manifest(
            kind=ManifestKind.FENCE,
            job_uid=self.job_uid,
            id=place.id,
            generation=place.generation,
            uid=self._ids.unique_id(),
            epoch=epoch,
            created_ms=self._clock.now_ms(),
        )

    def _target_of(self, rewind: Rewind) -> Manifest:
        try:
            return self.savepoints.load(rewind.savepoint)
        except NotFoundError as error:
            raise NotFoundError(
                f"job {self._job!r} is being set back to savepoint {rewind.savepoint!r}, and that was deleted: make it "
                f"again with `dstl savepoints --create {rewind.savepoint} --checkpoint {rewind.target}`, or of another "
                "checkpoint",
                job=self._job,
            ) from error

    def _restored(self, target: Manifest, record: EpochRecord, newest: CheckpointRef) -> Manifest:
        """Return what begins a rewind's branch: nothing that is under way belongs to it."""
        return replace(
            target,
            kind=ManifestKind.COMPLETE,
            uid=self._ids.unique_id(),
            generation=Place(record.branch, target.id, 0).generation,
            epoch=record.epoch,
            created_ms=self._clock.now_ms(),
            rewound_from=newest,
            kept_by="",
            under_way=NOTHING,
        )

    def _noted(self, restored: Manifest) -> SegmentHandle:
        """Store the note of what begins a rewind's branch, in an object of its own; return where it is."""
        segment = note_of_rewind(self._job, self.max_parallelism, restored).to_segment()
        buffers, (entry,) = encode_object([segment])
        key = f"{self._job}/segments/rewind/{self._ids.unique_id()}.seg"
        self._store.put(key, buffers)
        return SegmentHandle(key, sum(map(len, buffers)), entry)

    def _first_of_branch(self, record: EpochRecord) -> Manifest | None:
        """Return what a rewind's branch begins with, as far as it is stored; None while it is empty."""
        assert record.rewind is not None
        first = self._log.find(Place(record.branch, record.rewind.target, 0))
        if first is None and (place := self._log.first_of(record.branch)) is not None:
            first = self._log.find(place)
        return first

    def _stand(self, record: EpochRecord | None) -> Stand:
        """Return where the job stands; while a rewind is not done, where it stood before."""
        if record is None:
            return self._log.stand(0)
        if record.rewind is None:
            return self._log.stand(record.branch, record.latest, record.tail)
        if (first := self._first_of_branch(record)) is not None:
            return self._log.stand(record.branch, taken=[place_of_manifest(first)])
        return self._log.stand(record.rewind.parent, record.latest, record.tail)

    def _newest_epoch(self) -> EpochRecord | None:
        """Return the newest epoch's record. What was remembered before it may be gone, or be another job's."""
        record = self._epochs.newest()
        number = record.epoch if record else 0
        if number != self._epoch_seen:
            self.forget()
            self._epoch_seen = number
        return record

    def _first_place(self, manifest: Manifest) -> Place:
        """Return where a checkpoint goes, if nobody was there before: behind its epoch's fence, if that is in front."""
        place = Place(_branch_of(manifest.base), manifest.id, 0)
        epoch, fence = self._own_fence or (0, place)
        return fence.behind(is_fence=True) if epoch == manifest.epoch and fence[:2] == place[:2] else place

    def _last_behind(self, taken: Place, epoch: int) -> Manifest:
        """Return what lies last at the id of a place that is taken; of fences that pile up, only the last is read."""
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
        """Refuse a checkpoint where something lies last that it cannot follow."""
        if there.epoch > manifest.epoch:
            raise FencedError(
                f"job {self._job!r} was taken over by epoch {there.epoch}; this query runs as epoch "
                f"{manifest.epoch} and must stop",
                epoch=manifest.epoch,
                newer_epoch=there.epoch,
            )
        if _is_checkpoint(there):
            raise ConflictError(
                f"checkpoint {manifest.id} was completed already, as {there.ref.to_text()}", epoch=manifest.epoch
            )

    def _know(self, manifest: Manifest) -> None:
        if not _is_checkpoint(manifest):
            return
        with self._lock:
            self._bases[manifest.ref] = manifest.base
            while len(self._bases) > _BASES_KNOWN:
                self._bases.popitem(last=False)


def before_rewind(newest: CheckpointRef) -> str:
    """Return the name of the savepoint that keeps what a job is set back from."""
    return f"before-rewind-{newest.id}-{newest.uid[:8]}"


def _is_checkpoint(manifest: Manifest) -> bool:
    return manifest.kind is not ManifestKind.FENCE


def _branch_of(base: CheckpointRef | None) -> int:
    return Place.of(base.id, base.generation).branch if base is not None else 0
