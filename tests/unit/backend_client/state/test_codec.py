"""Values and keys, encoded to bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pandas as pd
import pytest

from backend_client.state.codec import KeyCodec, ValueCodec
from storage.errors import CorruptDataError, InvalidInputError
from tests.unit.backend_client.schemas import array, mapping, schema, struct

KEYS_THAT_PYTHON_LACKS = [
    mapping(key, "long") for key in (array("long"), struct(a=array("long")), struct(a=mapping("long", "long")))
]


def codec_of(kind: Any) -> ValueCodec:
    """Return a codec of one field of this type."""
    return ValueCodec(schema(field=kind), "total")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("long", 2**63 - 1),
        ("byte", -128),
        ("double", float("inf")),
        ("float", 0.5),
        ("string", "\u00fc\x00\U0001f600"),
        ("boolean", True),
        ("binary", b"\x00\xff"),
        ("date", date(1, 1, 1)),
        ("date", date(9999, 12, 31)),
        ("timestamp_ntz", datetime(1, 1, 1)),
        ("timestamp_ntz", datetime.max),
        ("timestamp", datetime(1900, 1, 2, 3, 4, 5, 999_999)),
        ("timestamp", datetime(1, 1, 1)),
        ("timestamp", datetime(9999, 12, 31)),
        ("interval day to second", timedelta(days=-1, microseconds=1)),
        ("interval day", timedelta(days=-1)),
        ("time(6)", time(0, 0, 0, 1)),
        ("interval hour to minute", timedelta(minutes=61)),
        ("interval second", timedelta(microseconds=1)),
        ("decimal(10,2)", Decimal("-12345678.90")),
        ("decimal(38,0)", Decimal(10**38 - 1)),
        (array("integer"), [1, None, 3]),
        (array(array("string")), [["a"], [], None]),
        (mapping("string", array("long")), {"a": [1], "b": None}),
        (mapping("long", "date"), {1: date(2020, 2, 29)}),
        (struct(a="long", b=struct(c="date")), (1, (date(2020, 1, 1),))),
        (struct(a="long", b=struct(c="date")), (None, None)),
        ("varchar(10)", "text"),
        ("string collate UTF8_LCASE", "text"),
        ("void", None),
    ],
)
def test_value_survives_round_trip(kind: Any, value: Any) -> None:
    """A value of every type, and null, is read back unchanged."""
    codec = codec_of(kind)

    assert codec.decode(codec.encode((value,))) == (value,)
    assert codec.decode(codec.encode((None,))) == (None,)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("interval day", timedelta(days=2)),
        ("interval hour to second", timedelta(days=2)),
        ("interval minute", timedelta(days=2)),
        ("time(6)", time(23, 59, 59, 999_999)),
        ("time(0)", time(1)),
    ],
)
def test_intervals_and_times_of_any_units_are_keys(kind: str, value: Any) -> None:
    """The difference of two dates is an interval of days, and rows are grouped by it as by other intervals."""
    codec = KeyCodec(schema(field=kind))

    assert tuple(codec.decode(codec.encode((value,)))) == (value,)


def test_aware_timestamp_is_same_moment() -> None:
    """A timestamp with a zone becomes the same time in local time, as everywhere in PySpark."""
    moment = datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=timezone(timedelta(hours=5)))
    codec = codec_of("timestamp")
    (back,) = codec.decode(codec.encode((moment,)))

    assert back.tzinfo is None
    assert back.astimezone(UTC) == moment


def test_not_a_number_survives() -> None:
    """NaN is read back as NaN."""
    codec = codec_of("double")
    (back,) = codec.decode(codec.encode((float("nan"),)))

    assert math.isnan(back)


def test_struct_may_be_an_object() -> None:
    """An object with the struct's first field, such as a dataclass, is taken as on Spark; any other one is refused."""

    @dataclass
    class Point:
        x: int
        day: date | None = None

    codec = ValueCodec(schema(point=struct(x="long", day="date")), "state")
    assert codec.decode(codec.encode((Point(1, date(2020, 1, 1)),))) == ((1, date(2020, 1, 1)),)
    assert codec.decode(codec.encode((SimpleNamespace(x=2, other=3),))) == ((2, None),)
    with pytest.raises(InvalidInputError, match=r"state\.point is of type struct<x, day>"):
        codec.encode((SimpleNamespace(other=3),))


def test_decimal_is_rounded_to_scale() -> None:
    """A decimal has the scale of its type, rounded as in Spark."""
    codec = codec_of("decimal(10,2)")

    assert codec.decode(codec.encode((Decimal("1.005"),))) == (Decimal("1.01"),)


@pytest.mark.parametrize("minus_zero", ["-0", "-0.00", "-0.001", "-0.0049", "-0E+5"])
@pytest.mark.parametrize("kind", ["decimal(10,2)", struct(x="decimal(10,2)"), array("decimal(10,2)")])
def test_decimals_have_one_zero(kind: Any, minus_zero: str) -> None:
    """A value that rounds to minus zero is the same value and key as zero: Spark's decimals have only one zero."""
    plus, minus = (amount if isinstance(kind, str) else (amount,) for amount in (Decimal("0.00"), Decimal(minus_zero)))

    for codec in (codec_of(kind), KeyCodec(schema(field=kind))):
        assert codec.encode((minus,)) == codec.encode((plus,))
        assert "-" not in str(codec.decode(codec.encode((minus,))))


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [("long", np.int64(5), 5), ("double", np.float64(0.5), 0.5), ("boolean", np.bool_(True), True), ("double", 3, 3.0)],
)
def test_numpy_value_is_accepted(kind: str, value: Any, expected: Any) -> None:
    """A NumPy scalar, or an int for a float, is stored as Python's own value."""
    codec = codec_of(kind)
    (back,) = codec.decode(codec.encode((value,)))

    assert back == expected
    assert type(back) is type(expected)


@pytest.mark.parametrize("value", [1e300, -1e300, 3.5e38])
def test_number_beyond_floats_is_infinite(value: float) -> None:
    """A number too large for a 4-byte float is read back as infinity, as from Spark's own state."""
    codec = codec_of("float")

    assert codec.decode(codec.encode((value,))) == (math.copysign(math.inf, value),)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("long", "1"),
        ("long", 1.0),
        ("long", True),
        ("long", 2**63),
        ("integer", 2**31),
        ("short", -(2**15) - 1),
        ("byte", 128),
        ("double", "x"),
        pytest.param("double", 2**2000, id="double-huge"),
        ("float", True),
        ("string", b"x"),
        ("string", 1),
        ("string", "\ud800"),
        ("boolean", 1),
        ("binary", "x"),
        ("date", "2020-01-01"),
        ("timestamp", date(2020, 1, 1)),
        ("decimal(10,2)", 1.5),
        ("decimal(10,2)", Decimal(10**8)),
        ("decimal(10,2)", Decimal("NaN")),
        ("decimal(10,2)", Decimal("Infinity")),
        ("decimal(10,2)", Decimal("1e100")),
        (array("long"), "abc"),
        (array("long"), 5),
        (array("long"), ["x"]),
        (mapping("long", "long"), 5),
        (mapping("long", "long"), {None: 1}),
        (mapping("long", "long"), [1, 2]),
        (struct(a="long"), (1, 2)),
        (struct(a="long"), 1),
        (struct(a="long"), {"a": "x"}),
    ],
)
def test_misfit_names_field(kind: Any, value: Any) -> None:
    """A value that does not fit its field is refused with the field's name, whatever the reason."""
    with pytest.raises(InvalidInputError, match=r"total\.field"):
        codec_of(kind).encode((value,))


@pytest.mark.parametrize("value", [5, "text", b"bytes", (1, 2), (), None, {"field": 1}])
def test_other_than_tuple_names_fields(value: Any) -> None:
    """Anything but a tuple of the right length is refused with the expected fields."""
    with pytest.raises(InvalidInputError, match="field"):
        codec_of("long").encode(value)


def test_null_in_required_field_is_refused() -> None:
    """A null in a field that is not nullable is refused with the field's name."""
    required = json.loads(schema(field="long"))
    required["fields"][0]["nullable"] = False

    with pytest.raises(InvalidInputError, match=r"total\.field is not nullable"):
        ValueCodec(json.dumps(required), "total").encode((None,))


@pytest.mark.parametrize(
    "kind", ["variant", "interval", "interval year to month", "udt", "decimal(x)", *KEYS_THAT_PYTHON_LACKS]
)
def test_unknown_type_is_refused_at_start(kind: Any) -> None:
    """A type that state cannot hold is refused when the query starts, not with the first value."""
    with pytest.raises(InvalidInputError, match=r"total\.field"):
        codec_of(kind)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("long", b""),
        ("long", b"\x92\x01"),
        ("long", b"\xc1"),
        ("long", b"\x05"),
        ("long", b"\x81\x01\x02"),
        ("long", msgpack.packb([2, 5])),
        ("long", msgpack.packb([1])),
        ("long", msgpack.packb([1, 2, 3])),
        ("long", msgpack.packb([1, 2]) + b"\x00"),
        ("date", msgpack.packb([1, 2**60])),
        ("date", msgpack.packb([1, "x"])),
        ("timestamp", msgpack.packb([1, 2**62])),
        ("timestamp_ntz", msgpack.packb([1, 2**62])),
        ("decimal(10,2)", msgpack.packb([1, "x"])),
        (array("date"), msgpack.packb([1, 5])),
        (mapping("long", "long"), msgpack.packb([1, [1, 2, 3]])),
        (struct(a="long"), msgpack.packb([1, [1, 2]])),
    ],
)
def test_damaged_value_is_reported(kind: Any, data: bytes) -> None:
    """I10: for bytes that are not a value of the schema, the error names the variable."""
    with pytest.raises(CorruptDataError, match="total"):
        codec_of(kind).decode(data)


def test_failed_value_leaves_codec_usable() -> None:
    """A refused value leaves nothing in the next one's bytes."""
    codec = ValueCodec(schema(a="string", b="long"), "total")
    before = codec.encode(("x", 1))
    for bad in (("y", 2**70), ("\ud800", 1)):
        with pytest.raises(ValueError):
            codec.encode(bad)

    assert codec.encode(("x", 1)) == before


@pytest.mark.parametrize("make", [list, np.array, pd.Series, iter], ids=["list", "array", "series", "iterator"])
def test_fields_in_any_sequence(make: Callable[[list[int]], Any]) -> None:
    """The fields of a value may be an array, a series or a generator, as on Spark."""
    codec = ValueCodec(schema(a="long", b="long"), "total")

    assert codec.decode(codec.encode(make([1, 2]))) == (1, 2)


@pytest.mark.parametrize("value", [None, 1, "ab", b"ab", {1: 2, 3: 4}, {1, 2}, np.array(1)], ids=repr)
def test_what_has_no_order_of_fields_is_refused(value: Any) -> None:
    """Text, dictionaries and sets are no tuples of fields; the error names the variable and its fields."""
    with pytest.raises(InvalidInputError, match=r"state total takes a tuple of 2 fields \(a, b\), not "):
        ValueCodec(schema(a="long", b="long"), "total").encode(value)


@pytest.mark.parametrize(
    "kind", [mapping("long", "long"), array(mapping("long", "long")), struct(a=mapping("long", "long"))]
)
def test_map_cannot_be_a_key(kind: Any) -> None:
    """A map cannot be a grouping key, at any depth; the error names the column."""
    with pytest.raises(InvalidInputError, match="'user'"):
        KeyCodec(schema(user=kind))


@pytest.mark.parametrize("kind", ["double", "float"])
@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (float("nan"), -float("nan"))])
def test_equal_keys_have_equal_bytes(kind: str, one: float, other: float) -> None:
    """I14: keys that are equal in Spark have the same bytes, at any depth, whichever of them a batch meets first."""
    plain = KeyCodec(schema(user=kind))
    nested = KeyCodec(schema(user=struct(number=kind, list=array(array(kind)), name="string")))

    assert plain.encode((one,)) == plain.encode((other,))
    keys = [((number, [[number, None], None, []], "a"),) for number in (one, other)]
    assert nested.encode(keys[0]) == nested.encode(keys[1])
    assert nested.encode(((1.5, [[-2.5]], "a"),)) != nested.encode(((1.5, [[2.5]], "a"),))
    assert nested.decode(nested.encode(((None, None, None),))) == ((None, None, None),)


def test_null_keys_are_legal() -> None:
    """A null in a key makes a separate key."""
    for codec in (KeyCodec(schema(a="long", b="string")), KeyCodec(schema(a="date", b="string"))):
        assert len({codec.encode(key) for key in [(None, None), (None, ""), (None, "None")]}) == 3
