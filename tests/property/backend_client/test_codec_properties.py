"""Round trips of values of any schema, and keys that are not prefixes of each other."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from backend_client.state.codec import KeyCodec, ValueCodec
from storage.errors import CorruptDataError, InvalidInputError
from tests.unit.backend_client.schemas import array, mapping, struct

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

SIMPLE: dict[str, st.SearchStrategy[Any]] = {
    "long": st.integers(-(2**63), 2**63 - 1),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "short": st.integers(-(2**15), 2**15 - 1),
    "byte": st.integers(-128, 127),
    "double": st.floats(allow_nan=False),
    "float": st.floats(allow_nan=False, width=32),
    "string": _TEXT,
    "boolean": st.booleans(),
    "binary": st.binary(max_size=20),
    "date": st.dates(),
    "timestamp": st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 29)),
    "timestamp_ntz": st.datetimes(),
    "interval day to second": st.timedeltas(timedelta(days=-(10**6)), timedelta(days=10**6)),
    "decimal(12,3)": st.decimals(-(10**9) + 1, 10**9 - 1, places=3),
}
HASHABLE = sorted(SIMPLE.keys() - {"double", "float", "decimal(12,3)"})

Typed = tuple[Any, st.SearchStrategy[Any]]


def _simple(name: str) -> Typed:
    return name, st.none() | SIMPLE[name]


def _compound(children: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    arrays = children.map(lambda child: (array(child[0]), st.none() | st.lists(child[1], max_size=4)))
    maps = st.tuples(st.sampled_from(HASHABLE), children).map(
        lambda pair: (
            mapping(pair[0], pair[1][0]),
            st.none() | st.dictionaries(SIMPLE[pair[0]], pair[1][1], max_size=4),
        )
    )
    structs = st.lists(children, min_size=1, max_size=3).map(
        lambda parts: (
            struct(**{f"f{number}": part[0] for number, part in enumerate(parts)}),
            st.none() | st.tuples(*(part[1] for part in parts)),
        )
    )
    return arrays | maps | structs


TYPES = st.recursive(st.sampled_from(sorted(SIMPLE)).map(_simple), _compound, max_leaves=5)


@st.composite
def values(draw: st.DrawFn) -> tuple[str, tuple[Any, ...]]:
    """Draw a schema and a value of it."""
    parts = draw(st.lists(TYPES, min_size=1, max_size=4))
    kinds = {f"c{number}": kind for number, (kind, _) in enumerate(parts)}
    return json.dumps(struct(**kinds)), tuple(draw(strategy) for _, strategy in parts)


@given(values())
def test_any_value_survives_round_trip(drawn: tuple[str, tuple[Any, ...]]) -> None:
    """A value of any schema is decoded unchanged."""
    schema, value = drawn
    codec = ValueCodec(schema, "state")

    assert codec.decode(codec.encode(value)) == value


@given(values(), st.data())
def test_any_damage_is_value_or_error(drawn: tuple[str, tuple[Any, ...]], data: st.DataObject) -> None:
    """I10: any bytes in a table are read as a value or raise the project's own error."""
    schema, value = drawn
    codec = ValueCodec(schema, "state")
    stored = bytearray(codec.encode(value))
    position = data.draw(st.integers(0, len(stored) - 1))
    stored[position] = data.draw(st.integers(0, 255))
    try:
        decoded = codec.decode(bytes(stored[: data.draw(st.integers(0, len(stored)))]))
    except CorruptDataError:
        return

    assert len(decoded) == len(value)


KEY_KINDS = st.lists(st.sampled_from(sorted(SIMPLE)), min_size=1, max_size=3)


@st.composite
def keys(draw: st.DrawFn) -> tuple[str, list[tuple[Any, ...]]]:
    """Draw a key schema and two keys of it that are often similar."""
    kinds = draw(KEY_KINDS)
    one = tuple(draw(st.none() | SIMPLE[kind]) for kind in kinds)
    other = tuple(draw(st.just(part) | st.none() | SIMPLE[kind]) for kind, part in zip(kinds, one, strict=True))
    return json.dumps(struct(**{f"k{number}": kind for number, kind in enumerate(kinds)})), [one, other]


@given(keys())
def test_no_key_is_prefix_of_another(drawn: tuple[str, list[tuple[Any, ...]]]) -> None:
    """Equal keys have equal bytes, other keys have other bytes, and no key's bytes are a prefix of another's."""
    schema, (one, other) = drawn
    codec = KeyCodec(schema)
    first, second = codec.encode(one), codec.encode(other)

    assert (first == second) == (one == other)
    assert first == second or not first.startswith(second)


@given(st.decimals(allow_nan=True, allow_infinity=True) | st.floats() | st.text() | st.integers())
def test_any_decimal_is_kept_or_refused(value: Decimal | float | str) -> None:
    """Any decimal is stored in the type's form or refused with the project's own error."""
    codec = ValueCodec(json.dumps(struct(amount="decimal(12,3)")), "state")
    try:
        stored = codec.encode((value,))
    except InvalidInputError:
        return

    assert codec.decode(stored)[0].as_tuple().exponent == -3
