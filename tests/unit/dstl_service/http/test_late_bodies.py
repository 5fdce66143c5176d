"""Bodies that stop arriving: how long they keep their room, and how they are answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from dstl_service.http.routes import appends
from storage.memory_store import MemoryStore
from tests.unit.dstl_service.http_life import Life, service

QUERY = (
    "operator=op&checkpoint_id=0&epoch=1&attempt=1&partition=0&sqn=0&first_key_group=0&last_key_group=1"
    "&count=1&checksum=0123456789abcdef"
)


def send_half(life: Life) -> tuple[int, dict[str, str]]:
    """Send half of a body directly to the application, and nothing more; return the answer's status and headers."""
    answer: dict[str, Any] = {}
    pieces = [{"type": "http.request", "body": b"x" * 700, "more_body": True}] * 2

    async def receive() -> Message:
        if not pieces:
            await asyncio.Event().wait()
        return pieces.pop()

    async def send(message: Message) -> None:
        answer.update(message)

    life.post_raw(f"{life.path}/change-sets", QUERY.encode(), [(b"content-length", b"1900")], receive, send)
    return answer["status"], {name.decode(): value.decode() for name, value in answer["headers"]}


@pytest.mark.timeout(60)
def test_body_that_never_comes_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """I9: a body that stops arriving is given up, its connection is closed, and others get its room."""
    monkeypatch.setattr(appends, "BODY_WAIT_S", 0.05)
    with service(MemoryStore()) as life:
        life.open()
        status, headers = send_half(life)

        assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
        assert "dstl_in_flight_bytes 0.0" in life.client.get("/metrics").text.splitlines()
        assert life.append_raw(b"x" * 1900).status_code == 200
