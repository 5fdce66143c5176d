"""Which casts change no value, or fail."""

from __future__ import annotations

import pyarrow as pa
import pytest

from backend_client.sinks.conversions import keeps_values

_AT, _LOCAL = pa.timestamp("us", "Asia/Tokyo"), pa.timestamp("us")


@pytest.mark.parametrize(
    ("given", "there", "keeps"),
    [
        (pa.null(), pa.int64(), True),
        (pa.int64(), pa.int32(), True),
        (pa.int64(), pa.float64(), True),
        (pa.int64(), pa.decimal128(20, 2), True),
        (pa.int64(), pa.bool_(), False),
        (pa.int64(), pa.string(), False),
        (pa.float32(), pa.float64(), True),
        (pa.float64(), pa.float32(), False),
        (pa.float64(), pa.int64(), False),
        (pa.float64(), pa.decimal128(20, 2), False),
        (pa.decimal128(9, 2), pa.decimal128(20, 2), True),
        (pa.decimal128(9, 2), pa.decimal256(42, 2), False),
        (pa.decimal128(9, 2), pa.float64(), False),
        (_AT, pa.timestamp("us", "UTC"), True),
        (_AT, _LOCAL, False),
        (_LOCAL, _AT, False),
        (_LOCAL, pa.date32(), False),
        (pa.date32(), _LOCAL, False),
        (pa.string(), pa.large_string(), True),
        (pa.large_binary(), pa.binary(), True),
        (pa.binary(), pa.string(), False),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), True),
        (pa.list_(_AT), pa.list_(_LOCAL), False),
        (pa.map_(pa.string(), pa.float64()), pa.map_(pa.string(), pa.float32()), False),
        (pa.map_(pa.string(), pa.int32()), pa.map_(pa.string(), pa.int64()), True),
        (pa.struct({"a": pa.int32()}), pa.struct({"a": pa.int64()}), True),
        (pa.struct({"a": pa.int32(), "b": pa.int32()}), pa.struct({"a": pa.int32()}), False),
        (pa.struct({"a": pa.int32(), "b": pa.int32()}), pa.struct({"b": pa.int32(), "a": pa.int32()}), False),
        (pa.struct({"a": pa.int32()}), pa.map_(pa.string(), pa.int32()), False),
    ],
    ids=str,
)
def test_casts_that_keep_values(given: pa.DataType, there: pa.DataType, keeps: bool) -> None:
    """A zone, a time of day, a field or a digit that would be dropped in silence is a change."""
    assert keeps_values(given, there) == keeps
