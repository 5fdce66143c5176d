"""Memory for JSON bodies: for incomplete ones, and for what is parsed until requests end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from dstl_service.http.access_middleware import VALUES
from dstl_service.http.job_limits import BodyRoom
from dstl_service.wire import VALUE_BYTES

PIECE = 100_000


class Requests:
    """Requests whose bodies arrive piece by piece, as a test decides."""

    def __init__(self, bytes_max: int) -> None:
        self.room = BodyRoom(self._read, bytes_max)
        self.read: list[str] = []

    async def _read(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        self.read.append(scope["path"])

    def begin(self, job: str, pieces: asyncio.Queue[bool], length: int | None = 32 << 20) -> asyncio.Task[None]:
        """Begin a request; the queue says for each piece whether more follows."""
        headers = [] if length is None else [(b"content-length", b"%d" % length)]
        scope = {"type": "http", "method": "POST", "path": f"/v1/jobs/{job}/persist", "headers": headers}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * PIECE, "more_body": await pieces.get()}

        return asyncio.create_task(self.room(scope, receive, None))  # type: ignore[arg-type]  # nothing is sent


@pytest.mark.parametrize("length", [32 << 20, None])
def test_unfinished_bodies_are_bounded(length: int | None) -> None:
    """B12, B13: one job's bodies may take half of the room, other jobs' the rest, and all of it is freed."""

    async def story() -> None:
        requests = Requests(4 * PIECE)
        greedy: asyncio.Queue[bool] = asyncio.Queue()
        other: asyncio.Queue[bool] = asyncio.Queue()
        many = [requests.begin("greedy", greedy, length) for _ in range(3)]
        one = requests.begin("other", other, length)
        for _ in range(3):
            greedy.put_nowait(True)
        done, _ = await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(HTTPException) as caught:
            done.pop().result()
        assert (caught.value.status_code, caught.value.headers) == (429, {"connection": "close"})
        for more in (True, False):
            other.put_nowait(more)
        await one
        for _ in range(2):
            greedy.put_nowait(False)
        await asyncio.gather(*many, return_exceptions=True)

        assert requests.room.room.held == 0
        assert "/v1/jobs/other/persist" in requests.read

    asyncio.run(asyncio.wait_for(story(), 60))


def test_jobs_leave_some_to_the_next() -> None:
    """B13: however many jobs begin bodies that do not end, the next job's body finds room."""

    async def story() -> None:
        requests = Requests(16 * PIECE)
        taken = []
        begun: list[asyncio.Task[None]] = []
        for job in ("first", "second", "third"):
            before = requests.room.room.held
            pieces: asyncio.Queue[bool] = asyncio.Queue()
            for _ in range(16):
                begun.append(requests.begin(job, pieces))
                pieces.put_nowait(True)
                for _ in range(3):
                    await asyncio.sleep(0)
            taken.append((requests.room.room.held - before) // PIECE)
        last: asyncio.Queue[bool] = asyncio.Queue()
        one = requests.begin("last", last)
        last.put_nowait(False)
        await one
        assert taken == [8, 4, 2]
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        assert requests.room.room.held == 0

    asyncio.run(asyncio.wait_for(story(), 60))


def test_parsed_bodies_count_until_their_requests_end() -> None:
    """C39: what short values take is bounded also while an answer waits for its client, and is free then."""
    values, size_bytes = 1_000, 2_000

    async def story() -> None:
        taken = asyncio.Event()

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await taken.wait()

        room = BodyRoom(answer, 1 << 20, 4 * (values * VALUE_BYTES + size_bytes))

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": bytes(size_bytes)}

        def ask(job: str) -> asyncio.Task[None]:
            length = [(b"content-length", b"%d" % size_bytes)]
            path = f"/v1/jobs/{job}/read"
            scope = {"type": "http", "method": "POST", "path": path, "headers": length, VALUES: values}
            return asyncio.create_task(room(scope, receive, None))  # type: ignore[arg-type]  # nothing is sent

        held, refused, other = [ask("greedy"), ask("greedy")], ask("greedy"), ask("other")
        with pytest.raises(HTTPException) as caught:
            await asyncio.wait_for(refused, 1)
        assert caught.value.status_code == 429
        assert not any(task.done() for task in (*held, other))
        taken.set()
        await asyncio.gather(*held, other)
        assert room.parsed.held == 0

    asyncio.run(asyncio.wait_for(story(), 60))
