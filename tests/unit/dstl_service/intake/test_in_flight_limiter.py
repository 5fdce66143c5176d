"""Room for arriving bytes: which requests wait, which are refused, and in which order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest

from dstl_service.intake import in_flight_limiter
from dstl_service.intake.in_flight_limiter import InFlightLimiter
from storage.errors import OverloadedError
from tools.virtual_time import VirtualLoop


class Hall:
    """A room for 1000 bytes; a test decides how many are taken."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self.hurried = 0
        self.refused = 0
        self.entered: list[str] = []
        self.held_of: Counter[str] = Counter()
        self.room = InFlightLimiter(1000, self._held, self._hurry, self._refuse)

    def _held(self, job: str | None) -> int:
        return self.held_bytes if job is None else self.held_of[job]

    def _hurry(self) -> None:
        self.hurried += 1

    def _refuse(self) -> None:
        self.refused += 1

    async def take_in(self, size_bytes: int, name: str = "", job: str = "job") -> None:
        """Let a body arrive, and hold it."""
        async with self.room.reserved(job, size_bytes) as place:
            self.entered.append(name)
            await place.arrived(size_bytes)
            self.held_bytes += size_bytes
            self.held_of[job] += size_bytes

    def free(self, size_bytes: int, job: str = "job") -> None:
        """Free bytes, as the end of an upload does."""
        self.held_bytes -= size_bytes
        self.held_of[job] -= size_bytes
        self.room.freed()


def in_virtual_time(story: Coroutine[Any, Any, None]) -> None:
    """
    Run a story whose waits end in the order of their times, one after the other.

    With a real clock, a process that was kept from running would see all of them end at once.
    """
    loop = VirtualLoop(lambda *_: None)
    try:
        loop.run_until_complete(story)
    finally:
        loop.close()


async def until_waiting(*tasks: asyncio.Task[None]) -> None:
    """Run tasks until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


def test_bytes_up_to_limit_are_admitted() -> None:
    """I9: the limit itself may be reached."""

    async def run() -> None:
        hall = Hall()
        await hall.take_in(600)
        await hall.take_in(400, job="other")

        assert (hall.room.used_bytes, hall.hurried) == (1000, 0)

    asyncio.run(run())


def test_body_past_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """I9: a body that finds no room in time is refused, to be resent, and was never counted."""
    monkeypatch.setattr(in_flight_limiter, "WAIT_S", 0.01)

    async def run() -> None:
        hall = Hall()
        await hall.take_in(600)
        with pytest.raises(OverloadedError, match="limit of 1000"):
            await hall.take_in(401, job="other")

        assert (hall.room.used_bytes, hall.hurried, hall.refused) == (600, 1, 1)

    asyncio.run(run())


def test_arriving_body_counts() -> None:
    """I9: a body counts from its first byte, not only when it is complete, and no longer when it breaks off."""

    async def run() -> None:
        hall = Hall()
        with pytest.raises(ConnectionError):
            async with hall.room.reserved("job", 900):
                assert hall.room.used_bytes == 900
                raise ConnectionError

        assert hall.room.used_bytes == 0

    asyncio.run(run())


def test_waiting_body_enters_when_room_is_freed() -> None:
    """A body that does not fit speeds up the uploads and enters as soon as one of them has freed room."""

    async def run() -> None:
        hall = Hall()
        await hall.take_in(1000)
        waiting = asyncio.create_task(hall.take_in(500, job="other"))
        await until_waiting(waiting)
        hall.free(400)
        await until_waiting(waiting)
        hall.free(100)
        await waiting

        assert (hall.room.used_bytes, hall.hurried, hall.refused) == (1000, 1, 0)

    asyncio.run(run())


@pytest.mark.parametrize("large_job", ["small", "large"])
def test_small_body_overtakes_no_large_one(large_job: str) -> None:
    """Bodies enter in the order of arrival, or many small ones would starve a large one."""

    async def run() -> None:
        hall = Hall()
        await hall.take_in(1000)
        large = asyncio.create_task(hall.take_in(900, "large", large_job))
        await until_waiting(large)
        small = asyncio.create_task(hall.take_in(10, "small", "small"))
        hall.free(100)
        await until_waiting(large, small)
        hall.free(900)
        await large
        hall.free(900, large_job)
        await small

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


def test_claim_without_bytes_takes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """I9, B12: a body of which little arrived takes little room, whatever it claims; its room grows as it arrives."""
    monkeypatch.setattr(in_flight_limiter, "FIRST_BYTES_MAX", 100)

    async def run() -> None:
        hall = Hall()
        async with hall.room.reserved("slow", 1000) as place:
            await place.arrived(4)
            await hall.take_in(900)
            assert hall.room.used_bytes == 1000
            hall.free(900)
            assert hall.held_of.total() == 0
            for arrived_bytes in (96, 100, 200):
                await place.arrived(arrived_bytes)
            assert hall.room.used_bytes == 800
            await place.arrived(600)
            assert hall.room.used_bytes == 1000

        assert (hall.room.used_bytes, hall.refused) == (0, 0)

    asyncio.run(run())


@pytest.mark.parametrize("other", ["a", "b"])
def test_body_that_cannot_grow_is_refused(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I9: of bodies that together are too large, one is refused and frees its room, and the other continues."""
    monkeypatch.setattr(in_flight_limiter, "FIRST_BYTES_MAX", 100)

    async def run() -> None:
        hall = Hall()

        async def arrive(job: str) -> None:
            async with hall.room.reserved(job, 900) as place:
                for _ in range(9):
                    await place.arrived(100)
                    await asyncio.sleep(0)

        results = await asyncio.gather(arrive("a"), arrive(other), return_exceptions=True)

        assert sorted(type(result).__name__ for result in results) == ["NoneType", "OverloadedError"]
        assert hall.room.used_bytes == 0

    in_virtual_time(run())


def test_one_job_announces_at_most_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """B13: unfinished bodies of one job leave half of the room to other jobs."""
    monkeypatch.setattr(in_flight_limiter, "WAIT_S", 0.01)

    async def run() -> None:
        hall = Hall()
        refused = 0
        async with AsyncExitStack() as silent:
            for _ in range(10):
                try:
                    await silent.enter_async_context(hall.room.reserved("greedy", 250))
                except OverloadedError:
                    refused += 1
            await hall.take_in(500, job="other")

            assert (refused, hall.room.used_bytes) == (8, 1000)

    asyncio.run(run())


def test_several_jobs_announce_no_more_than_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """B13: jobs with unfinished bodies leave a quarter together, although each announces as much as it is allowed."""
    monkeypatch.setattr(in_flight_limiter, "FIRST_BYTES_MAX", 50)

    async def run() -> None:
        hall = Hall()
        promised = {}
        async with AsyncExitStack() as silent:
            for job in ("a", "b", "c"):
                before = hall.room.used_bytes
                try:
                    for _ in range(30):
                        await silent.enter_async_context(hall.room.reserved(job, 900))
                except OverloadedError:
                    promised[job] = hall.room.used_bytes - before
            await hall.take_in(50, job="other")

            assert promised == {"a": 500, "b": 250, "c": 50}

    in_virtual_time(run())


def test_one_job_holds_two_thirds() -> None:
    """I9, B13: one job's sets that wait for upload hold at most two thirds; other jobs' sets are received as well."""

    async def run() -> None:
        hall = Hall()
        for _ in range(13):
            await hall.take_in(50, job="hung")
        waiting = asyncio.create_task(hall.take_in(50, "own", "hung"))
        await until_waiting(waiting)
        assert hall.held_of["hung"] == 650
        for _ in range(2):
            await hall.take_in(50, job="second")
        for number in range(4):
            await hall.take_in(50, job=f"job {number}")
        assert not waiting.done()
        hall.free(50, "hung")
        hall.free(200, "hung")
        await waiting

    asyncio.run(run())


def test_set_larger_than_a_share_is_taken_in() -> None:
    """I9: the largest set is received when its job holds nothing else, without evicting sets of others."""

    async def run() -> None:
        hall = Hall()
        await hall.take_in(100, job="other")
        await hall.take_in(100, job="large")
        waiting = asyncio.create_task(hall.take_in(900, "large", "large"))
        await until_waiting(waiting)
        hall.free(100, "large")
        await waiting
        assert hall.room.used_bytes == 1000

    asyncio.run(run())


def test_freed_room_goes_to_who_holds_least() -> None:
    """B13: a job with dozens of waiting bodies does not keep another job waiting until all of them are served."""

    async def run() -> None:
        hall = Hall()
        await hall.take_in(600, job="other")
        await hall.take_in(300, job="many")
        await hall.take_in(100, job="few")
        tasks = [asyncio.create_task(hall.take_in(100, f"many {number}", "many")) for number in range(3)]
        await until_waiting(*tasks)
        tasks.append(asyncio.create_task(hall.take_in(100, "few", "few")))
        await until_waiting(*tasks)
        for _ in range(9):
            hall.free(100, "other" if hall.held_of["other"] else "many")
        await asyncio.gather(*tasks)

        assert hall.entered[3:] == ["few", "many 0", "many 1", "many 2"]

    asyncio.run(run())


def test_body_that_has_begun_is_overtaken_by_none_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """I9: a large set enters although its job keeps sending small ones, which would always find room before it."""
    monkeypatch.setattr(in_flight_limiter, "FIRST_BYTES_MAX", 10)

    async def run() -> None:
        hall = Hall()
        await hall.take_in(100)

        async def send_large() -> None:
            async with hall.room.reserved("job", 600) as place:
                await place.arrived(300)
                hall.entered.append("large")

        large = asyncio.create_task(send_large())
        await until_waiting(large)
        small = asyncio.create_task(hall.take_in(50, "small"))
        await until_waiting(large, small)
        hall.free(100)
        await asyncio.gather(large, small)

        assert hall.entered[-2:] == ["large", "small"]
        assert hall.refused == 0

    in_virtual_time(run())
