"""Peers that accept and never answer, or lie: no other request waits for them."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from loadtest.attack.harness.attacker_job import AttackerJob
from loadtest.attack.harness.case import RSS_GROWTH_MAX, Case
from loadtest.attack.harness.target import TOKEN, Attacked, complete_body

_GROUP = "hung and lying peers"
_ANSWER_S = 4.0
"""Deadline of the service's answers to other requests meanwhile."""
_WATCHED_S = 2.0
_KNOWN_GROWTH_MAX = 192 << 20
"""Two answers of the maximum size that a peer may send."""
_MARK = b"mark-of-the-peer"

_Behaviour = Callable[[socket.socket], None]


class Peer:
    """Listens like another host's service, applies a behaviour to each connection, and keeps the received bytes."""

    def __init__(self, behaviour: _Behaviour | None = None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._behaviour = behaviour
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.got: list[bytes] = []
        self._kept: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """Stop listening and close all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._kept:
            connection.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._kept.append(connection)
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with suppress(OSError):
            self.got.append(connection.recv(65_536))
            if self._behaviour is not None:
                self._behaviour(connection)


@contextmanager
def _peers(count: int, behaviour: _Behaviour | None = None) -> Iterator[list[Peer]]:
    peers = [Peer(behaviour) for _ in range(count)]
    try:
        yield peers
    finally:
        for peer in peers:
            peer.close()


def _watch(target: Attacked, requests: Sequence[Callable[[], object]]) -> str | None:
    """Send requests that may hang, and check that others are answered meanwhile."""
    threads = [threading.Thread(target=_quietly, args=(send,), daemon=True) for send in requests]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _WATCHED_S
    while time.monotonic() < end:
        for method, path, body in (
            ("GET", "/ready", b""),
            ("GET", "/v1/jobs/neighbour/checkpoints", b""),
            ("POST", "/v1/jobs/beside/epochs", b'{"owner":"beside"}'),
        ):
            started = time.monotonic()
            answer = target.ask(method, path, body)
            took = time.monotonic() - started
            if answer.status != 200 or took > _ANSWER_S:
                return f"{method} {path} got {answer.status} after {took:.1f} s"
    return None


def _quietly(send: Callable[[], object]) -> None:
    with suppress(Exception):
        send()


def _asking(name: str, peers: int, refs: int, behaviour: _Behaviour | None = None, *, is_known: bool = False) -> Case:
    """Name sets of such peers in checkpoints, one job each; unknown peers must not get the token."""

    def run(target: Attacked) -> str | None:
        with _peers(peers, behaviour) as started:
            jobs = [AttackerJob(target, f"hung{number}") for number in range(peers)]

            def send(job: AttackerJob, peer: Peer) -> object:
                named = [job.ref(service_url=peer.url, service_id="peer", sqn=number) for number in range(refs)]
                return job.complete(named)

            pairs = zip(jobs, started, strict=True)
            found = _watch(target, [lambda job=job, peer=peer: send(job, peer) for job, peer in pairs])  # type: ignore[misc]
            if found is None and not is_known and any(TOKEN.encode() in data for peer in started for data in peer.got):
                found = "the token was sent to a stranger"
            return found

    known = ("beside", *(f"hung{number}" for number in range(peers)))
    growth_max = _KNOWN_GROWTH_MAX if is_known else RSS_GROWTH_MAX
    whole = f"{'known' if is_known else 'strange'} {name}"
    return Case(_GROUP, whole, run, known, growth_max, is_short=is_known == (behaviour is None))


def _drip(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
    for _ in range(60):
        connection.sendall(b"a")
        time.sleep(0.2)


def _flood(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
    for _ in range(4000):
        connection.sendall(b" " * 65_536)


def _headers_for_ever(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for _ in range(4000):
        connection.sendall(b"x: " + b"a" * 60_000 + b"\r\n")


def _lie(connection: socket.socket) -> None:
    body = b'{"handles":[{"object":"' + _MARK + b'"}],"kind":"not_found","message":"' + _MARK + b'","context":{}}'
    connection.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()


def _token_case(name: str, path: str) -> Case:
    """A caller with a token cannot make the service send its own to an address of the caller's choice."""

    def run(target: Attacked) -> str | None:
        with _peers(1, _lie) as (peer,):
            job = AttackerJob(target)
            refs = [job.ref(service_url=peer.url, service_id="peer")]
            body = {"epoch": job.epoch, "refs": refs} if path == "persist" else complete_body(job.epoch, 0, None, refs)
            job.post("checkpoints/0/begin", {"epoch": job.epoch})
            answer = job.post(path, body)
            if any(TOKEN.encode() in data for data in peer.got):
                return "the token was sent to a stranger"
            return "the stranger's answer was passed on" if _MARK in answer.data else None

    return Case(_GROUP, name, run, known=("forged",))


def _stopped(target: Attacked) -> str | None:
    """A sidecar of the same storage that is suspended while in use delays its own job only."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        other = Attacked(Path(folder) / "other", beside=target)
        stack.enter_context(other)
        job = AttackerJob(target, "hung0")
        job.post("checkpoints/0/begin", {"epoch": job.epoch})
        handed = AttackerJob(other, "hung1")  # a job of its own, so that it keeps running
        query = handed.append(handed.epoch)
        ref = json.loads(query.data.partition(b"\r\n\r\n")[2])
        refs = [job.ref(service_id=ref["service_id"], service_url=other.url, sqn=sqn) for sqn in range(40)]
        os.kill(other.pid, signal.SIGSTOP)
        try:
            return _watch(target, [lambda: job.complete(refs)] * 20)
        finally:
            os.kill(other.pid, signal.SIGCONT)


KNOWN = {"DSTL_PEERS_ALLOWED": "http://127.0.0.1:*"}
"""Settings of a service that knows the peers of these cases."""


def _behaviours(*, is_known: bool) -> list[Case]:
    return [
        _asking("peer that never answers, 40 sets", 1, 40, is_known=is_known),
        _asking("peers that never answer, 16", 16, 1, is_known=is_known),
        _asking("peers that never answer, 24 with 3 sets each", 24, 3, is_known=is_known),
        _asking("peer that sends single bytes", 4, 2, _drip, is_known=is_known),
        _asking("peer that sends 250 MB", 2, 2, _flood, is_known=is_known),
        _asking("peer whose head never ends", 2, 2, _headers_for_ever, is_known=is_known),
        _asking("peer that resets", 8, 2, _reset, is_known=is_known),
    ]


def of_known_peers() -> list[Case]:
    """Return the cases for a service with the settings `KNOWN`."""
    return _behaviours(is_known=True)


def cases() -> list[Case]:
    """Return the cases of this group, for a service that requires a token."""
    return [
        *_behaviours(is_known=False),
        _token_case("token for a stranger: complete", "checkpoints/0/complete"),
        _token_case("token for a stranger: flush", "checkpoints/0/flush"),
        _token_case("token for a stranger: persist", "persist"),
        Case(_GROUP, "sidecar that is stopped (SIGSTOP)", _stopped, known=("beside", "hung0", "hung1", "@services")),
    ]
