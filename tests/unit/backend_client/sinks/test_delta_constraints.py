"""Constraints that mean the same to Spark and to the library that writes a Delta table."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from backend_client.sinks.delta.constraints import foreign_constraints

COLUMNS = pa.schema(
    {
        "v": pa.int64(),
        "p": pa.string(),
        "f": pa.float64(),
        "d": pa.date32(),
        "a b": pa.int32(),
        "x": pa.decimal128(9, 2),
    }
)


def is_foreign(text: str) -> bool:
    metadata = SimpleNamespace(configuration={"delta.constraints.c": text, "comment": "v / 2"})
    table: Any = SimpleNamespace(metadata=lambda: metadata, schema=lambda: SimpleNamespace(fields=[]))
    found = foreign_constraints(table, COLUMNS)
    assert found in ([], [text])
    return found != []


@pytest.mark.parametrize(
    "text",
    [
        "v > 0",
        "v>-1 AND p = 'x'",
        "(v <= 5) or not (p <> 'and v / 2' and f >= 0.5)",
        "v in (1,2, 3) and p NOT IN ('a')",
        "v BETWEEN 1 AND 10 AND v != 3",
        "p is not null and v is null",
        "d > '2023-01-01'",
        "`a b` < 7 and x > 0",
    ],
)
def test_comparisons_with_values(text: str) -> None:
    """Both take them for the same."""
    assert not is_foreign(text)


@pytest.mark.parametrize(
    "text",
    [
        "v / 2 > 3",
        "v > 5 / 2",
        "2 * v > 5",
        "V > 0",  # the library does not find the column
        "p > 5",
        "v > '5'",
        "x > 0.5",
        "d > '2023'",
        "length(p) = 1",
        "p = 'a\\\\'",
        "p = 'it''s'",
        "p <=> 'x'",
        'p = "x"',
        "v > 0 -- and p = 'x'",
    ],
)
def test_all_else_is_foreign(text: str) -> None:
    """Operators, functions and casts may differ."""
    assert is_foreign(text)


def test_long_ones_are_foreign() -> None:
    """Whoever may alter the table could keep the driver and each publish busy; a list of a thousand codes is usual."""
    codes = ", ".join(f"'code {number}'" for number in range(5_000))
    assert not is_foreign(f"p in ({codes})")
    assert is_foreign("v > 0" + " and v > 0" * 10_000)


@pytest.mark.parametrize("text", ["v" * 10_000, "v " * 5_000, f"v in (1{' ' * 10_000}x", "v > 0 and " * 1_000 + "x"])
def test_long_ones_are_looked_at_in_no_time(text: str) -> None:
    """It grows with the length, not with its square: with that it was seconds."""
    began_s = time.thread_time()
    assert is_foreign(text)
    assert time.thread_time() - began_s < 1


@pytest.mark.parametrize("invariant", ["{", "[]", "5", '{"expression": 1}', "[" * 100_000])
def test_invariants_of_another_form_are_foreign(invariant: str) -> None:
    """Others may have written anything; the error is the same as for one that only Spark can check."""
    column = SimpleNamespace(metadata={"delta.invariants": invariant})
    table: Any = SimpleNamespace(
        metadata=lambda: SimpleNamespace(configuration={}), schema=lambda: SimpleNamespace(fields=[column])
    )
    assert foreign_constraints(table, COLUMNS) == [invariant]
