"""
Values and keys as bytes: data only, checked against a schema, versioned (I15).

A value is a MessagePack array ``[head, field, field, …]`` in the order of its schema; a key is the array of its
columns. MessagePack arrays are self-delimiting, so no key's bytes are a prefix of another's. `stored_forms` defines the
forms of the fields.
The head is ``encoding version + 256 * schema number``: a state's schemas are numbered from 0 in the order in which the
job used them. Values are always written under the newest schema; older values stay unchanged in table and log, and are
upgraded when they are read.
No I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgpack

from backend_client.state.schema_change import Upgrade, upgrade_of
from backend_client.state.stored_forms import (
    INTEGER_BITS,
    RowFactory,
    contains,
    decoder,
    field_encoder,
    key_encoder,
    nullable_decoder,
    nullable_encoder,
    plain_row,
)
from storage.errors import CorruptDataError, InvalidInputError

VALUE_ENCODING = 1

# Types whose Python values are MessagePack values, with the exact Python type that needs no conversion.
_PLAIN = {"integer": int, "long": int, "short": int, "byte": int, "double": float, "string": str, "boolean": bool}
_PLAIN_IN_KEYS = _PLAIN.keys() - {"double"}
_ENCODINGS = 256


def value_head(schema_number: int) -> int:
    """Return the first element of values written under a schema."""
    return VALUE_ENCODING + _ENCODINGS * schema_number


class ValueCodec:
    """
    Encodes the tuples of one state variable.

    Args:
        schema: Spark's JSON text of a struct type.
        what: The variable's name, for errors.
        make_row: Builds nested structs on decoding.
        earlier: The variable's earlier schemas, oldest first; stored values may have any of them.

    Raises:
        InvalidInputError: State cannot hold a type of the schema.
    """

    def __init__(self, schema: str, what: str, make_row: RowFactory = plain_row, earlier: Sequence[str] = ()) -> None:
        self._what = what
        self._schema = schema
        self._earlier = earlier
        self._head = value_head(len(earlier))
        self._upgrades: dict[int, Upgrade] = {}
        fields = json.loads(schema)["fields"]
        self._names = [field["name"] for field in fields]
        self._elements = len(fields) + 1
        self._encoders = [field_encoder(field, f"{what}.{field['name']}") for field in fields]
        decoders = [decoder(field["type"], make_row) for field in fields]
        self._decoders = decoders if any(decode is not None for decode in decoders) else None
        types = [_PLAIN.get(field["type"]) if isinstance(field["type"], str) else None for field in fields]
        self._plain_types = tuple(types) if all(types) else None
        # MessagePack accepts any integer up to 64 bits, signed or not, so narrower types are checked here.
        kinds = [field["type"] for field in fields] if self._plain_types else []
        self._bounds = [(at, 1 << (INTEGER_BITS[kind] - 1)) for at, kind in enumerate(kinds) if kind in INTEGER_BITS]
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
                    break  # the slow path below names the field
            else:
                try:
                    return self._pack((self._head, *value))  # type: ignore[no-any-return]
                except ValueError:  # text that is not valid Unicode
                    pass
        if not isinstance(value, (tuple, list)):
            value = self._in_order(value)
        if len(value) != len(self._encoders):
            raise InvalidInputError(
                f"state {self._what} has {len(self._encoders)} fields ({', '.join(self._names)}), "
                f"the value has {len(value)}"
            )
        fields = [encode(field) for encode, field in zip(self._encoders, value, strict=True)]
        return self._pack([self._head, *fields])  # type: ignore[no-any-return]

    def _in_order(self, value: Any) -> tuple[Any, ...]:
        """Return the fields of an array, a series or a generator, which Spark takes, too."""
        try:
            if not isinstance(value, (str, bytes, Mapping, AbstractSet)):
                return tuple(value)
        except TypeError:
            pass
        raise InvalidInputError(
            f"state {self._what} takes a tuple of {len(self._names)} fields ({', '.join(self._names)}), "
            f"not {type(value).__name__}"
        )

    def decode(self, data: bytes) -> tuple[Any, ...]:
        """
        Return the value that `encode` got, upgraded to the newest schema.

        Raises:
            CorruptDataError: The bytes are not a value of this schema or an earlier one.
        """
        try:
            fields = msgpack.unpackb(data, use_list=False, strict_map_key=False)
            if fields[0] != self._head or len(fields) != self._elements:
                fields = self._upgraded(fields)
            if self._decoders is None:
                return fields[1:]  # type: ignore[no-any-return]
            return tuple(
                field if decode is None or field is None else decode(field)
                for decode, field in zip(self._decoders, fields[1:], strict=True)
            )
        except (ValueError, TypeError, LookupError, ArithmeticError, OSError, msgpack.UnpackException) as error:
            raise CorruptDataError(f"a stored value of state {self._what} cannot be read: {error}") from error

    def _upgraded(self, fields: tuple[Any, ...]) -> tuple[Any, ...]:
        """Upgrade a value of an earlier schema to the newest."""
        number, encoding = divmod(fields[0], _ENCODINGS)
        if encoding != VALUE_ENCODING:
            raise ValueError(f"encoding {encoding} is unknown")
        if not 0 <= number <= len(self._earlier):
            raise ValueError(f"it was written under schema {number}, the newest known is {len(self._earlier)}")
        if number == len(self._earlier):
            raise ValueError(f"it has {len(fields) - 1} fields, the schema {len(self._names)}")
        upgrade = self._upgrades.get(number)
        if upgrade is None:
            upgrade = self._upgrades[number] = upgrade_of(self._earlier[number], self._schema, self._what)
        return (self._head, *upgrade(fields[1:]))


class KeyCodec:
    """
    Encodes grouping keys, given as Arrow's Python values of the key columns.

    Args:
        schema: Spark's JSON text of the struct of the key columns.
        make_row: Builds the key, and structs in it, on decoding.

    Raises:
        InvalidInputError: A key column has or contains a map.
    """

    def __init__(self, schema: str, make_row: RowFactory = plain_row) -> None:
        fields = json.loads(schema)["fields"]
        for field in fields:
            if contains(field["type"], "map"):
                raise InvalidInputError(f"column {field['name']!r} contains a map, which cannot be a grouping key")
        plain = all(isinstance(field["type"], str) and (field["type"] in _PLAIN_IN_KEYS) for field in fields)
        self._encoders = None if plain else [nullable_encoder(key_encoder(f["type"], f["name"])) for f in fields]
        self._decoders = [nullable_decoder(field["type"], make_row) for field in fields]
        self._make_key = make_row([field["name"] for field in fields])
        self._pack = msgpack.Packer(use_bin_type=True).pack

    def encode(self, key: tuple[Any, ...]) -> bytes:
        """Return the bytes of one key; nulls are legal."""
        if self._encoders is None:
            return self._pack(key)  # type: ignore[no-any-return]
        return self._pack([encode(part) for encode, part in zip(self._encoders, key, strict=True)])  # type: ignore[no-any-return]

    def decode(self, data: bytes) -> Any:
        """
        Return the key that `encode` got.

        Raises:
            CorruptDataError: The bytes are not a key of this schema.
        """
        try:
            parts = msgpack.unpackb(data, use_list=False)
            return self._make_key([decode(part) for decode, part in zip(self._decoders, parts, strict=True)])
        except (ValueError, TypeError, ArithmeticError, OSError, msgpack.UnpackException) as error:
            raise CorruptDataError(f"a stored key cannot be read: {error}") from error
