"""Bodies that are larger than they look, or never end: their share of the service's memory is bounded."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import pyarrow as pa

from loadtest.attack.harness.attacker_job import AttackerJob, answered, place_of_sets
from loadtest.attack.harness.case import Case, no_bug, refused
from loadtest.attack.harness.raw import Answer, ask, connected, request
from loadtest.attack.harness.target import Attacked, complete_body
from storage.change_set import SCHEMA

_GROUP = "bodies, trailers and bombs"
_MIB = 1 << 20
_SET = place_of_sets("neighbour", 1)
_JSON = "/v1/jobs/neighbour/epochs"
_CLAIMED_S = 6.0
"""Longer than a batch of another job may take."""
_BOMB_BYTES = 512 * _MIB
_DECODED_MAX = 160 * _MIB
_MERGED_S = 5.0


def _chunked(path: str, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *headers]
    return "\r\n".join([*lines, "transfer-encoding: chunked"]).encode() + b"\r\n\r\n"


def _pouring(
    name: str, head: bytes, piece: bytes, count: int, *, growth_max: int = 32 * _MIB, is_cut: bool = True
) -> Case:
    """Send a head, then a piece many times: the service must hold little of it, and with `is_cut` disconnect."""

    def run(target: Attacked) -> str | None:
        answer = ask(target.address, head, *([piece] * count), wait_s=8.0)
        if not is_cut:
            return None
        if answer.sent_bytes < len(head) + len(piece) * count or answer.is_closed or answer.is_refused:
            return None
        return f"accepted {answer.sent_bytes >> 20} MiB without an answer"

    return Case(_GROUP, name, run, rss_growth_max=growth_max)


def _trailers(path: str, method: str = "POST") -> tuple[bytes, bytes, int]:
    line = b"x-trailer: " + b"a" * 8000 + b"\r\n"
    return _chunked(path, method=method) + b"2\r\n{}\r\n0\r\n", line * 8, 400


def _small_chunks(target: Attacked) -> str | None:
    body = b"".join(b"1\r\n \r\n" for _ in range(100_000)) + b"0\r\n\r\n"
    return no_bug(ask(target.address, _chunked(_JSON) + body, wait_s=20.0))


def _sending(name: str, data: bytes, *, growth_max: int = 48 * _MIB) -> Case:
    def run(target: Attacked) -> str | None:
        return refused(ask(target.address, data, wait_s=10.0))

    return Case(_GROUP, name, run, rss_growth_max=growth_max)


def _claiming(name: str, size: int, count: int) -> Case:
    """Claim a large body, send four bytes and wait: other jobs continue."""

    def run(target: Attacked) -> str | None:
        place = AttackerJob(target, "claimer").place_of_sets()
        with ExitStack() as stack:
            for _ in range(count):
                connection = stack.enter_context(connected(target.address))
                connection.sendall(request("POST", place, headers={"content-length": str(size)}) + b"abcd")
            time.sleep(_CLAIMED_S)
        return None

    return Case(_GROUP, name, run, known=("claimer",))


def _unfinished(target: Attacked) -> str | None:
    piece = b" " * _MIB
    with ExitStack() as stack:
        for _ in range(10):
            connection = stack.enter_context(connected(target.address))
            connection.settimeout(2.0)
            with suppress(OSError):
                connection.sendall(request("POST", _JSON, headers={"content-length": str(31 * _MIB)}))
                for _ in range(30):
                    connection.sendall(piece)
        time.sleep(1.0)
    return None


def _pipelined(target: Attacked) -> str | None:
    """A valid request after a body of 100 KB is answered."""
    body = json.dumps({"owner": "a", "unknown": "x" * 100_000}).encode()
    first = request("POST", "/v1/jobs/neighbour/nothing", body, {"connection": "keep-alive"})
    answer: Answer = ask(target.address, first + request("GET", "/health"))
    return None if answer.statuses[1:] == [200] else f"the statuses are {answer.statuses}"


_DECODE = """
import sys
import pyarrow as pa
from storage.change_set import decode_change_set
from storage.errors import DstlError
data = open(sys.argv[1], "rb").read()
try:
    list(decode_change_set(data, "bomb"))
except DstlError:
    pass
print(pa.default_memory_pool().max_memory())
"""


def _bomb(target: Attacked) -> str | None:
    """A change set of some KB that unpacks to half a GiB is refused before it takes that much memory."""
    del target
    with tempfile.TemporaryDirectory() as folder:
        path, sink = Path(folder) / "bomb", pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, SCHEMA, options=options) as writer:
            value = pa.array([bytes(_BOMB_BYTES)], pa.binary())
            writer.write_batch(pa.record_batch([pa.array([b"\0\0key"], pa.binary()), value], schema=SCHEMA))
        path.write_bytes(sink.getvalue().to_pybytes())
        done = subprocess.run(
            [sys.executable, "-c", _DECODE, str(path)], capture_output=True, text=True, check=True, timeout=60
        )
        size = path.stat().st_size
    decoded = int(done.stdout)
    return f"{size} bytes became {decoded >> 20} MiB" if decoded > _DECODED_MAX else None


def _merged_bombs(target: Attacked) -> str | None:
    """Complete checkpoints of which each is acceptable; their log is not compacted if it unpacks to gigabytes."""
    _complete(AttackerJob(target, "merged"), (_set(bytes(500 * _MIB), "zstd") for _ in range(3)))
    return None


def _values_elsewhere(target: Attacked) -> str | None:
    """A log whose values lie outside of their sets is not compacted: the result would hold other jobs' memory."""
    near, far = struct.pack("<3i", 0, 2 * _MIB, 2 * _MIB), struct.pack("<3i", 0, 4 * _MIB, 2 * _MIB)
    _complete(AttackerJob(target, "elsewhere"), (_set(None, None).replace(near, far) for _ in range(3)))
    merged = list((target.storage / "elsewhere" / "segments").rglob("*=*.seg"))
    return f"{len(merged)} objects have values from elsewhere" if merged else None


def _set(value: bytes | None, compression: str | None) -> bytes:
    """Return a change set of a key with 2 MiB, and of one with this value."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        values = pa.array([os.urandom(2 * _MIB), value], pa.binary())
        writer.write_batch(pa.record_batch([pa.array([b"\0\0a", b"\0\0b"], pa.binary()), values], schema=SCHEMA))
    return bytes(sink.getvalue().to_pybytes())


def _complete(job: AttackerJob, sets: Iterable[bytes]) -> None:
    """Complete a checkpoint with each of these sets, and wait until their log may have been compacted."""
    operators, base = [{"name": "op", "parallelism": 1, "key_schema": "", "states": {}}], None
    for number, payload in enumerate(sets):
        job.post(f"checkpoints/{number}/begin", {"epoch": job.epoch})
        ref = job.append(job.epoch, payload, checkpoint_id=number, count=2)
        body = {**complete_body(job.epoch, number, base, [answered(ref)]), "operators": operators}
        base = answered(job.post(f"checkpoints/{number}/complete", body))["ref"]
    time.sleep(_MERGED_S)


def _long_offsets(target: Attacked) -> str | None:
    """Complete checkpoints with offsets of 25 MiB each: the coordinator holds those of all retained ones."""
    job = AttackerJob(target, "offsets")
    return refused(job.complete([], offsets="a" * (25 * _MIB)))


def _append_bomb(target: Attacked) -> str | None:
    """A compressed body is not unpacked on receipt."""
    body = gzip.compress(bytes(200 * _MIB), 9)
    return refused(ask(target.address, request("POST", _JSON, body, {"content-encoding": "gzip"}), wait_s=10.0))


def _many_values(name: str, value: bytes, path: str = _JSON) -> Case:
    """Send as many short values as 31 MiB hold: parsed, they would take gigabytes, and the time of all other jobs."""
    body = b'{"owner":"a","x":[' + value * (31 * _MIB // len(value)) + b"1]}"

    def run(target: Attacked) -> str | None:
        return refused(ask(target.address, request("POST", path, body), wait_s=20.0))

    return Case(_GROUP, name, run, neighbour_ms_max=1_000.0)


def cases() -> list[Case]:
    """Return the cases of this group."""
    return [
        _pouring("trailers of 25 MB", *_trailers(_JSON)),
        _pouring("trailers of 25 MB after an open path", *_trailers("/health", "GET")),
        _pouring("trailers of 25 MB after no path", *_trailers("/nothing")),
        _pouring("trailers of 25 MB after a change set", *_trailers(_SET)),
        _pouring("many short trailers", _chunked(_JSON) + b"2\r\n{}\r\n0\r\n", b"x: a\r\n" * 1000, 2000),
        _pouring("chunk extension of 25 MB", _chunked(_JSON) + b"1;x=", b"a" * 65_536, 400),
        _pouring("chunk size of a million zeros", _chunked(_JSON), b"0" * 65_536, 64, is_cut=False),
        _pouring(
            "JSON of 60 MB in chunks",
            _chunked(_JSON),
            b"10000\r\n" + b" " * 65_536 + b"\r\n",
            960,
            growth_max=96 * _MIB,
        ),
        _sending("JSON said to have 33 MiB", request("POST", _JSON, headers={"content-length": str(33 * _MIB)}) + b"{"),
        _sending(
            "change set said to have 1 GiB", request("POST", _SET, headers={"content-length": str(1 << 30)}) + b"a"
        ),
        _sending("change set without a length", _chunked(_SET) + b"1\r\na\r\n0\r\n\r\n"),
        _sending("change set of another checksum", request("POST", _SET, b"a" * _MIB)),
        _many_values("ten million empty lists", b"[],"),
        _many_values("ten million empty objects", b"{},", "/v1/jobs/neighbour/checkpoints/0/complete"),
        _many_values("eight million numbers", b"999,"),
        Case(_GROUP, "100,000 chunks of one byte", _small_chunks),
        Case(_GROUP, "valid request after a body of 100 KB", _pipelined),
        Case(_GROUP, "compressed JSON of 200 MB", _append_bomb, rss_growth_max=48 * _MIB),
        Case(_GROUP, "change set that unpacks to 512 MiB", _bomb, neighbour_ms_max=60_000.0),
        Case(_GROUP, "log that unpacks to 1.5 GiB", _merged_bombs, known=("merged",), neighbour_ms_max=60_000.0),
        Case(_GROUP, "log with values elsewhere in memory", _values_elsewhere, known=("elsewhere",)),
        Case(_GROUP, "offsets of 25 MiB", _long_offsets, known=("offsets",), rss_growth_max=160 * _MIB),
        _claiming("claimed 100 MiB, sent four bytes", 100 * _MIB, 1),
        _claiming("claimed 30 MiB, twenty times", 30 * _MIB, 20),
        Case(_GROUP, "ten unfinished JSON bodies of 31 MiB", _unfinished, rss_growth_max=160 * _MIB),
    ]
