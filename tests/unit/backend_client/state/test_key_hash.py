"""Spark's hash of stored keys; tests/e2e/test_rewriting.py compares it with Spark's own for each type."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from backend_client.state.codec import KeyCodec
from backend_client.state.key_hash import KeyHash, key_group_of
from storage.errors import InvalidInputError
from tests.unit.backend_client.schemas import array, struct


def signed_hash(kind: Any, *values: Any) -> int:
    """Return Spark's hash of a key of columns of one type."""
    schema = json.dumps(struct(**{f"c{at}": kind for at in range(len(values))}))
    _, hashed = KeyHash(schema).first(KeyCodec(schema).encode(values))
    return hashed - (1 << 32) if hashed >> 31 else hashed


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("integer", 1, -559580957),
        ("long", 1, -1712319331),
        ("string", "Spark", 228093765),
        ("boolean", True, -559580957),
        ("string", None, 42),
    ],
)
def test_hash_of_spark(kind: str, value: Any, expected: int) -> None:
    """Hashes are those that ``SELECT hash(…)`` returns; a null leaves the seed."""
    assert signed_hash(kind, value) == expected


def test_hash_is_folded_over_columns() -> None:
    """The order of columns counts, a null between them does not, and arrays count as their elements."""
    assert signed_hash("integer", 1, 2) != signed_hash("integer", 2, 1)
    assert signed_hash("integer", 1, None, 2) == signed_hash("integer", 1, 2) == signed_hash(array("integer"), [1, 2])


def test_equal_fractions_have_one_hash() -> None:
    """Zeros and NaNs are one key each; a decimal's hash is that of its digits, whatever wrote them."""
    assert signed_hash("double", -0.0) == signed_hash("double", 0.0)
    assert signed_hash("float", math.nan) == signed_hash("float", -math.nan)
    assert signed_hash("decimal(9,2)", Decimal("1.5")) == signed_hash("long", 150)


@pytest.mark.parametrize("kind", ["interval day", "interval day to second", "daytimeinterval"])
def test_intervals_are_hashed_as_their_microseconds(kind: str) -> None:
    """An interval's units do not matter."""
    assert signed_hash(kind, timedelta(days=1)) == signed_hash("long", 86_400_000_000)


@pytest.mark.parametrize("kind", ["string collate UTF8_LCASE", "variant", "interval year to month"])
def test_other_types_are_refused(kind: str) -> None:
    """A type that only Spark can hash is refused by name, before anything is rewritten."""
    with pytest.raises(InvalidInputError, match="key column k is of type"):
        KeyHash(json.dumps(struct(k=kind)))


def test_key_groups_of_a_hash() -> None:
    """The remainder is never negative."""
    assert [key_group_of(hashed, 5) for hashed in (0, 7, (1 << 32) - 1)] == [0, 2, 4]


def test_first_key_of_an_entry() -> None:
    """Bytes after a key are ignored; damaged bytes are an error."""
    schema = json.dumps(struct(a="string", b="integer"))
    data = KeyCodec(schema).encode(("x", 3))
    assert KeyHash(schema).first(data + data) == KeyHash(schema).first(data)
    for damaged in (b"", data[:-1], b"\x93" + data[1:] + b"\x01", b"\x91\x01", b"\x05"):
        with pytest.raises(ValueError, match=r".*"):
            KeyHash(schema).first(damaged)
