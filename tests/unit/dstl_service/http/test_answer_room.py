"""Memory for answers that clients do not take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Message

from dstl_service.composition import Parts
from dstl_service.http.job_limits import UNCOUNTED_BYTES_MAX, AnswerRoom
from dstl_service.http.routes.restore import answer_restore
from dstl_service.http.task_requests import RestoreRequest
from dstl_service.intake.change_sets import BatchSettings
from dstl_service.restore.plan import RestorePlan
from dstl_service.wire import CheckpointRef
from storage.errors import OverloadedError
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from tests.unit.dstl_service.http_life import service
from tests.unit.dstl_service.samples import segment, stored

MIB = 1 << 20
GROUPS = KeyGroupRange(0, 127)


class Client:
    """A client that takes nothing of its answer until it is told to."""

    def __init__(self, job: str, taking: asyncio.Event) -> None:
        self.job = job
        self.taking = taking
        self.status = 0
        self.body = b""

    async def send(self, message: Message) -> None:
        """Take a part of the answer, as the server's flow control does: the one after what was not taken waits."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        if self.body:
            await self.taking.wait()
        self.body += message.get("body", b"")

    def ask(self, app: Any) -> asyncio.Task[None]:
        """Send a request for the job's checkpoints."""
        scope = {"type": "http", "method": "GET", "path": f"/v1/jobs/{self.job}/checkpoints"}
        return asyncio.create_task(app(scope, None, self.send))


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test coroutine."""
    asyncio.run(asyncio.wait_for(story(), 60))


def answering(size_bytes: int) -> Any:
    """Return an application whose answers have this size."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Response(b"x" * size_bytes)(scope, receive, send)

    return app


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstl_service.http.job_limits.log_refusal", lambda *_: None)


def test_answers_that_nobody_takes_are_bounded() -> None:
    """A12: a job's answers may hold half of the room, others get the rest, and what is taken is freed."""

    async def story() -> None:
        room, taking = AnswerRoom(answering(3 * MIB), 12 * MIB), asyncio.Event()
        greedy = [Client("greedy", taking) for _ in range(4)]
        other = Client("other", taking)
        asked = [client.ask(room) for client in (*greedy, other)]
        await asyncio.sleep(0.05)
        assert [client.status for client in greedy] == [200, 200, 429, 429]
        assert other.status == 200
        assert room.room.held == 9 * MIB
        taking.set()
        await asyncio.gather(*asked)

        assert [len(client.body) for client in (*greedy[:2], other)] == [3 * MIB] * 3
        assert room.room.held == 0

    run(story)


def test_largest_answer_is_sent_alone() -> None:
    """An answer as large as the room is sent if nothing else waits."""

    async def story() -> None:
        room, taking = AnswerRoom(answering(4 * MIB), 4 * MIB), asyncio.Event()
        taking.set()
        client = Client("job", taking)
        await client.ask(room)

        assert (client.status, len(client.body)) == (200, 4 * MIB)

    run(story)


def test_small_answers_are_sent_at_once() -> None:
    """Answers of the usual size are not counted, nor sent in pieces."""

    async def story() -> None:
        room = AnswerRoom(answering(UNCOUNTED_BYTES_MAX), 1)
        client = Client("job", asyncio.Event())
        await client.ask(room)

        assert (client.status, len(client.body)) == (200, UNCOUNTED_BYTES_MAX)

    run(story)


def test_streams_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A12: a job's streams wait for each other while their clients take nothing; those of another job do not."""
    monkeypatch.setattr("dstl_service.restore_service.STREAMS_BYTES_MAX", 16 * MIB)
    monkeypatch.setattr("dstl_service.restore_service._STREAM_BYTES_MAX", 4 * MIB)
    payload, read = bytes(3 * MIB), {"many": 0, "other": 0}

    async def story(parts: Parts, wanted: dict[str, CheckpointRef]) -> None:
        taking, enough, tasks = asyncio.Event(), asyncio.Event(), []

        async def send(job: str, message: Message) -> None:
            if len(message.get("body", b"")) > MIB:
                read[job] += 1
                if read == {"many": 2, "other": 1}:
                    enough.set()
                await taking.wait()

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        for job in ("many", "many", "many", "many", "other"):
            stream = await answer_restore(parts, RestoreRequest(job, "op", GROUPS, None, wanted[job]))
            tasks.append(asyncio.create_task(stream({"type": "http"}, receive, partial(send, job))))
        async with asyncio.timeout(60):
            await enough.wait()
        await asyncio.sleep(0.1)  # and no more come
        assert read == {"many": 2, "other": 1}
        taking.set()
        await asyncio.gather(*tasks)

    with service(MemoryStore(), batch=BatchSettings()) as life:
        wanted = {}
        for job in read:
            life.path = f"/v1/jobs/{job}"
            life.open()
            wanted[job] = CheckpointRef(**life.complete(0, None, life.append(payload)))
        life.portal.call(story, life.parts, wanted)

    assert read == {"many": 4, "other": 1}


def test_plans_of_streams_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """C40: each restore from a long log holds its plan as long as its client takes nothing, or as it waits its turn."""
    monkeypatch.setattr("dstl_service.restore_service._HANDLE_BYTES", 100)
    monkeypatch.setattr("dstl_service.restore_service.PLANS_BYTES_MAX", 400)

    async def story(parts: Parts, wanted: dict[str, CheckpointRef]) -> None:
        async def send(message: Message) -> None:
            pass

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        ask = [partial(answer_restore, parts, RestoreRequest(job, "op", GROUPS, None, wanted[job])) for job in wanted]
        streams = [await ask[0](), await ask[0](), await ask[1]()]
        with pytest.raises(OverloadedError, match="restores of job 'many' from long logs"):
            await ask[0]()
        for stream in streams:
            await stream({"type": "http"}, receive, send)
        await ask[0]()

    with service(MemoryStore(), batch=BatchSettings()) as life:
        wanted = {}
        for job in ("many", "other"):
            life.path = f"/v1/jobs/{job}"
            life.open()
            wanted[job] = CheckpointRef(**life.complete(0, None, life.append(bytes(3 * MIB))))
        life.portal.call(story, life.parts, wanted)


def test_stream_counts_what_it_holds() -> None:
    """A12: what a stream holds is its largest frame twice, and the object from which that was read."""
    small, large = (segment(payload=bytes(size), partition=number) for number, size in enumerate((10, 3 * MIB)))
    handles = stored(MemoryStore(), [small, large], "job/segments/host/1.seg")

    held_bytes = RestorePlan(True, GROUPS, handles).held_bytes

    assert held_bytes == 2 * large.size_bytes + handles[0].object_size_bytes
