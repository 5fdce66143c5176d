"""How answers are written to their connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from dstl_service.http.http_protocol import GatheredWrites


class Connection:
    """A transport that records its calls."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.closing = False

    def writelines(self, lines: Iterable[bytes]) -> None:
        """Record one system call."""
        self.done.append(list(lines))

    def close(self) -> None:
        """Record the end."""
        self.closing = True
        self.done.append("closed")

    def is_closing(self) -> bool:
        """Tell whether it was closed."""
        return self.closing


def done_after(act: Callable[[GatheredWrites, Connection], None]) -> list[Any]:
    """Return the calls on a connection after this turn of the event loop and the next."""
    connection = Connection()

    async def run() -> None:
        # Stands in for a transport.
        act(GatheredWrites(connection, asyncio.get_running_loop()), connection)  # type: ignore[arg-type]
        await asyncio.sleep(0)

    asyncio.run(run())
    return connection.done


def test_head_and_body_leave_together() -> None:
    """Writes of one turn of the event loop become one write, in their order."""

    def act(writes: GatheredWrites, _: Connection) -> None:
        writes.write(b"head")
        writes.write(b"body")

    assert done_after(act) == [[b"head", b"body"]]


def test_nothing_is_lost_at_close() -> None:
    """Data written before a close are sent before it, once."""

    def act(writes: GatheredWrites, _: Connection) -> None:
        writes.write(b"answer")
        writes.close()

    assert done_after(act) == [[b"answer"], "closed"]


def test_lost_connection_is_not_written() -> None:
    """A connection that broke meanwhile gets no more writes, and this causes no error."""

    def act(writes: GatheredWrites, connection: Connection) -> None:
        writes.write(b"answer")
        connection.closing = True

    assert done_after(act) == []


def test_all_else_is_the_transport_itself() -> None:
    """All calls other than writing and closing go to the transport."""

    def act(writes: GatheredWrites, connection: Connection) -> None:
        assert not writes.is_closing()
        connection.closing = True
        assert writes.is_closing()

    assert done_after(act) == []
