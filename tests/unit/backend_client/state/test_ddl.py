"""Schemas as text, without Spark."""

from __future__ import annotations

import json

import pytest

from backend_client.state.ddl import parse_schema
from storage.errors import InvalidInputError
from tests.unit.backend_client.schemas import array, mapping, struct


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n long, s STRING", struct(n="long", s="string")),
        ("n: bigint, m: int", struct(n="long", m="integer")),
        ("a decimal, b decimal(5), c numeric(12, 3)", struct(a="decimal(10,0)", b="decimal(5,0)", c="decimal(12,3)")),
        ("`a b` tinyint, `c``d` real", struct(**{"a b": "byte", "c`d": "float"})),
        ("l array<array<date>>", struct(l=array(array("date")))),
        ("m map<int, struct<x: int, y void>>", struct(m=mapping("integer", struct(x="integer", y="void")))),
        ("struct<a:int>", struct(a="integer")),
        ("struct int", struct(struct="integer")),
        ("v varchar(3), i interval day to second", struct(v="varchar(3)", i="interval day to second")),
        ("a time, b TIME(3)", struct(a="time(6)", b="time(3)")),
        ("i interval hour to second, j INTERVAL DAY", struct(i="interval hour to second", j="interval day")),
        ("", struct()),
    ],
)
def test_text_is_read_as_by_spark(text: str, expected: dict[str, object]) -> None:
    """All types that state can hold are parsed, in Spark's spellings."""
    assert parse_schema(text) == expected


def test_field_may_be_required_and_commented() -> None:
    """Constraints and comments after a field's type are kept."""
    (field,) = parse_schema("n long not null comment 'it\\'s'")["fields"]

    assert field == {"name": "n", "type": "long", "nullable": False, "metadata": {"comment": "it's"}}
    assert json.dumps(field)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n", "found its end, expected a word"),
        ("n long,", "found its end, expected a name"),
        ("n long s string", "found 's', expected ','"),
        ("n array<long", "found its end, expected '>'"),
        ("n decimal(x)", "found 'x', expected a number"),
        ("n long; m long", "'; m long' cannot be parsed"),
        ("n variant", "state cannot hold the type variant"),
        ("n interval year to month", "state cannot hold intervals of 'year'"),
        ("n interval hour to day", "state cannot hold intervals of 'day'"),
        ("n long not empty", "found 'empty', expected null"),
    ],
)
def test_wrong_text_is_refused_where_it_is_wrong(text: str, message: str) -> None:
    """The error quotes the text and names the missing part and its place."""
    with pytest.raises(InvalidInputError, match=message):
        parse_schema(text)
