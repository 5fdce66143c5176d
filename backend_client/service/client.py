"""
HTTP to a changelog service, over a Unix socket or TCP.

Every request may be sent twice, because all operations of the service are idempotent. The client reopens broken
connections, waits for a missing service (or starts it, if it may), and retries after back-pressure, all within its
patience.

One connection per client, kept open; not thread-safe. Uses the standard library only, to keep workers light.
"""

from __future__ import annotations

import http.client
import json
import random
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import urlencode, urlsplit

from backend_client.service.answers import WholeBody, error_of, retry_after_s
from backend_client.service.deadline import Deadline
from dstl_service.wire import ChangeSetRef, CheckpointRef, LogTarget, PersistRequest, ReadRequest, decode_frames
from storage.errors import DstlError, InternalError, InvalidInputError, UnavailableError
from storage.key_groups import KeyGroupRange
from storage.private_folder import OWN, Trust, user_name
from storage.unix_peer import peer_uid

_RETRY_STATUSES = frozenset({429, 503})
_BROKEN = (OSError, http.client.HTTPException)
_LAST_TRY_S = 1.0
"""Minimum timeout of a request, even after its patience is over."""
_SIGN_OF_LIFE_S = 5.0
"""Interval of health checks, while an answer is pending, of a service that the client may restart."""
_SIGNS_PER_PATIENCE = 8


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float, trust: Trust) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._trust = trust

    def connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self.timeout)
            connection.connect(self._path)
            check_listener(connection, self._path, self._trust)
        except BaseException:
            connection.close()
            raise
        self.sock = connection


def check_listener(connection: socket.socket, path: str, trust: Trust) -> None:
    """
    Check that a trusted user's process listens at the other end of a Unix socket.

    Raises:
        InvalidInputError: Another user's process listens; it would get token and state, and could send forged tables.
    """
    uid = peer_uid(connection.fileno())
    if uid is not None and not trust.includes(uid):
        raise InvalidInputError(
            f"{user_name(uid)} listens on {path} and is not a trusted user, so nothing was sent: run the sidecar as "
            "the tasks' user, or add that user to the option trusted_uids (DSTL_TRUSTED_UIDS)"
        )


class ServiceClient:
    """
    A client of the service at `address`.

    Args:
        address: ``unix:///path``, ``http://host:port`` or ``https://host:port``.
        token: Sent with every request, or None; a function is called again when the service refuses its token.
        patience_s: How long a request is repeated before its error is raised.
        ensure: Called when the service does not answer soon; may start it, or replace one that hangs. None if managed
            externally.
        ca_file: CA certificates that verify an ``https`` service; None for the system's.
        trust: The users whose processes may listen on a Unix socket.
        certificate: Files with the client certificate and key for an ``https`` service, if any; may be the same file.
    """

    keeps_copies = False
    """Whether restored tables are a standby's copies, for which no snapshot is asked."""

    def __init__(
        self,
        address: str,
        token: str | Callable[[], str | None] | None = None,
        patience_s: float = 60.0,
        ensure: Callable[[], None] | None = None,
        ca_file: str | None = None,
        trust: Trust = OWN,
        certificate: tuple[str, str | None] | None = None,
    ) -> None:
        self._connection: http.client.HTTPConnection | None = None
        self.address = address
        self._ask_token = token if callable(token) else lambda: token
        self._token = self._ask_token()
        self._ca_file = ca_file
        self._trust = trust
        self._certificate = certificate
        self._patience_s = patience_s
        self._ensure = ensure
        self.takes_files = address.startswith("unix:") and not self.keeps_copies
        """Whether restores of tables may name files on this host's disk in place of their bytes."""

    def get(self, path: str) -> Any:
        """Return the JSON answer to a GET."""
        return self._json("GET", path, None)

    def post(self, path: str, body: Any, patience_s: float | None = None) -> Any:
        """Return the JSON answer to a POST of a JSON document, or None for an empty one."""
        return self._json("POST", path, json.dumps(body).encode(), patience_s)

    def append(
        self, target: LogTarget, sqn: int, payload: bytes, checksum: int, count: int, *, preemptive: bool
    ) -> ChangeSetRef:
        """Send a change set; return the reference by which the coordinator can get it."""
        query = urlencode(
            {
                "operator": target.operator,
                "checkpoint_id": target.checkpoint_id,
                "epoch": target.epoch,
                "attempt": target.attempt,
                "partition": target.partition,
                "sqn": sqn,
                "first_key_group": target.key_groups.first,
                "last_key_group": target.key_groups.last,
                "count": count,
                "checksum": f"{checksum:016x}",
                "preemptive": "true" if preemptive else "false",
                **({"job_uid": target.job_uid} if target.job_uid else {}),
            }
        )
        answer = self._json("POST", f"/v1/jobs/{target.job}/change-sets?{query}", payload)
        return ChangeSetRef(**answer)

    def persist(self, job: str, epoch: int, refs: list[ChangeSetRef], *, wait: bool = True) -> list[dict[str, Any]]:
        """Make change sets durable; return their handles, or an empty list without `wait`."""
        body = asdict(PersistRequest(epoch, refs, wait))
        return list(self.post(f"/v1/jobs/{job}/persist", body)["handles"])

    @contextmanager
    def restore(
        self,
        job: str,
        operator: str,
        key_groups: KeyGroupRange,
        from_checkpoint: str | None,
        to_checkpoint: str,
        *,
        is_output: bool = False,
        only: int | None = None,
        patience_s: float | None = None,
    ) -> Iterator[Iterator[tuple[dict[str, Any], bytes]]]:
        """
        Open the stream of frames that advances a table from a checkpoint (None: an empty table) to another one.

        With `is_output` the operator holds rows in the log, and the frames are those, with `only` of one checkpoint.
        Frames: `dstl_service.wire.decode_frames`.
        """
        query: dict[str, Any] = {
            "operator": operator,
            "first_key_group": key_groups.first,
            "last_key_group": key_groups.last,
            "to": CheckpointRef.parse(to_checkpoint).to_text(),
            "have": from_checkpoint,
            "output": "true" if is_output else None,
            "only": only,
            "copy": "true" if self.keeps_copies else None,
            "files": "true" if self.takes_files and not is_output else None,
        }
        given = urlencode({name: value for name, value in query.items() if value is not None})
        with self._frames("GET", f"/v1/jobs/{job}/restore?{given}", None, patience_s) as frames:
            yield self._restored(frames)

    @contextmanager
    def read(
        self, job: str, epoch: int, refs: Sequence[ChangeSetRef]
    ) -> Iterator[Iterator[tuple[dict[str, Any], bytes]]]:
        """Open the stream of frames with these change sets of a checkpoint that does not exist yet."""
        body = json.dumps(asdict(ReadRequest(epoch, list(refs)))).encode()
        with self._frames("POST", f"/v1/jobs/{job}/read", body) as frames:
            yield frames

    def _restored(self, frames: Iterator[tuple[dict[str, Any], bytes]]) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Return the frames of a restore on their way to the caller; a subclass may look at them."""
        return frames

    @contextmanager
    def _frames(
        self, method: str, path: str, body: bytes | None, patience_s: float | None = None
    ) -> Iterator[Iterator[tuple[dict[str, Any], bytes]]]:
        response = self._request(method, path, body, Deadline(self._patience_s if patience_s is None else patience_s))
        try:
            yield decode_frames(WholeBody(response))
            if response.read(1):
                raise InternalError("the service sent data after the end of a stream")
        except BaseException as error:
            self.close()
            if isinstance(error, _BROKEN) and not isinstance(error, DstlError):
                raise UnavailableError(f"the service at {self.address} broke off a stream: {error}") from error
            raise

    def __del__(self) -> None:
        # A client is often dropped without `close`, for example with a query's runner.
        self.close()

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _json(self, method: str, path: str, body: bytes | None, patience_s: float | None = None) -> Any:
        deadline = Deadline(self._patience_s if patience_s is None else patience_s)
        while True:
            response = self._request(method, path, body, deadline)
            try:
                data = response.read()
            except _BROKEN as error:
                self.close()
                if deadline.left_s < 0:
                    raise UnavailableError(f"the service at {self.address} broke off an answer: {error}") from error
                continue
            try:
                return json.loads(data) if data else None
            except ValueError as error:
                raise InternalError(f"{self.address}, not a changelog service, answered {data[:100]!r}") from error

    def _request(self, method: str, path: str, body: bytes | None, deadline: Deadline) -> http.client.HTTPResponse:
        """Send until the answer is not a retryable refusal; raise the error that the service reports."""
        pause_s = 0.02
        while True:
            asked_s = 0
            try:
                response = self._send(method, path, body, deadline)
                reported = error_of(response, self.address) if response.status >= 300 else None
            except ssl.SSLCertVerificationError as error:
                self.close()
                raise InvalidInputError(
                    f"the certificate of {self.address} is not trusted: {error.verify_message}; set ca_file"
                ) from error
            except _BROKEN as error:
                self.close()
                if deadline.left_s <= 0:
                    raise UnavailableError(
                        f"the changelog service at {self.address} does not answer: {error}; check that it runs and "
                        "that this host can reach it"
                    ) from error
                if self._ensure is not None:
                    deadline.look_after(self._ensure)
            else:
                if reported is None:
                    return response
                if response.status == http.client.UNAUTHORIZED and self._has_new_token():
                    continue
                if response.status not in _RETRY_STATUSES or deadline.left_s <= 0:
                    raise reported
                asked_s = retry_after_s(response)
            # Many tasks get the same refusal at once; jitter keeps them from retrying together.
            pause_s_now = max(pause_s * random.uniform(0.5, 1.5), asked_s * random.uniform(1.0, 1.3))
            time.sleep(max(0.0, min(pause_s_now, deadline.left_s)))
            pause_s = min(1.0, pause_s * 2)

    def _send(self, method: str, path: str, body: bytes | None, deadline: Deadline) -> http.client.HTTPResponse:
        timeout_s = max(_LAST_TRY_S, deadline.left_s)
        # A slow upload may need another try; a hung service that reads nothing must leave time for it.
        send_s = timeout_s if self._ensure is None else max(_LAST_TRY_S, timeout_s / 2)
        if self._connection is None:
            self._connection = self._connect(send_s)
        elif self._connection.sock is not None:
            self._connection.sock.settimeout(send_s)
        headers = {
            "content-type": "application/json" if body is None or body[:1] in b"{[" else "application/octet-stream"
        }
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        self._connection.request(method, path, body=body, headers=headers)
        if self._ensure is not None:
            self._wait_for_answer(self._connection.sock, deadline, self._ensure)
        response = self._connection.getresponse()
        if response.length is None and not response.chunked:
            # The service always sends the length of an answer, so the connection broke within the headers.
            raise http.client.HTTPException("the connection closed within the answer's headers")
        return response

    def _wait_for_answer(self, connection: socket.socket, deadline: Deadline, ensure: Callable[[], None]) -> None:
        """
        Return when an answer begins or the connection breaks; check the service until then.

        A slow request is not sent again. If the service hangs and is replaced, the request ends with its connection. If
        the check itself fails, the wait continues, because the service may just be busy.
        """
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        look_s = min(_SIGN_OF_LIFE_S, self._patience_s / _SIGNS_PER_PATIENCE)
        end = Deadline(max(_LAST_TRY_S, deadline.left_s))
        while not poll.poll(max(0.0, min(end.left_s, look_s)) * 1000):
            if end.left_s <= 0:
                raise TimeoutError("timed out")
            with suppress(UnavailableError):
                deadline.look_after(partial(end.look_after, ensure))
        connection.settimeout(max(_LAST_TRY_S, end.left_s))

    def _has_new_token(self) -> bool:
        """Read the token again; return whether it changed. Tokens are rotated while jobs run."""
        previous, self._token = self._token, self._ask_token()
        return self._token != previous

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.address)
        if parts.scheme == "unix":
            return _UnixConnection(parts.path, timeout_s, self._trust)
        if parts.scheme == "http" and parts.hostname:
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        if parts.scheme == "https" and parts.hostname:
            try:
                context = ssl.create_default_context(cafile=self._ca_file)
            except OSError as error:
                raise InvalidInputError(f"ca_file {self._ca_file} cannot be read: {error}") from error
            if self._certificate is not None:
                try:
                    context.load_cert_chain(*self._certificate)
                except OSError as error:
                    raise InvalidInputError(f"certificate {self._certificate[0]} cannot be used: {error}") from error
            return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)
        raise InvalidInputError(
            f"service address {self.address!r} must be unix:///path, http://host:port or https://host:port"
        )
