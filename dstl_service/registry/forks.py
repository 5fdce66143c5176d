"""
Forks: jobs that begin with the state of another job, their *parent*, and name its objects instead of copying them.

Keys of objects are whole, so the manifests of a fork name those of the parent as any other. A savepoint of the parent,
the *hold*, keeps them: it names all that the fork began with, until the fork needs none of it any more.

    savepoints/fork-at-<id>-<call uid>   of the parent: the checkpoint at which a fork is about to begin
    savepoints/fork-hold-<fork's uid>    of the parent: the hold

Both say for which fork they are (`Manifest.held_for`). The fork's ``job.json`` names parent, checkpoint and the first
of the two: from then on the fork is decided, and every process may repeat each step after another died or paused. The
next claim, fork, rewind or garbage collection of the fork completes the rest: the hold is made, as a copy of the first
savepoint, then the fork's first manifest. It is complete, and of the epoch before the first.

A parent is not deleted while a living fork has a hold. A deletion puts its tombstone, then looks for holds; a fork
makes its hold, then looks for the tombstone. So one of the two sees the other.

A hold is deleted when its fork's life has ended, or the fork names no object of another job. The fork's collector
decides that as it decides on an orphan (`dstl_service.collection.garbage_collector`): an object that no manifest names
then is never named later. Blocking I/O; the service calls it in threads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from dstl_service.formats.keys import EpochRecord, JobRecord, Place, decode_job
from dstl_service.formats.manifest import Manifest, ManifestKind, decode_manifest
from dstl_service.formats.materialization_index import encode_index, read_index
from dstl_service.formats.under_way import NOTHING
from dstl_service.registry.lives import LifeFolder, Lives, record_key
from dstl_service.registry.savepoint_register import PIN, name_of
from dstl_service.registry.savepoints import SavepointStore
from dstl_service.registry.takeover import OwnedJob, put_note
from dstl_service.wire import ForkOrigin
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, CorruptDataError, DstlError, NotFoundError
from storage.model import MaterializationHandle, ObjectInfo
from storage.object_store import ObjectStore, is_readable

_HOLD, _BEGUN, _ALL = "fork-hold-", "fork-at-", "fork-"

logger = logging.getLogger("dstl_service")


class ForkedJob(OwnedJob):
    """A job that may be a fork of another one, and may have forks."""

    def __init__(self, store: ObjectStore, job: str, clock: Clock, ids: IdSource) -> None:
        super().__init__(store, job, clock, ids)
        self.origin: ForkOrigin | None = None

    # --- Of a fork ---------------------------------------------------------------------------------------------------

    def finish_fork(self) -> None:
        """
        Write the first manifest of a fork unless that is done.

        Raises:
            NotFoundError: The savepoint with which it begins is gone, and it never began.
            ConflictError: The parent is deleted.
        """
        origin = self.origin
        if origin is None or self._has_begun():
            return
        try:
            first = self._first_of_fork(self._held(origin), origin)
        except DstlError:
            if self._has_begun():  # others finished it meanwhile
                return
            raise
        if self.has_newer_epoch(first.epoch):
            return  # others finished it, and went on
        note = put_note(self._store, self._ids, self._job, self.max_parallelism, first)
        with suppress(ConflictError):  # another process was quicker
            self._log.append(replace(first, note=note))

    def _has_begun(self) -> bool:
        return self._newest_epoch() is not None or self._log.stand(0).latest is not None

    def settled_epoch(self) -> int:
        """Return the newest epoch's number; an unfinished fork or rewind is finished first."""
        self.finish_fork()
        return super().settled_epoch()

    def never_began(self) -> bool:
        """Return whether it is a fork that no driver has opened: if it is marked as deleted, none does any more."""
        return self.origin is not None and self._newest_epoch() is None

    def owns(self, key: str) -> bool:
        """Return whether an object is the job's own, which no other job deletes; else it is another job's."""
        return key.startswith(f"{self._job}/")

    def release_hold(self) -> None:
        """Delete a fork's hold; called when nothing names an object of another job, and nothing is going to."""
        assert self.origin is not None
        if Lives(self._store, self.origin.job).has_ended(self.origin.life):
            return  # nothing there is needed, or read again
        savepoints = _savepoints(self._store, self.origin.job, self.origin.life)
        mine = _hold_of(self.job_uid), self.origin.savepoint
        for title in savepoints.names(_ALL):
            if title.partition(PIN)[0] in mine:
                savepoints.discard(title)
                logger.info("fork no longer needs its parent", extra={"job": self._job, "savepoint": title})

    def ensure_hold(self) -> None:
        """
        Make a fork's hold again if it was lost with its parent's savepoints.

        It then names all that the fork's manifests and savepoints name, which is not the state of any checkpoint.
        """
        origin, newest = self.origin, self.newest()
        assert origin is not None
        if newest is None or has_hold(self._store, self.job_uid, origin):
            return
        parent = _record_of(self._store, _fork(origin.job, origin.life))
        if parent is None:
            return  # it is gone, and its objects with it
        named = [*self.stored_chain(newest.ref), *(saved for _, saved in self.savepoints.all())]
        log = dict.fromkeys(handle for one in named for handle in (*one.earlier, *one.segments))
        snapshots = dict.fromkeys(handle for one in named for handle in one.materializations)
        shared = (self._shared_part(handle, origin.job, parent.uid) for handle in snapshots)
        hold = replace(
            newest,
            job_uid=parent.uid,
            segments=(),
            earlier=tuple(handle for handle in log if not self.owns(handle.object_key)),
            materializations=tuple(filter(None, shared)),
            note=None,
            forked_from=origin,
        )
        name, this = _hold_of(self.job_uid), _fork(self._job, self._folder.life)
        _savepoints(self._store, origin.job, origin.life).add_hold(name, hold, self._ids.unique_id(), this)
        logger.error("the fork's hold in its parent was lost, and was made again", extra={"job": self._job})

    def _shared_part(self, handle: MaterializationHandle, job: str, uid: str) -> MaterializationHandle | None:
        """Return a snapshot of the parent with the files that one of the fork shares; None if it shares none."""
        if not self.owns(handle.index_key):
            return handle
        try:
            index = read_index(self._store, handle)
        except CorruptDataError:
            if is_readable(self._store, handle.index_key):
                raise
            return None  # subsumed since, or of a savepoint that cannot be restored
        # The fork's index goes before those files: later snapshots share them, too.
        files = tuple(file for file in index.files if not self.owns(file.object_key))
        made = replace(index, job_uid=uid, uid=self._ids.unique_id(), parents=(), files=files)
        if not files:
            return None
        self._store.put(made.handle(job).index_key, encode_index(made), if_absent=True)
        return made.handle(job)

    def _begin_epoch(self, owner: str, back_to: tuple[str, int] | None) -> EpochRecord:
        self.finish_fork()
        return super()._begin_epoch(owner, back_to)

    def _held(self, origin: ForkOrigin) -> Manifest:
        """Return the checkpoint with which a fork begins; from now on its parent keeps it."""
        savepoints, name = _savepoints(self._store, origin.job, origin.life), _hold_of(self.job_uid)
        self._check_parent(origin)
        try:
            held = savepoints.load(name)
        except NotFoundError:
            try:
                held = savepoints.copy(
                    name, origin.savepoint, self._ids.unique_id(), _fork(self._job, self._folder.life)
                )
            except NotFoundError as error:
                raise NotFoundError(
                    f"job {self._job!r} was to begin with checkpoint {origin.checkpoint.to_text()} of job "
                    f"{origin.job!r}, but savepoint {origin.savepoint!r} there was deleted before: delete job "
                    f"{self._job!r} (`dstl delete --now --write`), and fork again",
                    job=self._job,
                ) from error
        self._check_parent(origin)
        return held

    def _check_parent(self, origin: ForkOrigin) -> None:
        lives = Lives(self._store, origin.job)
        # The tombstone goes after the life's end is on record.
        if lives.tombstone(origin.life) is not None or lives.has_ended(origin.life):
            raise ConflictError(
                f"job {self._job!r} was to begin with the state of job {origin.job!r}, which is deleted: `dstl "
                f"undelete` brings that back; else delete job {self._job!r}",
                job=self._job,
            )

    def _first_of_fork(self, held: Manifest, origin: ForkOrigin) -> Manifest:
        """
        Return the first manifest of a fork: the held state, without sinks.

        The parent publishes the output that its sinks have not published yet; the fork's sinks start empty.
        """
        sinks = {operator.name for operator in held.operators if operator.is_sink}
        log = (handle for handle in (*held.earlier, *held.segments) if handle.entry.id.operator not in sinks)
        return replace(
            held,
            kind=ManifestKind.COMPLETE,
            job_uid=self.job_uid,
            uid=self._ids.unique_id(),
            generation=Place(0, held.id, 0).generation,
            epoch=self._epochs.first - 1,
            created_ms=self._clock.now_ms(),
            base=None,
            operators=tuple(operator for operator in held.operators if not operator.is_sink),
            segments=(),
            earlier=tuple(log),
            note=None,
            rewound_from=None,
            kept_by="",
            held_for="",
            under_way=NOTHING,
            forked_from=origin,
        )

    # --- Of a parent -------------------------------------------------------------------------------------------------

    def offer(self, manifest: Manifest, savepoint: str | None, fork: str, fork_life: int) -> ForkOrigin:
        """
        Keep a checkpoint for a fork that is about to be created; return where that begins.

        Args:
            manifest: The checkpoint, or a savepoint's.
            savepoint: The name of that savepoint; None for a checkpoint.
            fork: The fork's name.
            fork_life: Its life.

        Raises:
            NotFoundError: Checkpoint or savepoint is gone.
        """
        call_uid, held_for = self._ids.unique_id(), _fork(fork, fork_life)
        name = f"{_BEGUN}{manifest.id}-{call_uid}"
        if savepoint is None:
            self.keep(name, manifest, held_for)
        else:
            manifest = self.savepoints.copy(name, savepoint, call_uid, held_for)
        return ForkOrigin(self._job, self._folder.life, manifest.ref, name)

    def delete_savepoint(self, name: str) -> None:
        """
        Delete a savepoint or a pin; see `SavepointStore.delete`.

        Raises:
            NotFoundError: There is none.
            ConflictError: A fork needs it.
        """
        if name.startswith(_ALL) and PIN not in name:
            with suppress(NotFoundError):
                held_for = self.savepoints.load(name).held_for
                if held_for and is_alive(self._store, held_for):
                    raise ConflictError(
                        f"savepoint {name!r} keeps objects of job {self._job!r} that its fork {_name_of(held_for)!r} "
                        "needs; it is deleted when the fork no longer needs them, or is deleted itself",
                        job=self._job,
                    )
        self.savepoints.delete(name)

    def tidy_holds(self, modified_ms_max: int) -> None:
        """
        Delete the holds of forks that were deleted, and what forks that were given up have left.

        Args:
            modified_ms_max: A fork that has not been created yet counts as given up if it was begun until then. If it
                is created later nevertheless, it finds its savepoint gone, and never begins.
        """
        for one, info, held_for in self._listed_holds():
            is_ended = not is_alive(self._store, held_for)
            if is_ended or (one.startswith(_BEGUN) and self._is_done(name_of(one), held_for, info, modified_ms_max)):
                self.savepoints.discard_object(one)
                logger.info("fork is gone or done", extra={"job": self._job, "savepoint": one, "fork": held_for})

    def _listed_holds(self) -> Iterator[tuple[str, ObjectInfo, str]]:
        """Yield savepoints and pins for forks that are listed: the object's name, what is listed of it, and fork."""
        prefix = f"{self._folder.path}/savepoints/"
        for info in self._store.list(f"{prefix}{_ALL}"):
            with suppress(NotFoundError):
                if held_for := decode_manifest(self._store.get(info.key), info.key).held_for:
                    yield info.key.removeprefix(prefix).removesuffix(".json"), info, held_for

    def _is_done(self, name: str, held_for: str, info: ObjectInfo, modified_ms_max: int) -> bool:
        """Return whether the fork has its hold, or was never created."""
        record = _record_of(self._store, held_for)
        if record is None or record.origin is None or record.origin.savepoint != name:
            return info.modified_ms <= modified_ms_max
        return self.savepoints.register.read(begin=False).object_of(_hold_of(record.uid)) is not None


def living_forks(store: ObjectStore, job: str, life: int) -> list[str]:
    """
    Return the names of the forks that need objects of a life of a job.

    Raises:
        UnavailableError: A savepoint on the register is not found, or not yet.
        CorruptDataError: A savepoint, or the register, cannot be read.
    """
    held = [found.held_for for _, found in _savepoints(store, job, life).registered(_HOLD)]
    return sorted({_name_of(fork) for fork in held if fork and is_alive(store, fork)})


def is_alive(store: ObjectStore, held_for: str) -> bool:
    """Return whether the life of a fork, as savepoints name it, has not ended."""
    return not Lives(store, _name_of(held_for)).has_ended(_life_of(held_for))


def has_hold(store: ObjectStore, uid: str, origin: ForkOrigin) -> bool:
    """Return whether the parent of a fork of this uid keeps what the fork began with."""
    try:
        _savepoints(store, origin.job, origin.life).load(_hold_of(uid))
    except NotFoundError:
        return False
    return True


def _savepoints(store: ObjectStore, job: str, life: int) -> SavepointStore:
    return SavepointStore(store, LifeFolder(store, job, life))


def _record_of(store: ObjectStore, held_for: str) -> JobRecord | None:
    key = record_key(_name_of(held_for), _life_of(held_for))
    try:
        return decode_job(store.get(key), key)
    except NotFoundError:
        return None


def _hold_of(uid: str) -> str:
    return f"{_HOLD}{uid}"


def _fork(job: str, life: int) -> str:
    return f"{job}@{life}"


def _name_of(held_for: str) -> str:
    return held_for.partition("@")[0]


def _life_of(held_for: str) -> int:
    return int(held_for.partition("@")[2])
