"""Keys that share a sort number."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_schema

from backend_client.columnar.keys import KeyColumns
from backend_client.key_group_sql import HASH_BITS
from backend_client.spark.task.mixed_keys import KeySeparator, key_encoding, with_key_groups, with_keys

Rows = list[tuple[int, str | None, int]]
SCHEMA = pa.schema([("order", pa.int64()), ("key", pa.string()), ("row", pa.int64())])
FIELDS = pa.schema([("key", pa.string())])
ENCODE = key_encoding(from_arrow_schema(FIELDS).json(), FIELDS)


def batch(rows: Rows) -> pa.RecordBatch:
    """Return rows of (number, key, row) as a batch."""
    columns = zip(*rows, strict=True) if rows else ([], [], [])
    return pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def rows_of(batches: list[pa.RecordBatch]) -> Rows:
    """Return the rows of batches."""
    return [tuple(row.values()) for part in batches for row in part.to_pylist()]


def apart(batches: Iterator[pa.RecordBatch] | list[pa.RecordBatch]) -> KeySeparator:
    """Separate the keys of batches."""
    return KeySeparator(batches, 1, ENCODE)


@st.composite
def mixed(draw: st.DrawFn) -> list[Rows]:
    """Draw sorted rows in batches, with few sort numbers for many keys."""
    key = st.sampled_from(["a", "b", "c", None])
    drawn = sorted(draw(st.lists(st.tuples(st.integers(0, 3), key), max_size=40)), key=lambda row: row[0])
    rows: Rows = [(order, key and f"{key}{order}", at) for at, (order, key) in enumerate(drawn)]
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=6)))
    return [rows[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(rows)], strict=True)]


@given(mixed())
def test_rows_of_a_key_come_together(parts: list[Rows]) -> None:
    """Every row occurs once; numbers ascend, and a key's rows are together in their original order."""
    found = rows_of(list(apart([batch(part) for part in parts])))

    given_rows = [row for part in parts for row in part]
    assert sorted(found, key=lambda row: row[2]) == given_rows
    assert [order for order, _, _ in found] == sorted(order for order, _, _ in found)
    keys = [(order, key) for order, key, _ in found]
    starts = [at for at in range(len(keys)) if at == 0 or keys[at] != keys[at - 1]]
    assert len(starts) == len(set(keys))
    for wanted in set(keys):
        rows = [row for order, key, row in found if (order, key) == wanted]
        assert rows == sorted(rows)


def test_text_of_any_bytes_is_separated() -> None:
    """Keys with text that is invalid UTF-8, which columnar operators take, come together like others."""
    raw = [b"\xff", b"a", b"\xff", b"a", b"\xfe"]

    def part(keys: list[bytes]) -> pa.RecordBatch:
        text = pa.array(keys, pa.binary()).view(pa.string())
        return pa.record_batch([pa.array([1] * len(keys)), text, pa.array(range(len(keys)))], schema=SCHEMA)

    found = [
        key for piece in apart([part(raw), part(raw[1:])]) for key in piece.column(1).view(pa.binary()).to_pylist()
    ]

    assert found == [b"\xff"] * 3 + [b"a"] * 4 + [b"\xfe"] * 2


@pytest.mark.parametrize("is_nested", [False, True])
def test_moments_that_python_lacks_are_separated(is_nested: bool) -> None:
    """The last moment of the year 9999 is beyond Python's dates in time zones to the east."""
    moments = pa.array([253_402_300_799_999_999, 5, 253_402_300_799_999_999]).view(pa.timestamp("us", "Asia/Kolkata"))
    column = pa.StructArray.from_arrays([moments, moments], ["a", "b"]) if is_nested else moments
    in_utc = column.cast(
        pa.struct([(name, pa.timestamp("us", "UTC")) for name in "ab"]) if is_nested else pa.timestamp("us", "UTC")
    )
    fields = pa.schema([pa.field("key", in_utc.type)])
    schema = from_arrow_schema(fields).json()
    keys = KeyColumns(schema, fields)
    rows = pa.record_batch([pa.array([1, 1, 1]), column], ["order", "key"])

    found = pa.concat_batches(list(KeySeparator([rows, rows], 1, key_encoding(schema, fields))))

    assert keys.keys_of([found["key"]]) == [
        *keys.keys_of([in_utc.take([0])]) * 4,
        *keys.keys_of([in_utc.take([1])]) * 2,
    ]


def test_unmixed_batches_are_not_copied() -> None:
    """If no keys share a number, nothing is copied, wherever batches end."""
    given_batches = [batch([(1, "a", 0), (1, "a", 1), (2, "b", 2)]), batch([(2, "b", 3)]), batch([(3, "c", 4)])]

    assert all(found is given for found, given in zip(apart(given_batches), given_batches, strict=True))


@pytest.mark.parametrize("others", [0, 1])
def test_first_key_is_not_held(others: int) -> None:
    """The rows of the first of several keys with one number are handed on before the next batch is read."""
    read = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal read
        for number in range(5):
            read += 1
            yield batch([(1, "a", 2 * number), *[(1, "b", 2 * number + 1)] * others])

    found = iter(apart(batches()))
    for number in range(5):
        assert (rows_of([next(found)]), read) == ([(1, "a", 2 * number)], number + 1)
    assert rows_of(list(found)) == [(1, "b", 2 * number + 1) for number in range(5)] * others


def test_key_groups_take_the_place_of_numbers() -> None:
    """The key group is the part above the hash, up to the largest key group."""
    orders = [0, (1 << HASH_BITS) - 1, 1 << HASH_BITS, (32_767 << HASH_BITS) + 5]

    found = list(with_key_groups([batch([(order, "a", 0) for order in orders])]))

    assert found[0].column(0).to_pylist() == [0, 0, 1, 32_767]
    assert found[0].columns[1:] == batch([(0, "a", 0)] * 4).columns[1:]


def test_key_columns_are_moved_to_the_front() -> None:
    """All key columns follow the number in the key's order, wherever they are in the row; the row's order stays."""
    given = {"order": [1, 2], "of_key": [0.5, 0.0]}
    rows = {"a": ["x", "y"], "b": [7, 8], "c": [-0.0, 0.0]}
    batches = [pa.RecordBatch.from_pydict({**given, **rows})] * 2

    for found in with_keys(batches, (1, None, 0)):
        assert found.schema.names == ["order", "b", "of_key", "a", "a", "b", "c"]
        assert [column.to_pylist() for column in found.columns[1:4]] == [[7, 8], [0.5, 0.0], ["x", "y"]]
        assert found.select(range(4, found.num_columns)).to_pydict() == rows
