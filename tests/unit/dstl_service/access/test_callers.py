"""Over a Unix socket, the service answers only processes of trusted users."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from dstl_service.access.callers import identified
from dstl_service.http.connections import Connections
from dstl_service.http.http_protocol import protocol_of
from dstl_service.process.logs import LogLimiter
from dstl_service.settings import HttpSettings
from storage.private_folder import Trust
from storage.testing import FakeClock
from tests.other_user import IS_ROOT, NOBODY, another_user


class NobodyTrusted(Trust):
    """Trust no user at all."""

    __slots__ = ()

    def includes(self, uid: int) -> bool:
        """Trust nobody."""
        return False


async def answer_to(trust: Trust, path: Path, *, as_other: bool = False) -> bytes:
    """Return everything that a caller over a Unix socket reads."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, lifespan="off", log_config=None)
    config.load()
    protocol = identified(protocol_of(Connections(HttpSettings(), LogLimiter(FakeClock()))), trust)
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: protocol(config, state, {}), str(path))
    os.chmod(path, 0o777)
    try:
        if as_other:
            with another_user():
                reader, writer = await asyncio.open_unix_connection(str(path))
        else:
            reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return answer
    finally:
        server.close()
        await server.wait_closed()


def test_own_processes_are_answered(tmp_path: Path) -> None:
    """A process of the service's own user is accepted."""
    assert asyncio.run(answer_to(Trust(), tmp_path / "s")).startswith(b"HTTP/1.1 200")


def test_others_are_refused_before_their_request_is_read(tmp_path: Path) -> None:
    """A process of another user is told which setting would admit it; its request is not read."""
    answer = asyncio.run(answer_to(NobodyTrusted(), tmp_path / "s"))

    assert answer.startswith(b"HTTP/1.1 403")
    assert b"trusted_uids" in answer


@pytest.mark.skipif(not IS_ROOT, reason="only root can be another user")
@pytest.mark.parametrize(("users", "status"), [("", b"403"), (str(NOBODY), b"200")])
def test_real_other_user(users: str, status: bytes) -> None:
    """The kernel's answer about another user's process decides, whatever the socket's mode."""
    with tempfile.TemporaryDirectory(prefix="dc") as folder:
        os.chmod(folder, 0o755)
        answer = asyncio.run(answer_to(Trust.parse(users), Path(folder) / "s", as_other=True))

    assert answer.startswith(b"HTTP/1.1 " + status)
