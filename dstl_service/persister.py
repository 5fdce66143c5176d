"""
Makes change sets durable, wherever they were received: by this service or by those of other hosts.

Owned by the event loop; requests to other services run in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dstl_service.active_job import ActiveJob
from dstl_service.intake import Intake
from dstl_service.peers import PeerClient
from dstl_service.wire import NOTE_CHARS_MAX, ChangeSetRef
from storage.errors import InvalidInputError, LostChangesError
from storage.model import Segment, SegmentHandle


class Persister:
    """
    Gets handles for references.

    Args:
        intake: Has the sets that are here.
        peers: Asks the services that have others.
        in_thread: Runs a blocking call.
        service_id: Tells which sets are here.
    """

    def __init__(
        self, intake: Intake, peers: PeerClient, in_thread: Callable[..., Awaitable[Any]], service_id: str
    ) -> None:
        self._intake = intake
        self._peers = peers
        self._in_thread = in_thread
        self._service_id = service_id

    async def persist(
        self, job: ActiveJob, refs: Sequence[ChangeSetRef], *, wait: bool = True, note: Segment | None = None
    ) -> list[SegmentHandle]:
        """
        Make change sets durable, those of other services too; return their handles in order, then that of the note.

        A note goes into the same object as the sets that are here, or, if none is and it is not too long to be sent, as
        those of another service.

        Raises:
            LostChangesError: A set is gone with the process that received it.
            UnavailableError: The store did not take them; nothing is lost, ask again.
        """
        here = [ref for ref in refs if ref.handle is None and ref.service_id == self._service_id]
        away = [ref for ref in refs if ref.handle is None and ref.service_id != self._service_id]
        found = {id(ref): _given_handle(job.name, ref) for ref in refs if ref.handle is not None}
        is_note_here = bool(here) or not away or (note is not None and note.size_bytes > NOTE_CHARS_MAX)
        ids = self._intake.request(job, [ref.change_set_id(job.name) for ref in here], note if is_note_here else None)
        remote = self._persist_away(job.name, away, wait=wait, note=None if is_note_here else note)
        if not wait:
            await remote
            return []
        of_note: list[SegmentHandle] = []
        answers = await asyncio.gather(self._intake.durable(job, ids), remote)
        for owned, handles in zip((here, away), answers, strict=True):
            found.update({id(ref): handle for ref, handle in zip(owned, handles, strict=False)})
            of_note += handles[len(owned) :]
        return [*(found[id(ref)] for ref in refs), *of_note]

    async def held(self, job: ActiveJob, refs: Sequence[ChangeSetRef]) -> list[Segment] | list[SegmentHandle]:
        """
        Return the sets themselves where this process holds all of them, else their handles, for which they are stored.

        Raises:
            LostChangesError: A set is gone; the batch must be executed again.
            UnavailableError: The store did not take them.
        """
        if all(ref.handle is None and ref.service_id == self._service_id for ref in refs):
            held = job.book.held([ref.change_set_id(job.name) for ref in refs])
            if held is not None:
                return held
        return await self.persist(job, refs)

    async def _persist_away(
        self, name: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: Segment | None
    ) -> list[SegmentHandle]:
        """Ask the services of other hosts, each once, for the sets that they hold; the first one stores the note."""
        hosts: dict[str, list[ChangeSetRef]] = {}
        for ref in refs:
            if ref.service_url is None:
                raise LostChangesError(
                    f"a change set of checkpoint {ref.checkpoint_id} was received by a service process that is gone; "
                    "the batch must be executed again",
                    job=name,
                )
            hosts.setdefault(ref.service_url, []).append(ref)
        found: dict[int, SegmentHandle] = {}
        notes = [str(note.payload, "ascii") if note and not number else None for number in range(len(hosts))]
        answers = await asyncio.gather(
            *(
                # Without the address whoever is asked asks nobody else: a process that took the place of the one that
                # received a set would else ask itself, for ever.
                self._in_thread(
                    partial(
                        self._peers.persist,
                        url,
                        name,
                        [replace(ref, service_url=None) for ref in owned],
                        wait=wait,
                        note=text,
                    )
                )
                for (url, owned), text in zip(hosts.items(), notes, strict=True)
            )
        )
        if not wait:
            return []
        for owned, handles in zip(hosts.values(), answers, strict=True):
            found.update({id(ref): handle for ref, handle in zip(owned, handles, strict=False)})
        of_note = [
            handle for owned, handles in zip(hosts.values(), answers, strict=True) for handle in handles[len(owned) :]
        ]
        return [*(found[id(ref)] for ref in refs), *of_note]


def _given_handle(job: str, ref: ChangeSetRef) -> SegmentHandle:
    """
    Return the handle that somebody else got for a set.

    Raises:
        InvalidInputError: It points at another set, or at what is no segment object of the job.
    """
    assert ref.handle is not None
    handle = SegmentHandle.from_dict(ref.handle)
    if handle.entry.id != ref.change_set_id(job) or not handle.object_key.startswith(f"{job}/segments/"):
        raise InvalidInputError(f"the handle in {handle.object_key} is not that of change set {ref.change_set_id(job)}")
    return handle
