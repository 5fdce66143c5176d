"""The number of compactions that run at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

from dstl_service.compaction.compactor import Compactor
from dstl_service.compaction.plan import Compaction, Output
from dstl_service.restore.segment_cache import SegmentCache
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.model import SegmentKind

PARTITION = KeyGroupRange(0, 7)
COMPACTION = Compaction("op", 1, frozenset(), frozenset(), (Output(0, PARTITION, SegmentKind.COMPACTED, ()),))


class Threads:
    """Runs calls on demand, and counts those that run."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.go_on = asyncio.Event()

    async def run(self, job: str, function: Any, *args: Any) -> Any:
        """Count the call until `go_on` is set."""
        self.running.append(job)
        await self.go_on.wait()
        self.running.remove(job)
        return function(*args)


def compactor_of(threads: Threads) -> Compactor:
    """Return a compactor whose calls run in these threads."""
    return Compactor(MemoryStore(), SegmentCache(1), None, threads.run, 1)  # type: ignore[arg-type]


async def settled() -> None:
    """Run the event loop until nothing is ready."""
    for _ in range(20):
        await asyncio.sleep(0)


async def _many_jobs() -> tuple[int, int]:
    threads = Threads()
    compactor = compactor_of(threads)
    runs = [asyncio.ensure_future(compactor.run(f"job-{number}", 1, [COMPACTION], "uid")) for number in range(10)]
    await settled()
    at_once = len(threads.running)
    threads.go_on.set()
    return at_once, sum(len(made) for made in await asyncio.gather(*runs))


def test_compactions_of_many_jobs_run_in_turn() -> None:
    """C7: however many jobs compact, only two hold their logs in memory at a time; all of them finish."""
    assert asyncio.run(_many_jobs()) == (2, 10)


async def _cancelled() -> tuple[list[str], list[str]]:
    threads = Threads()
    compactor = compactor_of(threads)
    runs = [asyncio.ensure_future(compactor.run(f"job-{number}", 1, [COMPACTION], "uid")) for number in range(4)]
    await settled()
    for run in runs[:2]:
        run.cancel()
    await settled()
    held = list(threads.running)
    threads.go_on.set()
    ended = await asyncio.gather(*runs, return_exceptions=True)
    return held, ["cancelled" if isinstance(end, asyncio.CancelledError) else "made" for end in ended]


def test_cancelled_compaction_gives_its_turn_back_when_its_thread_ends() -> None:
    """C7: the thread of a cancelled compaction still holds memory, so the next compaction waits for its end."""
    assert asyncio.run(_cancelled()) == (["job-0", "job-1"], ["cancelled", "cancelled", "made", "made"])
