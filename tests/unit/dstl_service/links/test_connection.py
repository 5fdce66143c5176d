"""Both ends of a link in one process: answers, errors, heartbeats, and what a paused process does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from dstl_service.links import connection as module
from dstl_service.links.connection import Answer, LinkConnection, LinkEndedError, LinkStreams
from dstl_service.links.frames import FRAME_BYTES_MAX, FrameDecoder, Message, encode_frame
from dstl_service.links.room import ROOM_BYTES, LinkRoom
from storage.errors import InternalError, LostChangesError, OverloadedError


@asynccontextmanager
async def linked(path: Path, answer: Answer, room: LinkRoom) -> AsyncIterator[tuple[LinkConnection, LinkConnection]]:
    """Give both ends of a link; the second one answers."""
    accepted: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
        asyncio.get_running_loop().create_future()
    )

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result((reader, writer))

    server = await asyncio.start_unix_server(accept, path / "s")
    ends = [await asyncio.open_unix_connection(path / "s"), await accepted]
    first, second = (
        LinkConnection(LinkStreams(reader, writer, FrameDecoder()), answer, room, "job") for reader, writer in ends
    )
    tasks = [asyncio.create_task(end.run()) for end in (first, second)]
    try:
        yield first, second
    finally:
        for end in (first, second):
            end.end()
        await asyncio.gather(*tasks)
        server.close()


def run(
    path: Path,
    test: Callable[[LinkConnection, LinkConnection], Awaitable[None]],
    answer: Answer,
    bytes_max: int = ROOM_BYTES,
) -> None:
    """Run a test with both ends of a link, which leaves nothing behind in their room of this size."""

    async def main() -> None:
        room = LinkRoom(bytes_max)
        async with linked(path, answer, room) as (first, second):
            await test(first, second)
        await asyncio.sleep(0)
        assert room.held == 0

    asyncio.run(main())


async def echo(body: Message) -> Message:
    """Answer with the request, or raise the error that it names."""
    if "error" in body:
        raise LostChangesError("a set is lost", key="k")
    if "bug" in body:
        raise KeyError("bug")
    if "wait" in body:
        await asyncio.Event().wait()
    return body


def test_many_requests_in_both_directions(tmp_path: Path) -> None:
    """Answers come back to their own requests, however many run, and large ones too."""

    async def test(first: LinkConnection, second: LinkConnection) -> None:
        bodies: list[Message] = [{"n": number, "text": "x" * (number * 20_000)} for number in range(40)]
        for end in (first, second):
            assert await asyncio.gather(*(end.request(body) for body in bodies)) == bodies

    run(tmp_path, test, echo)


def test_errors_keep_their_kind(tmp_path: Path) -> None:
    """An error of the other side is raised here; a bug there has no words of its own."""

    async def test(first: LinkConnection, _: LinkConnection) -> None:
        with pytest.raises(LostChangesError, match="a set is lost"):
            await first.request({"error": 1})
        with pytest.raises(InternalError, match="see the service's log"):
            await first.request({"bug": 1})

    run(tmp_path, test, echo)


def test_too_many_requests_are_refused(tmp_path: Path) -> None:
    """A request beyond the bound is answered at once, so that it takes no memory."""

    async def test(first: LinkConnection, _: LinkConnection) -> None:
        waiting = [asyncio.create_task(first.request({"wait": 1})) for _ in range(256)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await first.request({})
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    run(tmp_path, test, echo)


def test_silent_side_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After three heartbeats without a byte, requests end with an error, and so does every later one."""
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)
    sent = b""

    async def main() -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            sent = await reader.read()
            writer.close()
            ended.set()

        ended = asyncio.Event()
        server = await asyncio.start_unix_server(accept, tmp_path / "s")
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        end = LinkConnection(LinkStreams(reader, writer, FrameDecoder()), echo, LinkRoom(), "job")
        serving = asyncio.create_task(end.run())
        with pytest.raises(LinkEndedError):
            await end.request({})
        await serving
        with pytest.raises(LinkEndedError):
            await end.request({})
        await ended.wait()
        server.close()

    asyncio.run(main())
    assert sent.count(encode_frame({})) == module.SILENT_HEARTBEATS_MAX


def test_quiet_link_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats alone keep a link for any time."""
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.005)

    async def test(first: LinkConnection, _: LinkConnection) -> None:
        for _turn in range(20):
            await asyncio.sleep(0.01)
            assert await first.request({"n": 1}) == {"n": 1}

    run(tmp_path, test, echo)


def test_requests_that_take_too_much_memory_are_refused(tmp_path: Path) -> None:
    """I9: unanswered requests hold a share of the room, by what they take when they are parsed; then it is free."""

    async def test(first: LinkConnection, _second: LinkConnection) -> None:
        large = [asyncio.create_task(first.request({"wait": 1, "empty": [[]] * 1_000})) for _ in range(10)]
        refused, _waiting = await asyncio.wait(large, timeout=0.5)
        assert 0 < len(refused) < 10
        with pytest.raises(OverloadedError, match="ask again"):
            await refused.pop()
        assert await first.request({"n": 1}) == {"n": 1}
        for task in large:
            task.cancel()
        await asyncio.gather(*large, return_exceptions=True)

    run(tmp_path, test, echo, 1_000_000)


def test_incomplete_frames_have_a_bound(tmp_path: Path) -> None:
    """I9: any number of links of one job holds no more than its share, and the next job still gets a frame through."""

    async def main() -> None:
        room, ended = LinkRoom(), asyncio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await LinkConnection(LinkStreams(reader, writer, FrameDecoder()), echo, room, "job").run()
            ended.set()

        server = await asyncio.start_unix_server(accept, tmp_path / "s")
        writers = []
        for _ in range(6):
            _, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writers.append(writer)
            writer.write(FRAME_BYTES_MAX.to_bytes(4, "big") + b" " * (FRAME_BYTES_MAX // 2))
            with suppress(OSError):
                await writer.drain()
        await ended.wait()

        assert 0 < room.held <= ROOM_BYTES // 2
        assert room.take("other", FRAME_BYTES_MAX)
        for writer in writers:
            writer.close()
        server.close()

    asyncio.run(main())


def test_end_that_reads_no_answers_is_given_up(tmp_path: Path) -> None:
    """A host of a job cannot fill the memory of its coordinator by asking on and on."""

    async def main() -> None:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await LinkConnection(LinkStreams(reader, writer, FrameDecoder()), echo, LinkRoom(), "job").run()
            ended.set_result(None)

        server = await asyncio.start_unix_server(accept, tmp_path / "s")
        _, writer = await asyncio.open_unix_connection(tmp_path / "s", limit=1)
        sent = 0
        while not ended.done():
            writer.write(encode_frame({"id": sent, "request": {"text": "x" * 10_000}}))
            sent += 1
            with suppress(OSError):
                await asyncio.wait_for(writer.drain(), 0.1)
            assert sent < 5000
        writer.close()
        server.close()

    asyncio.run(main())
