"""Keys packed as columns have the bytes of keys packed one by one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_schema

from backend_client.columnar.keys import KeyColumns
from backend_client.columnar.packing import joined, of_equal_width, pack_integers, pack_rows
from backend_client.state.codec import KeyCodec

EDGES = [
    edge + by for power in (5, 7, 8, 15, 16, 31, 32, 63) for edge in (1 << power, -(1 << power)) for by in (-1, 0, 1)
]


def integers(bits: int) -> st.SearchStrategy[int]:
    """Draw signed numbers, often where the length of their bytes changes."""
    bound = 1 << (bits - 1)
    inside = [edge for edge in EDGES if -bound <= edge < bound]
    return st.sampled_from(inside) | st.integers(-bound, bound - 1)


LENGTHS = st.sampled_from([0, 1, 31, 32, 255, 256, 65_535, 65_536])
VALUES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "byte": (pa.int8(), integers(8)),
    "short": (pa.int16(), integers(16)),
    "integer": (pa.int32(), integers(32)),
    "long": (pa.int64(), integers(64)),
    "text": (pa.string(), st.text(max_size=40) | LENGTHS.map(lambda length: "x" * length)),
    "binary": (pa.binary(), st.binary(max_size=40) | LENGTHS.map(bytes)),
    "boolean": (pa.bool_(), st.booleans()),
    "double": (pa.float64(), st.floats()),
    "float": (pa.float32(), st.floats(width=32)),
    "date": (pa.date32(), st.dates()),
    "moment": (
        pa.timestamp("us", "UTC"),
        st.datetimes(datetime(2, 1, 2), datetime(9998, 12, 30), timezones=st.just(UTC)),
    ),
    "wall clock": (pa.timestamp("us"), st.datetimes()),
    "time of day": (pa.time64("ns"), st.times()),
    "gap": (pa.duration("us"), st.timedeltas(timedelta(-100_000), timedelta(100_000))),
    "decimal": (pa.decimal128(38, 7), st.decimals(-(10**30), 10**30, places=7)),
    "small": (pa.decimal128(38, 38), st.decimals("-0.9", "0.9", places=38)),
}
VALUES |= {
    "struct": (
        pa.struct([(name, kind) for name, (kind, _) in VALUES.items()]),
        st.fixed_dictionaries({name: st.none() | values for name, (_, values) in VALUES.items()}),
    ),
    "lists": (pa.list_(pa.list_(pa.float64())), st.lists(st.none() | st.lists(st.none() | st.floats(), max_size=3))),
}


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    """Draw rows of some columns, with nulls, sometimes a slice of a longer batch."""
    kinds = draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=4))
    rows = draw(st.integers(0, 6))
    columns = [
        pa.array(draw(st.lists(st.none() | VALUES[kind][1], min_size=rows, max_size=rows)), VALUES[kind][0])
        for kind in kinds
    ]
    begin = draw(st.integers(0, rows))
    return pa.RecordBatch.from_arrays(columns, [f"{at}" for at in range(len(kinds))]).slice(begin)


def refused(column: pa.Array) -> pa.Array:
    """Pack no column."""
    raise AssertionError(f"{column.type} has no packer")


@given(batches())
def test_rows_have_the_bytes_of_keys(batch: pa.RecordBatch) -> None:
    """I15: a key has one form, however it is encoded."""
    schema = from_arrow_schema(batch.schema).json()
    encode = KeyCodec(schema).encode
    rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
    packed = KeyColumns(schema, batch.schema).encode(batch.columns)

    assert packed.type == pa.binary()
    assert packed.to_pylist() == list(map(encode, rows))


@given(st.lists(integers(64)))
def test_integers(values: list[int]) -> None:
    """Numbers use the fewest bytes that MessagePack has for them."""
    assert pack_integers(np.array(values, np.int64)).to_pylist() == list(map(msgpack.packb, values))


@pytest.mark.parametrize("columns", [1, 15, 16, 300])
def test_many_columns(columns: int) -> None:
    """The number of columns is part of the key."""
    packed = pack_rows([pa.array([at], pa.int64()) for at in range(columns)], refused)
    assert packed.to_pylist() == [msgpack.packb(list(range(columns)))]


def test_parts_are_joined() -> None:
    """Bytes of fixed and of variable width are joined row by row."""
    heads = of_equal_width(np.array([[0, 1], [2, 3]], np.uint8))
    assert joined(heads, pa.array([b"", b"xyz"]), pa.scalar(b"!")).to_pylist() == [b"\0\1!", b"\2\3xyz!"]
    assert of_equal_width(np.zeros((0, 4), np.uint8)).to_pylist() == []
