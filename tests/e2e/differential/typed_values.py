"""Values of every type that keys, rows, state and output can have."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

from pyspark.sql import Row

COLUMNS = {
    "flag": "boolean",
    "tiny": "byte",
    "small": "short",
    "number": "int",
    "big": "long",
    "single": "float",
    "twice": "double",
    "amount": "decimal(12,3)",
    "text": "string",
    "raw": "binary",
    "day": "date",
    "moment": "timestamp",
    "wall": "timestamp_ntz",
    "point": "struct<x: int, day: date, name: string>",
    "pair": "struct<x: int, when: timestamp, parts: array<decimal(5,2)>>",
    "list": "array<struct<n: long, raw: binary>>",
    "lookup": "map<string, struct<day: date, tags: array<string>>>",
}
SCHEMA = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
MOMENT = dt.datetime(2024, 2, 29, 12, 30, 15, 123456)
VALUES: list[tuple[Any, ...]] = [
    (
        True,
        -5,
        300,
        70_000,
        1 << 60,
        0.5,
        -0.1,
        Decimal("12.345"),
        "Ünï",
        bytearray(b"\x00\xff"),
        dt.date(1969, 7, 20),
        MOMENT,
        MOMENT,
        Row(x=1, day=dt.date(2024, 2, 29), name=None),
        Row(x=1, when=MOMENT, parts=[Decimal("1.50"), None]),
        [Row(n=1, raw=bytearray(b"a")), None, Row(n=None, raw=None)],
        {"a": Row(day=dt.date(2024, 1, 1), tags=["x", None]), "b": None},
    ),
    (None,) * len(COLUMNS),
    (
        False,
        127,
        -32768,
        0,
        -1,
        float("inf"),
        1e300,
        Decimal("-0.001"),
        "",
        bytearray(),
        dt.date(1, 1, 1),
        dt.datetime(1900, 1, 1),
        dt.datetime(1, 1, 1),
        Row(x=None, day=None, name=""),
        Row(x=None, when=None, parts=[]),
        [],
        {},
    ),
]
# Spark fails on keys that hold arrays.
KEY_COLUMNS = tuple(name for name in COLUMNS if name not in ("pair", "list", "lookup"))
