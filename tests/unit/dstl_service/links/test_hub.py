"""The listener of links keeps few connections of strangers, however fast they come."""

from __future__ import annotations

import asyncio
import socket

from dstl_service.links.frames import Message
from dstl_service.links.hub import JOB_UNUSED_S, LinkHub
from dstl_service.links.room import LinkRoom
from dstl_service.wire import OpenLinks
from tools.virtual_time import VirtualLoop


async def answer(_job: str, body: Message) -> Message:
    """Answer nothing of interest."""
    return body


def is_open(connection: socket.socket) -> bool:
    """Say whether the other side has kept a connection."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_burst_of_strangers_takes_few_files() -> None:
    """Connections that wait together in the listener's queue are counted one by one."""

    async def main() -> None:
        hub = LinkHub("coordinator", answer, LinkRoom())
        address = await hub.open("job", OpenLinks(1, "127.0.0.1", "127.0.0.1"))
        await asyncio.sleep(0.05)
        # The loop stands still meanwhile, so that all of them are accepted at once.
        connections = [socket.create_connection((address.host, address.port)) for _ in range(100)]
        try:
            await asyncio.sleep(0.5)
            assert sum(map(is_open, connections)) == 16
        finally:
            for connection in connections:
                connection.close()
            await hub.close()

    asyncio.run(main())


def test_jobs_that_have_ended_are_forgotten() -> None:
    """After a day without hosts and requests a job's token is refused; one whose driver still asks keeps it."""

    async def main() -> None:
        hub = LinkHub("coordinator", answer, LinkRoom())
        request = OpenLinks(1, "127.0.0.1", "127.0.0.1")
        await hub.open("ended", request)
        address = await hub.open("running", request)
        for _ in range(3):
            await asyncio.sleep(JOB_UNUSED_S / 2)
            assert await hub.open("running", request) == address
        await hub.open("new", request)

        assert [hub.has(job) for job in ("ended", "running", "new")] == [False, True, True]
        await hub.close()

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda call, future: future.set_result(call()))) as runner:
        runner.run(main())
