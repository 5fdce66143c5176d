"""
Makes change sets durable, wherever they were received: by this service or by those of other hosts.

Owned by the event loop; requests to other services run in threads of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from dstl_service.intake.active_job import ActiveJob, ActiveJobs
from dstl_service.intake.handle_check import HandleCheck, check_note_handle, checked_handle
from dstl_service.intake.intake import Intake
from dstl_service.peers.calls import PeerCalls
from dstl_service.wire import NOTE_CHARS_MAX, ChangeSetRef
from storage.errors import InvalidInputError, LostChangesError, UnavailableError
from storage.model import Segment, SegmentHandle


class Persister:
    """
    Gets handles for references.

    Args:
        intake: Has the sets that are here.
        jobs: The jobs of this process.
        peers: Asks the services that have others.
        handles: Looks whether handles that come with a request point at what is stored.
        service_id: Tells which sets are here.
    """

    def __init__(
        self, intake: Intake, jobs: ActiveJobs, peers: PeerCalls, handles: HandleCheck, service_id: str
    ) -> None:
        self._intake = intake
        self._jobs = jobs
        self._peers = peers
        self._handles = handles
        self._service_id = service_id

    async def persist_claimed(
        self, name: str, refs: Sequence[ChangeSetRef], *, wait: bool = True, note: Segment | None = None
    ) -> list[SegmentHandle]:
        """Make change sets durable for whoever claims that they are of a job, when the store has it; see `persist`."""
        epochs = [ref.epoch for ref in refs] + ([note.id.writer.epoch] if note is not None else [])
        if not epochs:
            return []
        job = await self._jobs.known(name, max(epochs))
        return await self.persist(job, refs, wait=wait, note=note)

    async def persist(
        self, job: ActiveJob, refs: Sequence[ChangeSetRef], *, wait: bool = True, note: Segment | None = None
    ) -> list[SegmentHandle]:
        """
        Make change sets durable, those of other services too; return their handles in order, then that of the note.

        A note goes into the same object as the sets that are here, or, if none is and it is not too long to be sent, as
        those of another service.

        Raises:
            LostChangesError: A set is gone with the process that received it, or is not stored where its handle says.
            UnavailableError: The store did not take them; nothing is lost, ask again.
            InvalidInputError: A handle is not that of its set, or an address is none of a service of this storage.
        """
        here = [ref for ref in refs if ref.handle is None and ref.service_id == self._service_id]
        away = [ref for ref in refs if ref.handle is None and ref.service_id != self._service_id]
        found = {
            id(ref): checked_handle(job.name, ref, SegmentHandle.from_dict(ref.handle))
            for ref in refs
            if ref.handle is not None
        }
        self._handles.begin(job.name, found.values())
        is_note_here = bool(here) or not away or (note is not None and note.size_bytes > NOTE_CHARS_MAX)
        ids = self._intake.request(job, [ref.change_set_id(job.name) for ref in here], note if is_note_here else None)
        remote = self._persist_away(job.name, away, wait=wait, note=None if is_note_here else note)
        if not wait:
            await remote
            return []
        of_note: list[SegmentHandle] = []
        own, others, _ = await asyncio.gather(
            self._intake.durable(job, ids), remote, self._handles.check(job.name, found.values())
        )
        for owned, handles in ((here, own), (away, others)):
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
        asked: dict[str, list[ChangeSetRef]] = {}
        for url, owned in hosts.items():
            asked.setdefault(await self._peers.origin_of(name, url), []).extend(owned)
        notes = [note if not number else None for number in range(len(asked))]
        answers = await asyncio.gather(
            *(
                self._ask(origin, name, owned, wait=wait, note=part)
                for (origin, owned), part in zip(asked.items(), notes, strict=True)
            )
        )
        if not wait:
            return []
        found: dict[int, SegmentHandle] = {}
        of_note: list[SegmentHandle] = []
        for owned, handles in zip(asked.values(), answers, strict=True):
            found.update({id(ref): handle for ref, handle in zip(owned, handles, strict=False)})
            of_note += handles[len(owned) :]
        return [*(found[id(ref)] for ref in refs), *of_note]

    async def _ask(
        self, origin: str, name: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: Segment | None
    ) -> list[SegmentHandle]:
        """Ask one service; what it answers must be handles of what it was asked for."""
        # Without the address whoever is asked asks nobody else: a process that took the place of the one that received
        # a set would else ask itself, for ever.
        wanted = [replace(ref, service_url=None) for ref in refs]
        text = None if note is None else str(note.payload, "ascii")
        handles = await self._peers.persist(origin, name, wanted, wait=wait, note=text)
        if not wait:
            return []
        try:
            expected = len(refs) + (note is not None)
            if len(handles) != expected:
                raise InvalidInputError(f"{len(handles)} handles, not {expected}")
            for ref, handle in zip(refs, handles, strict=False):
                checked_handle(name, ref, handle)
            if note is not None:
                check_note_handle(name, note, handles[-1])
        except InvalidInputError as error:
            raise UnavailableError(f"service {origin} answered what it was not asked for: {error.message}") from None
        return handles
