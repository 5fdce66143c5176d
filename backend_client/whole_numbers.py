"""
Finds numbers whose fraction Arrow would cut off without an error, at any depth of a value.

Whole numbers of any type pass: 3.0 is 3, as on Spark. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

_WHOLE = {int, type(None)}


def holds_integers(kind: pa.DataType) -> bool:
    """Return whether a type is one of integers, or has one inside."""
    return pa.types.is_integer(kind) or any(holds_integers(kind.field(at).type) for at in range(kind.num_fields))


def check_whole(values: Iterable[Any], kind: pa.DataType) -> None:
    """
    Check values of which Arrow has made an array of this type.

    Raises:
        TypeError: A number at the place of an integer has a fraction.
    """
    for number in _fractions(values, kind):
        raise TypeError(f"{number!r} is not a whole number")


def _fractions(values: Iterable[Any], kind: pa.DataType) -> Iterator[Any]:
    if pa.types.is_integer(kind):
        numbers = values if isinstance(values, (list, tuple)) else list(values)
        if not _WHOLE.issuperset(map(type, numbers)):
            yield from (number for number in numbers if _has_fraction(number))
    elif holds_integers(kind):
        given = [value for value in values if value is not None]
        if pa.types.is_struct(kind):
            for at in range(kind.num_fields):
                field = kind.field(at)
                yield from _fractions([_part(value, field.name, at) for value in given], field.type)
        elif pa.types.is_map(kind):
            pairs = [pair for value in given for pair in (value.items() if isinstance(value, dict) else value)]
            yield from _fractions([_part(pair, "key", 0) for pair in pairs], kind.key_type)
            yield from _fractions([_part(pair, "value", 1) for pair in pairs], kind.item_type)
        else:
            yield from _fractions(chain.from_iterable(given), kind.value_type)


def _part(value: Any, name: str, position: int) -> Any:
    """Return a struct's field as Arrow finds it: in a tuple by position, in a dictionary or list of pairs by name."""
    if isinstance(value, tuple):
        return value[position]
    return (value if isinstance(value, dict) else dict(value)).get(name)


def _has_fraction(number: Any) -> bool:
    return isinstance(number, (float, np.floating, Decimal)) and number != int(number)
