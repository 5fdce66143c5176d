"""
Random histories of a state's schema, and values written under each of its schemas.

The model converts Python values field by field, by name; the codec does the same on stored bytes.
"""

from __future__ import annotations

import json
from decimal import Decimal
from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from backend_client.state.codec import ValueCodec
from backend_client.state.declared_states import merge_states
from dstl_service.wire import StateInfo
from tests.unit.backend_client.schemas import array, mapping

_WIDER = {
    "byte": ["short", "integer", "long", "float", "double"],
    "short": ["integer", "long", "float", "double"],
    "integer": ["long", "double"],
    "float": ["double"],
    "decimal(5,2)": ["decimal(7,2)", "decimal(9,4)"],
}
_SIMPLE: dict[str, st.SearchStrategy[Any]] = {
    "byte": st.integers(-128, 127),
    "short": st.integers(-(2**15), 2**15 - 1),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False, width=32),
    "double": st.floats(allow_nan=False),
    "decimal(5,2)": st.decimals(-999, 999, places=2),
    "decimal(7,2)": st.decimals(-99999, 99999, places=2),
    "decimal(9,4)": st.decimals(-99999, 99999, places=4),
    "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    "binary": st.binary(max_size=8),
    "date": st.dates(),
    "timestamp_ntz": st.datetimes(),
}
_KEYS = ["string", "integer", "date"]
_names = count()


def _field(kind: Any, default: Any = None) -> dict[str, Any]:
    metadata = {} if default is None else {"default": default}
    return {"name": f"f{next(_names)}", "type": kind, "nullable": True, "metadata": metadata}


def _structs(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(children, min_size=1, max_size=3).map(
        lambda kinds: {"type": "struct", "fields": [_field(kind) for kind in kinds]}
    )


TYPES = st.recursive(
    st.sampled_from(sorted(_SIMPLE)),
    lambda children: (
        children.map(array)
        | st.tuples(st.sampled_from(_KEYS), children).map(lambda pair: mapping(*pair))
        | _structs(children)
    ),
    max_leaves=4,
)


def evolved(draw: st.DrawFn, kind: Any) -> Any:
    """Draw a type that this type may become."""
    if isinstance(kind, str):
        return draw(st.sampled_from([kind, *_WIDER.get(kind, [])]))
    if kind["type"] == "array":
        return array(evolved(draw, kind["elementType"]))
    if kind["type"] == "map":
        return mapping(kind["keyType"], evolved(draw, kind["valueType"]))
    kept = [field for field in kind["fields"] if draw(st.integers(0, 4))]
    fields = [{**field, "type": evolved(draw, field["type"])} for field in kept]
    fields += [_field(kind) for kind in draw(st.lists(TYPES, max_size=1))]
    if not fields or draw(st.booleans()):
        fields.append(_field("long", draw(st.none() | st.integers(-9, 9))))
    return {"type": "struct", "fields": draw(st.permutations(fields))}


def value_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of a type; sometimes null."""
    if isinstance(kind, str):
        return st.none() | _SIMPLE[kind]
    if kind["type"] == "array":
        return st.none() | st.lists(value_of(kind["elementType"]), max_size=3)
    if kind["type"] == "map":
        return st.none() | st.dictionaries(_SIMPLE[kind["keyType"]], value_of(kind["valueType"]), max_size=3)
    return st.none() | fields_of(kind)


def fields_of(kind: dict[str, Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Return values of a struct type."""
    return st.tuples(*(value_of(field["type"]) for field in kind["fields"]))


def model(old: Any, new: Any, value: Any) -> Any:
    """Return the value after its type changes."""
    if value is None or isinstance(old, str):
        if isinstance(value, int) and new in ("float", "double"):
            return float(value)
        return value
    if old["type"] == "array":
        return [model(old["elementType"], new["elementType"], item) for item in value]
    if old["type"] == "map":
        return {key: model(old["valueType"], new["valueType"], item) for key, item in value.items()}
    before = {field["name"]: (field["type"], item) for field, item in zip(old["fields"], value, strict=True)}
    return tuple(
        model(before[field["name"]][0], field["type"], before[field["name"]][1])
        if field["name"] in before
        else field["metadata"].get("default")
        for field in new["fields"]
    )


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[tuple[Any, ...]]]:
    """Draw the successive schemas of a state, and a value written under each."""
    schemas = [draw(_structs(TYPES))]
    for _ in range(draw(st.integers(0, 3))):
        schemas.append(evolved(draw, schemas[-1]))
    return schemas, [draw(fields_of(schema)) for schema in schemas]


@given(histories())
def test_older_values_are_read_as_newest_schema(drawn: tuple[list[dict[str, Any]], list[tuple[Any, ...]]]) -> None:
    """I15: a value written under any schema of a history is read with the newest schema and its exact types."""
    schemas, values = drawn
    states: dict[str, StateInfo] = {}
    stored = []
    for schema, value in zip(schemas, values, strict=True):
        states = merge_states("op", states, {"s": StateInfo(1, "value", json.dumps(schema))})
        stored.append(ValueCodec(states["s"].schema, "s", earlier=states["s"].earlier).encode(value))
    codec = ValueCodec(states["s"].schema, "s", earlier=states["s"].earlier)

    for schema, value, data in zip(schemas, values, stored, strict=True):
        expected = model(schema, schemas[-1], value)
        decoded = codec.decode(data)
        assert decoded == expected
        assert shape(decoded) == shape(expected)


@given(histories())
def test_state_set_back_reads_what_it_wrote(drawn: tuple[list[dict[str, Any]], list[tuple[Any, ...]]]) -> None:
    """A program that returns to an earlier checkpoint with its schema reads the values of that checkpoint."""
    schemas, values = drawn
    states: dict[str, StateInfo] = {}
    for schema, value in zip(schemas, values, strict=True):
        states = merge_states("op", states, {"s": StateInfo(1, "value", json.dumps(schema))})
        codec = ValueCodec(states["s"].schema, "s", earlier=states["s"].earlier)

        assert codec.decode(codec.encode(value)) == value


def shape(value: Any) -> Any:
    """Return the types of a value's parts; a decimal's digits count, because they are part of Spark's type."""
    if isinstance(value, (list, tuple)):
        return [shape(item) for item in value]
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return type(value) if not isinstance(value, Decimal) else Decimal
