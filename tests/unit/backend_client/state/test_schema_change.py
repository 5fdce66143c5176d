"""Which changes of a state's schema are possible, and the errors for the others."""

from __future__ import annotations

import json
import re
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pytest

from backend_client.state.codec import ValueCodec, value_head
from backend_client.state.schema_change import upgrade_of
from storage.errors import CorruptDataError, InvalidInputError
from tests.unit.backend_client.schemas import array, mapping, schema, struct


def required(text: str, name: str, default: Any = None) -> str:
    """Return a schema in which one field is not nullable and may have a default."""
    document = json.loads(text)
    for field in document["fields"]:
        if field["name"] == name:
            field.update(nullable=False, metadata={} if default is None else {"default": default})
    return json.dumps(document)


def read(written: str, newest: str, value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a value written under one schema as read under another."""
    return ValueCodec(newest, "s", earlier=[written]).decode(ValueCodec(written, "s").encode(value))


@pytest.mark.parametrize(
    ("written", "newest", "value", "expected"),
    [
        (schema(a="long"), schema(a="long", b="string"), (1,), (1, None)),
        (schema(a="long", b="string"), schema(b="string"), (1, "x"), ("x",)),
        (schema(a="long", b="string"), schema(b="string", a="long"), (1, "x"), ("x", 1)),
        (schema(a="integer"), schema(a="long"), (1,), (1,)),
        (schema(a="integer"), schema(a="double"), (1,), (1.0,)),
        (schema(a="float"), schema(a="double"), (0.5,), (0.5,)),
        (schema(a="varchar(3)"), schema(a="string"), ("abc",), ("abc",)),
        (schema(a="decimal(5,2)"), schema(a="decimal(9,4)"), (Decimal("1.25"),), (Decimal("1.2500"),)),
        (schema(a=struct(x="integer")), schema(a=struct(y="long", x="long")), ((1,),), ((None, 1),)),
        (schema(a=array("byte")), schema(a=array("double")), ([1, None],), ([1.0, None],)),
        (schema(a=mapping("string", "short")), schema(a=mapping("string", "float")), ({"k": 1},), ({"k": 1.0},)),
        (
            schema(a=array(struct(x="integer"))),
            schema(a=array(struct(x="integer", y="date"))),
            ([(1,), None],),
            ([(1, None), None],),
        ),
    ],
)
def test_possible_change_reads_older_value(
    written: str, newest: str, value: tuple[Any, ...], expected: tuple[Any, ...]
) -> None:
    """Fields may be added, removed, moved and widened at any depth; older values are read with the newest schema."""
    decoded = read(written, newest, value)

    assert decoded == expected
    assert repr(decoded) == repr(expected)


@pytest.mark.parametrize(
    ("kind", "default", "expected"),
    [
        ("long", 7, 7),
        ("double", 0, 0.0),
        ("string", "none", "none"),
        ("boolean", False, False),
        ("decimal(5,2)", "1.5", Decimal("1.50")),
        ("decimal(5,2)", 1.5, Decimal("1.50")),
        ("date", "2024-02-29", date(2024, 2, 29)),
        ("timestamp_ntz", "2024-02-29T12:00:00", datetime(2024, 2, 29, 12)),
        (array("long"), [], []),
        (struct(x="long"), {"x": 3}, (3,)),
    ],
)
def test_new_field_has_its_default(kind: Any, default: Any, expected: Any) -> None:
    """In older values, a new field that is not nullable has its default."""
    newest = required(schema(a="long", b=kind), "b", default)

    assert read(schema(a="long"), newest, (1,)) == (1, expected)


@pytest.mark.parametrize(
    ("written", "newest", "message"),
    [
        (schema(a="long"), schema(a="integer"), "field 'a' was stored as bigint, now it is int"),
        (schema(a="long"), schema(a="double"), "field 'a' was stored as bigint, now it is double"),
        (schema(a="integer"), schema(a="float"), "field 'a' was stored as int, now it is float"),
        (schema(a="string"), schema(a="long"), "field 'a' was stored as string, now it is bigint"),
        (schema(a="decimal(9,2)"), schema(a="decimal(9,4)"), "field 'a' was stored as decimal(9,2)"),
        (schema(a="long"), schema(a=struct(x="long")), "field 'a' was stored as bigint, now it is struct<x:bigint>"),
        (schema(a=struct(x="long")), schema(a=struct(x="date")), "field 'a.x' was stored as bigint, now it is date"),
        (schema(a=array("long")), schema(a=array("byte")), "field 'a.element' was stored as bigint"),
        (schema(a=mapping("integer", "long")), schema(a=mapping("long", "long")), "field 'a.key' was stored as int"),
        (schema(a=mapping("string", "long")), schema(a=mapping("string", "date")), "field 'a.value' was stored as"),
        (schema(a="long"), required(schema(a="long"), "a"), "field 'a' was stored as nullable, now it is not"),
        (schema(a="long"), required(schema(a="long", b="long"), "b"), "the new field 'b' is not nullable and has no"),
        (schema(a="long"), required(schema(a="long", b="long"), "b", "x"), "the default 'x' of field 'b' does not"),
        (schema(a="long"), required(schema(a="long", b="byte"), "b", 300), "the default 300 of field 'b' does not"),
    ],
)
def test_impossible_change_names_the_field(written: str, newest: str, message: str) -> None:
    """A change that could lose data is refused with the field's path and the alternatives."""
    with pytest.raises(InvalidInputError, match=re.escape(f"state 's': {message}")) as caught:
        upgrade_of(written, newest, "state 's'")

    assert "use another state name" in str(caught.value)


def test_values_of_first_schema_are_as_ever() -> None:
    """I15: state stored before schemas had numbers has the bytes of the first schema, and is readable."""
    assert ValueCodec(schema(a="long"), "s").encode((1,)) == b"\x92\x01\x01"
    assert ValueCodec(schema(a="long", b="long"), "s", earlier=[schema(a="long")]).decode(b"\x92\x01\x01") == (1, None)


def test_value_of_unknown_schema_is_refused() -> None:
    """I10: a value with an unknown schema number, or another number of fields, is damage."""
    codec = ValueCodec(schema(a="long"), "s", earlier=[schema(a="integer", b="long")])
    writer = ValueCodec(schema(a="long"), "s", earlier=["{}", "{}"])

    with pytest.raises(CorruptDataError, match="written under schema 2, the newest known is 1"):
        codec.decode(writer.encode((1,)))
    with pytest.raises(CorruptDataError, match="it has 1 fields, its schema 2"):
        codec.decode(b"\x92\x01\x01")
    with pytest.raises(CorruptDataError, match="encoding 2 is unknown"):
        codec.decode(b"\x92\x02\x01")
    assert value_head(1) == 257
