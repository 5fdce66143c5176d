"""Requests over links: a coordinator has other hosts persist change sets, and a host asks its coordinator to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from dstl_service.links.dialer import LinkDialer
from dstl_service.links.frames import Message
from dstl_service.links.hub import LinkHub
from dstl_service.peers.client import without_its_words
from dstl_service.wire import ChangeSetRef, PersistRequest
from storage.errors import DstlError, LostChangesError, UnavailableError
from storage.model import SegmentHandle

_ASK_TIMEOUT_S = 10.0
"""Longest time of a request that does not wait for uploads."""


class _Asked(NamedTuple):
    """A request to a host to persist sets."""

    refs: tuple[ChangeSetRef, ...]
    note: str | None


class _Early(NamedTuple):
    """Handles that are fetched before the checkpoint is completed."""

    asked: _Asked
    task: asyncio.Task[list[SegmentHandle]]


class LinkCalls:
    """
    Calls hosts that have links.

    Args:
        hub: Links of other hosts to this coordinator.
        dialer: Links of this host to other coordinators.
        timeout_s: Longest time of a call.
    """

    def __init__(self, hub: LinkHub, dialer: LinkDialer, timeout_s: float) -> None:
        self._hub = hub
        self._dialer = dialer
        self._timeout_s = timeout_s
        self._early: dict[str, dict[str, _Early]] = {}
        """By job and host."""

    def reaches(self, job: str, service_id: str) -> bool:
        """Say whether a process has a link to this coordinator of a job, or its handles are being fetched."""
        return self._hub.knows(job, service_id) or service_id in self._early.get(job, ())

    def has_coordinator(self, job: str) -> bool:
        """Say whether this host has a link to a job's coordinator, which reaches the other hosts."""
        return self._dialer.has_link(job)

    async def persist(
        self, service_id: str, job: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: str | None
    ) -> list[SegmentHandle]:
        """
        Have a host persist sets and a note; return the handles in order, or none without `wait`.

        Without `wait` the handles are fetched meanwhile. A later call for the same sets gets them, even if the host is
        gone by then: between both, a user's function may run for hours.

        Raises:
            LostChangesError: The host lacks a set, has no link any more, or does not answer in time.
            UnavailableError: The answer cannot be read.
            DstlError: The host refused, with an error of this kind.
        """
        asked = _Asked(tuple(refs), note)
        if wait:
            return await self._fetched(service_id, job, asked) or await self._ask(service_id, job, asked, wait=True)
        await self._ask(service_id, job, asked, wait=False)
        early = self._of_checkpoint(job, refs[0].checkpoint_id)
        task = asyncio.get_running_loop().create_task(self._ask(service_id, job, asked, wait=True))
        task.add_done_callback(_look_at_error)
        if (replaced := early.get(service_id)) is not None:
            replaced.task.cancel()
        early[service_id] = _Early(asked, task)
        return []

    def close(self) -> None:
        """Fetch no more handles."""
        for job in list(self._early):
            self._forget(job)

    async def _fetched(self, service_id: str, job: str, asked: _Asked) -> list[SegmentHandle] | None:
        """Return the handles that a call without `wait` fetched for the same sets, or None."""
        early = self._early.get(job, {}).get(service_id)
        if early is None or early.asked != asked:
            return None
        await asyncio.wait([early.task])
        return None if early.task.cancelled() or early.task.exception() is not None else early.task.result()

    def _of_checkpoint(self, job: str, checkpoint_id: int) -> dict[str, _Early]:
        """Return the fetches for a checkpoint; forget those for earlier ones, and for jobs that have ended."""
        if job not in self._early:
            for ended in [other for other in self._early if not self._hub.has(other)]:
                self._forget(ended)
        if any(early.asked.refs[0].checkpoint_id != checkpoint_id for early in self._early.get(job, {}).values()):
            self._forget(job)
        return self._early.setdefault(job, {})

    def _forget(self, job: str) -> None:
        for early in self._early.pop(job, {}).values():
            early.task.cancel()

    async def _ask(self, service_id: str, job: str, asked: _Asked, *, wait: bool) -> list[SegmentHandle]:
        try:
            async with asyncio.timeout(self._timeout_s if wait else _ASK_TIMEOUT_S):
                answer = await self._hub.request(job, service_id, _persist_request(asked.refs, asked.note, wait=wait))
        except TimeoutError:
            raise LostChangesError(
                f"sidecar {service_id} did not answer within {self._timeout_s:g} s; its change sets count as lost"
            ) from None
        except LostChangesError:
            raise
        except DstlError as error:
            raise without_its_words(service_id, error) from None
        return _handles(service_id, answer)

    async def persist_by_coordinator(self, job: str, refs: Sequence[ChangeSetRef]) -> list[SegmentHandle]:
        """
        Have a job's coordinator persist sets that other hosts hold; return the handles in order.

        Raises:
            DstlError: As `persist`.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._dialer.request(job, _persist_request(refs, None, wait=True))
        except TimeoutError:
            raise UnavailableError(f"the coordinator of job {job!r} did not answer in time; ask again") from None
        handles = _handles("the coordinator", answer)
        if len(handles) != len(refs):
            raise UnavailableError(f"the coordinator sent {len(handles)} handles, not {len(refs)}; ask again", job=job)
        return handles


def _look_at_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # the call that needs the handles asks again, and reports it


def _persist_request(refs: Sequence[ChangeSetRef], note: str | None, *, wait: bool) -> Message:
    return {"persist": asdict(PersistRequest(max(ref.epoch for ref in refs), list(refs), wait, note))}


def _handles(service_id: str, answer: dict[str, Any]) -> list[SegmentHandle]:
    try:
        return [SegmentHandle.from_dict(handle) for handle in answer["handles"]]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UnavailableError(f"sidecar {service_id} sent an unreadable answer over its link") from None
