"""
The end of a job, which can be undone for a time: a tombstone first, the objects later.

    @deleted/<job>.json         tombstone: who, when, until when it can be undone; of a later life <job>@<life>.json
    @fates/<job>/<uid>          what became of a tombstone: kept or collected, whoever put it first; stays for ever

A job with a tombstone is not opened. Undoing and collecting both put the fate, create-if-absent, before they do
anything: so one of the two happens, by one process, whatever the clocks say and however long somebody is paused. A
collector that dies leaves a rest, which the next one collects. If it only slept, it does no harm when it goes on,
though the name may be another job's by then: a tombstone and a deletion are of one life
(`dstl_service.registry.lives`). Blocking I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from dstl_service.formats.keys import encode_job
from dstl_service.registry.jobs import Removal, delete_job, has_leftovers
from dstl_service.registry.lives import Lives, record_key
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, CorruptDataError, NotFoundError
from storage.object_store import ObjectStore

DELAY_S = 7 * 24 * 3600
"""How long a deletion can be undone if nobody says otherwise."""

_FOLDER = "@deleted/"
_KEPT = b"kept"


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Says that a job was deleted, in which life of its name, by whom and when, and until when that can be undone."""

    job: str
    uid: str
    who: str
    at_ms: int
    until_ms: int
    life: int = 0

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
        return self._of(job, Lives(self._store, job).current())

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
        return tombstone if self._put(tombstone) else self._of(job, life) or tombstone

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
        tombstone = self._tombstone(job, life, who, DELAY_S)
        if not self._put(tombstone):
            raise ConflictError(f"job {job!r} was created and deleted meanwhile; it stays as it is", job=job)
        record = encode_job(self._ids.unique_id(), max_parallelism)
        try:
            self._store.put(record_key(job, life), record, if_absent=True)
        except ConflictError:
            self.undo(job)
            raise ConflictError(f"job {job!r} was created meanwhile; nothing of it was deleted", job=job) from None
        return self.collect(tombstone) or Removal(job, 0, 0, True)

    def _tombstone(self, job: str, life: int, who: str, delay_s: int) -> Tombstone:
        now_ms = self._clock.now_ms()
        return Tombstone(job, self._ids.unique_id(), who, now_ms, now_ms + delay_s * 1000, life)

    def _put(self, tombstone: Tombstone) -> bool:
        """Put a tombstone; say whether there was none of this life."""
        try:
            key = _tombstone_key(tombstone.job, tombstone.life)
            self._store.put(key, json.dumps(asdict(tombstone)).encode(), if_absent=True)
        except ConflictError:
            return False
        return True

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
            if self._store.get(_fate_key(tombstone)) != _KEPT:  # else whoever did that died before the next step
                raise ConflictError(f"the objects of job {job!r} are being deleted already", job=job) from None
        self._store.delete([_tombstone_key(job, tombstone.life)])
        return tombstone

    def collect(self, tombstone: Tombstone) -> Removal | None:
        """
        Delete all objects of a deleted job, and free its name; go on where another collector began.

        Returns:
            What was deleted; None if somebody brought the job back.
        """
        try:
            mine = f"collected by {self._ids.unique_id()}".encode()
            self._store.put(_fate_key(tombstone), mine, if_absent=True)
        except ConflictError:
            if self._store.get(_fate_key(tombstone)) == _KEPT:
                return None
        try:
            removal = delete_job(self._store, tombstone.job, life=tombstone.life, write=True)
        except NotFoundError:  # whoever began was interrupted behind it
            removal = Removal(tombstone.job, 0, 0, True)
            Lives(self._store, tombstone.job).end(tombstone.life)
        self._store.delete([_tombstone_key(tombstone.job, tombstone.life)])
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

    def _of(self, job: str, life: int) -> Tombstone | None:
        return self._read(_tombstone_key(job, life))

    def _read(self, key: str) -> Tombstone | None:
        try:
            return Tombstone(**json.loads(self._store.get(key)))
        except NotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise CorruptDataError(f"tombstone {key} cannot be read", object_key=key) from error


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")


def _tombstone_key(job: str, life: int) -> str:
    return f"{_FOLDER}{job}{f'@{life}' if life else ''}.json"


def _fate_key(tombstone: Tombstone) -> str:
    return f"@fates/{tombstone.job}/{tombstone.uid}"
