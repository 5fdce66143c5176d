"""The metrics of restores while they run, and after their clients disconnect."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message

from dstl_service.intake.change_sets import BatchSettings
from storage.memory_store import MemoryStore
from tests.unit.dstl_service.http_life import Life, service, text

SEGMENT_BYTES = 1 << 20
SEGMENTS = 4
NAMES = ("dstl_restore_planned_bytes_total", "dstl_restored_bytes_total", "dstl_restores_running")


def progress(life: Life) -> list[float | None]:
    """Return planned bytes, sent bytes and running restores of the job."""
    return [life.parts.metrics.registry.get_sample_value(name, {"job": "job"}) for name in NAMES]


def stored(life: Life) -> dict[str, Any]:
    """Complete a checkpoint of several large segments; return its reference."""
    life.open()
    sets = [life.append(bytes([number]) * SEGMENT_BYTES, partition=number) for number in range(SEGMENTS)]
    return life.complete(0, None, *sets)


async def take_some(life: Life, ref: dict[str, Any], frames: int) -> list[float | None]:
    """Restore like a client that reads some frames, then none, and disconnects; return the progress before that."""
    is_stuck, is_gone = asyncio.Event(), asyncio.Event()
    taken = 0

    async def receive() -> Message:
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal taken
        if message["type"] == "http.response.body":
            if taken == frames:
                is_stuck.set()
                await asyncio.Event().wait()
            taken += 1

    query = f"operator=op&first_key_group=0&last_key_group=127&to={text(ref)}"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "GET",
        "path": f"{life.path}/restore",
        "query_string": query.encode(),
        "headers": [],
    }
    answer = asyncio.ensure_future(life.client.app(scope, receive, send))
    await is_stuck.wait()
    seen = progress(life)
    is_gone.set()
    await answer
    return seen


def test_progress_follows_what_client_took() -> None:
    """Frames that the client read count as sent; when it disconnects, the restore no longer runs."""
    with service(MemoryStore(), batch=BatchSettings()) as life:
        ref = stored(life)
        plan_and_two_segments = 3
        during = life.portal.call(take_some, life, ref, plan_and_two_segments)
        after = progress(life)

    assert during == [SEGMENTS * SEGMENT_BYTES, 2 * SEGMENT_BYTES, 1]
    assert after == [SEGMENTS * SEGMENT_BYTES, 2 * SEGMENT_BYTES, 0]


def test_whole_restores_send_what_was_planned() -> None:
    """Large restores, which are streamed, and small ones, which are not, report all planned bytes as sent."""
    with service(MemoryStore(), batch=BatchSettings()) as life:
        first = stored(life)
        assert life.restore(first) == (True, [bytes([number]) * SEGMENT_BYTES for number in range(SEGMENTS)])
        streamed = progress(life)
        second = life.complete(1, first, life.append(b"small", checkpoint_id=1))
        assert life.restore(second, first) == (False, [b"small"])
        small = progress(life)

    assert streamed == [SEGMENTS * SEGMENT_BYTES, SEGMENTS * SEGMENT_BYTES, 0]
    assert small == [SEGMENTS * SEGMENT_BYTES + 5, SEGMENTS * SEGMENT_BYTES + 5, 0]
