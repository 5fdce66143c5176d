"""How many requests of a job may be in progress."""

from __future__ import annotations

import asyncio
from typing import Any

from dstl_service.http.job_limits import RequestPlaces
from dstl_service.process.logs import LogLimiter
from storage.testing import FakeClock


class Requests:
    """Requests that are answered when a test decides."""

    def __init__(self, connections_max: int) -> None:
        self.places = RequestPlaces(self._wait, connections_max)
        self.end = asyncio.Event()
        self.statuses: list[int] = []
        self.answered: list[str] = []

    async def _wait(self, scope: Any, receive: Any, send: Any) -> None:
        await self.end.wait()
        self.answered.append(scope["path"])

    def begin(self, path: str) -> asyncio.Task[None]:
        """Begin a request."""
        state = type("State", (), {"overloads": LogLimiter(FakeClock())})
        app = type("App", (), {"state": state})
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "app": app}

        async def send(message: dict[str, Any]) -> None:
            if "status" in message:
                self.statuses.append(message["status"])
                assert (b"connection", b"close") in message["headers"]

        return asyncio.create_task(self.places(scope, None, send))  # type: ignore[arg-type]  # nothing is received


def test_requests_of_one_job_leave_half_of_all_connections() -> None:
    """B13: a job whose requests never end leaves connections to others, and regains its own when they end."""

    async def story() -> None:
        requests = Requests(16)
        running = [requests.begin("/v1/jobs/greedy/change-sets") for _ in range(20)]
        running += [requests.begin("/v1/jobs/other"), requests.begin("/v1/info")]
        await asyncio.sleep(0)
        assert requests.statuses == [429] * 12
        requests.end.set()
        await asyncio.gather(*running)
        await asyncio.gather(*(requests.begin("/v1/jobs/greedy/change-sets") for _ in range(8)))
        assert requests.statuses == [429] * 12
        assert requests.answered.count("/v1/jobs/greedy/change-sets") == 16
        assert {"/v1/jobs/other", "/v1/info"} <= set(requests.answered)

    asyncio.run(asyncio.wait_for(story(), 60))


def test_one_connection_serves_one_request() -> None:
    """A service with a single connection answers on it."""

    async def story() -> None:
        requests = Requests(1)
        requests.end.set()
        await requests.begin("/v1/jobs/job")
        assert requests.answered == ["/v1/jobs/job"]

    asyncio.run(asyncio.wait_for(story(), 60))
