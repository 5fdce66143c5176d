"""A host connects to the coordinators of its jobs again and again, and seldom to those that have been gone for long."""

from __future__ import annotations

import asyncio
import socket

import pytest

from dstl_service.links import dialer as module
from dstl_service.links.certificates import make_server_context, pinned_context
from dstl_service.links.dialer import UNUSED_S, LinkDialer
from dstl_service.links.frames import Message
from dstl_service.links.room import LinkRoom
from dstl_service.wire import LinkAddress
from tools.virtual_time import VirtualLoop


async def answer(_job: str, body: Message) -> Message:
    """Answer nothing of interest."""
    return body


def test_coordinator_that_has_ended_is_seldom_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a thousand ended jobs tries each of them once a minute, but at once when a task asks."""
    _, certificate = make_server_context()
    tries: list[float] = []

    def tried(text: str) -> object:
        tries.append(asyncio.get_running_loop().time())
        return pinned_context(text)

    async def main() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = LinkAddress("127.0.0.1", unused.getsockname()[1], certificate, "token")
            dialer = LinkDialer("host", answer, LinkRoom())
            assert (await dialer.ensure("job", address)).coordinator_id is None
            assert len(tries) > 3, "a coordinator that starts is found at once"
            await asyncio.sleep(UNUSED_S / 2)
            assert len(tries) < UNUSED_S / 2 / 50

            asked_s = asyncio.get_running_loop().time()
            await dialer.ensure("job", address)
            assert min(at_s for at_s in tries if at_s >= asked_s) < asked_s + 1
            await asyncio.sleep(2 * UNUSED_S)
            ended = len(tries)
            await asyncio.sleep(UNUSED_S)
            assert len(tries) == ended, "it is given up"
            await dialer.close()

    monkeypatch.setattr(module, "pinned_context", tried)
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda call, future: future.set_result(call()))) as runner:
        runner.run(main())


def test_jobs_of_any_number_leave_few_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer of jobs with a prefix may ask for links of any number of them; those asked for last are kept."""
    _, certificate = make_server_context()
    monkeypatch.setattr(module, "LINKS_MAX", 3)

    async def main() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = LinkAddress("127.0.0.1", unused.getsockname()[1], certificate, "token")
            dialer = LinkDialer("host", answer, LinkRoom())
            before = len(asyncio.all_tasks())
            for number in range(10):
                await dialer.ensure(f"job-{number}", address)
            await asyncio.sleep(1)
            assert len(asyncio.all_tasks()) == before + 3
            assert dialer.jobs == ["job-7", "job-8", "job-9"]
            await dialer.close()

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda call, future: future.set_result(call()))) as runner:
        runner.run(main())
