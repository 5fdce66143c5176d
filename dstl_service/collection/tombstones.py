"""
Deletion of a job, which can be undone for a time: a tombstone first, the objects later.

    @deleted/<job>.json         tombstone: who, when, until when it can be undone; <job>@<life>.json in a later life,
                                and <job>@<life>.<n>.json after n undone deletions of the life
    @fates/<job>/<uid>          fate of a tombstone: kept or collected, the first put decides; stays for ever
    @fates/<job>/<life>.<n>     the tombstone of this number was undone; stays for ever

A job with a tombstone is not opened. Undoing and collecting both put the fate, create-if-absent, before they do
anything: so exactly one of the two happens, whatever the clocks say and however long a process is paused. Undoing then
records that the deletion's number is past, and deletes the tombstone. So the key of a tombstone is never reused: a
process that resumes late cannot delete the tombstone of a later deletion.

A collector claims an epoch before it deletes anything. The process that buried the job may have died before its claim,
and a query that still runs would complete checkpoints with missing objects (I4). If the claim fails, nothing is
deleted, and the next collector retries. A collector that dies leaves objects, which the next one deletes. One that was
only paused does no harm when it resumes, even if the name is another job's by then: a tombstone and a deletion belong
to one life (`dstl_service.registry.lives`). Blocking I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from dstl_service.collection.job_deletion import Removal, delete_job, has_leftovers
from dstl_service.formats.keys import encode_job
from dstl_service.formats.tombstone import TOMBSTONES, Tombstone
from dstl_service.registry.forks import living_forks
from dstl_service.registry.job_store import JobStore
from dstl_service.registry.lives import Lives, read_tombstone, record_key
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, CorruptDataError, DstlError, FencedError, NotFoundError
from storage.object_store import PROBE_FOLDER, ObjectStore, is_readable
from storage.validation import NUMBER_MAX

DELAY_S = 7 * 24 * 3600
"""Default time for which a deletion can be undone."""

_KEPT = b"kept"
_OWNER = "dstl delete"

logger = logging.getLogger("dstl_service")


class Deletions:
    """Knows the deleted jobs of a storage."""

    def __init__(self, store: ObjectStore, clock: Clock, ids: IdSource) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids

    def of(self, job: str) -> Tombstone | None:
        """
        Return the tombstone of a job, or None.

        Raises:
            CorruptDataError: The tombstone cannot be read.
        """
        lives = Lives(self._store, job)
        return lives.tombstone(lives.current())

    def check(self, job: str) -> None:
        """Raise `ConflictError` if a job is deleted; the message says what can be done."""
        found = self.of(job)
        if found is not None:
            raise ConflictError(
                f"job {job!r} {found.text}: `dstl undelete` brings it back, `dstl delete --now --write` frees its name",
                job=job,
            )

    def bury(self, job: str, who: str, delay_s: int) -> Tombstone:
        """
        Mark a job as deleted; an existing tombstone stays as it is.

        Raises:
            NotFoundError: The job does not exist.
            ConflictError: Forks need its objects; it is not deleted.
        """
        life = Lives(self._store, job).current()
        self._store.head(record_key(job, life))
        tombstone, is_new = self._put(self._tombstone(job, life, who, delay_s))
        if is_new:
            self._keep_if_forked(tombstone)
        else:  # its look for forks may have failed
            self.check_no_forks(tombstone)
        return tombstone

    def clear(self, job: str, who: str, max_parallelism: int) -> Removal:
        """
        Delete all objects below a name that no job has, as if a job were created and deleted at once.

        The tombstone prevents that a job is created meanwhile whose objects would be deleted too. It can be undone like
        any other, since a job may have been created before it was put; no collector takes it before it expires.

        Raises:
            NotFoundError: No object of this name exists.
            ConflictError: A job was created meanwhile, or forks need these objects; nothing was deleted.
        """
        if not has_leftovers(self._store, job):
            raise NotFoundError(f"no object of a job {job!r} exists", job=job)
        life = Lives(self._store, job).current()
        tombstone, is_new = self._put(self._tombstone(job, life, who, DELAY_S))
        if not is_new:
            raise ConflictError(f"job {job!r} was created and deleted meanwhile; nothing was changed", job=job)
        self._keep_if_forked(tombstone)  # before it gets another uid, with which it could not be rebuilt
        record = encode_job(self._ids.unique_id(), max_parallelism)
        try:
            self._store.put(record_key(job, life), record, if_absent=True)
        except ConflictError:
            self.undo(job)
            raise ConflictError(f"job {job!r} was created meanwhile; nothing of it was deleted", job=job) from None
        return self.collect(tombstone, although_damaged=True) or Removal(job, 0, 0, True)

    def _tombstone(self, job: str, life: int, who: str, delay_s: int) -> Tombstone:
        now_ms = self._clock.now_ms()
        until_ms = min(now_ms + delay_s * 1000, NUMBER_MAX)  # a greater number could not be read again
        return Tombstone(job, self._ids.unique_id(), who, now_ms, until_ms, life)

    def _put(self, tombstone: Tombstone) -> tuple[Tombstone, bool]:
        """
        Put a tombstone under the first number that is not past; return the tombstone there, and whether it is new.

        One whose undo has begun no longer counts, since no collector would take it: its undo is finished first.
        """
        while True:
            number = Lives(self._store, tombstone.job).tombstone_number(tombstone.life)
            numbered = replace(tombstone, number=number)
            try:
                self._store.put(numbered.key, numbered.encode(), if_absent=True)
            except ConflictError:
                there = read_tombstone(self._store, numbered.key)
                if there is None or not self._is_kept(there):
                    return there or numbered, False
                self._finish_undo(there)
                continue
            if not self._is_past(numbered):
                return numbered, True
            self._store.delete([numbered.key])  # that number was used and undone while this was paused

    def undo(self, job: str) -> Tombstone:
        """
        Bring a deleted job back. An interrupted call can be repeated by any process.

        Raises:
            NotFoundError: The job is not deleted.
            ConflictError: Its objects are already being deleted.
        """
        lives = Lives(self._store, job)
        life = lives.current()
        number = lives.tombstone_number(life)
        tombstone = lives.tombstone_of(life, number)
        if tombstone is None and number:
            tombstone = lives.tombstone_of(life, number - 1)
        if tombstone is None:
            raise NotFoundError(f"job {job!r} is not deleted, or was deleted completely", job=job)
        try:
            self._store.put(tombstone.fate_key, _KEPT, if_absent=True)
        except ConflictError:
            if self._store.get(tombstone.fate_key) != _KEPT:  # else an earlier undo died before the next step
                raise ConflictError(f"the objects of job {job!r} are already being deleted", job=job) from None
        self._finish_undo(tombstone)
        return tombstone

    def collect(self, tombstone: Tombstone, *, although_damaged: bool = False) -> Removal | None:
        """
        Delete all objects of a deleted job, and free its name; continues what another collector began.

        Args:
            tombstone: The job's.
            although_damaged: Delete even if the registry cannot be read, and so a running query cannot be fenced; the
                caller has ensured that none runs.

        Returns:
            What was deleted; None if the deletion was undone.

        Raises:
            CorruptDataError: The registry cannot be read; nothing was deleted.
            NotFoundError: A rewind of the job cannot be finished; nothing was deleted.
            ConflictError: Forks need its objects; nothing was deleted.
            UnavailableError: Nothing, or not everything, was deleted; the next call continues.
        """
        if self._is_past(tombstone):
            self._store.delete([tombstone.key])
            return None
        self.check_no_forks(tombstone)
        try:
            mine = f"collected by {self._ids.unique_id()}".encode()
            self._store.put(tombstone.fate_key, mine, if_absent=True)
        except ConflictError:
            if self._store.get(tombstone.fate_key) == _KEPT:
                self._finish_undo(tombstone)
                return None
        try:
            self.fence(tombstone)
        except (CorruptDataError, NotFoundError):
            if not although_damaged:
                raise
        try:
            removal = delete_job(self._store, tombstone.job, life=tombstone.life, write=True)
        except NotFoundError:  # an earlier collector was interrupted after deleting it
            removal = Removal(tombstone.job, 0, 0, True)
            Lives(self._store, tombstone.job).end(tombstone.life)
        self._store.delete([tombstone.key])
        return removal

    def _keep_if_forked(self, tombstone: Tombstone) -> None:
        """Undo a deletion that has just begun, and raise as `check_no_forks`, if forks need objects of the job."""
        try:
            self.check_no_forks(tombstone)
        except DstlError:
            self.undo(tombstone.job)
            raise

    def check_no_forks(self, tombstone: Tombstone) -> None:
        """Raise `ConflictError` if forks need objects of a job; none begins that finds this tombstone."""
        job = tombstone.job
        if forks := living_forks(self._store, job, tombstone.life):
            raise ConflictError(
                f"job {job!r} is not deleted, since forks need its objects: {', '.join(forks)}. Delete them first, "
                "or wait until they no longer need the objects that they began with (`dstl savepoints` lists "
                "the holds)",
                job=job,
            )

    def fence(self, tombstone: Tombstone) -> None:
        """
        Fence a deleted job's query, which stops at its next checkpoint; returns if the job is gone.

        Raises:
            CorruptDataError: The registry cannot be read.
            NotFoundError: The job is being rewound to a savepoint that was deleted.
        """
        job_store = JobStore(self._store, tombstone.job, self._clock, self._ids)
        while not Lives(self._store, tombstone.job).has_ended(tombstone.life):
            try:
                job_store.open_life(tombstone.life)
            except NotFoundError:
                return
            try:
                job_store.claim(_OWNER)
            except FencedError:  # by another collector, which may die before it puts its fence
                continue
            except (CorruptDataError, NotFoundError, ConflictError):  # damaged, or being deleted by another collector
                if not job_store.has_ended() and not job_store.never_began():
                    raise
            return

    def collect_expired(self) -> list[Removal]:
        """Collect all jobs whose time to undo has expired; a failure is logged, and the next call retries."""
        removals: list[Removal] = []
        damage: list[str] = []
        found = list(self.all(damage.append))
        for message in damage:
            logger.error("a tombstone cannot be read, so its job is not collected", extra={"error": message})
        for tombstone in found:
            try:
                removal = self.collect(tombstone) if self.is_over(tombstone) else None
            except DstlError as error:
                logger.warning("deleted job was not collected", extra={"job": tombstone.job, "error": str(error)})
                continue
            removals += [removal] if removal is not None else []
        return removals

    def is_over(self, tombstone: Tombstone) -> bool:
        """
        Return whether the time to undo has passed.

        This process's clock only saves requests until then, and may be far ahead: the store's own decides.
        """
        if self._clock.now_ms() < tombstone.until_ms:
            return False
        now = f"{PROBE_FOLDER}/{self._ids.unique_id()}"
        try:
            self._store.put(now, b"now")
            passed_ms = self._store.head(now).modified_ms - self._store.head(tombstone.key).modified_ms
        except NotFoundError:  # it was undone or collected since
            return False
        finally:
            self._store.delete([now])
        return passed_ms >= tombstone.until_ms - tombstone.at_ms

    def all(self, on_damage: Callable[[str], object]) -> Iterator[Tombstone]:
        """Yield the tombstones of all deleted jobs; `on_damage` gets a message for each that cannot be read."""
        for info in self._store.list(TOMBSTONES):
            try:
                tombstone = read_tombstone(self._store, info.key)
            except CorruptDataError as error:
                on_damage(error.message)
                continue
            if tombstone is not None:
                yield tombstone

    def _is_past(self, tombstone: Tombstone) -> bool:
        """Return whether the deletion of this number was undone."""
        return is_readable(self._store, tombstone.past_key)

    def _is_kept(self, tombstone: Tombstone) -> bool:
        """Return whether an undo of this deletion was decided; its later steps may be unfinished."""
        try:
            return self._store.get(tombstone.fate_key) == _KEPT
        except NotFoundError:
            return False

    def _finish_undo(self, tombstone: Tombstone) -> None:
        self._store.put(tombstone.past_key, _KEPT)
        self._store.delete([tombstone.key])
