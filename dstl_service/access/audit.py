"""
The record of who did what to which job: log lines, and objects that only this record writes.

    @audit/<job>/<time-ordered id>.json

No job can have the name ``@audit``, so the record outlives the job. Best effort: what cannot be stored is in the log,
which says so, and what was done is done. Blocking I/O.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from storage.clock import Clock, IdSource
from storage.errors import CorruptDataError, DstlError
from storage.object_store import ObjectStore

KEPT_MAX = 1_000
"""So many entries of a job are kept, the newest."""

_PRUNED_BY = "open"  # a job's most frequent act that is not part of a batch
_FACT_CHARS_MAX = 300

logger = logging.getLogger("dstl_service")


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """
    One act.

    Args:
        at_ms: When, by the clock of who recorded it.
        who: Name of the token, certificate or user.
        act: What was done: open, rewind, delete, …
        job: To which job.
        facts: What else is worth knowing, such as the name of a savepoint.
    """

    at_ms: int
    who: str
    act: str
    job: str
    facts: dict[str, str] = field(default_factory=dict)


class AuditTrail:
    """Writes and reads the record of one storage."""

    def __init__(self, store: ObjectStore, clock: Clock, ids: IdSource) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self.failures = 0

    def record(self, who: str, act: str, job: str, **facts: str) -> None:
        """Put an act on record; never raises for the store's sake."""
        short = {name: text[:_FACT_CHARS_MAX] for name, text in facts.items()}
        entry = AuditEntry(self._clock.now_ms(), who[:_FACT_CHARS_MAX], act, job, short)
        logger.info("audit", extra={"who": entry.who, "act": act, "job": job, "facts": short})
        try:
            self._store.put(f"{_folder(job)}{self._ids.unique_id()}.json", json.dumps(asdict(entry)).encode())
            if act == _PRUNED_BY:
                self._prune(job)
        except DstlError as error:
            self.failures += 1
            logger.warning("an act is on record in the log only", extra={"act": act, "job": job, "error": str(error)})

    def entries(self, job: str) -> Iterator[AuditEntry]:
        """
        Yield what is on record of a job, oldest first.

        Raises:
            CorruptDataError: An entry cannot be read.
        """
        for info in self._store.list(_folder(job)):
            try:
                yield AuditEntry(**json.loads(self._store.get(info.key)))
            except (ValueError, TypeError) as error:
                raise CorruptDataError(f"entry {info.key} of the record cannot be read", object_key=info.key) from error

    def _prune(self, job: str) -> None:
        keys = [info.key for info in self._store.list(_folder(job))]
        self._store.delete(keys[:-KEPT_MAX])


def this_user() -> str:
    """Return the user of this process and its host, for what is done without a service."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = f"uid {os.geteuid()}"
    return f"{name}@{socket.gethostname()}"


def _folder(job: str) -> str:
    return f"@audit/{job}/"
