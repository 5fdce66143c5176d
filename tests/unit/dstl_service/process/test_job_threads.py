"""B13: the threads that jobs share: whatever one job does with them, requests of other jobs are served."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from dstl_service.composition import Parts
from dstl_service.formats.checkpoint_record import CheckpointRecord, NotedSet, encode_record, received_segment
from dstl_service.intake.notes import NOTES_AT_ONCE
from dstl_service.process.job_threads import JobThreads
from dstl_service.restore_service import RESTORE_THREADS
from storage.memory_store import MemoryStore
from storage.model import ChangeSetId, Segment, Writer
from storage.testing import Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.http_life import Life, service
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(180)


def with_threads(total: int, story: Callable[[JobThreads, threading.Event], Awaitable[None]]) -> None:
    """Run a test coroutine with some threads and the event that blocks them."""
    let_go = threading.Event()

    async def tell() -> None:
        threads = JobThreads(total, "test")
        try:
            await asyncio.wait_for(story(threads, let_go), 40)
        finally:
            let_go.set()
            threads.close()

    asyncio.run(tell())


def begun(threads: JobThreads, job: str, count: int, function: Callable[[], Any]) -> list[asyncio.Task[Any]]:
    """Start calls of a job."""
    return [asyncio.get_running_loop().create_task(threads.run(job, function)) for _ in range(count)]


def test_slow_calls_leave_threads_to_others() -> None:
    """Hung calls of one job take no thread from another one, and continue once they can."""

    async def story(threads: JobThreads, let_go: threading.Event) -> None:
        slow = begun(threads, "slow", 20, let_go.wait)
        await asyncio.sleep(0)
        assert await threads.run("other", int, "7") == 7
        let_go.set()
        assert await asyncio.gather(*slow) == [True] * 20

    with_threads(4, story)


@pytest.mark.parametrize("total", [4, 8, 16])
def test_slow_calls_of_several_jobs_leave_threads_to_others(total: int) -> None:
    """B13: as many jobs hang, with all calls they may have, as there are slots reserved for new jobs."""

    async def story(threads: JobThreads, let_go: threading.Event) -> None:
        slow = [call for job in range(total // 4) for call in begun(threads, f"slow {job}", total, let_go.wait)]
        for _ in range(3):
            await asyncio.sleep(0)
        assert await threads.run("other", int, "7") == 7
        let_go.set()
        assert all(await asyncio.gather(*slow))

    with_threads(total, story)


def test_stop_iteration_reaches_its_caller() -> None:
    """An error that a future cannot hold reaches the caller as another error, and the thread is free again."""

    async def story(threads: JobThreads, let_go: threading.Event) -> None:
        for _ in range(5):
            with pytest.raises(RuntimeError, match="StopIteration"):
                await threads.run("job", lambda: next(iter(())))

    with_threads(2, story)


def test_place_is_the_threads() -> None:
    """A call without a caller keeps its slot while its thread is busy: the number of running threads stays bounded."""

    async def story(threads: JobThreads, let_go: threading.Event) -> None:
        gone = begun(threads, "job", 3, let_go.wait)
        await asyncio.sleep(0)
        for call in gone:
            call.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        later = begun(threads, "job", 1, threading.get_ident)
        assert await threads.run("other", int, "7") == 7
        assert not later[0].done()
        let_go.set()
        await later[0]

    with_threads(4, story)


def test_pieces_come_in_order() -> None:
    """A result that is read in pieces is complete; an error is raised at the piece where it happened."""

    def pieces(last: int) -> Iterator[bytes]:
        for number in range(3):
            if number == last:
                raise ValueError(number)
            yield b"%d" % number

    async def story(threads: JobThreads, _: threading.Event) -> None:
        assert [piece async for piece in threads.each("job", pieces(9))] == [b"0", b"1", b"2"]
        got = []
        with pytest.raises(ValueError, match="2"):
            async for piece in threads.each("job", pieces(2)):
                got.append(piece)  # noqa: PERF401 - the error comes behind some
        assert got == [b"0", b"1"]

    with_threads(2, story)


def test_restores_of_one_job_leave_threads_to_others() -> None:
    """However many restores of one job wait for the store, small or streamed, a restore of another job is served."""
    let_go = threading.Event()

    def hung() -> Iterator[bytes]:
        let_go.wait(120)
        yield b"slow"

    async def story(own: Parts) -> None:
        async def streamed(job: str, pieces: Iterator[bytes]) -> bytes:
            return b"".join([piece async for piece in own.restores.in_turn(job, pieces)])

        create = asyncio.get_running_loop().create_task
        slow = [create(own.restores.joined("slow", hung())) for _ in range(RESTORE_THREADS)]
        slow += [create(streamed("slow", hung())) for _ in range(RESTORE_THREADS)]
        await asyncio.sleep(0)
        try:
            assert await asyncio.wait_for(own.restores.joined("other", iter([b"a", b"b"])), 40) == b"ab"
            assert await asyncio.wait_for(streamed("other", iter([b"a", b"b"])), 40) == b"ab"
        finally:
            let_go.set()
        assert await asyncio.gather(*slow) == [b"slow"] * 2 * RESTORE_THREADS

    with service(MemoryStore()) as life:
        life.portal.call(story, life.parts)


def test_registry_of_one_job_that_hangs_stops_no_other() -> None:
    """A job whose manifests hang occupies some threads: another job opens, persists and completes."""
    store = FaultyStore(MemoryStore())
    seen = RecordingStore(store)
    with service(seen, io_threads=4) as life, ThreadPoolExecutor(12) as callers:
        life.open()
        seen.clear()
        store.inject(Fault("list", FaultKind.DELAY, "job/*", times=None))
        waiting = [callers.submit(life.client.get, f"{life.path}/savepoints") for _ in range(12)]
        try:
            wait_until(lambda: seen.count("list") >= 2)
            other = Life(life.client, "other")
            other.open()
            assert other.complete(0, None, other.append())["id"] == 0
        finally:
            store.heal()
        assert [call.result().status_code for call in waiting] == [200] * 12


def test_notes_of_one_job_stop_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow notes of one job do not delay a note of another one."""
    let_go = threading.Event()

    def slowly(job: str, text: str) -> Any:
        assert job == "other" or let_go.wait(120)
        return received_segment(job, text)

    monkeypatch.setattr("dstl_service.intake.notes.received_segment", slowly)
    with service(MemoryStore(), io_threads=4) as life, ThreadPoolExecutor(12) as callers:
        waiting = [
            callers.submit(
                life.client.post, f"/v1/jobs/{job}/persist", json={"epoch": 1, "refs": [], "wait": True, "note": "{}"}
            )
            for job in [*["slow"] * 11, "other"]
        ]
        try:
            assert waiting[-1].result(20).status_code == 400
            assert not any(call.done() for call in waiting[:-1])
        finally:
            let_go.set()
        assert {call.result().status_code for call in waiting} == {400}


def test_few_notes_are_parsed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """I9: notes of megabytes need ten times their size while they are parsed: few at once, and fewer of one job."""
    let_go, running = threading.Event(), Counter[str]()

    def slowly(job: str, text: str) -> Any:
        running[job] += 1
        assert let_go.wait(120)
        return received_segment(job, text)

    monkeypatch.setattr("dstl_service.intake.notes.received_segment", slowly)
    with service(MemoryStore()) as life, ThreadPoolExecutor(40) as callers:

        def ask(job: str) -> Future[Any]:
            body = {"epoch": 1, "refs": [], "wait": True, "note": "{}"}
            return callers.submit(life.client.post, f"/v1/jobs/{job}/persist", json=body)

        waiting = [ask("one") for _ in range(12)]
        try:
            wait_until(lambda: running["one"] >= NOTES_AT_ONCE // 2)
            waiting += [ask(job) for job in ("two", "three", "four", "five") for _ in range(5)]
            wait_until(lambda: running.total() >= NOTES_AT_ONCE)
            assert life.client.get("/health").status_code == 200
            assert (running["one"], running.total()) == (NOTES_AT_ONCE // 2, NOTES_AT_ONCE)
        finally:
            let_go.set()
        assert {call.result().status_code for call in waiting} == {400}


def test_long_note_does_not_block_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """B9: a note, which may have megabytes, is read in a thread other than the event loop's."""
    sets = tuple(NotedSet(ChangeSetId("job", "op", 0, Writer(1, 1), 0, number), number) for number in range(100))
    text = encode_record(CheckpointRecord("job", "uid", 128, 0, sets, uid="u", epoch=1)).decode()
    readers: list[int] = []

    def recorded(job: str, text: str) -> Segment:
        readers.append(threading.get_ident())
        return received_segment(job, text)

    monkeypatch.setattr("dstl_service.intake.notes.received_segment", recorded)
    with service(MemoryStore()) as life:
        life.open()
        body = {"epoch": 1, "refs": [], "note": text}
        assert life.client.post(f"{life.path}/persist", json=body).status_code == 200
        loop_thread = life.portal.call(threading.get_ident)

    assert len(readers) == 1
    assert loop_thread not in readers
