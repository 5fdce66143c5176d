"""A driver and its tasks, as the service sees them: requests through FastAPI's test client."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anyio.from_thread import BlockingPortal
from fastapi import FastAPI
from fastapi.testclient import TestClient
from httpx2 import Response
from starlette.types import Receive, Send

from dstl_service.app import create_app
from dstl_service.composition import Parts
from dstl_service.intake.change_sets import BatchSettings
from dstl_service.settings import ServiceSettings
from dstl_service.uploads.settings import UploadSettings
from dstl_service.wire import decode_frames
from storage.checksum import checksum64
from storage.clock import Clock, IdSource
from storage.object_store import ObjectStore

QUICK = UploadSettings(timeout_ms=200, attempts_max=2, delay_after_error_ms=1)
PATIENT = UploadSettings(timeout_ms=10_000, attempts_max=2, delay_after_error_ms=1)
SMALL = BatchSettings(delay_ms=1, size_bytes=1000, in_flight_bytes_max=2000)


def scope_of_post(path: str, headers: list[tuple[bytes, bytes]], query: bytes = b"") -> dict[str, Any]:
    """Return the ASGI scope of a POST."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": headers,
        "client": ("test", 1),
        "server": ("test", 1),
    }


class Life:
    """Sends the requests of one job to one service process."""

    def __init__(self, client: TestClient, job: str = "job") -> None:
        self.client = client
        self.path = f"/v1/jobs/{job}"
        self.epoch = 0

    @property
    def portal(self) -> BlockingPortal:
        """The portal into the service's event loop."""
        assert self.client.portal is not None
        return self.client.portal

    @property
    def parts(self) -> Parts:
        """The parts of the service."""
        app = self.client.app
        assert isinstance(app, FastAPI)
        parts: Parts = app.state.parts
        return parts

    def open(self) -> dict[str, Any]:
        """Take the job over."""
        answer = self.client.post(f"{self.path}/epochs", json={"owner": "test"})
        assert answer.status_code == 200, answer.text
        opened: dict[str, Any] = answer.json()
        self.epoch = opened["epoch"]
        return opened

    def append_raw(self, payload: bytes = b"payload", **changes: Any) -> Response:
        """Send a change set; return the response."""
        query = {
            "operator": "op",
            "checkpoint_id": 0,
            "epoch": self.epoch,
            "attempt": 1,
            "partition": 0,
            "sqn": 0,
            "first_key_group": 0,
            "last_key_group": 127,
            "count": 1,
            "checksum": f"{checksum64(payload):016x}",
            **changes,
        }
        return self.client.post(f"{self.path}/change-sets", params=query, content=payload)

    def post_raw(
        self, path: str, query: bytes, headers: list[tuple[bytes, bytes]], receive: Receive, send: Send
    ) -> None:
        """Pass a POST directly to the application, whose body and answer go through these functions."""
        scope = scope_of_post(path, [(b"content-type", b"application/octet-stream"), *headers], query)
        self.portal.call(self.client.app, scope, receive, send)

    def append(self, payload: bytes = b"payload", **changes: Any) -> dict[str, Any]:
        """Send a change set that must be accepted; return its reference."""
        answer = self.append_raw(payload, **changes)
        assert answer.status_code == 200, answer.text
        reference: dict[str, Any] = answer.json()
        return reference

    def persist(self, *refs: dict[str, Any], wait: bool = True) -> Response:
        """Make sets durable; return the response."""
        return self.client.post(f"{self.path}/persist", json={"epoch": self.epoch, "refs": refs, "wait": wait})

    def begin(self, checkpoint_id: int) -> Response:
        """Begin a checkpoint; return the response."""
        return self.client.post(f"{self.path}/checkpoints/{checkpoint_id}/begin", json={"epoch": self.epoch})

    def abort(self, checkpoint_id: int) -> Response:
        """Abort a checkpoint; return the response."""
        return self.client.post(f"{self.path}/checkpoints/{checkpoint_id}/abort", json={"epoch": self.epoch})

    def flush(self, checkpoint_id: int, base: Any, *refs: dict[str, Any], **changes: Any) -> Response:
        """Start the upload of a checkpoint's sets; return the response."""
        return self._plan(f"{checkpoint_id}/flush", checkpoint_id, base, refs, changes)

    def complete_raw(self, checkpoint_id: int, base: Any, *refs: dict[str, Any], **changes: Any) -> Response:
        """Complete a checkpoint; return the response."""
        return self._plan(f"{checkpoint_id}/complete", checkpoint_id, base, refs, changes)

    def _plan(self, path: str, checkpoint_id: int, base: Any, refs: Any, changes: dict[str, Any]) -> Response:
        operator = {"name": "op", "parallelism": 1, "key_schema": "{}", "states": {}}
        body = {
            "epoch": self.epoch,
            "uid": f"e{self.epoch}c{checkpoint_id}",
            "base": base,
            "refs": refs,
            "operators": [operator],
            "query_id": "query",
            "offsets": "offsets",
            **changes,
        }
        return self.client.post(f"{self.path}/checkpoints/{path}", json=body)

    def complete(self, checkpoint_id: int, base: Any, *refs: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """Complete a checkpoint that must succeed; return its reference."""
        answer = self.complete_raw(checkpoint_id, base, *refs, **changes)
        assert answer.status_code == 200, answer.text
        reference: dict[str, Any] = answer.json()["ref"]
        return reference

    def restore_raw(self, want: dict[str, Any], at: dict[str, Any] | None = None, **changes: Any) -> Response:
        """Request the restore that leads from `at` to `want`; return the response."""
        query = {"operator": "op", "first_key_group": 0, "last_key_group": 127, "to": text(want), **changes}
        if at is not None:
            query["have"] = text(at)
        return self.client.get(f"{self.path}/restore", params=query)

    def restore(self, to: dict[str, Any], have: dict[str, Any] | None = None) -> tuple[bool, list[bytes]]:
        """Return whether the table must be empty, and the payloads."""
        answer = self.restore_raw(to, have)
        assert answer.status_code == 200, answer.text
        (plan, _), *segments, (end, _) = decode_frames(io.BytesIO(answer.content))
        assert (plan["kind"], end["kind"]) == ("plan", "end")
        assert [f"{checksum64(payload):016x}" for _, payload in segments] == [head["checksum"] for head, _ in segments]
        return plan["full"], [payload for _, payload in segments]


def samples(life: Life) -> dict[str, float]:
    """Return all samples of a service's metrics by their name with labels."""
    lines = [line for line in life.client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def text(ref: dict[str, Any]) -> str:
    """Return a reference in the form of query strings."""
    return f"{ref['id']}.{ref['generation']}.{ref['uid']}"


@contextmanager
def service(
    store: ObjectStore, clock: Clock | None = None, *, ids: IdSource | None = None, **settings: Any
) -> Iterator[Life]:
    """Run a service, like a new process, on a store; it starts with nothing in memory."""
    values = {"batch": SMALL, "upload": PATIENT, "host_id": "host", "shutdown_timeout_s": 1, **settings}
    app = create_app(ServiceSettings("memory://x", **values), store, clock, ids)
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
        yield Life(client)
