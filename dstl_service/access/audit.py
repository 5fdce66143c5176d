"""
The audit log of acts on jobs: log lines, and objects that only this module writes.

    @audit/<job>/<time-ordered id>=<checksum of actor and act>.json

The newest acts of each actor and kind are kept, so repeating an act pushes no other actor's acts out of the record. No
job can have the name ``@audit``, so the entries outlive the job. Best effort: an entry that cannot be stored is only in
the process log, with a warning, and the act stands. Blocking I/O.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from storage.checksum import checksum64
from storage.clock import Clock, IdSource
from storage.errors import DstlError, NotFoundError
from storage.object_store import ObjectStore
from storage.stored_json import parse_json, text_of, whole_number

KEPT_MAX = 1_000
"""Number of newest entries kept of one kind of act, by one actor on one job."""

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
        self._record(who, who, act, job, facts)

    def record_command(self, act: str, job: str, **facts: str) -> None:
        """
        Record an act of a command, as `record` does.

        All acts of a user count as one actor's, whatever the host: a command in a container has a different host each
        time, and its entries would stay for ever.
        """
        self._record(this_user(), user_of_process(), act, job, facts)

    def _record(self, who: str, actor: str, act: str, job: str, facts: dict[str, str]) -> None:
        short = {name: text[:_FACT_CHARS_MAX] for name, text in facts.items()}
        entry = AuditEntry(self._clock.now_ms(), who[:_FACT_CHARS_MAX], act, job, short)
        logger.info("audit", extra={"who": entry.who, "act": act, "job": job, "facts": short})
        try:
            kind = _kind_of(actor[:_FACT_CHARS_MAX], act)
            self._store.put(f"{_folder(job)}{self._ids.unique_id()}{kind}", json.dumps(asdict(entry)).encode())
            self._prune(job, kind)
        except DstlError as error:
            self.failures += 1
            logger.warning("an act is recorded only in the log", extra={"act": act, "job": job, "error": str(error)})

    def entries(self, job: str, on_damage: Callable[[str], object]) -> Iterator[AuditEntry]:
        """
        Yield the entries of a job, oldest first.

        Args:
            job: Its name.
            on_damage: Called with a message for each entry that cannot be read.
        """
        for info in self._store.list(_folder(job)):
            try:
                entry = _decoded(parse_json(self._store.get(info.key)))
            except NotFoundError:  # pruned since it was listed
                continue
            except (ValueError, TypeError, LookupError, AttributeError):
                on_damage(f"audit entry {info.key} is damaged; delete it")
                continue
            yield entry

    def _prune(self, job: str, kind: str) -> None:
        same = [info.key for info in self._store.list(_folder(job)) if info.key.endswith(kind)]
        self._store.delete(same[:-KEPT_MAX])


def _decoded(document: dict[str, Any]) -> AuditEntry:
    facts = {text_of(name): text_of(text) for name, text in document["facts"].items()}
    who, act, job = (text_of(document[name]) for name in ("who", "act", "job"))
    return AuditEntry(whole_number(document["at_ms"]), who, act, job, facts)


def this_user() -> str:
    """Return this process as ``user@host``, for acts of commands, which use no service."""
    return f"{user_of_process()}@{socket.gethostname()}"


def user_of_process() -> str:
    """Return the name of this process's user."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"


def _kind_of(actor: str, act: str) -> str:
    """Return the end of an entry's key, which all entries of this actor and act share."""
    return f"={checksum64(json.dumps([actor, act]).encode()):016x}.json"


def _folder(job: str) -> str:
    return f"@audit/{job}/"
