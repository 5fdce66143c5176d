"""A check that callers share: how often it is made, and what each of them is told."""

from __future__ import annotations

import asyncio

import pytest

from dstl_service.process.shared_check import KEPT_MS, SharedCheck
from storage.errors import UnavailableError
from storage.testing import FakeClock


class Storage:
    """Counts its checks; each waits until it may go on, and fails while it is down."""

    def __init__(self) -> None:
        self.checks = 0
        self.is_down = False
        self.may_go_on = asyncio.Event()

    async def check(self) -> None:
        self.checks += 1
        await self.may_go_on.wait()
        if self.is_down:
            raise UnavailableError("it is down")


async def _asked(shared: SharedCheck, times: int) -> list[BaseException | None]:
    return await asyncio.gather(*(shared.ask() for _ in range(times)), return_exceptions=True)


def test_callers_share_a_check_and_its_good_answer() -> None:
    """However many ask, one check is made; the next one when the answer is a second old."""

    async def scenario() -> None:
        storage, clock = Storage(), FakeClock()
        shared = SharedCheck(storage.check, clock)
        asked = asyncio.create_task(_asked(shared, 100))
        await asyncio.sleep(0)
        storage.may_go_on.set()
        assert await asked == [None] * 100
        assert await _asked(shared, 100) == [None] * 100
        assert storage.checks == 1
        clock.advance(KEPT_MS)
        await _asked(shared, 100)
        assert storage.checks == 2

    asyncio.run(scenario())


def test_error_reaches_all_and_is_not_kept() -> None:
    """All who wait for a check get its error; who asks later has the storage checked again."""

    async def scenario() -> None:
        storage = Storage()
        shared = SharedCheck(storage.check, FakeClock())
        storage.is_down = True
        storage.may_go_on.set()
        errors = await _asked(shared, 3)
        assert [type(error) for error in errors] == [UnavailableError] * 3
        storage.is_down = False
        await shared.ask()
        assert storage.checks == 2

    asyncio.run(scenario())


def test_caller_that_leaves_does_not_end_the_check() -> None:
    """Others still get the answer of a check whose first caller has disconnected."""

    async def scenario() -> None:
        storage = Storage()
        shared = SharedCheck(storage.check, FakeClock())
        first, second = asyncio.create_task(shared.ask()), asyncio.create_task(shared.ask())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        storage.may_go_on.set()
        await second
        assert storage.checks == 1

    asyncio.run(scenario())
