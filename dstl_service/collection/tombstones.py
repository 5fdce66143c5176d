"""
The end of a job, which can be undone for a time: a tombstone first, the objects later.

    @deleted/<job>.json         tombstone: who, when, until when it can be undone; of a later life <job>@<life>.json,
                                and of one that was brought back n times before <job>@<life>.<n>.json
    @fates/<job>/<uid>          what became of a tombstone: kept or collected, whoever put it first; stays for ever
    @fates/<job>/<life>.<n>     the tombstone of this number was undone; stays for ever

A job with a tombstone is not opened. Undoing and collecting both put the fate, create-if-absent, before they do
anything: so one of the two happens, by one process, whatever the clocks say and however long somebody is paused. Who
undoes a deletion says next that its number is past, and deletes the tombstone then. So the key of a tombstone never
comes again: whoever goes on late deletes the tombstone of no later deletion.

A collector claims an epoch before it deletes anything. Whoever buried the job may have died before he did, and a query
that ran on would complete checkpoints of which a part is gone (I4). Where that cannot be done, nothing is deleted, and
the next collector tries it again. One that dies leaves a rest, which the next one collects. If it only slept, it does
no harm when it goes on, though the name may be another job's by then: a tombstone and a deletion are of one life
(`dstl_service.registry.lives`). Blocking I/O.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from dstl_service.formats.keys import encode_job
from dstl_service.registry.job_store import JobStore
from dstl_service.registry.jobs import Removal, delete_job, has_leftovers
from dstl_service.registry.lives import Lives, first_without, record_key
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, CorruptDataError, DstlError, FencedError, NotFoundError
from storage.object_store import ObjectStore, exists

DELAY_S = 7 * 24 * 3600
"""How long a deletion can be undone if nobody says otherwise."""

_FOLDER = "@deleted/"
_KEPT = b"kept"
_OWNER = "dstl delete"

logger = logging.getLogger("dstl_service")


@dataclass(frozen=True, slots=True)
class Tombstone:
    """
    Says that a job was deleted, in which life of its name, by whom and when, and until when that can be undone.

    `number` counts the deletions of this life that were undone before.
    """

    job: str
    uid: str
    who: str
    at_ms: int
    until_ms: int
    life: int = 0
    number: int = 0

    @property
    def text(self) -> str:
        """What people want to know."""
        at, until = map(_time, (self.at_ms, self.until_ms))
        return f"was deleted by {self.who} at {at}, which can be undone until {until}"


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
            CorruptDataError: It cannot be read.
        """
        life = Lives(self._store, job).current()
        return self._read(_tombstone_key(job, life, self._number(job, life)))

    def check(self, job: str) -> None:
        """Return unless a job is deleted; `ConflictError` says what can be done then."""
        found = self.of(job)
        if found is not None:
            raise ConflictError(
                f"job {job!r} {found.text}: `dstl undelete` brings it back, `dstl delete --now --write` frees its name",
                job=job,
            )

    def bury(self, job: str, who: str, delay_s: int) -> Tombstone:
        """
        Let a job be deleted from now on; one that is already stays as it was deleted first.

        Raises:
            NotFoundError: There is no such job.
        """
        life = Lives(self._store, job).current()
        self._store.head(record_key(job, life))
        tombstone = self._tombstone(job, life, who, delay_s)
        return self._put(tombstone)[0]

    def clear(self, job: str, who: str, max_parallelism: int) -> Removal:
        """
        Delete what lies below a name that no job has, as of a job that was created and deleted at once.

        So nobody creates one meanwhile, whose objects would be taken for what lay there. Its tombstone can be undone as
        any other, for it may be put when a job was created: until that is known, nobody else collects it.

        Raises:
            NotFoundError: There is nothing of this name.
            ConflictError: A job was created meanwhile; nothing of it is deleted.
        """
        if not has_leftovers(self._store, job):
            raise NotFoundError(f"there is nothing of the name {job!r}", job=job)
        life = Lives(self._store, job).current()
        tombstone, is_new = self._put(self._tombstone(job, life, who, DELAY_S))
        if not is_new:
            raise ConflictError(f"job {job!r} was created and deleted meanwhile; it stays as it is", job=job)
        record = encode_job(self._ids.unique_id(), max_parallelism)
        try:
            self._store.put(record_key(job, life), record, if_absent=True)
        except ConflictError:
            self.undo(job)
            raise ConflictError(f"job {job!r} was created meanwhile; nothing of it was deleted", job=job) from None
        return self.collect(tombstone, although_damaged=True) or Removal(job, 0, 0, True)

    def _tombstone(self, job: str, life: int, who: str, delay_s: int) -> Tombstone:
        now_ms = self._clock.now_ms()
        return Tombstone(job, self._ids.unique_id(), who, now_ms, now_ms + delay_s * 1000, life)

    def _put(self, tombstone: Tombstone) -> tuple[Tombstone, bool]:
        """
        Put a tombstone under the first number that is not past; return what lies there, and whether there was none.

        One that somebody began to undo is no longer one: nobody would collect it.
        """
        while True:
            numbered = replace(tombstone, number=self._number(tombstone.job, tombstone.life))
            try:
                self._store.put(_key_of(numbered), json.dumps(asdict(numbered)).encode(), if_absent=True)
            except ConflictError:
                there = self._read(_key_of(numbered))
                if there is None or not self._is_kept(there):
                    return there or numbered, False
                self._finish_undo(there)
                continue
            if not self._is_past(numbered):
                return numbered, True
            self._store.delete([_key_of(numbered)])  # the one of this number came and went while this was paused

    def undo(self, job: str) -> Tombstone:
        """
        Bring a deleted job back. Who was interrupted at that can be followed by anyone.

        Raises:
            NotFoundError: It is not deleted.
            ConflictError: Its objects are being deleted already.
        """
        life = Lives(self._store, job).current()
        number = self._number(job, life)
        tombstone = self._read(_tombstone_key(job, life, number))
        if tombstone is None and number:
            tombstone = self._read(_tombstone_key(job, life, number - 1))
        if tombstone is None:
            raise NotFoundError(f"job {job!r} is not deleted, or all of it is gone", job=job)
        try:
            self._store.put(_fate_key(tombstone), _KEPT, if_absent=True)
        except ConflictError:
            if self._store.get(_fate_key(tombstone)) != _KEPT:  # else whoever did that died before the next step
                raise ConflictError(f"the objects of job {job!r} are being deleted already", job=job) from None
        self._finish_undo(tombstone)
        return tombstone

    def collect(self, tombstone: Tombstone, *, although_damaged: bool = False) -> Removal | None:
        """
        Delete all objects of a deleted job, and free its name; go on where another collector began.

        Args:
            tombstone: The job's.
            although_damaged: Also where the registry cannot be read, so that a query that still runs cannot be stopped:
                somebody has seen to it that none does.

        Returns:
            What was deleted; None if somebody brought the job back.

        Raises:
            CorruptDataError: The registry cannot be read, and nothing was deleted.
            UnavailableError: Nothing, or not all, was deleted; the next call does the rest.
        """
        if self._is_past(tombstone):
            self._store.delete([_key_of(tombstone)])
            return None
        try:
            mine = f"collected by {self._ids.unique_id()}".encode()
            self._store.put(_fate_key(tombstone), mine, if_absent=True)
        except ConflictError:
            if self._store.get(_fate_key(tombstone)) == _KEPT:
                self._finish_undo(tombstone)
                return None
        try:
            self.fence(tombstone)
        except (CorruptDataError, NotFoundError):
            if not although_damaged:
                raise
        try:
            removal = delete_job(self._store, tombstone.job, life=tombstone.life, write=True)
        except NotFoundError:  # whoever began was interrupted behind it
            removal = Removal(tombstone.job, 0, 0, True)
            Lives(self._store, tombstone.job).end(tombstone.life)
        self._store.delete([_key_of(tombstone)])
        return removal

    def fence(self, tombstone: Tombstone) -> None:
        """
        Let a query of a deleted job stop with its next checkpoint; nothing is to be done where the job is gone.

        Raises:
            CorruptDataError: The registry cannot be read.
            NotFoundError: The job is being set back to a savepoint that was deleted.
        """
        jobs = JobStore(self._store, tombstone.job, self._clock, self._ids)
        while not Lives(self._store, tombstone.job).has_ended(tombstone.life):
            try:
                jobs.open_life(tombstone.life)
            except NotFoundError:
                return
            try:
                jobs.claim(_OWNER)
            except FencedError:  # by another collector, which may die before its fence is there
                continue
            except (CorruptDataError, NotFoundError):  # or read while another collector deletes it
                if not jobs.has_ended():
                    raise
            return

    def collect_expired(self) -> list[Removal]:
        """Delete the objects of all jobs whose deletion cannot be undone any more; what fails waits for the next."""
        now_ms = self._clock.now_ms()
        removals: list[Removal] = []
        for tombstone in [found for found in self.all() if found.until_ms <= now_ms]:
            try:
                removal = self.collect(tombstone)
            except DstlError as error:
                logger.warning("deleted job was not collected", extra={"job": tombstone.job, "error": str(error)})
                continue
            removals += [removal] if removal is not None else []
        return removals

    def all(self) -> Iterator[Tombstone]:
        """Yield the tombstones of all deleted jobs."""
        for info in self._store.list(_FOLDER):
            tombstone = self._read(info.key)
            if tombstone is not None:
                yield tombstone

    def _number(self, job: str, life: int) -> int:
        """Return which number the tombstone has that this life has, or would get."""
        return first_without(lambda number: exists(self._store, _past(job, life, number)))

    def _is_past(self, tombstone: Tombstone) -> bool:
        """Say whether the deletion of this number was undone."""
        return exists(self._store, _past_key(tombstone))

    def _is_kept(self, tombstone: Tombstone) -> bool:
        """Say whether somebody decided to undo this deletion; the steps behind that may be left to be done."""
        try:
            return self._store.get(_fate_key(tombstone)) == _KEPT
        except NotFoundError:
            return False

    def _finish_undo(self, tombstone: Tombstone) -> None:
        self._store.put(_past_key(tombstone), _KEPT)
        self._store.delete([_key_of(tombstone)])

    def _read(self, key: str) -> Tombstone | None:
        try:
            return Tombstone(**json.loads(self._store.get(key)))
        except NotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise CorruptDataError(f"tombstone {key} cannot be read", object_key=key) from error


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")


def _tombstone_key(job: str, life: int, number: int) -> str:
    which = f"@{life}.{number}" if number else f"@{life}" if life else ""
    return f"{_FOLDER}{job}{which}.json"


def _key_of(tombstone: Tombstone) -> str:
    return _tombstone_key(tombstone.job, tombstone.life, tombstone.number)


def _past(job: str, life: int, number: int) -> str:
    return f"@fates/{job}/{life:08d}.{number:06d}"


def _past_key(tombstone: Tombstone) -> str:
    return _past(tombstone.job, tombstone.life, tombstone.number)


def _fate_key(tombstone: Tombstone) -> str:
    return f"@fates/{tombstone.job}/{tombstone.uid}"
