"""
HTTP to a changelog service, over a Unix socket or TCP.

Every request may be sent twice: all of the service's operations are safe to repeat. So a connection that breaks is
opened again, a service that is gone is waited for (or started again, where the client may), and one that pushes back is
asked again after a while, all within the client's patience.

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

from dstl_service.wire import ChangeSetRef, CheckpointRef, LogTarget, PersistRequest, ReadRequest, decode_frames
from storage.errors import DstlError, InternalError, InvalidInputError, UnavailableError, error_from_dict
from storage.model import KeyGroupRange
from storage.private_folder import OWN, Trust, user_name
from storage.unix_peer import peer_uid

_RETRY_STATUSES = frozenset({429, 503})
_UNAUTHORIZED = 401
_BROKEN = (OSError, http.client.HTTPException)
_RETRY_AFTER_MAX_S = 60
_LAST_TRY_S = 1.0
"""What a request gets at least, also one whose patience is over."""
_SIGN_OF_LIFE_S = 5.0
"""A service that may be started anew is asked for a sign of life when an answer takes so long."""
_SIGNS_PER_PATIENCE = 8


class _Deadline:
    """How long somebody waits, less what was spent on starting the service anew."""

    def __init__(self, patience_s: float) -> None:
        self._at = time.monotonic() + patience_s

    @property
    def left_s(self) -> float:
        """What is left; negative when it is over."""
        return self._at - time.monotonic()

    def look_after(self, ensure: Callable[[], None]) -> None:
        """Have the service looked after; the time is not the request's."""
        begun = time.monotonic()
        ensure()
        self._at += time.monotonic() - begun


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
    Return if a trusted user's process listens at the other end of a Unix socket.

    Raises:
        InvalidInputError: Another user's does, who would get token and state, and could hand out tables of their own.
    """
    uid = peer_uid(connection.fileno())
    if uid is not None and not trust.includes(uid):
        raise InvalidInputError(
            f"{user_name(uid)} answers on {path}, and nothing is sent there: run the sidecar as the tasks' user, or "
            "let the option trusted_uids (DSTL_TRUSTED_UIDS) name that one"
        )


class ServiceClient:
    """
    A client of the service at `address`.

    Args:
        address: ``unix:///path``, ``http://host:port`` or ``https://host:port``.
        token: Sent with every request, or None; a function is asked again when the service refuses what it gave.
        patience_s: How long a request is repeated before its error is raised.
        ensure: Called when nobody answers, or not soon: may start the service anew, in the place of one that hangs.
            None: somebody else looks after it.
        ca_file: Certificates by which an ``https`` service is known; None: those of the system.
        trust: Whose process may listen on a Unix socket.
        certificate: Files with the certificate and the key to show to an ``https`` service, if any; both may be one.
    """

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

    def get(self, path: str) -> Any:
        """Return the JSON answer to a GET."""
        return self._json("GET", path, None)

    def post(self, path: str, body: Any, patience_s: float | None = None) -> Any:
        """Return the JSON answer to a POST of a JSON document, or None for an empty one."""
        return self._json("POST", path, json.dumps(body).encode(), patience_s)

    def append(
        self, target: LogTarget, sqn: int, payload: bytes, checksum: int, count: int, *, preemptive: bool
    ) -> ChangeSetRef:
        """Hand a change set over; return the reference by which the coordinator can ask for it."""
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
        """Have change sets made durable; return their handles, or nothing without `wait`."""
        body = asdict(PersistRequest(epoch, refs, wait))
        handles: list[dict[str, Any]] = self.post(f"/v1/jobs/{job}/persist", body)["handles"]
        return handles

    @contextmanager
    def restore(
        self, job: str, operator: str, key_groups: KeyGroupRange, from_checkpoint: str | None, to_checkpoint: str
    ) -> Iterator[Iterator[tuple[dict[str, Any], bytes]]]:
        """
        Open the stream of frames that leads a table from one checkpoint, or None for an empty table, to another one.

        For the frames see `dstl_service.wire.decode_frames`.
        """
        query = {
            "operator": operator,
            "first_key_group": key_groups.first,
            "last_key_group": key_groups.last,
            "to": CheckpointRef.parse(to_checkpoint).to_text(),
        }
        if from_checkpoint is not None:
            query["have"] = from_checkpoint
        with self._frames("GET", f"/v1/jobs/{job}/restore?{urlencode(query)}", None) as frames:
            yield frames

    @contextmanager
    def read(
        self, job: str, epoch: int, refs: Sequence[ChangeSetRef]
    ) -> Iterator[Iterator[tuple[dict[str, Any], bytes]]]:
        """Open the stream of frames that are these change sets, of a checkpoint that does not exist yet."""
        body = json.dumps(asdict(ReadRequest(epoch, list(refs)))).encode()
        with self._frames("POST", f"/v1/jobs/{job}/read", body) as frames:
            yield frames

    @contextmanager
    def _frames(self, method: str, path: str, body: bytes | None) -> Iterator[Iterator[tuple[dict[str, Any], bytes]]]:
        response = self._request(method, path, body, _Deadline(self._patience_s))
        try:
            yield decode_frames(response)
            if response.read(1):
                raise InternalError("the service sent more than the end of a stream")
        except BaseException as error:
            self.close()
            if isinstance(error, _BROKEN) and not isinstance(error, DstlError):
                raise UnavailableError(f"the service at {self.address} broke off a stream: {error}") from error
            raise

    def __del__(self) -> None:
        # A query has no end that a client could wait for: its runner is simply dropped.
        self.close()

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _json(self, method: str, path: str, body: bytes | None, patience_s: float | None = None) -> Any:
        deadline = _Deadline(self._patience_s if patience_s is None else patience_s)
        while True:
            response = self._request(method, path, body, deadline)
            try:
                data = response.read()
            except _BROKEN as error:
                self.close()
                if deadline.left_s < 0:
                    raise UnavailableError(f"the service at {self.address} broke off: {error}") from error
                continue
            try:
                return json.loads(data) if data else None
            except ValueError as error:
                raise InternalError(f"{self.address} answered {data[:100]!r}: is it a changelog service?") from error

    def _request(self, method: str, path: str, body: bytes | None, deadline: _Deadline) -> http.client.HTTPResponse:
        """Send until an answer comes that is none of "not now"; raise what the service reports."""
        pause_s = 0.02
        while True:
            asked_s = 0
            try:
                response = self._send(method, path, body, deadline)
                reported = _error_of(response) if response.status >= 300 else None
            except ssl.SSLCertVerificationError as error:
                self.close()
                raise InvalidInputError(
                    f"the certificate of {self.address} is not trusted: {error.verify_message}; set ca_file"
                ) from error
            except _BROKEN as error:
                self.close()
                if deadline.left_s <= 0:
                    raise UnavailableError(
                        f"the changelog service at {self.address} does not answer: {error}; is it running on this host?"
                    ) from error
                if self._ensure is not None:
                    deadline.look_after(self._ensure)
            else:
                if reported is None:
                    return response
                if response.status == _UNAUTHORIZED and self._has_new_token():
                    continue
                if response.status not in _RETRY_STATUSES or deadline.left_s <= 0:
                    raise reported
                asked_s = _retry_after_s(response)
            # Many tasks meet the same refusal at the same time; they must not come back together.
            pause_s_now = max(pause_s * random.uniform(0.5, 1.5), asked_s * random.uniform(1.0, 1.3))
            time.sleep(max(0.0, min(pause_s_now, deadline.left_s)))
            pause_s = min(1.0, pause_s * 2)

    def _send(self, method: str, path: str, body: bytes | None, deadline: _Deadline) -> http.client.HTTPResponse:
        timeout_s = max(_LAST_TRY_S, deadline.left_s)
        # A body that is taken slowly is sent again; one that a hung service takes not at all must leave time for that.
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
            # The service always says how long an answer is: the connection broke within the headers.
            raise http.client.HTTPException("the answer's headers broke off")
        return response

    def _wait_for_answer(self, connection: socket.socket, deadline: _Deadline, ensure: Callable[[], None]) -> None:
        """
        Return when an answer begins, or the connection breaks; have the service looked after until then.

        A request may take long, and is not sent again for that. One whose service hangs ends with its connection. It is
        waited for no less because nobody can tell how the service is, or end it: it may be busy, and answer.
        """
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        look_s = min(_SIGN_OF_LIFE_S, self._patience_s / _SIGNS_PER_PATIENCE)
        end = _Deadline(max(_LAST_TRY_S, deadline.left_s))
        while not poll.poll(max(0.0, min(end.left_s, look_s)) * 1000):
            if end.left_s <= 0:
                raise TimeoutError("timed out")
            with suppress(UnavailableError):
                deadline.look_after(partial(end.look_after, ensure))
        connection.settimeout(max(_LAST_TRY_S, end.left_s))

    def _has_new_token(self) -> bool:
        """Ask for the token again; tell whether it is another one now. It is exchanged while jobs run."""
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


def _retry_after_s(response: http.client.HTTPResponse) -> int:
    """Return how long the service asks to wait; 0 if it does not say, or not in seconds."""
    text = response.getheader("retry-after", "")
    return min(int(text), _RETRY_AFTER_MAX_S) if text.isascii() and text.isdigit() else 0


def _error_of(response: http.client.HTTPResponse) -> DstlError:
    data = response.read()
    try:
        return error_from_dict(json.loads(data))
    except (ValueError, AttributeError):
        return InternalError(f"the service answered {response.status}: {data[:200]!r}")
