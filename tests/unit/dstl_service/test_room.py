"""Room for what arrives: who waits, who is refused, and in which order."""

from __future__ import annotations

import asyncio

import pytest

from dstl_service import room
from dstl_service.room import Room
from storage.errors import OverloadedError


class Hall:
    """A room for 1000 bytes, of which a test says how many are taken."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self.hurried = 0
        self.refused = 0
        self.entered: list[str] = []
        self.room = Room(1000, lambda: self.held_bytes, self._hurry, self._refuse)

    def _hurry(self) -> None:
        self.hurried += 1

    def _refuse(self) -> None:
        self.refused += 1

    async def take_in(self, size_bytes: int, name: str = "") -> None:
        """Let a body arrive, and hold it."""
        async with self.room.reserved(size_bytes):
            self.entered.append(name)
            self.held_bytes += size_bytes

    def free(self, size_bytes: int) -> None:
        """Let bytes go, as the end of an upload does."""
        self.held_bytes -= size_bytes
        self.room.freed()


async def until_waiting(*tasks: asyncio.Task[None]) -> None:
    """Let tasks run until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


def test_bytes_up_to_limit_are_admitted() -> None:
    """I9: the limit itself may be reached."""

    async def run() -> None:
        hall = Hall()
        await hall.take_in(600)
        await hall.take_in(400)

        assert (hall.room.used_bytes, hall.hurried) == (1000, 0)

    asyncio.run(run())


def test_body_past_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """I9: what finds no room in time is refused, to be sent again, and was never counted."""
    monkeypatch.setattr(room, "WAIT_S", 0.01)

    async def run() -> None:
        hall = Hall()
        await hall.take_in(600)
        with pytest.raises(OverloadedError, match="limit of 1000"):
            await hall.take_in(401)

        assert (hall.room.used_bytes, hall.hurried, hall.refused) == (600, 1, 1)

    asyncio.run(run())


def test_arriving_body_counts() -> None:
    """I9: a body counts from its begin on, not only when it is complete, and no more when it breaks off."""

    async def run() -> None:
        hall = Hall()
        with pytest.raises(ConnectionError):
            async with hall.room.reserved(900):
                assert hall.room.used_bytes == 900
                raise ConnectionError

        assert hall.room.used_bytes == 0

    asyncio.run(run())


def test_waiting_body_enters_when_room_is_freed() -> None:
    """A body that does not fit hurries the uploads and enters as soon as one of them made room."""

    async def run() -> None:
        hall = Hall()
        await hall.take_in(1000)
        waiting = asyncio.create_task(hall.take_in(500))
        await until_waiting(waiting)
        hall.free(400)
        await until_waiting(waiting)
        hall.free(100)
        await waiting

        assert (hall.room.used_bytes, hall.hurried, hall.refused) == (1000, 1, 0)

    asyncio.run(run())


def test_small_body_overtakes_no_large_one() -> None:
    """Bodies enter in the order of arrival, or many small ones would keep a large one out for ever."""

    async def run() -> None:
        hall = Hall()
        await hall.take_in(1000)
        large = asyncio.create_task(hall.take_in(900, "large"))
        await until_waiting(large)
        small = asyncio.create_task(hall.take_in(10, "small"))
        hall.free(100)
        await until_waiting(large, small)
        hall.free(900)
        await asyncio.gather(large, small)

        assert hall.entered == ["", "large", "small"]

    asyncio.run(run())


def test_client_that_goes_away_leaves_no_trace() -> None:
    """I9: a waiting request that is cancelled takes no room, and the next one gets its turn."""

    async def run() -> None:
        hall = Hall()
        await hall.take_in(1000)
        gone = asyncio.create_task(hall.take_in(900, "gone"))
        await until_waiting(gone)
        following = asyncio.create_task(hall.take_in(900, "following"))
        await until_waiting(following)
        gone.cancel()
        hall.free(1000)
        await following

        assert hall.entered == ["", "following"]
        assert hall.room.used_bytes == 900

    asyncio.run(run())
