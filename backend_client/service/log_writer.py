"""
One task's end of the log: seals change sets under ascending sequence numbers and sends them to the sidecar.

When the open change set passes a threshold, it is sealed and sent while rows are still being processed, so that only a
tail is left at the end of the task. A sent change set is *received*; the coordinator decides when it becomes durable.
"""

from __future__ import annotations

from dataclasses import replace

from backend_client.service.client import ServiceClient
from dstl_service.wire import ChangeSetRef, LogTarget
from storage.change_set import ChangeColumns, encode_change_set, encode_columns
from storage.checksum import checksum64

_SET_BYTES = 16 << 20
"""Larger sets are divided, unless they have only one change; a fraction of what a service holds by default."""


class LogWriter:
    """
    Sends the change sets of one attempt. Single-threaded, used once.

    Args:
        client: The sidecar's client.
        target: The log to which the changes belong.
        first_sqn: First sequence number. A second pass continues the numbers of the first pass's accepted attempt, so
            that change sets of attempts that do not follow each other can be told apart.
    """

    def __init__(self, client: ServiceClient, target: LogTarget, first_sqn: int = 0) -> None:
        self._client = client
        self._target = target
        self._first_sqn = first_sqn
        self.refs: list[ChangeSetRef] = []
        self.changes = 0

    def append(self, changes: dict[bytes, bytes | None], *, preemptive: bool) -> None:
        """
        Seal `changes` as the next change set and send it; does nothing if there are none.

        If one key has written more than a service takes at once, the changes become several sets.

        Raises:
            DstlError: The sidecar did not accept it within the client's patience.
        """
        if not changes:
            return
        payload = encode_change_set(changes)
        if len(payload) > _SET_BYTES and len(changes) > 1:
            items = [*changes.items()]
            half = len(items) // 2
            for part in (items[:half], items[half:]):
                self.append(dict(part), preemptive=True)
        else:
            self._send(payload, len(changes), preemptive=preemptive)

    def append_columns(self, changes: ChangeColumns, *, preemptive: bool) -> None:
        """
        Append as `append` does, with columns.

        Raises:
            DstlError: As `append`.
        """
        if len(changes.keys):
            self._send(encode_columns(changes), len(changes.keys), preemptive=preemptive)

    def _send(self, payload: bytes, changes: int, *, preemptive: bool) -> None:
        ref = self._client.append(
            self._target, self._first_sqn + len(self.refs), payload, checksum64(payload), changes, preemptive=preemptive
        )
        self.refs.append(ref)
        self.changes += changes

    def make_durable(self) -> None:
        """Wait until all change sets are durable; put their handles into `refs`. For unreachable sidecars."""
        pending = [ref for ref in self.refs if ref.handle is None]
        if pending:
            handles = self._client.persist(self._target.job, self._target.epoch, pending)
            found = dict(zip((ref.sqn for ref in pending), handles, strict=True))
            self.refs = [replace(ref, handle=found.get(ref.sqn, ref.handle)) for ref in self.refs]
