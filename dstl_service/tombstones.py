"""
The end of a job, which can be undone for a time: a tombstone first, the objects later.

    @deleted/<job>.json         tombstone: who, when, until when it can be undone
    @fates/<job>/<uid>          what became of a tombstone: kept or collected, whoever put it first; stays for ever

A job with a tombstone is not opened. Undoing and collecting both put the fate, create-if-absent, before they do
anything: so one of the two happens, by one process, whatever the clocks say and however long somebody is paused. A
collector that dies leaves a rest, which only a person may have collected by another one: the name is free afterwards,
and a first one that only slept would delete what is called so then. Blocking I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from dstl_service.jobs import Removal, delete_job
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, CorruptDataError, NotFoundError
from storage.object_store import ObjectStore

DELAY_S = 7 * 24 * 3600
"""How long a deletion can be undone if nobody says otherwise."""

_FOLDER = "@deleted/"
_KEPT = b"kept"


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Says that a job was deleted, by whom and when, and until when that can be undone."""

    job: str
    uid: str
    who: str
    at_ms: int
    until_ms: int

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
        return self._read(_tombstone_key(job))

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
        self._store.head(f"{job}/job.json")
        now_ms = self._clock.now_ms()
        tombstone = Tombstone(job, self._ids.unique_id(), who, now_ms, now_ms + delay_s * 1000)
        try:
            self._store.put(_tombstone_key(job), json.dumps(asdict(tombstone)).encode(), if_absent=True)
        except ConflictError:
            return self.of(job) or tombstone
        return tombstone

    def undo(self, job: str) -> Tombstone:
        """
        Bring a deleted job back.

        Raises:
            NotFoundError: It is not deleted.
            ConflictError: Its objects are being deleted already.
        """
        tombstone = self.of(job)
        if tombstone is None:
            raise NotFoundError(f"job {job!r} is not deleted, or all of it is gone", job=job)
        try:
            self._store.put(_fate_key(tombstone), _KEPT, if_absent=True)
        except ConflictError:
            raise ConflictError(f"the objects of job {job!r} are being deleted already", job=job) from None
        self._store.delete([_tombstone_key(job)])
        return tombstone

    def collect(self, tombstone: Tombstone, *, take_over: bool = False) -> Removal | None:
        """
        Delete all objects of a deleted job, and free its name.

        Args:
            tombstone: The job's.
            take_over: Go on where another collector began; it must not run any more.

        Returns:
            What was deleted; None if somebody brought the job back, or another collector began.
        """
        try:
            mine = f"collected by {self._ids.unique_id()}".encode()
            self._store.put(_fate_key(tombstone), mine, if_absent=True)
        except ConflictError:
            if not take_over or self._store.get(_fate_key(tombstone)) == _KEPT:
                return None
        try:
            removal = delete_job(self._store, tombstone.job, write=True)
        except NotFoundError:  # whoever began was interrupted behind it
            removal = Removal(tombstone.job, 0, 0, True)
        self._store.delete([_tombstone_key(tombstone.job)])
        return removal

    def collect_expired(self) -> list[Removal]:
        """Delete the objects of all jobs whose deletion cannot be undone any more."""
        now_ms = self._clock.now_ms()
        expired = [tombstone for tombstone in self.all() if tombstone.until_ms <= now_ms]
        return [removal for tombstone in expired if (removal := self.collect(tombstone)) is not None]

    def all(self) -> Iterator[Tombstone]:
        """Yield the tombstones of all deleted jobs."""
        for info in self._store.list(_FOLDER):
            tombstone = self._read(info.key)
            if tombstone is not None:
                yield tombstone

    def _read(self, key: str) -> Tombstone | None:
        try:
            return Tombstone(**json.loads(self._store.get(key)))
        except NotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise CorruptDataError(f"tombstone {key} cannot be read", object_key=key) from error


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")


def _tombstone_key(job: str) -> str:
    return f"{_FOLDER}{job}.json"


def _fate_key(tombstone: Tombstone) -> str:
    return f"@fates/{tombstone.job}/{tombstone.uid}"
