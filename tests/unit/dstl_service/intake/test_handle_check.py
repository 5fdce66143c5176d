"""How handles in a request are checked: few objects at a time, and beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dstl_service.intake import handle_check, persister
from dstl_service.intake.handle_check import HandleCheck, checked_handle
from dstl_service.wire import ChangeSetRef
from storage.errors import LostChangesError
from storage.memory_store import MemoryStore
from storage.model import SegmentHandle
from tests.unit.dstl_service.http_life import service
from tests.unit.dstl_service.samples import handles_of, segment, stored


class Looks:
    """Look-ups that wait until a test lets them go, as those of a slow store do."""

    def __init__(self) -> None:
        self.waiting = 0
        self.waiting_max = 0
        self.let_go = asyncio.Event()

    async def __call__(self, job: str, look: Callable[..., Any], *args: Any) -> Any:
        self.waiting += 1
        self.waiting_max = max(self.waiting_max, self.waiting)
        await self.let_go.wait()
        self.waiting -= 1
        return look(*args)


def absent(count: int) -> list[SegmentHandle]:
    """Return handles of objects that do not exist."""
    (handle,) = handles_of([segment()])
    return [replace(handle, object_key=f"job/segments/host/{number}.seg") for number in range(count)]


def test_few_objects_are_looked_for_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A13: requests that name many absent objects, and wait for none, leave a bounded number of look-ups behind."""
    monkeypatch.setattr(handle_check, "LOOKS_AHEAD_MAX", 20)
    monkeypatch.setattr(handle_check, "LOOKS_AT_ONCE", 10)

    async def story() -> None:
        looks = Looks()
        check = HandleCheck(MemoryStore(), looks)
        for _ in range(3):
            check.begin("job", absent(100))
        await asyncio.sleep(0)
        assert looks.waiting == 20
        asked = asyncio.create_task(check.check("job", absent(200)[100:]))
        await asyncio.sleep(0.01)
        assert looks.waiting == 30
        looks.let_go.set()
        with pytest.raises(LostChangesError):
            await asked
        assert looks.waiting_max == 30
        check.begin("job", absent(5))
        await asyncio.sleep(0.01)
        assert looks.waiting == 0

    asyncio.run(asyncio.wait_for(story(), 60))


def test_all_objects_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """I5: each of many handles is compared with its object, the last one too."""
    monkeypatch.setattr(handle_check, "LOOKS_AT_ONCE", 2)
    store = MemoryStore()
    handles = [stored(store, [segment(n)], f"job/segments/host/{n}.seg")[0] for n in range(5)]

    async def story() -> None:
        looks = Looks()
        looks.let_go.set()
        check = HandleCheck(store, looks)
        await check.check("job", handles)
        with pytest.raises(LostChangesError):
            await check.check("job", [*handles, absent(9)[8]])

    asyncio.run(asyncio.wait_for(story(), 60))


def test_references_are_parted_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """C37: a request may have any number of handles, and keeps no other one waiting while they are checked."""
    threads: list[str] = []

    def recorded(job: str, ref: ChangeSetRef, handle: SegmentHandle) -> SegmentHandle:
        threads.append(threading.current_thread().name.partition("_")[0])
        return checked_handle(job, ref, handle)

    monkeypatch.setattr(persister, "checked_handle", recorded)
    monkeypatch.setattr(persister, "_ON_LOOP_MAX", 1)
    with service(MemoryStore()) as life:
        life.open()
        ref, other = (life.append(partition=partition) for partition in (0, 1))
        (handle,) = life.persist(ref).json()["handles"]
        life.complete(0, None, {**ref, "handle": handle}, other)

    assert threads == ["io"]
