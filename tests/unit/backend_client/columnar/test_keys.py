"""Keys of a batch, encoded to bytes and decoded."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import msgpack
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from backend_client.columnar.keys import KeyColumns
from backend_client.state.codec import KeyCodec
from storage.errors import CorruptDataError

COLUMNS = {
    "i": pa.array([1, -5, None], pa.int32()),
    "s": pa.array(["a", "", None]),
    "d": pa.array([0.5, float("inf"), None]),
    "b": pa.array([True, False, None]),
    "x": pa.array([b"\x00", b"", None]),
    "day": pa.array([date(2024, 2, 29), date(1, 1, 1), None]),
    "at": pa.array(
        [datetime(2024, 1, 1, 1, tzinfo=UTC), datetime(1960, 1, 1, tzinfo=UTC), None], pa.timestamp("us", "UTC")
    ),
    "gap": pa.array([timedelta(days=1), timedelta(microseconds=-1), None], pa.duration("us")),
    "hour": pa.array([time(23, 59, 59, 999_999), time(0), None], pa.time64("ns")),
    "m": pa.array([Decimal("1.50"), Decimal("-0.01"), None], pa.decimal128(10, 2)),
    "p": pa.array(
        [{"a": 1, "b": ["x"]}, {"a": None, "b": []}, None], pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])
    ),
}


@pytest.mark.parametrize("names", [["i"], ["s", "i"], list(COLUMNS)])
def test_keys_come_back(names: list[str]) -> None:
    """Keys have the bytes that other operators use; columns are read back, with or without numbers after the keys."""
    batch = pa.RecordBatch.from_pydict({name: COLUMNS[name] for name in names})
    schema = from_arrow_schema(batch.schema).json()
    keys = KeyColumns(schema, batch.schema)
    encoded = keys.encode(batch.columns).to_pylist()
    numbers = [0, -7, 1 << 40]
    behind = [key + msgpack.packb(number) for key, number in zip(encoded, numbers, strict=True)]

    rows = list(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    assert encoded == list(map(KeyCodec(schema).encode, rows))
    assert keys.decode(encoded, with_number=False) == (batch, [])
    assert keys.decode(behind, with_number=True) == (batch, numbers)


RAW = [b"M\xfcller", "Müller".encode(), b"\xed\xa0\x80", b"", None]
TEXT = pa.array(RAW, pa.binary()).view(pa.string())
LONG = pa.array([1 << 62, -(1 << 62), 253_402_300_800_000_000, 0, None])
NOT_IN_PYTHON = {
    "text": TEXT,
    "moment": LONG.view(pa.timestamp("us", "UTC")),
    "wall clock": LONG.view(pa.timestamp("us")),
    "day": pa.array([1 << 30, -(1 << 30), 2_932_897, 0, None], pa.int32()).view(pa.date32()),
    "decimal": pa.array([Decimal("1.50")] * 5, pa.decimal128(10, 2)),
}
NOT_IN_PYTHON["parts"] = pa.StructArray.from_arrays(
    [*NOT_IN_PYTHON.values(), LONG], names=[*NOT_IN_PYTHON, "day"], mask=pa.array([False] * 4 + [True])
)
NOT_IN_PYTHON["list"] = pa.ListArray.from_arrays([0, 2, 2, None, 3, 5], TEXT)


@pytest.mark.parametrize("names", [["text"], ["moment", "decimal"], list(NOT_IN_PYTHON)])
def test_values_that_python_lacks_come_back(names: list[str]) -> None:
    """Text that is invalid UTF-8, and years beyond 1 to 9999, alone, beside other types and in nested ones."""
    columns = {name: NOT_IN_PYTHON[name] for name in names}
    fields = pa.schema([pa.field(name, column.type) for name, column in columns.items()])
    keys = KeyColumns(from_arrow_schema(fields).json(), fields)

    decoded, _ = keys.decode(keys.keys_of(list(columns.values())), with_number=False)

    assert decoded.equals(pa.RecordBatch.from_arrays(list(columns.values()), schema=fields))


def test_structs_of_nothing_come_back() -> None:
    """A struct without fields, and a slice of structs with a field that is always null."""
    nothing, null = pa.struct([]), pa.struct([("none", pa.null()), ("i", pa.int64())])
    fields = pa.schema([("empty", nothing), ("null", null)])
    values = [{"none": None, "i": number} for number in range(5)]
    columns = [pa.array([{}] * 4 + [None], nothing), pa.array([*values, None], null).slice(1)]
    keys = KeyColumns(from_arrow_schema(fields).json(), fields)

    encoded = keys.keys_of([column.slice(3) for column in columns])

    assert encoded == [msgpack.packb([[], [None, 4]]), msgpack.packb([None, None])]
    decoded, _ = keys.decode(encoded, with_number=False)
    assert decoded.to_pylist() == [{"empty": {}, "null": values[4]}, {"empty": None, "null": None}]


@pytest.mark.parametrize("damaged", [b"\x92\x01\x02", b"\xc1", b"\x91\xa1a", b"\x01"])
def test_damaged_keys_are_an_error(damaged: bytes) -> None:
    """I10: bytes that are not a key of these columns are refused."""
    fields = pa.schema([("i", pa.int32())])
    with pytest.raises(CorruptDataError, match="keys"):
        KeyColumns(from_arrow_schema(fields).json(), fields).decode([damaged], with_number=False)


@pytest.mark.parametrize("count", [1, 2])
def test_long_keys_come_back(count: int) -> None:
    """Keys of more than 100 MB, in total or in one key, are read back like short ones."""
    fields = pa.schema([("url", pa.string())])
    keys = KeyColumns(from_arrow_schema(fields).json(), fields)
    batch = pa.RecordBatch.from_pydict({"url": ["/" * (110_000_000 // count)] * count}, fields)

    decoded, _ = keys.decode(keys.encode(batch.columns).to_pylist(), with_number=False)

    assert decoded == batch
