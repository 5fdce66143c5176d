"""
Encodes and decodes single values of Spark types.

A *stored form* is a MessagePack value: numbers, text and bytes unchanged, timestamps as microseconds since 1970-01-01
UTC, timestamps without zone as microseconds of the wall clock, dates as days, times of day as nanoseconds, decimals as
text, maps as flat lists of keys and values, structs as arrays. Types are those of Spark's JSON description of a schema;
nothing here imports Spark. No I/O.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

from storage.errors import InvalidInputError

Convert = Callable[[Any], Any]
RowFactory = Callable[[Sequence[str]], Callable[[Iterable[Any]], Any]]

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - the wall clock of timestamps without zone
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_MICROSECOND = timedelta(microseconds=1)
_DECIMAL = re.compile(r"^decimal\((\d+),(-?\d+)\)$")
_ONE_FORM = (
    (re.compile(r"^((var)?char\(|string )"), "string"),
    (re.compile(r"^time\("), "time"),
    (re.compile(r"^(daytimeinterval|interval (day|hour|minute|second))"), "interval day to second"),
)
DECIMAL_CONTEXT = Context(prec=76, rounding=ROUND_HALF_UP)
_NATIVE = {bool, bytes, bytearray, date, datetime, Decimal, float, int, str, timedelta}
INTEGER_BITS = {"byte": 8, "short": 16, "integer": 32, "long": 64}


def plain_row(_: Sequence[str]) -> Callable[[Iterable[Any]], Any]:
    """Make structs plain tuples; Spark's side passes a factory of its `Row` instead."""
    return tuple


def key_encoder(kind: Any, path: str) -> Convert:
    """Return the encoder of a part of a grouping key."""
    encode, normal = encoder(kind, path), _normal_form(kind)
    return encode if normal is None else lambda value: normal(encode(value))


def _normal_form(kind: Any) -> Convert | None:
    """Return the conversion of non-null stored values to the one form of equal keys; None if there is nothing to do."""
    if kind in ("double", "float"):
        # In Spark 0.0 and -0.0 are one key, and all NaNs are one key, at any depth.
        return lambda number: math.nan if math.isnan(number) else number + 0.0
    if isinstance(kind, str):
        return None
    if kind["type"] == "array":
        item = _normal_form(kind["elementType"])
        return None if item is None else lambda values: [None if value is None else item(value) for value in values]
    parts = [_normal_form(field["type"]) for field in kind["fields"]]
    if not any(parts):
        return None
    return lambda values: [
        value if part is None or value is None else part(value) for part, value in zip(parts, values, strict=True)
    ]


def field_encoder(field: dict[str, Any], path: str) -> Convert:
    """Return the encoder of a struct's field; `path` names it in errors."""
    encode = encoder(field["type"], path)
    if field.get("nullable", True):
        return nullable_encoder(encode)

    def required(value: Any) -> Any:
        if value is None:
            raise InvalidInputError(f"{path} is not nullable, the value is None")
        return encode(value)

    return required


def nullable_encoder(encode: Convert) -> Convert:
    """Return an encoder that keeps None."""
    return lambda value: None if value is None else encode(value)


def _mismatch(path: str, kind: str, value: Any) -> InvalidInputError:
    return InvalidInputError(f"{path} is of type {kind}, the value is {value!r} ({type(value).__name__})")


def _native(value: Any) -> Any:
    """Return the Python value of a NumPy or pandas scalar; other values unchanged."""
    if type(value) in _NATIVE:
        return value
    for name in ("to_pydatetime", "to_pytimedelta"):
        convert = getattr(value, name, None)
        if convert is not None:
            return convert()
    item = getattr(value, "item", None)
    return item() if item is not None and getattr(value, "ndim", None) == 0 else value


def encoder(kind: Any, path: str) -> Convert:
    """
    Return the encoder of non-null values of type `kind`.

    The encoder raises `InvalidInputError`, which names `path`, for a value of another type.

    Raises:
        InvalidInputError: State cannot hold the type.
    """
    if isinstance(kind, dict):
        return _compound_encoder(kind, path)
    if kind in INTEGER_BITS:
        return _integer_encoder(kind, path)
    if kind.startswith("decimal"):
        return _decimal_encoder(kind, path)
    simple = _SIMPLE_ENCODERS.get(base_type(kind))
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


def base_type(kind: str) -> str:
    """Return the type that defines the stored form: that of all text, of all intervals up to days, of all times."""
    return next((form for pattern, form in _ONE_FORM if pattern.match(kind)), kind)


def _integer_encoder(kind: str, path: str) -> Convert:
    bound = 1 << (INTEGER_BITS[kind] - 1)

    def encode(value: Any) -> int:
        value = _native(value)
        if type(value) is not int:
            raise _mismatch(path, kind, value)
        if not -bound <= value < bound:
            raise InvalidInputError(f"{path} is of type {kind}; {value} is out of its range")
        return value

    return encode


def decimal_digits(kind: str) -> tuple[int, int] | None:
    """Return precision and scale of a decimal type; None for other types."""
    found = _DECIMAL.match(kind)
    return (int(found[1]), int(found[2])) if found else None


def decimal_quantum(scale: int) -> Decimal:
    """Return the smallest step of decimals with this scale."""
    return Decimal(1).scaleb(-scale)


def _decimal_encoder(kind: str, path: str) -> Convert:
    digits = decimal_digits(kind)
    if digits is None:
        raise InvalidInputError(f"{path}: {kind} is not a decimal type")
    precision, scale = digits
    quantum, context = decimal_quantum(scale), DECIMAL_CONTEXT
    zero = quantum * 0  # Spark's decimals have no minus zero; as a key it would differ from zero

    def encode(value: Any) -> str:
        value = _native(value)
        if isinstance(value, bool) or not isinstance(value, (Decimal, int)):
            raise _mismatch(path, kind, value)
        try:
            rounded = Decimal(value).quantize(quantum, context=context)
        except ArithmeticError as error:  # infinite, or more digits than any decimal type has
            raise InvalidInputError(f"{path} is of type {kind}, which cannot hold {value}") from error
        if not rounded.is_finite() or len(rounded.as_tuple().digits) > precision:
            raise InvalidInputError(f"{path} is of type {kind}; {value} has too many digits")
        return str(rounded or zero)

    return encode


def _compound_encoder(kind: dict[str, Any], path: str) -> Convert:
    if kind["type"] == "struct":
        return _struct_encoder(kind, path)
    if kind["type"] == "array":
        element = nullable_encoder(encoder(kind["elementType"], f"{path}[]"))

        def encode_array(value: Any) -> list[Any]:
            if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
                raise _mismatch(path, "array", value)
            return [element(item) for item in value]

        return encode_array
    if kind["type"] == "map":
        if contains(kind["keyType"], "array") or contains(kind["keyType"], "map"):
            raise InvalidInputError(
                f"{path}: state cannot hold maps with arrays or maps in keys, because Python dictionaries cannot"
            )
        encode_key = encoder(kind["keyType"], f"{path}.key")
        encode_value = nullable_encoder(encoder(kind["valueType"], f"{path}.value"))

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
    encoders = [field_encoder(field, f"{path}.{field['name']}") for field in kind["fields"]]

    def encode(value: Any) -> list[Any]:
        if not isinstance(value, (dict, tuple, list)) and names[0] in (attributes := getattr(value, "__dict__", {})):
            value = attributes  # of a dataclass, for example, which Spark takes, too
        if isinstance(value, dict):
            value = [value.get(name) for name in names]
        if not isinstance(value, (tuple, list)) or len(value) != len(encoders):
            raise _mismatch(path, f"struct<{', '.join(names)}>", value)
        return [convert(item) for convert, item in zip(encoders, value, strict=True)]

    return encode


def decoder(kind: Any, make_row: RowFactory) -> Convert | None:
    """Return the decoder of non-null stored values, or None if they need no decoding."""
    if isinstance(kind, str):
        return Decimal if kind.startswith("decimal") else _SIMPLE_DECODERS.get(base_type(kind))
    if kind["type"] == "struct":
        build = make_row([field["name"] for field in kind["fields"]])
        convert_all = [nullable_decoder(field["type"], make_row) for field in kind["fields"]]
        return lambda values: build(convert(value) for convert, value in zip(convert_all, values, strict=True))
    if kind["type"] == "array":
        convert_item = decoder(kind["elementType"], make_row)
        if convert_item is None:
            return list
        return lambda values: [None if value is None else convert_item(value) for value in values]
    convert_key = nullable_decoder(kind["keyType"], make_row)
    convert_value = nullable_decoder(kind["valueType"], make_row)
    return lambda flat: {
        convert_key(key): convert_value(value) for key, value in zip(flat[::2], flat[1::2], strict=True)
    }


def nullable_decoder(kind: Any, make_row: RowFactory) -> Convert:
    """Return the decoder of stored values or None."""
    convert = decoder(kind, make_row)
    if convert is None:
        return lambda value: value
    return lambda value: None if value is None else convert(value)


def contains(kind: Any, part: str) -> bool:
    """Return whether a type is or contains a `part`: a map, or an array outside of maps."""
    if isinstance(kind, str):
        return False
    if kind["type"] == part:
        return True
    if kind["type"] == "array":
        return contains(kind["elementType"], part)
    return kind["type"] == "struct" and any(contains(field["type"], part) for field in kind["fields"])


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


def in_utc(value: datetime) -> datetime:
    """Return a timestamp in UTC; without zone it is local time, as `decoder` returns it."""
    return _EPOCH_UTC + timedelta(microseconds=_timestamp_to_micros(value))


def _wall_clock_to_micros(value: datetime) -> int:
    return (value.replace(tzinfo=None) - _EPOCH) // _MICROSECOND


def _float32(value: float) -> float:
    # Spark stores a float in 4 bytes; reads must return the same value as in Spark, infinity included.
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def _unicode(value: str) -> str:
    value.encode()  # refuses a lone surrogate here, where the field's name is known
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
    "interval day to second": (timedelta, lambda value: value // _MICROSECOND),
    "time": (time, lambda at: (datetime.combine(_EPOCH, at) - _EPOCH) // _MICROSECOND * 1000),
    "void": ((), lambda _: None),
}

_SIMPLE_DECODERS: dict[str, Convert] = {
    "date": lambda days: date.fromordinal(days + _EPOCH_DAY),
    "timestamp": _micros_to_timestamp,
    "timestamp_ntz": lambda micros: _EPOCH + timedelta(microseconds=micros),
    "interval day to second": lambda micros: timedelta(microseconds=micros),
    "time": lambda nanos: (_EPOCH + timedelta(microseconds=nanos // 1000)).time(),
}
