"""
The audit log of acts on jobs: log lines, and objects that only this module writes.

    @audit/<job>/<time-ordered id>.json

No job can have the name ``@audit``, so the entries outlive the job. Best effort: an entry that cannot be stored is only
in the process log, with a warning, and the act stands. Blocking I/O.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from storage.clock import Clock, IdSource
from storage.errors import CorruptDataError, DstlError
from storage.object_store import ObjectStore
from storage.stored_json import parse_json, text_of, whole_number

KEPT_MAX = 1_000
"""Number of newest entries kept per job."""

_PRUNED_BY = "open"  # a job's most frequent act outside of batches
_FACT_CHARS_MAX = 300

logger = logging.getLogger("dstl_service")


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """
    One act.

    Args:
        at_ms: Time of the act, by the recording process' clock.
        who: Name of the token, certificate or user.
        act: The act: open, rewind, delete, …
        job: Name of the job.
        facts: Further facts, such as the name of a savepoint.
    """

    at_ms: int
    who: str
    act: str
    job: str
    facts: dict[str, str] = field(default_factory=dict)


class AuditTrail:
    """Writes and reads the audit log of one storage."""

    def __init__(self, store: ObjectStore, clock: Clock, ids: IdSource) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self.failures = 0

    def record(self, who: str, act: str, job: str, **facts: str) -> None:
        """Record an act; errors of the store are logged and counted in `failures`, never raised."""
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
        Yield the entries of a job, oldest first.

        Raises:
            CorruptDataError: An entry cannot be read.
        """
        for info in self._store.list(_folder(job)):
            try:
                yield _decoded(parse_json(self._store.get(info.key)))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise CorruptDataError(f"audit entry {info.key} is damaged; delete it", object_key=info.key) from error

    def _prune(self, job: str) -> None:
        keys = [info.key for info in self._store.list(_folder(job))]
        self._store.delete(keys[:-KEPT_MAX])


def _decoded(document: dict[str, Any]) -> AuditEntry:
    facts = {text_of(name): text_of(text) for name, text in document["facts"].items()}
    who, act, job = (text_of(document[name]) for name in ("who", "act", "job"))
    return AuditEntry(whole_number(document["at_ms"]), who, act, job, facts)


def this_user() -> str:
    """Return this process as ``user@host``, for acts of commands, which use no service."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = f"uid {os.geteuid()}"
    return f"{name}@{socket.gethostname()}"


def _folder(job: str) -> str:
    return f"@audit/{job}/"
