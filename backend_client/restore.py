"""
Advance the table to the base: the one way in which a table gets its content.

It serves the normal case (the previous batch's change set, from the sidecar's memory), retries, speculative copies,
moves to another executor, cold starts and changed parallelism alike.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress

from backend_client.service_client import ServiceClient
from backend_client.state_table import StateTable
from dstl_service.wire import CheckpointRef
from storage.change_set import decode_change_set
from storage.checksum import checksum64
from storage.errors import CorruptDataError, UnavailableError, error_from_dict
from storage.model import KeyGroupRange

_KEY_GROUP = struct.Struct(">H")
_BROKEN_STREAMS_MAX = 2


class _GoneError(Exception):
    """The table is so old that what leads from it to the base is no longer stored."""


def advance_to_base(
    table: StateTable,
    client: ServiceClient,
    job: str,
    operator: str,
    key_groups: KeyGroupRange,
    base: CheckpointRef | None,
) -> int:
    """
    Bring the table to checkpoint `base` (None: before the first); return the number of changes applied.

    Raises:
        CorruptDataError: Stored state is damaged; names the object. The table keeps no part of it under a version.
        UnavailableError: The sidecar or its store does not answer.
    """
    if base is None:
        # Whatever is here belongs to no checkpoint of this job.
        table.clear()
        return 0
    for _ in range(_BROKEN_STREAMS_MAX):
        with suppress(UnavailableError):
            return _advance(table, client, job, operator, key_groups, base.to_text())
    return _advance(table, client, job, operator, key_groups, base.to_text())


def _advance(
    table: StateTable, client: ServiceClient, job: str, operator: str, key_groups: KeyGroupRange, want: str
) -> int:
    """Try once. A sidecar that dies meanwhile breaks the stream; the table's version tells where to begin again."""
    have = table.version
    if have == want:
        return 0
    try:
        return _apply(table, client, job, operator, key_groups, have, want)
    except _GoneError:
        table.clear()
        return _apply(table, client, job, operator, key_groups, None, want)


def _apply(
    table: StateTable,
    client: ServiceClient,
    job: str,
    operator: str,
    key_groups: KeyGroupRange,
    have: str | None,
    want: str,
) -> int:
    with client.restore(job, operator, key_groups, have, want) as frames:
        plan, _ = next(frames)
        if plan["kind"] != "plan":
            raise _reported(plan)
        if plan["full"]:
            table.clear()
        return table.advance(_changes(frames, key_groups), want)


def _changes(
    frames: Iterator[tuple[dict[str, object], bytes]], key_groups: KeyGroupRange
) -> Iterable[tuple[bytes, bytes | None]]:
    for header, payload in frames:
        if header["kind"] == "end":
            return
        if header["kind"] == "gone":
            raise _GoneError
        if header["kind"] != "segment":
            raise _reported(header)
        source = str(header["object"])
        if f"{checksum64(payload):016x}" != header["checksum"]:
            raise CorruptDataError(f"a segment of object {source} was damaged on its way", object_key=source)
        changes = decode_change_set(payload, source)
        if key_groups.covers(KeyGroupRange(int(str(header["first"])), int(str(header["last"])))):
            yield from changes
        else:
            low, high = _KEY_GROUP.pack(key_groups.first), _KEY_GROUP.pack(key_groups.last)
            yield from ((key, value) for key, value in changes if low <= key[:2] <= high)


def _reported(header: dict[str, object]) -> Exception:
    error = header.get("error")
    if header["kind"] == "error" and isinstance(error, dict):
        return error_from_dict(error)
    return CorruptDataError(f"unexpected frame {header['kind']!r} in a restore stream")
