"""
Makes change sets durable, whether this service or the services of other hosts received them.

Owned by the event loop; requests to other services run in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self

from dstl_service.intake.active_job import ActiveJob
from dstl_service.intake.active_jobs import ActiveJobs
from dstl_service.intake.handle_check import HandleCheck, checked_handle
from dstl_service.intake.intake import Intake
from dstl_service.intake.notes import NoteReader, Persisted, check_note_handle, is_stored_here, text_of
from dstl_service.links.calls import LinkCalls
from dstl_service.peers.calls import PeerCalls
from dstl_service.process.job_threads import RunInThread
from dstl_service.wire import ChangeSetRef
from storage.errors import InvalidInputError, LostChangesError, UnavailableError
from storage.model import ChangeSetId, Segment, SegmentHandle

_ON_LOOP_MAX = 1_000
"""Most references that are looked at on the event loop; a request may have a hundred times as many."""


class _Parted(NamedTuple):
    """
    The references of a request, by their places in it.

    Args:
        found: Handles that came with them, which are of their sets.
        here: Places of the sets that this service holds.
        here_ids: Their ids.
        away: Places of the others.
    """

    found: dict[int, SegmentHandle]
    here: list[int]
    here_ids: list[ChangeSetId]
    away: list[int]

    @classmethod
    def of(cls, job: str, refs: Sequence[ChangeSetRef], service_id: str) -> Self:
        """Part the references of a request; raises as `checked_handle`."""
        found = {
            place: checked_handle(job, ref, SegmentHandle.from_dict(ref.handle))
            for place, ref in enumerate(refs)
            if ref.handle is not None
        }
        here = [place for place, ref in enumerate(refs) if place not in found and ref.service_id == service_id]
        away = sorted(set(range(len(refs))) - found.keys() - set(here))
        return cls(found, here, [refs[place].change_set_id(job) for place in here], away)


class _Host(NamedTuple):
    """Another host's service: its address, or the id of a process that has a link; and how it is called."""

    name: str
    calls: PeerCalls | LinkCalls


class Persister:
    """
    Turns references into handles of durable sets.

    Args:
        intake: Uploads the sets that this service holds.
        jobs: The jobs of this process.
        peers: Calls the services that hold the others.
        links: Calls those of them that have no address.
        handles: Checks handles that come with a request against the store.
        notes: Parses the notes in requests.
        in_thread: Runs a job's call that takes long.
        service_id: Tells references of this process from others.
    """

    def __init__(
        self,
        intake: Intake,
        jobs: ActiveJobs,
        peers: PeerCalls,
        links: LinkCalls,
        handles: HandleCheck,
        notes: NoteReader,
        in_thread: RunInThread,
        service_id: str,
    ) -> None:
        self._intake = intake
        self._jobs = jobs
        self._peers = peers
        self._links = links
        self._handles = handles
        self._notes = notes
        self._in_thread = in_thread
        self._service_id = service_id

    async def persist_claimed(
        self, name: str, refs: Sequence[ChangeSetRef], *, wait: bool = True, note: str | None = None
    ) -> Persisted:
        """
        Like `persist`, for another process's claim of job and epoch.

        Raises:
            NotFoundError: The store has no such job or epoch.
            InvalidInputError: `note` is not a note of this job, or as `persist`.
        """
        segment = await self._notes.segment_of(name, note)
        epochs = [ref.epoch for ref in refs] + ([segment.id.writer.epoch] if segment is not None else [])
        if not epochs:
            return Persisted([])
        job = await self._jobs.known(name, max(epochs))
        return await self.persist(job, refs, wait=wait, note=segment)

    async def persist(
        self, job: ActiveJob, refs: Sequence[ChangeSetRef], *, wait: bool = True, note: Segment | None = None
    ) -> Persisted:
        """
        Make change sets durable, those of other services too; with `wait` false, only start the uploads.

        The note is stored with the sets that this service holds; if it holds none, and the note is at most
        `NOTE_CHARS_MAX` long, another service stores it.

        Raises:
            LostChangesError: A set is lost with the process that received it, or is not stored where its handle says.
            UnavailableError: The upload failed; nothing is lost, ask again.
            InvalidInputError: A handle belongs to another set, or an address is not that of a service of this storage.
        """
        found, here, here_ids, away = await self._parted(job.name, refs)
        self._handles.begin(job.name, found.values())
        is_note_here = is_stored_here(note, holds_sets=bool(here), others_do=bool(away))
        ids = self._intake.request(job, here_ids, note if is_note_here else None)
        remote = self._persist_away(
            job.name, [refs[place] for place in away], wait=wait, note=None if is_note_here else note
        )
        if not wait:
            await remote
            return Persisted([])
        stored, others, _ = await asyncio.gather(
            self._intake.durable(job, ids), remote, self._handles.check(job.name, found.values())
        )
        own = Persisted.of(stored, len(here))
        found.update(zip(here, own.handles, strict=True))
        found.update(zip(away, others.handles, strict=True))
        return Persisted([found[place] for place in range(len(refs))], own.note or others.note)

    async def held(self, job: ActiveJob, refs: Sequence[ChangeSetRef]) -> list[Segment] | list[SegmentHandle]:
        """
        Return the sets if this process holds all their payloads; else make them durable and return their handles.

        Raises:
            LostChangesError: A set is lost; the batch must be executed again.
            UnavailableError: The upload failed; nothing is lost, ask again.
        """
        parted = await self._parted(job.name, refs)
        if len(parted.here) == len(refs) and (held := job.book.held(parted.here_ids)) is not None:
            return held
        return (await self.persist(job, await self._reachable(job.name, refs))).handles

    async def _parted(self, job: str, refs: Sequence[ChangeSetRef]) -> _Parted:
        """Part the references of a request; on the event loop, many would keep all other requests waiting."""
        if len(refs) <= _ON_LOOP_MAX:
            return _Parted.of(job, refs, self._service_id)
        return await self._in_thread(job, _Parted.of, job, refs, self._service_id)

    async def _reachable(self, name: str, refs: Sequence[ChangeSetRef]) -> list[ChangeSetRef]:
        """Have the coordinator persist the sets that only it can reach; return all references, those with handles."""
        # The coordinator may still have a link to that of the previous driver, which reaches no host any more.
        away = [
            place
            for place, ref in enumerate(refs)
            if ref.handle is None
            and ref.service_url is None
            and ref.service_id != self._service_id
            and not self._links.reaches(name, ref.service_id)
        ]
        found = list(refs)
        if away and self._links.has_coordinator(name):
            handles = await self._links.persist_by_coordinator(name, [refs[place] for place in away])
            for place, handle in zip(away, handles, strict=True):
                found[place] = replace(refs[place], handle=handle.to_dict())
        return found

    async def _persist_away(
        self, name: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: Segment | None
    ) -> Persisted:
        """Call each service of another host once for the sets that it holds; the first one stores the note."""
        hosts: dict[tuple[str | None, str], list[int]] = {}
        for place, ref in enumerate(refs):
            by_link = ref.service_id if ref.service_url is None else ""
            hosts.setdefault((ref.service_url, by_link), []).append(place)
        asked: dict[_Host, list[int]] = {}
        for (url, service_id), places in hosts.items():
            if url is not None:
                asked.setdefault(_Host(await self._peers.origin_of(name, url), self._peers), []).extend(places)
            elif self._links.reaches(name, service_id):
                asked[_Host(service_id, self._links)] = places
            else:
                raise LostChangesError(
                    f"a change set of checkpoint {refs[places[0]].checkpoint_id} was held by a service process that is "
                    "gone; the batch must be executed again",
                    job=name,
                )
        notes = [note, *[None] * len(asked)]
        answers = await asyncio.gather(
            *(
                self._ask(host, name, [refs[place] for place in places], wait=wait, note=part)
                for (host, places), part in zip(asked.items(), notes, strict=False)
            )
        )
        if not wait:
            return Persisted([])
        found = {
            place: handle
            for places, answer in zip(asked.values(), answers, strict=True)
            for place, handle in zip(places, answer.handles, strict=True)
        }
        return Persisted([found[place] for place in range(len(refs))], answers[0].note if answers else None)

    async def _ask(
        self, host: _Host, name: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: Segment | None
    ) -> Persisted:
        """Call one service; check that its handles belong to the sets and the note of the request."""
        # Without a URL in the references the called service calls no other: the successor of the process that received
        # a set would otherwise call itself for ever.
        wanted = [replace(ref, service_url=None) for ref in refs]
        handles = await host.calls.persist(host.name, name, wanted, wait=wait, note=text_of(note))
        if not wait:
            return Persisted([])
        try:
            expected = len(refs) + (note is not None)
            if len(handles) != expected:
                raise InvalidInputError(f"{len(handles)} handles, not {expected}")
            for ref, handle in zip(refs, handles, strict=False):
                checked_handle(name, ref, handle)
            check_note_handle(name, note, handles[-1])
        except InvalidInputError as error:
            raise UnavailableError(f"service {host.name} answered with wrong handles: {error.message}") from None
        return Persisted.of(handles, len(refs))
