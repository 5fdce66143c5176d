"""Handles of other hosts' change sets are fetched while a user's function runs, and kept no longer than needed."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from dstl_service.links.calls import LinkCalls
from dstl_service.links.dialer import LinkDialer
from dstl_service.links.frames import Message
from dstl_service.links.hub import LinkHub
from dstl_service.wire import ChangeSetRef
from storage.errors import LostChangesError
from tests.unit.dstl_service.samples import handles_of, segment

HANDLES = handles_of([segment()])


class Hosts:
    """Stands for the hub: each host answers, unless it is gone or stands still."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self.still: set[str] = set()
        self.cancelled: list[str] = []
        self.ended: set[str] = set()

    def has(self, job: str) -> bool:
        """Say whether a job's hosts may connect."""
        return job not in self.ended

    def knows(self, job: str, service_id: str) -> bool:
        """Say whether a host has a link."""
        return bool(job) and service_id not in self.gone

    async def request(self, job: str, service_id: str, body: Message) -> Message:
        """Answer with handles."""
        if not self.knows(job, service_id):
            raise LostChangesError("the host is gone")
        if body["persist"]["wait"] and service_id in self.still:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.append(service_id)
                raise
        return {"handles": [handle.to_dict() for handle in HANDLES]}


def calls_of(hosts: Hosts) -> LinkCalls:
    """Return calls to these hosts."""
    return LinkCalls(cast("LinkHub", hosts), cast("LinkDialer", cast("Any", None)), 60)


def ref(service_id: str, checkpoint_id: int = 1) -> ChangeSetRef:
    """Return a reference of a host's change set."""
    return ChangeSetRef("op", checkpoint_id, 3, 7, 0, 0, 10, service_id)


def test_host_may_be_forgotten_while_the_function_runs() -> None:
    """I7: a host counts as reached, and its handles are there, however long it has been gone."""

    async def main() -> None:
        hosts = Hosts()
        calls = calls_of(hosts)
        await calls.persist("a", "job", [ref("a")], wait=False, note=None)
        await asyncio.sleep(0)
        hosts.gone.add("a")

        assert calls.reaches("job", "a")
        assert await calls.persist("a", "job", [ref("a")], wait=True, note=None) == HANDLES
        with pytest.raises(LostChangesError):
            await calls.persist("a", "job", [ref("a", 2)], wait=True, note=None)
        assert not calls.reaches("other", "a")

    asyncio.run(main())


def test_next_checkpoint_forgets_what_was_fetched_before() -> None:
    """Handles of hosts that never come back are kept for one checkpoint; other hosts of the same one keep theirs."""

    async def main() -> None:
        hosts = Hosts()
        hosts.still.add("a")
        calls = calls_of(hosts)
        for service_id in ("a", "b"):
            await calls.persist(service_id, "job", [ref(service_id)], wait=False, note=None)
        await asyncio.sleep(0)
        hosts.gone = {"a", "b"}
        assert calls.reaches("job", "a")
        assert calls.reaches("job", "b")

        await calls.persist("c", "job", [ref("c", 2)], wait=False, note=None)
        await asyncio.sleep(0)

        assert hosts.cancelled == ["a"]
        assert not calls.reaches("job", "a")
        assert not calls.reaches("job", "b")
        calls.close()

    asyncio.run(main())


def test_handles_of_jobs_that_have_ended_are_forgotten() -> None:
    """A coordinator of thousands of jobs in turn keeps no handles of those whose links are closed."""

    async def main() -> None:
        hosts = Hosts()
        calls = calls_of(hosts)
        await calls.persist("a", "ended", [ref("a")], wait=False, note=None)
        await calls.persist("a", "running", [ref("a")], wait=False, note=None)
        hosts.gone, hosts.ended = {"a"}, {"ended"}
        await calls.persist("b", "new", [ref("b")], wait=False, note=None)

        assert not calls.reaches("ended", "a")
        assert calls.reaches("running", "a")
        calls.close()

    asyncio.run(main())
