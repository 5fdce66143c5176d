"""
The coordinator's side of links: a listener that accepts the sidecars of a job's hosts.

It begins to listen when the first job asks for it. A connection shows the token of a job within seconds, or is closed;
nothing is answered before. Its requests and those to it then concern this job only. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from dstl_service.links.certificates import make_server_context
from dstl_service.links.connection import LinkConnection, LinkEndedError, LinkStreams, read_message
from dstl_service.links.frames import FrameDecoder, FrameError, Message, encode_frame
from dstl_service.links.room import LinkRoom
from dstl_service.wire import LinkAddress, OpenLinks
from storage.clock import new_secret
from storage.errors import DstlError, InvalidInputError, LostChangesError
from storage.validation import validate_name

BACK_WITHIN_S = 2.0
"""How long requests wait for a host whose link has ended to connect again."""
SILENT_BACK_WITHIN_S = 0.5
"""
Likewise if the link has ended in silence, which took two seconds: by now the driver runs the host's tasks elsewhere.
"""
_HELLO_S = 5.0
_STRANGERS_MAX = 256
_STRANGERS_PER_ADDRESS_MAX = 16
_BACKLOG = 512
_ACCEPT_AGAIN_S = 0.2
_HOSTS_PER_JOB_MAX = 2_000
_FORGOTTEN_S = 60.0
"""How long a host without a link is kept: requests to it wait for it to come back, instead of failing at once."""
JOB_UNUSED_S = 86_400.0
"""A job without a linked host and without a request for this time has ended; its token is refused from then on."""

logger = logging.getLogger("dstl_service")

AnswerOfJob = Callable[[str, Message], Awaitable[Message]]
"""Answers a request of a job's host."""


@dataclass(slots=True, eq=False)
class _Host:
    """A host of a job: its current connection, if it has one, the address it came from, and how the last one ended."""

    connection: LinkConnection | None = None
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""
    is_silent: bool = False

    def ended(self, connection: LinkConnection) -> None:
        """Forget a connection that has ended, unless there is a newer one."""
        if self.connection is connection:
            self.connection = None
            self.connected.clear()
            self.is_silent = connection.is_silent


@dataclass(slots=True, eq=False)
class _Job:
    """A job that has links: whose driver asked for them, and its hosts by the ids of their sidecars' processes."""

    epoch: int
    address: LinkAddress
    used_s: float
    hosts: dict[str, _Host] = field(default_factory=dict)


class LinkHub:
    """
    Accepts links and passes requests to the hosts behind them.

    Args:
        service_id: This process's id, told to the hosts.
        answer: Answers the hosts' requests.
        room: Memory for what the hosts send.
    """

    def __init__(self, service_id: str, answer: AnswerOfJob, room: LinkRoom) -> None:
        self.service_id = service_id
        self._answer = answer
        self._room = room
        self._jobs: dict[str, _Job] = {}
        self._opening = asyncio.Lock()
        self._server: asyncio.Task[None] | None = None
        self._bound_address = ""
        self._port = 0
        self._certificate = ""
        self._strangers: Counter[str] = Counter()
        self._served: set[asyncio.Task[None]] = set()

    async def open(self, job: str, request: OpenLinks) -> LinkAddress:
        """
        Listen, unless this process does already, and return the address for a job's hosts.

        A newer epoch gets a new token, and ends the links of the older ones. The caller has checked the epoch.

        Raises:
            InvalidInputError: The address cannot be listened on, or this process already listens on another one.
        """
        async with self._opening:
            known = self._used(job)
            if known is not None and known.epoch >= request.epoch:
                return known.address
            self._forget_unused()
            await self._listen(request.bind_address, request.port)
            address = LinkAddress(request.host, self._port, self._certificate, new_secret())
            if known is not None:
                self.forget(job)
            self._jobs[job] = _Job(request.epoch, address, asyncio.get_running_loop().time())
            return address

    def has(self, job: str) -> bool:
        """Say whether a job's hosts may connect."""
        return job in self._jobs

    def _used(self, job: str) -> _Job | None:
        known = self._jobs.get(job)
        if known is not None:
            known.used_s = asyncio.get_running_loop().time()
        return known

    def _forget_unused(self) -> None:
        since_s = asyncio.get_running_loop().time() - JOB_UNUSED_S
        for job in [job for job, known in self._jobs.items() if not known.hosts and known.used_s < since_s]:
            self.forget(job)

    def accepts_at(self, address: LinkAddress) -> bool:
        """Say whether an address is that of this process."""
        own = (self._port, self._certificate)
        return self._server is not None and (address.port, address.certificate) == own

    def forget(self, job: str) -> None:
        """End the links of a job, and refuse its token from now on."""
        ended = self._jobs.pop(job, None)
        for host in ended.hosts.values() if ended is not None else ():
            if host.connection is not None:
                host.connection.end()

    def knows(self, job: str, service_id: str) -> bool:
        """Say whether a process of this id has a link to this job, or had one."""
        known = self._jobs.get(job)
        return known is not None and service_id in known.hosts

    def silent_hosts(self, job: str) -> list[str]:
        """Return the addresses of a job's hosts that stopped sending without closing their link, and are not back."""
        known = self._jobs.get(job)
        hosts = [] if known is None else list(known.hosts.values())
        present = {host.address for host in hosts if host.connection is not None}
        return sorted({host.address for host in hosts if host.is_silent} - present)

    async def request(self, job: str, service_id: str, body: Message) -> Message:
        """
        Send a request to a host and return its answer; it is sent again when the host is back after a lost connection.

        Raises:
            LostChangesError: The host has no link, and did not come back in time.
            DstlError: The host's error.
        """
        while True:
            known = self._used(job)
            host = known.hosts.get(service_id) if known is not None else None
            if host is None:
                raise _is_gone(service_id, job)
            try:
                async with asyncio.timeout(SILENT_BACK_WITHIN_S if host.is_silent else BACK_WITHIN_S):
                    await host.connected.wait()
            except TimeoutError:
                raise _is_gone(service_id, job) from None
            if (connection := host.connection) is None:
                continue
            try:
                return await connection.request(body)
            except LinkEndedError:
                host.ended(connection)  # or the next round would find it again before it is closed

    async def close(self) -> None:
        """Stop listening, and end all links."""
        if self._server is not None:
            self._server.cancel()
        for job in list(self._jobs):
            self.forget(job)
        for task in self._served:
            task.cancel()
        await asyncio.gather(*self._served, return_exceptions=True)

    async def _listen(self, address: str, port: int) -> None:
        if self._server is not None:
            if port in (0, self._port) and address == self._bound_address:
                return
            raise InvalidInputError(
                f"this service listens for links on {self._bound_address} port {self._port} already; drivers of one "
                "host use the same spark.driver.bindAddress and the same link_port"
            )
        context, certificate = await asyncio.to_thread(make_server_context)
        try:
            listener = await asyncio.to_thread(_listener, address, port)
        except OSError as error:
            raise InvalidInputError(
                f"links cannot be accepted on {address} port {port}: {error.strerror or error}; set "
                "spark.driver.bindAddress to an address of the driver's host, and link_port to a free port or 0"
            ) from error
        self._bound_address, self._port, self._certificate = address, int(listener.getsockname()[1]), certificate
        self._server = asyncio.get_running_loop().create_task(self._accept(listener, context))
        logger.info("listening for links", extra={"address": address, "port": self._port})

    async def _accept(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    accepted, peer = await loop.sock_accept(listener)
                except OSError as error:  # at the limit of open files
                    logger.warning("a link could not be accepted", extra={"error": str(error)})
                    await asyncio.sleep(_ACCEPT_AGAIN_S)
                    continue
                # Counted before its handshake: half-open connections must not take the files of others. And counted
                # here: a burst is accepted without a pause, and none of its tasks has run before the last one.
                if self._strangers.total() >= _STRANGERS_MAX or self._strangers[peer[0]] >= _STRANGERS_PER_ADDRESS_MAX:
                    accepted.close()
                    await asyncio.sleep(0)  # a flood of connections must not keep the loop
                    continue
                self._strangers[str(peer[0])] += 1
                task = loop.create_task(self._serve(accepted, str(peer[0]), context))
                self._served.add(task)
                task.add_done_callback(self._served.discard)

    async def _serve(self, accepted: socket.socket, address: str, context: ssl.SSLContext) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            try:
                async with asyncio.timeout(_HELLO_S):
                    reader, writer = await _encrypted(accepted, context)
                    decoder = FrameDecoder()
                    hello = await read_message(reader, decoder)
            finally:
                self._strangers[address] -= 1
                if not self._strangers[address]:
                    del self._strangers[address]
            await self._introduced(hello, address, LinkStreams(reader, writer, decoder))
        except (OSError, FrameError, TimeoutError, DstlError) as error:
            logger.debug("a connection is not a link", extra={"error": repr(error)})
        finally:
            if writer is not None:
                writer.transport.abort()
            accepted.close()

    async def _introduced(self, hello: Message, address: str, streams: LinkStreams) -> None:
        """Serve a connection whose first message shows the token of a job."""
        job, service_id = str(hello.get("job")), validate_name("service", hello.get("service_id"))
        known = self._used(job)
        if known is None or not _is_same(known.address.token, hello.get("token")):
            return
        if service_id not in known.hosts and len(known.hosts) >= _HOSTS_PER_JOB_MAX:
            logger.warning("a job has too many links", extra={"job": job, "links": len(known.hosts)})
            return
        streams.writer.write(encode_frame({"service_id": self.service_id}))
        host = known.hosts.setdefault(service_id, _Host())
        host.address = address
        await self._keep(job, known, service_id, LinkConnection(streams, partial(self._answer, job), self._room, job))

    async def _keep(self, name: str, job: _Job, service_id: str, connection: LinkConnection) -> None:
        host = job.hosts[service_id]
        if host.connection is not None:  # the host noticed the end of its connection before this process did
            host.connection.end()
        host.connection, host.is_silent = connection, False
        host.connected.set()
        logger.info("a host is linked", extra={"job": name, "service": service_id})
        try:
            await connection.run()
        finally:
            host.ended(connection)
            asyncio.get_running_loop().call_later(_FORGOTTEN_S, _drop, job, service_id, host)


def _listener(address: str, port: int) -> socket.socket:
    """Return a listening socket. Blocking: the name is resolved."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


async def _encrypted(
    accepted: socket.socket, context: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, accepted, ssl=context, ssl_handshake_timeout=_HELLO_S
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _drop(job: _Job, service_id: str, host: _Host) -> None:
    if host.connection is None and job.hosts.get(service_id) is host:
        del job.hosts[service_id]


def _is_same(token: str, shown: object) -> bool:
    return isinstance(shown, str) and hmac.compare_digest(token.encode(), shown.encode(errors="replace"))


def _is_gone(service_id: str, job: str) -> LostChangesError:
    return LostChangesError(
        f"the sidecar {service_id} of another host has no link to this coordinator any more; its change sets count as "
        "lost, and the batch must be executed again",
        job=job,
    )
