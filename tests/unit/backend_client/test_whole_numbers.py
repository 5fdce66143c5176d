"""Numbers in integer fields."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Row

from backend_client.whole_numbers import check_whole, holds_integers

INTEGERS = pa.list_(pa.int64())
STRUCT = pa.struct([("n", pa.int32()), ("s", pa.string())])
UNNAMED = Row(4.0, "y")  # type: ignore[call-overload]  # values without names, which Spark's types leave out
NESTED = pa.map_(pa.int16(), pa.list_(STRUCT))


class Point(NamedTuple):
    """A struct whose fields Arrow reads by position."""

    x: float
    y: str


@pytest.mark.parametrize(
    ("kind", "value", "made"),
    [
        (pa.int64(), 3.0, 3),
        (pa.int64(), -0.0, 0),
        (pa.int8(), np.float32(3), 3),
        (pa.int64(), Decimal("3.00"), 3),
        (pa.int64(), np.int16(3), 3),
        (pa.int64(), None, None),
        (INTEGERS, [1, 3.0, None], [1, 3, None]),
        (INTEGERS, np.array([1.0, 2.0]), [1, 2]),
        (INTEGERS, (2**63 - 1,), [2**63 - 1]),
        (NESTED, {2.0: [None, {"n": 3.0, "s": "x"}, {}]}, [(2, [None, {"n": 3, "s": "x"}, {"n": None, "s": None}])]),
        (NESTED, [(2, None)], [(2, None)]),
        (NESTED, [{"key": 2, "value": [(3, "x"), UNNAMED]}], [(2, [{"n": 3, "s": "x"}, {"n": 4, "s": "y"}])]),
        (STRUCT, Point(3, "x"), {"n": 3, "s": "x"}),
        (STRUCT, [("n", 3), ("s", "x")], {"n": 3, "s": "x"}),
        (pa.list_(pa.float64()), [1.5], [1.5]),
    ],
)
def test_whole_numbers_pass(kind: pa.DataType, value: Any, made: Any) -> None:
    """Integral values of any type are accepted as integers, as in Spark; fields of other types are not checked."""
    check_whole([value, None], kind)

    assert pa.array([value], kind).to_pylist() == [made]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), 1.5),
        (pa.list_(INTEGERS), [[1], None, [Decimal("0.1")]]),
        (NESTED, {1: [{"n": np.float64(1e-9)}]}),
        (NESTED, [{"key": 1, "value": [(0.5, "x")]}]),
        (STRUCT, Point(0.5, "x")),
        (STRUCT, [("n", 0.5), ("s", "x")]),
    ],
)
def test_fraction_is_an_error(kind: pa.DataType, value: Any) -> None:
    """A fraction, which Arrow would truncate, is refused at any depth, with the field's name."""
    assert holds_integers(kind)
    with pytest.raises(TypeError, match="is not a whole number"):
        check_whole([None, value], kind)
