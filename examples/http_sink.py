"""
A sink of one's own: publishes to an HTTP service, exactly once.

The service needs two things, as `examples.http_receiver` shows: it counts who has opened a slot, and it stores a
request's records and its idempotency key in one transaction.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

import pyarrow as pa

from backend_client.sinks.protocol import Marker, Sink, Slot, SlotPublisher
from storage.errors import FencedError, UnavailableError

_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class HttpSink(Sink):
    """
    Posts each slot's records of a checkpoint as lines of JSON, in one request.

    Args:
        url: Address of the service.
    """

    url: str

    def check(self, columns: pa.Schema, slots: Sequence[Slot]) -> None:
        """Ask whether the service is there."""
        _call("GET", f"{self.url}/health")

    def open(self, slot: Slot) -> SlotPublisher:
        """Get the slot's next generation, after which the service refuses earlier ones."""
        url = f"{self.url}/slots/{slot.job_uid}/{slot.sink}/{slot.number}"
        opened = _call("POST", f"{url}/open")
        return _HttpPublisher(url, opened["generation"], opened["key"])


class _HttpPublisher(SlotPublisher):
    def __init__(self, url: str, generation: int, key: str | None) -> None:
        self._url = url
        self._generation = generation
        self._key = key

    def last_published(self) -> Marker | None:
        """Return the marker: the idempotency key of the last request that the service has stored."""
        return None if self._key is None else Marker.parse(self._key)

    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        """Post the records; the marker is the request's idempotency key."""
        lines = [json.dumps(row, default=str) for batch in records for row in batch.to_pylist()]
        headers = {"Idempotency-Key": marker.to_text(), "Generation": str(self._generation)}
        body = "\n".join(lines).encode()
        _call("POST", f"{self._url}/records", body, headers, expected=HTTPStatus.NO_CONTENT)
        self._key = marker.to_text()
        return len(lines)

    def close(self) -> None:
        """Nothing is kept open."""


class _NoRedirects(HTTPRedirectHandler):
    """A request that is redirected loses its records on the way, and is answered by another service."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none: the redirect is an error."""


_OPENER = build_opener(_NoRedirects)


def _call(
    method: str,
    url: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    *,
    expected: HTTPStatus = HTTPStatus.OK,
) -> Any:
    """Send a request; any other answer than the expected one is not the service's, such as the page of a proxy."""
    request = Request(url, body if method == "POST" else None, dict(headers or {}), method=method)  # noqa: S310 - the user's own address
    try:
        with _OPENER.open(request, timeout=_TIMEOUT_S) as response:
            found, text = response.status, response.read()
        if found == expected:
            return json.loads(text or b"null")
    except HTTPError as error:
        if error.code == HTTPStatus.CONFLICT:
            raise FencedError("the slot was opened by another publisher") from error
        raise UnavailableError(f"{url} refused output with status {error.code}: {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise UnavailableError(f"{url} does not answer: {error}; check that the service is up") from error
    raise UnavailableError(f"{url} answered with status {found} instead of {expected}: check the address")
