"""Requests that two parsers may read differently: the request hidden in them must never be executed."""

from __future__ import annotations

from loadtest.attack.harness.case import Case, no_bug, refused
from loadtest.attack.harness.raw import ask
from loadtest.attack.harness.target import Attacked

_BODY = b'{"owner":"smuggler"}'
_HIDDEN = (
    b"POST /v1/jobs/smuggled/epochs HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"content-length: 20\r\n\r\n" + _BODY
)
_CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(_BODY), _BODY)


def _post(*lines: bytes, body: bytes = b"", path: bytes = b"/v1/jobs/cover/checkpoints/0/begin") -> bytes:
    head = (b"POST " + path + b" HTTP/1.1", b"host: 127.0.0.1", b"content-type: application/json", *lines)
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def _get(*lines: bytes, rest: bytes = b"", start: bytes = b"GET /health HTTP/1.1") -> bytes:
    return b"\r\n".join((start, b"host: 127.0.0.1", *lines)) + b"\r\n\r\n" + rest


_END = b"0\r\n\r\n"

# Two lengths, or an invalid one: nothing after the head may be executed.
_AMBIGUOUS: dict[str, bytes] = {
    "length and chunks": _post(b"content-length: 5", b"transfer-encoding: chunked", body=_END + _HIDDEN),
    "chunks and length": _post(b"transfer-encoding: chunked", b"content-length: 5", body=_END + _HIDDEN),
    "two lengths": _post(b"content-length: 0", b"content-length: 200", body=_HIDDEN),
    "two lengths, reversed": _post(b"content-length: 200", b"content-length: 0", body=_HIDDEN),
    "list of lengths": _post(b"content-length: 0, 200", body=_HIDDEN),
    "length with plus": _post(b"content-length: +0", body=_HIDDEN),
    "negative length": _post(b"content-length: -1", body=_HIDDEN),
    "length in hex": _post(b"content-length: 0x0", body=_HIDDEN),
    "length of words": _post(b"content-length: none", body=_HIDDEN),
    "length of 5,000 digits": _post(b"content-length: " + b"9" * 5000, body=_HIDDEN),
    "length beyond 64 bits": _post(b"content-length: 18446744073709551616", body=_HIDDEN),
    "length with a space in it": _post(b"content-length: 0 0", body=_HIDDEN),
    "space before the colon": _post(b"content-length : 0", body=_HIDDEN),
    "unknown coding": _post(b"transfer-encoding: xchunked", body=_END + _HIDDEN),
    "chunked, then another": _post(b"transfer-encoding: chunked, identity", body=_END + _HIDDEN),
    "coding with a vertical tab": _post(b"transfer-encoding: \x0bchunked", body=_END + _HIDDEN),
    "coding with a space before the colon": _post(b"transfer-encoding : chunked", body=_END + _HIDDEN),
    "coding in quotes": _post(b'transfer-encoding: "chunked"', body=_END + _HIDDEN),
    "folded coding": _post(b"transfer-encoding:\r\n chunked, x", body=_END + _HIDDEN),
    "name with NUL": _post(b"content\x00-length: 0", body=_HIDDEN),
    "value with NUL": _post(b"x-a: a\x00b", body=_HIDDEN),
    "chunk size with 0x": _post(b"transfer-encoding: chunked", body=b"0x0\r\n\r\n" + _HIDDEN),
    "negative chunk size": _post(b"transfer-encoding: chunked", body=b"-1\r\n\r\n" + _HIDDEN),
    "chunk size beyond 64 bits": _post(b"transfer-encoding: chunked", body=b"1" + b"0" * 16 + b"\r\n" + _HIDDEN),
    "chunk size of no digits": _post(b"transfer-encoding: chunked", body=b"\r\n\r\n" + _HIDDEN),
    "chunk longer than it says": _post(b"transfer-encoding: chunked", body=b"1\r\nabc\r\n0\r\n\r\n" + _HIDDEN),
    "control characters as name": _post(b"\x01\x02: a", body=_HIDDEN),
    "line without colon": _post(b"no colon here", body=_HIDDEN),
}

# Odd, or of another protocol: any answer but a bug; the hidden request is part of a body or ignored.
_ODD: dict[str, bytes] = {
    "carriage return in a value": _post(b"x-a: a\rcontent-length: 0", b"content-length: 141", body=_HIDDEN),
    "line feed alone in a value": _post(b"x-a: a", b"content-length: %d" % len(_HIDDEN), body=_HIDDEN),
    "chunk extension that holds it": _post(
        b"transfer-encoding: chunked", b"connection: close", body=b"0;x=" + _HIDDEN.replace(b"\r\n", b" ") + b"\r\n\r\n"
    ),
    "trailer that holds it": _post(
        b"transfer-encoding: chunked",
        b"connection: close",
        body=b"0\r\nx: " + _HIDDEN.replace(b"\r\n", b" ") + b"\r\n\r\n",
    ),
    "body of a GET that holds it": _get(b"content-length: %d" % len(_HIDDEN), b"connection: close", rest=_HIDDEN),
    "switch to HTTP/2": _get(
        b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQAoAAA"
    ),
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "WebSocket": _get(
        b"connection: upgrade",
        b"upgrade: websocket",
        b"sec-websocket-version: 13",
        b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
    ),
    "HTTP/0.9": b"GET /health\r\n",
    "HTTP/9.9": _get(start=b"GET /health HTTP/9.9"),
    "HTTP/1.0 with chunks": b"POST /v1/jobs/cover/checkpoints/0/begin HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n"
    + _CHUNKED,
    "CONNECT": b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nhost: 127.0.0.1:22\r\n\r\n",
    "TRACE": _get(start=b"TRACE /v1/info HTTP/1.1"),
    "method of no protocol": _get(start=b"SMUGGLE /health HTTP/1.1"),
    "method of 60,000 letters": _get(start=b"A" * 60_000 + b" /health HTTP/1.1"),
    "path of 70,000 letters": _get(start=b"GET /" + b"a" * 70_000 + b" HTTP/1.1"),
    "header of 70,000 letters": _get(b"x-a: " + b"a" * 70_000),
    "10,000 headers": _get(*(b"x-%d: a" % number for number in range(10_000))),
    "expectation of no protocol": _post(b"expect: 200-maybe", b"content-length: 0", b"connection: close"),
    "continue without a body": _post(b"expect: 100-continue", b"content-length: 0", b"connection: close"),
    "address of another host": _get(b"connection: close", start=b"GET http://elsewhere.example/v1/info HTTP/1.1"),
    "two hosts": _get(b"host: elsewhere.example", b"connection: close"),
    "no host": b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n",
    "empty lines before": b"\r\n" * 50 + _get(b"connection: close"),
    "bytes of TLS": bytes.fromhex("16030100a5010000a10303") + b"\x00" * 160,
    "noise": bytes(range(256)) * 40,
}


def _ambiguous(data: bytes) -> Case:
    def run(target: Attacked) -> str | None:
        answer = ask(target.address, data, wait_s=3.0)
        return refused(answer) or ("two requests were answered" if len(answer.statuses) > 1 else None)

    return Case("request smuggling", "", run)


def _odd(data: bytes) -> Case:
    def run(target: Attacked) -> str | None:
        answer = ask(target.address, data, wait_s=3.0)
        return no_bug(answer) if answer.statuses else None

    return Case("request smuggling", "", run)


def cases() -> list[Case]:
    """Return the cases of this group."""
    found = [(name, _ambiguous(data)) for name, data in _AMBIGUOUS.items()]
    found += [(name, _odd(data)) for name, data in _ODD.items()]
    return [Case(case.group, name, case.run) for name, case in found]
