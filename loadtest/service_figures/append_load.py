"""
A minimal append load, since it runs on the same processors as the service that it measures.

A *lane* is one query on a host: a process that appends the change sets of a checkpoint over several connections,
requests their upload, waits for their handles, and continues with the next checkpoint. While one lane waits, the others
append. Requests are written to raw sockets with prepared payloads; a connection has one request in progress, like a
task's. Only the length of an answer is decoded.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from storage.checksum import checksum64

_START_DELAY_S = 1.0
_PAUSE_S = 0.01
_RECEIVE_BYTES = 1 << 20
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """Load of each lane: `sets` change sets of `set_bytes` per checkpoint, for at least `seconds`."""

    set_bytes: int
    sets: int
    seconds: float
    lanes: int = 2
    connections: int = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """Durable data of all lanes together, and its cost."""

    seconds: float
    sets: int
    checkpoints: int
    refused: int
    megabytes: float


class LoadError(RuntimeError):
    """The service answered with an error; its text is the message."""


def run_load(socket_path: str, load: Load) -> Outcome:
    """Run the lanes in parallel against the service at a Unix socket."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(load.lanes, mp_context=context) as pool:
        start_s = time.monotonic() + _START_DELAY_S
        lanes = [pool.submit(_run_lane, socket_path, f"lane-{number}", load, start_s) for number in range(load.lanes)]
        done: Sequence[tuple[float, int, int]] = [lane.result() for lane in lanes]
    checkpoints = sum(count for _, count, _ in done)
    sets = checkpoints * load.sets
    return Outcome(
        seconds=max(end_s for end_s, _, _ in done) - start_s,
        sets=sets,
        checkpoints=checkpoints,
        refused=sum(refused for _, _, refused in done),
        megabytes=sets * load.set_bytes / 1e6,
    )


class Connection:
    """One persistent connection with at most one request in progress."""

    def __init__(self, socket_path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_TIMEOUT_S)
        self._socket.connect(socket_path)
        self._request: tuple[bytes, bytes] = (b"", b"")
        self.refused = 0

    def send(self, path: str, body: bytes) -> None:
        """Send a POST without waiting for the answer."""
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        kind = "application/json" if body[:1] == b"{" else "application/octet-stream"
        self._request = (f"{head}content-type: {kind}\r\n\r\n".encode(), body)
        self._write()

    def answer(self) -> bytes:
        """Return the body of the answer; after back-pressure the request is sent again after a pause."""
        while True:
            head, body = self._read()
            if head.startswith(b"HTTP/1.1 200 "):
                return body
            if not head.startswith(b"HTTP/1.1 429 "):
                raise LoadError(body.decode(errors="replace"))
            self.refused += 1
            time.sleep(_PAUSE_S)
            self._write()

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def _write(self) -> None:
        head, body = self._request
        sent = self._socket.sendmsg([head, body])
        if sent < len(head) + len(body):
            self._socket.sendall(memoryview(body)[sent - len(head) :])

    def _read(self) -> tuple[bytes, bytes]:
        data = self._receive()
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._receive()
        head, body = data[:end], data[end + 4 :]
        length = int(head[head.index(b"content-length: ") + 16 :].partition(b"\r\n")[0])
        while len(body) < length:
            body += self._receive()
        return head, body

    def _receive(self) -> bytes:
        data = self._socket.recv(_RECEIVE_BYTES)
        if not data:
            raise LoadError("the service closed the connection")
        return data


def _run_lane(socket_path: str, job: str, load: Load, start_s: float) -> tuple[float, int, int]:
    """Return the lane's end time, its number of durable checkpoints, and how often it met back-pressure."""
    payload = os.urandom(load.set_bytes)
    query = f"first_key_group=0&last_key_group=127&count=1&checksum={checksum64(payload):016x}"
    connections = [Connection(socket_path) for _ in range(load.connections)]
    connections[0].send(f"/v1/jobs/{job}/epochs", b'{"owner":"load"}')
    epoch = json.loads(connections[0].answer())["epoch"]
    time.sleep(max(0.0, start_s - time.monotonic()))
    checkpoint_id = 0
    while checkpoint_id == 0 or time.monotonic() < start_s + load.seconds:
        path = f"/v1/jobs/{job}/change-sets?operator=op&checkpoint_id={checkpoint_id}&epoch={epoch}&attempt=1"
        refs = []
        for number in range(load.sets + load.connections):
            connection = connections[number % load.connections]
            if number >= load.connections:
                refs.append(connection.answer())
            if number < load.sets:
                connection.send(f"{path}&partition={number % 128}&sqn={number}&{query}", payload)
        connections[0].send(f"/v1/jobs/{job}/persist", b'{"epoch":%d,"refs":[%b]}' % (epoch, b",".join(refs)))
        connections[0].answer()
        checkpoint_id += 1
    end_s = time.monotonic()
    for connection in connections:
        connection.close()
    return end_s, checkpoint_id, sum(connection.refused for connection in connections)
