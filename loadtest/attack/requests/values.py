"""Hostile JSON and numbers: refused as invalid, never a bug, and never stored."""

from __future__ import annotations

from loadtest.attack.harness.case import Case, refused
from loadtest.attack.harness.raw import ask, request
from loadtest.attack.harness.target import Attacked

_OPEN = "/v1/jobs/values/epochs"
_BEGIN = "/v1/jobs/neighbour/checkpoints/0/begin"
_COMPLETE = "/v1/jobs/neighbour/checkpoints/0/complete"
_DIGITS = "9" * 5000

_BODIES: dict[str, tuple[str, bytes]] = {
    "epoch of 5,000 digits": (_BEGIN, b'{"epoch":' + _DIGITS.encode() + b"}"),
    "epoch NaN": (_BEGIN, b'{"epoch":NaN}'),
    "epoch Infinity": (_BEGIN, b'{"epoch":Infinity}'),
    "epoch 1e400": (_BEGIN, b'{"epoch":1e400}'),
    "epoch below zero": (_BEGIN, b'{"epoch":-1}'),
    "epoch beyond 53 bits": (_BEGIN, b'{"epoch":9007199254740993}'),
    "epoch beyond 64 bits": (_BEGIN, b'{"epoch":18446744073709551617}'),
    "epoch as a text": (_BEGIN, b'{"epoch":"1"}'),
    "epoch as a float": (_BEGIN, b'{"epoch":1.5}'),
    "epoch as a flag": (_BEGIN, b'{"epoch":true}'),
    "epoch as null": (_BEGIN, b'{"epoch":null}'),
    "epoch as a list": (_BEGIN, b'{"epoch":[1]}'),
    "no epoch": (_BEGIN, b"{}"),
    "lists 100,000 deep": (_OPEN, b"[" * 100_000),
    "objects 100,000 deep": (_OPEN, b'{"a":' * 100_000),
    "closed lists 50,000 deep": (_OPEN, b"[" * 50_000 + b"]" * 50_000),
    "owner 20,000 deep": (_OPEN, b'{"owner":' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
    "owner of a million letters": (_OPEN, b'{"owner":"' + b"a" * 1_000_000 + b'"}'),
    "owner as a number": (_OPEN, b'{"owner":1}'),
    "a list for an object": (_OPEN, b"[]"),
    "a text for an object": (_OPEN, b'"a"'),
    "null for an object": (_OPEN, b"null"),
    "nothing": (_OPEN, b""),
    "no JSON": (_OPEN, b"owner=a"),
    "broken UTF-8": (_OPEN, b'{"owner":"\xff\xfe"}'),
    "UTF-16": (_OPEN, '{"owner":1}'.encode("utf-16")),
    "half a surrogate as a name": (_COMPLETE, b'{"epoch":1,"uid":"\\ud800"}'),
    "NUL as a name": (_COMPLETE, b'{"epoch":1,"uid":"\\u0000"}'),
    "two documents": (_OPEN, b"{}{}"),
    "trailing comma": (_OPEN, b'{"owner":"a",}'),
    "parallelism of 5,000 digits": (_OPEN, b'{"owner":"a","max_parallelism":' + _DIGITS.encode() + b"}"),
    "parallelism of zero": (_OPEN, b'{"owner":"a","max_parallelism":0}'),
    "a million references": (
        _COMPLETE,
        b'{"epoch":1,"uid":"a","base":null,"operators":[],"refs":[' + b"1," * 1_000_000 + b"1]}",
    ),
    "offsets as an object": (_COMPLETE, b'{"epoch":1,"uid":"a","base":null,"operators":[],"refs":[],"offsets":{}}'),
}
_SET = "/v1/jobs/neighbour/change-sets?operator=op&checkpoint_id=0&epoch={epoch}&attempt=1&partition=0&sqn={sqn}"
_SET += "&first_key_group={first}&last_key_group=1&count={count}&checksum={checksum}"
_GOOD = {"epoch": "1", "sqn": "1", "first": "0", "count": "1", "checksum": "0" * 16}
_QUERIES: dict[str, dict[str, str]] = {
    "epoch of 5,000 digits": {"epoch": _DIGITS},
    "epoch NaN": {"epoch": "NaN"},
    "epoch below zero": {"epoch": "-1"},
    "epoch in other digits": {"epoch": "%D9%A1"},
    "epoch with underscores": {"epoch": "1_0"},
    "epoch twice": {"epoch": "1&epoch=2_"},
    "number of 5,000 digits": {"sqn": _DIGITS},
    "number as hex": {"sqn": "0x1"},
    "key groups reversed": {"first": "5"},
    "key group beyond the last": {"first": "70000"},
    "count below zero": {"count": "-5"},
    "count of 5,000 digits": {"count": _DIGITS},
    "checksum too long": {"checksum": "0" * 17},
    "checksum of other letters": {"checksum": "g" * 16},
    "checksum of another body": {"checksum": "1" * 16},
}
_PATHS: dict[str, tuple[str, str]] = {
    "checkpoint of 5,000 digits": ("GET", f"/v1/jobs/neighbour/checkpoints/{_DIGITS}"),
    "checkpoint below zero": ("GET", "/v1/jobs/neighbour/checkpoints/-1"),
    "version of 5,000 digits": (
        "GET",
        f"/v1/jobs/neighbour/restore?operator=op&first_key_group=0&last_key_group=1&to={_DIGITS}.0.a",
    ),
    "invalid version": ("GET", "/v1/jobs/neighbour/restore?operator=op&first_key_group=0&last_key_group=1&to=1.1"),
    "invalid flag": ("POST", "/v1/jobs/neighbour/garbage-collection?dry_run=perhaps"),
}


def _sending(name: str, data: bytes) -> Case:
    def run(target: Attacked) -> str | None:
        return refused(ask(target.address, data))

    return Case("hostile JSON and numbers", name, run)


def cases() -> list[Case]:
    """Return the cases of this group."""
    found = [_sending(f"body: {name}", request("POST", path, body)) for name, (path, body) in _BODIES.items()]
    for name, values in _QUERIES.items():
        data = request("POST", _SET.format(**(_GOOD | values)), b"abcd")
        found.append(_sending(f"query: {name}", data))
    return found + [_sending(f"path: {name}", request(*asked)) for name, asked in _PATHS.items()]
