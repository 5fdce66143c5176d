"""How often a task asks its sidecar for the link to the coordinator."""

from __future__ import annotations

import uuid
from typing import Any

from backend_client.service.host_link import linked_coordinator
from dstl_service.wire import LinkAddress

COORDINATOR = "c" * 32


class RecordingSidecar:
    """A service that has a link, and counts the requests for it."""

    def __init__(self) -> None:
        self.asked = 0

    def post(self, path: str, body: dict[str, Any], patience_s: float) -> dict[str, Any]:
        """Answer a request."""
        assert (path, body["host"], patience_s > 0) == ("/v1/jobs/job/links", "driver.example", True)
        self.asked += 1
        return {"coordinator_id": COORDINATOR, "why_not": ""}


def test_process_of_a_sidecar_is_asked_once_in_a_while() -> None:
    """I7: a restarted sidecar has no link, so it is asked; else its change sets are lost in each try of the batch."""
    sidecar, address = RecordingSidecar(), LinkAddress("driver.example", 1, "", uuid.uuid4().hex)

    def linked(service_id: str) -> str | None:
        return linked_coordinator(sidecar, "job", address, service_id)  # type: ignore[arg-type]

    assert [linked(name) for name in ("first", "first", "successor", "successor")] == [COORDINATOR] * 4
    assert sidecar.asked == 2
