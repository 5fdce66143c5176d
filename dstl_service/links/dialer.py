"""
A sidecar's side of links: it connects to the coordinators of the jobs whose tasks run on its host.

A task asks for the link of its job. The link is kept, and connected again when it breaks, while tasks ask. Owned by the
event loop.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from dstl_service.links.certificates import pinned_context
from dstl_service.links.connection import LinkConnection, LinkEndedError, LinkStreams, read_message
from dstl_service.links.frames import FrameDecoder, FrameError, Message, encode_frame
from dstl_service.links.hub import AnswerOfJob
from dstl_service.links.room import LinkRoom
from dstl_service.wire import LinkAddress, Linked
from storage.errors import UnavailableError

CONNECT_WITHIN_S = 3.0
"""How long a task waits for its host's link; without one it makes its change sets durable itself."""
UNUSED_S = 86_400.0
"""A link that no task asked for in this time is given up; a batch may take hours after its tasks."""
LINKS_MAX = 2_000
"""Links of one host, far more than it has jobs at a time: each has a task, and a connection that it tries again."""
_AGAIN_FIRST_S, _AGAIN_S, _AGAIN_MAX_S = 0.1, 3.0, 60.0
_AGAIN_PART = 10
"""After a long time without a connection, it is tried again after this part of it: most such drivers have ended."""

logger = logging.getLogger("dstl_service")


@dataclass(slots=True, eq=False)
class _Link:
    """A link of a job: wanted as long as tasks ask for it."""

    address: LinkAddress
    asked_s: float
    connection: LinkConnection | None = None
    coordinator_id: str = ""
    why_not: str = ""
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by a task: the next try must not wait long."""
    task: asyncio.Task[None] | None = None


class LinkDialer:
    """
    Keeps the links of this host's jobs.

    Args:
        service_id: This process's id, told to the coordinators.
        answer: Answers the coordinators' requests.
        room: Memory for what the coordinators send.
    """

    def __init__(self, service_id: str, answer: AnswerOfJob, room: LinkRoom) -> None:
        self._service_id = service_id
        self._answer = answer
        self._room = room
        self._links: dict[str, _Link] = {}

    async def ensure(self, job: str, address: LinkAddress) -> Linked:
        """
        Wait for the link to a job's coordinator, at most `CONNECT_WITHIN_S`; another address replaces the link.

        Raises:
            InvalidInputError: The address's certificate is not one in PEM.
        """
        loop = asyncio.get_running_loop()
        link = self._links.get(job)
        if link is None or link.address != address:
            pinned_context(address.certificate)  # an error is the caller's
            self.forget(job)
            self._make_room()
            link = self._links[job] = _Link(address, loop.time())
            link.task = loop.create_task(self._keep(job, link))
        link.asked_s = loop.time()
        link.asked.set()
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                await link.connected.wait()
        except TimeoutError:
            return Linked(None, link.why_not or "no answer")
        return Linked(link.coordinator_id)

    def has_link(self, job: str) -> bool:
        """Say whether this process has a link to the coordinator of a job."""
        link = self._links.get(job)
        return link is not None and link.connection is not None

    async def request(self, job: str, body: Message) -> Message:
        """
        Send a request to a job's coordinator and return its answer.

        Raises:
            UnavailableError: There is no link, or it ended before the answer; ask again.
            DstlError: The coordinator's error.
        """
        link = self._links.get(job)
        with suppress(LinkEndedError):
            if link is not None and link.connection is not None:
                return await link.connection.request(body)
        raise UnavailableError(f"the link to the coordinator of job {job!r} has ended; ask again", job=job)

    @property
    def jobs(self) -> list[str]:
        """The jobs that have a link, or for which one is tried."""
        return list(self._links)

    @property
    def is_linked(self) -> bool:
        """Say whether there is any link: its coordinator may still ask for what this process received."""
        return any(link.connection is not None for link in self._links.values())

    def forget(self, job: str) -> None:
        """Give a job's link up."""
        link = self._links.pop(job, None)
        if link is not None and link.task is not None:
            link.task.cancel()

    def _make_room(self) -> None:
        """Give up a link for another one if there are too many: one without a connection, asked for longest ago."""
        if len(self._links) >= LINKS_MAX:
            asked = ((link.connection is not None, link.asked_s, job) for job, link in self._links.items())
            self.forget(min(asked)[2])

    async def close(self) -> None:
        """End all links."""
        tasks = [link.task for link in self._links.values() if link.task is not None]
        for job in list(self._links):
            self.forget(job)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, job: str, link: _Link) -> None:
        loop = asyncio.get_running_loop()
        since_s, wait_s = loop.time(), _AGAIN_FIRST_S
        while loop.time() - link.asked_s < UNUSED_S:
            try:
                connection = await self._connected(job, link)
            except (OSError, FrameError, TimeoutError, asyncio.IncompleteReadError) as error:
                link.why_not = str(error) or type(error).__name__
                logger.debug("no link", extra={"job": job, "error": link.why_not})
            else:
                link.connection = connection
                link.connected.set()
                try:
                    await self._until_unused(connection, link)
                finally:
                    link.connected.clear()
                    link.connection = None
                    since_s, wait_s = loop.time(), _AGAIN_FIRST_S
            await asyncio.sleep(wait_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(min((loop.time() - since_s) / _AGAIN_PART, _AGAIN_MAX_S) - wait_s):
                    await link.asked.wait()
            wait_s = _AGAIN_FIRST_S if link.asked.is_set() else min(2 * wait_s, _AGAIN_S)
            link.asked.clear()
        if self._links.get(job) is link:
            del self._links[job]

    async def _connected(self, job: str, link: _Link) -> LinkConnection:
        address, decoder = link.address, FrameDecoder()
        async with asyncio.timeout(CONNECT_WITHIN_S):
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=pinned_context(address.certificate)
            )
            try:
                writer.write(encode_frame({"job": job, "token": address.token, "service_id": self._service_id}))
                link.coordinator_id = str((await read_message(reader, decoder)).get("service_id"))
            except BaseException:
                writer.transport.abort()
                raise
        answer = partial(self._answer, job)
        return LinkConnection(LinkStreams(reader, writer, decoder), answer, self._room, job)

    async def _until_unused(self, connection: LinkConnection, link: _Link) -> None:
        """Serve the connection until it ends or no task has asked for it for long."""
        loop = asyncio.get_running_loop()
        serving = loop.create_task(connection.run())
        try:
            while not serving.done() and (left_s := link.asked_s + UNUSED_S - loop.time()) > 0:
                await asyncio.wait([serving], timeout=left_s)
        finally:
            connection.end()
            await asyncio.gather(serving, return_exceptions=True)
