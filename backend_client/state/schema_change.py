"""
The allowed changes of a state's schema between runs, and the upgrade of older values.

Fields match by name, at any depth. A schema may gain fields (values that lack them get the default, or null), lose
fields, reorder them, widen them (`_WIDER`, decimals with more digits) and allow null. Any other change is refused, also
against every earlier schema, because its values may still be stored. Keys never change.

The same walk over both schemas decides whether a change is possible and makes the function that brings a stored value
from the one to the other. Values are never rewritten for a new schema: each says under which it was written.
No I/O.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from backend_client.state.stored_forms import (
    DECIMAL_CONTEXT,
    Convert,
    base_type,
    decimal_digits,
    decimal_quantum,
    encoder,
)
from storage.errors import InvalidInputError

Upgrade = Callable[[Sequence[Any]], Sequence[Any]]

_WIDER = {
    # type      what holds each of its values exactly
    "byte": ("short", "integer", "long", "float", "double"),
    "short": ("integer", "long", "float", "double"),
    "integer": ("long", "double"),
    "float": ("double",),
}
_FRACTIONS = ("float", "double")
_TEXT = {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}
_DEFAULT = "default"
"""Metadata key for a new field's default, as JSON: ``StructField("n", LongType(), True, {"default": 0})``."""


class _ChangeError(Exception):
    """The change is not possible; names the field and the reason."""


def upgrade_of(written: str, newest: str, what: str) -> Upgrade:
    """
    Return the function that upgrades a value's fields from one schema to another, both in stored form.

    Raises:
        InvalidInputError: The change is not possible; names the field.
    """
    try:
        convert = _struct_change(json.loads(written), json.loads(newest), "")
    except _ChangeError as error:
        raise InvalidInputError(f"{what}: {error}. Use the stored schema again, or use another state name") from None
    return convert or (lambda fields: fields)


def same_form(one: Any, other: Any) -> bool:
    """Return whether two types have the same stored form; comments and nullability do not matter."""
    return bool(_shape(one) == _shape(other))


def key_difference(stored: dict[str, Any], given: dict[str, Any]) -> str | None:
    """Return the first difference of two key schemas in words; None without one. Nullability does not matter."""
    old, new = stored["fields"], given["fields"]
    for position, field in enumerate(old):
        if position >= len(new):
            return f"has lost its field {field['name']!r}"
        other = new[position]
        if field["name"] != other["name"]:
            return f"was stored with field {field['name']!r} where {other['name']!r} is now"
        if not same_form(field["type"], other["type"]):
            return (
                f"was stored with field {field['name']!r} as {type_text(field['type'])}, "
                f"now it is {type_text(other['type'])}"
            )
    return f"has the new field {new[len(old)]['name']!r}" if len(new) > len(old) else None


def type_text(kind: Any) -> str:
    """Return a type as Spark's SQL writes it."""
    if isinstance(kind, str):
        return _TEXT.get(kind, kind)
    if kind["type"] == "struct":
        fields = (f"{field['name']}:{type_text(field['type'])}" for field in kind["fields"])
        return f"struct<{','.join(fields)}>"
    if kind["type"] == "array":
        return f"array<{type_text(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"map<{type_text(kind['keyType'])},{type_text(kind['valueType'])}>"
    return str(kind["type"])


def _shape(kind: Any) -> Any:
    """Return what defines a type's stored form: names and types, without comments and nullability."""
    if isinstance(kind, str):
        return base_type(kind)
    if kind["type"] == "struct":
        return [(field["name"], _shape(field["type"])) for field in kind["fields"]]
    if kind["type"] == "array":
        return ("array", _shape(kind["elementType"]))
    if kind["type"] == "map":
        return ("map", _shape(kind["keyType"]), _shape(kind["valueType"]))
    return kind


def _change(old: Any, new: Any, path: str) -> Convert | None:
    """Return the conversion of non-null stored values from one type to another; None if there is nothing to do."""
    if isinstance(old, str) and isinstance(new, str):
        return _simple_change(base_type(old), base_type(new), path)
    if isinstance(old, dict) and isinstance(new, dict) and old["type"] == new["type"]:
        if old["type"] == "struct":
            return _struct_change(old, new, f"{path}.")
        if old["type"] == "array":
            element = _change(old["elementType"], new["elementType"], f"{path}.element")
            return None if element is None else _each(element)
        if old["type"] == "map":
            if not same_form(old["keyType"], new["keyType"]):
                raise _ChangeError(_differs(f"{path}.key", old["keyType"], new["keyType"]))
            value = _change(old["valueType"], new["valueType"], f"{path}.value")
            return None if value is None else _every_second(value)
    raise _ChangeError(_differs(path, old, new))


def _simple_change(old: str, new: str, path: str) -> Convert | None:
    if old == new:
        return None
    if new in _WIDER.get(old, ()):
        return float if new in _FRACTIONS and old not in _FRACTIONS else None
    before, now = decimal_digits(old), decimal_digits(new)
    if before and now:
        (precision, scale), (new_precision, new_scale) = before, now
        if new_scale >= scale and new_precision - new_scale >= precision - scale:
            return None if scale == new_scale else _rescaled(decimal_quantum(new_scale))
    raise _ChangeError(_differs(path, old, new))


def _struct_change(old: dict[str, Any], new: dict[str, Any], path: str) -> Upgrade | None:
    positions = {field["name"]: position for position, field in enumerate(old["fields"])}
    steps = [_field_change(old["fields"], positions.get(field["name"]), field, path) for field in new["fields"]]
    count = len(old["fields"])
    if len(steps) == count and all(at == to and change is None for to, (at, change, _) in enumerate(steps)):
        return None

    def upgrade(values: Sequence[Any]) -> list[Any]:
        if len(values) != count:
            raise ValueError(f"it has {len(values)} fields, its schema {count}")
        return [
            default if at is None else values[at] if change is None or values[at] is None else change(values[at])
            for at, change, default in steps
        ]

    return upgrade


def _field_change(
    old: Sequence[dict[str, Any]], position: int | None, field: dict[str, Any], path: str
) -> tuple[int | None, Convert | None, Any]:
    """Return a field's old position, the conversion of its values, and its default if it is new."""
    name = f"{path}{field['name']}"
    if position is None:
        return None, None, _default(field, name)
    before = old[position]
    if before.get("nullable", True) and not field.get("nullable", True):
        raise _ChangeError(f"field {name!r} was stored as nullable, now it is not")
    return position, _change(before["type"], field["type"], name), None


def _default(field: dict[str, Any], path: str) -> Any:
    """Return the stored form of a new field in values that lack it."""
    value = (field.get("metadata") or {}).get(_DEFAULT)
    if value is not None:
        try:
            return encoder(field["type"], path)(_of_json(field["type"], value))
        except (InvalidInputError, ValueError, ArithmeticError) as error:
            raise _ChangeError(f"the default {value!r} of field {path!r} does not fit: {error}") from error
    if not field.get("nullable", True):
        raise _ChangeError(
            f"the new field {path!r} is not nullable and has no default, and stored values do not have it: "
            'make it nullable, or give it a default (metadata={"default": …})'
        )
    return None


def _of_json(kind: Any, value: Any) -> Any:
    """Return the Python value of a JSON default."""
    if isinstance(value, str | float) and isinstance(kind, str) and decimal_digits(kind):
        return Decimal(str(value))
    if isinstance(value, str) and kind == "date":
        return date.fromisoformat(value)
    if isinstance(value, str) and kind in ("timestamp", "timestamp_ntz"):
        return datetime.fromisoformat(value)
    return value


def _each(change: Convert) -> Convert:
    return lambda values: [None if value is None else change(value) for value in values]


def _every_second(change: Convert) -> Convert:
    return lambda flat: [
        change(value) if position % 2 and value is not None else value for position, value in enumerate(flat)
    ]


def _rescaled(quantum: Decimal) -> Convert:
    return lambda text: str(Decimal(text).quantize(quantum, context=DECIMAL_CONTEXT))


def _differs(path: str, old: Any, new: Any) -> str:
    return f"field {path!r} was stored as {type_text(old)}, now it is {type_text(new)}, which cannot hold all of it"
