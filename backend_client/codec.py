"""
Values and keys as bytes: data only, checked against a schema, versioned (I15).

A value is a MessagePack array ``[encoding version, field, field, …]`` in the order of its schema; a key is the array of
its columns. MessagePack arrays are self-delimiting, so no key's bytes are a prefix of another's.
Types without a MessagePack form are carried as: timestamps as microseconds since 1970-01-01 UTC, timestamps without
zone as microseconds of the wall clock, dates as days, decimals as text, maps as flat lists of keys and values, structs
as arrays. A schema is Spark's JSON description of it; nothing here imports Spark.
No I/O.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

import msgpack

from storage.errors import CorruptDataError, InvalidInputError

VALUE_ENCODING = 1

Convert = Callable[[Any], Any]
RowFactory = Callable[[Sequence[str]], Callable[[Iterable[Any]], Any]]

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - the wall clock of timestamps without zone
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_MICROSECOND = timedelta(microseconds=1)
_DECIMAL = re.compile(r"^decimal\((\d+),(-?\d+)\)$")
_INTEGERS = {"byte": 8, "short": 16, "integer": 32, "long": 64}
# Types whose Python values are MessagePack values already, with the exact Python type that needs no look.
_PLAIN = {"integer": int, "long": int, "short": int, "byte": int, "double": float, "string": str, "boolean": bool}
_PLAIN_IN_KEYS = _PLAIN.keys() - {"double"}


def plain_row(_: Sequence[str]) -> Callable[[Iterable[Any]], Any]:
    """Make structs plain tuples; Spark's side passes a factory of its `Row` instead."""
    return tuple


class ValueCodec:
    """
    Encodes the tuples of one state variable.

    Args:
        schema: Spark's JSON text of a struct type.
        what: Names the variable in errors.
        make_row: Builds nested structs on decoding.

    Raises:
        InvalidInputError: The schema has a type that state cannot hold.
    """

    def __init__(self, schema: str, what: str, make_row: RowFactory = plain_row) -> None:
        self._what = what
        fields = json.loads(schema)["fields"]
        self._names = [field["name"] for field in fields]
        self._encoders = [_field_encoder(field, f"{what}.{field['name']}") for field in fields]
        decoders = [_decoder(field["type"], make_row) for field in fields]
        self._decoders = decoders if any(decoder is not None for decoder in decoders) else None
        types = [_PLAIN.get(field["type"]) if isinstance(field["type"], str) else None for field in fields]
        self._plain_types = tuple(types) if all(types) else None
        # MessagePack holds all of them up to 64 bits, with or without a sign.
        kinds = [field["type"] for field in fields] if self._plain_types else []
        self._bounds = [(at, 1 << (_INTEGERS[kind] - 1)) for at, kind in enumerate(kinds) if kind in _INTEGERS]
        self._pack = msgpack.Packer(use_bin_type=True).pack

    def encode(self, value: Any) -> bytes:
        """
        Return the bytes of one value.

        Raises:
            InvalidInputError: It does not fit the schema; names the field.
        """
        if type(value) is tuple and tuple(map(type, value)) == self._plain_types:
            for at, bound in self._bounds:
                if not -bound <= value[at] < bound:
                    break  # the careful way below says which field it is
            else:
                try:
                    return self._pack((VALUE_ENCODING, *value))  # type: ignore[no-any-return]
                except ValueError:  # text that is no Unicode
                    pass
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise InvalidInputError(
                f"state {self._what} takes a tuple of {len(self._names)} fields ({', '.join(self._names)}), "
                f"not {type(value).__name__}"
            )
        if len(value) != len(self._encoders):
            raise InvalidInputError(
                f"state {self._what} has {len(self._encoders)} fields ({', '.join(self._names)}), "
                f"the value has {len(value)}"
            )
        fields = [encode(field) for encode, field in zip(self._encoders, value, strict=True)]
        return self._pack([VALUE_ENCODING, *fields])  # type: ignore[no-any-return]

    def decode(self, data: bytes) -> tuple[Any, ...]:
        """
        Return the value that `encode` was given.

        Raises:
            CorruptDataError: The bytes are no value of this schema.
        """
        try:
            fields = msgpack.unpackb(data, use_list=False, strict_map_key=False)
            if fields[0] != VALUE_ENCODING:
                raise ValueError(f"encoding {fields[0]} is unknown")
            if len(fields) != len(self._names) + 1:
                raise ValueError(f"it has {len(fields) - 1} fields, the schema {len(self._names)}")
            if self._decoders is None:
                return fields[1:]  # type: ignore[no-any-return]
            return tuple(
                field if decode is None or field is None else decode(field)
                for decode, field in zip(self._decoders, fields[1:], strict=True)
            )
        except (ValueError, TypeError, LookupError, ArithmeticError, OSError, msgpack.UnpackException) as error:
            raise CorruptDataError(f"a stored value of state {self._what} cannot be read: {error}") from error


class KeyCodec:
    """
    Encodes grouping keys, given as the Python values that Arrow makes of the key columns.

    Args:
        schema: Spark's JSON text of the struct of the key columns.
        make_row: Builds the key, and structs in it, on decoding.
    """

    def __init__(self, schema: str, make_row: RowFactory = plain_row) -> None:
        fields = json.loads(schema)["fields"]
        for field in fields:
            if _contains_map(field["type"]):
                raise InvalidInputError(f"column {field['name']!r} holds a map; maps cannot be grouping keys")
        plain = all(isinstance(field["type"], str) and (field["type"] in _PLAIN_IN_KEYS) for field in fields)
        self._encoders = None if plain else [_nullable(_key_encoder(f["type"], f["name"])) for f in fields]
        self._decoders = [_decoder_or_none(field["type"], make_row) for field in fields]
        self._make_key = make_row([field["name"] for field in fields])
        self._pack = msgpack.Packer(use_bin_type=True).pack

    def encode(self, key: tuple[Any, ...]) -> bytes:
        """Return the bytes of one key; nulls are legal."""
        if self._encoders is None:
            return self._pack(key)  # type: ignore[no-any-return]
        return self._pack([encode(part) for encode, part in zip(self._encoders, key, strict=True)])  # type: ignore[no-any-return]

    def decode(self, data: bytes) -> Any:
        """
        Return the key that `encode` was given.

        Raises:
            CorruptDataError: The bytes are no key of this schema.
        """
        try:
            parts = msgpack.unpackb(data, use_list=False)
            return self._make_key([decode(part) for decode, part in zip(self._decoders, parts, strict=True)])
        except (ValueError, TypeError, ArithmeticError, OSError, msgpack.UnpackException) as error:
            raise CorruptDataError(f"a stored key cannot be read: {error}") from error


def _key_encoder(kind: Any, path: str) -> Convert:
    encode = _encoder(kind, path)
    if kind in ("double", "float"):
        # Spark takes 0.0 and -0.0 for one key, and all that is not a number for another.
        return lambda value: math.nan if value is not None and math.isnan(value) else encode(value) + 0.0
    return encode


def _field_encoder(field: dict[str, Any], path: str) -> Convert:
    encode = _encoder(field["type"], path)
    if field.get("nullable", True):
        return _nullable(encode)

    def required(value: Any) -> Any:
        if value is None:
            raise InvalidInputError(f"{path} is not nullable, the value is None")
        return encode(value)

    return required


def _nullable(encode: Convert) -> Convert:
    return lambda value: None if value is None else encode(value)


def _mismatch(path: str, kind: str, value: Any) -> InvalidInputError:
    return InvalidInputError(f"{path} is of type {kind}, the value is {value!r} ({type(value).__name__})")


def _native(value: Any) -> Any:
    """Return the Python value of a NumPy or pandas scalar, and other values as they are."""
    for name in ("to_pydatetime", "to_pytimedelta"):
        convert = getattr(value, name, None)
        if convert is not None:
            return convert()
    item = getattr(value, "item", None)
    return item() if item is not None and getattr(value, "ndim", None) == 0 else value


def _encoder(kind: Any, path: str) -> Convert:
    if isinstance(kind, dict):
        return _compound_encoder(kind, path)
    if kind in _INTEGERS:
        return _integer_encoder(kind, path)
    if kind.startswith("decimal"):
        return _decimal_encoder(kind, path)
    simple = _SIMPLE_ENCODERS.get(_base(kind))
    if simple is None:
        raise InvalidInputError(f"{path}: state cannot hold the type {kind}; use a type that Spark's rows can carry")
    accepts, convert = simple

    def encode(value: Any) -> Any:
        value = _native(value)
        if not isinstance(value, accepts) or (kind != "boolean" and isinstance(value, bool)):
            raise _mismatch(path, kind, value)
        try:
            return convert(value)
        except (ArithmeticError, ValueError) as error:
            raise InvalidInputError(f"{path} is of type {kind}, which cannot hold {value!r}: {error}") from error

    return encode


def _base(kind: str) -> str:
    return "string" if kind.startswith(("char(", "varchar(", "string ")) else kind


def _integer_encoder(kind: str, path: str) -> Convert:
    bound = 1 << (_INTEGERS[kind] - 1)

    def encode(value: Any) -> int:
        value = _native(value)
        if type(value) is not int:
            raise _mismatch(path, kind, value)
        if not -bound <= value < bound:
            raise InvalidInputError(f"{path} is of type {kind}; {value} is out of its range")
        return value

    return encode


def _decimal_encoder(kind: str, path: str) -> Convert:
    found = _DECIMAL.match(kind)
    if found is None:
        raise InvalidInputError(f"{path}: {kind} is no decimal type")
    precision, scale = int(found[1]), int(found[2])
    quantum, context = Decimal(1).scaleb(-scale), Context(prec=76, rounding=ROUND_HALF_UP)

    def encode(value: Any) -> str:
        value = _native(value)
        if isinstance(value, bool) or not isinstance(value, (Decimal, int)):
            raise _mismatch(path, kind, value)
        try:
            rounded = Decimal(value).quantize(quantum, context=context)
        except ArithmeticError as error:  # infinite, or with more digits than any decimal type has
            raise InvalidInputError(f"{path} is of type {kind}, which cannot hold {value}") from error
        if not rounded.is_finite() or len(rounded.as_tuple().digits) > precision:
            raise InvalidInputError(f"{path} is of type {kind}; {value} has too many digits")
        return str(rounded)

    return encode


def _compound_encoder(kind: dict[str, Any], path: str) -> Convert:
    if kind["type"] == "struct":
        return _struct_encoder(kind, path)
    if kind["type"] == "array":
        element = _nullable(_encoder(kind["elementType"], f"{path}[]"))

        def encode_array(value: Any) -> list[Any]:
            if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
                raise _mismatch(path, "array", value)
            return [element(item) for item in value]

        return encode_array
    if kind["type"] == "map":
        if isinstance(kind["keyType"], dict) and kind["keyType"]["type"] == "array":
            raise InvalidInputError(
                f"{path}: state cannot hold maps whose keys are arrays: Python has no such dictionaries"
            )
        encode_key = _encoder(kind["keyType"], f"{path}.key")
        encode_value = _nullable(_encoder(kind["valueType"], f"{path}.value"))

        def encode_map(value: Any) -> list[Any]:
            pairs = value.items() if isinstance(value, dict) else value
            flat: list[Any] = []
            try:
                for key, item in pairs:
                    flat += (encode_key(key), encode_value(item))
            except (TypeError, ValueError) as error:
                if isinstance(error, InvalidInputError):
                    raise
                raise _mismatch(path, "map", value) from error
            return flat

        return encode_map
    raise InvalidInputError(f"{path}: state cannot hold the type {kind['type']}")


def _struct_encoder(kind: dict[str, Any], path: str) -> Convert:
    names = [field["name"] for field in kind["fields"]]
    encoders = [_field_encoder(field, f"{path}.{field['name']}") for field in kind["fields"]]

    def encode(value: Any) -> list[Any]:
        if isinstance(value, dict):
            value = [value.get(name) for name in names]
        if not isinstance(value, (tuple, list)) or len(value) != len(encoders):
            raise _mismatch(path, f"struct<{', '.join(names)}>", value)
        return [convert(item) for convert, item in zip(encoders, value, strict=True)]

    return encode


def _decoder(kind: Any, make_row: RowFactory) -> Convert | None:
    """Return what turns a stored value into its Python form, or None if it is that already."""
    if isinstance(kind, str):
        if kind.startswith("decimal"):
            return Decimal
        return _SIMPLE_DECODERS.get(kind)
    if kind["type"] == "struct":
        build = make_row([field["name"] for field in kind["fields"]])
        convert_all = [_decoder_or_none(field["type"], make_row) for field in kind["fields"]]
        return lambda values: build(convert(value) for convert, value in zip(convert_all, values, strict=True))
    if kind["type"] == "array":
        convert_item = _decoder(kind["elementType"], make_row)
        if convert_item is None:
            return list
        return lambda values: [None if value is None else convert_item(value) for value in values]
    convert_key = _decoder_or_none(kind["keyType"], make_row)
    convert_value = _decoder_or_none(kind["valueType"], make_row)
    return lambda flat: {
        convert_key(key): convert_value(value) for key, value in zip(flat[::2], flat[1::2], strict=True)
    }


def _decoder_or_none(kind: Any, make_row: RowFactory) -> Convert:
    convert = _decoder(kind, make_row)
    if convert is None:
        return lambda value: value
    return lambda value: None if value is None else convert(value)


def _contains_map(kind: Any) -> bool:
    if isinstance(kind, str):
        return False
    if kind["type"] == "map":
        return True
    if kind["type"] == "array":
        return _contains_map(kind["elementType"])
    return kind["type"] == "struct" and any(_contains_map(field["type"]) for field in kind["fields"])


def _timestamp_to_micros(value: datetime) -> int:
    if value.tzinfo is not None:
        return (value - _EPOCH_UTC) // _MICROSECOND
    # A naive timestamp is local time, as everywhere in PySpark.
    for edge, edge_micros in _CALENDAR_EDGES:
        if value.year == edge.year:
            return edge_micros + (value - edge) // _MICROSECOND
    return int(value.replace(microsecond=0).timestamp()) * 1_000_000 + value.microsecond


def _micros_to_timestamp(micros: int) -> datetime:
    for edge, edge_micros in _CALENDAR_EDGES:
        if (edge.year == 1 and micros < edge_micros + _YEAR_MICROS) or (edge.year == 9999 and micros >= edge_micros):
            return edge + timedelta(microseconds=micros - edge_micros)
    local = datetime.fromtimestamp(micros // 1_000_000)  # noqa: DTZ006 - Spark hands out naive local time
    return local.replace(microsecond=micros % 1_000_000)


# In the first and the last year, which people use for "always" and "never", Python cannot always look at the days
# around to find the offset of the zone: there it is taken as constant.
_YEAR_MICROS = 365 * 86_400 * 1_000_000
_CALENDAR_EDGES = tuple(
    (edge, int((edge + timedelta(days=2)).timestamp()) * 1_000_000 - 2 * 86_400 * 1_000_000)
    for edge in (datetime(1, 1, 1), datetime(9999, 1, 1))  # noqa: DTZ001 - local time
)


def _wall_clock_to_micros(value: datetime) -> int:
    return (value.replace(tzinfo=None) - _EPOCH) // _MICROSECOND


def _float32(value: float) -> float:
    # Spark keeps a float in 4 bytes; what is read back must be what Spark would give back.
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def _unicode(value: str) -> str:
    value.encode()  # half of a surrogate pair is refused here, where the field's name is known
    return value


_SIMPLE_ENCODERS: dict[str, tuple[Any, Convert]] = {
    "boolean": (bool, bool),
    "double": ((float, int), float),
    "float": ((float, int), _float32),
    "string": (str, _unicode),
    "binary": ((bytes, bytearray, memoryview), bytes),
    "date": (date, lambda value: value.toordinal() - _EPOCH_DAY),
    "timestamp": (datetime, _timestamp_to_micros),
    "timestamp_ntz": (datetime, _wall_clock_to_micros),
    "daytimeinterval": (timedelta, lambda value: value // _MICROSECOND),
    "interval day to second": (timedelta, lambda value: value // _MICROSECOND),
    "void": ((), lambda _: None),
}

_SIMPLE_DECODERS: dict[str, Convert] = {
    "date": lambda days: date.fromordinal(days + _EPOCH_DAY),
    "timestamp": _micros_to_timestamp,
    "timestamp_ntz": lambda micros: _EPOCH + timedelta(microseconds=micros),
    "daytimeinterval": lambda micros: timedelta(microseconds=micros),
    "interval day to second": lambda micros: timedelta(microseconds=micros),
}
