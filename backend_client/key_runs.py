"""Finds the boundaries between keys in Arrow columns with each key's rows adjacent. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Bools = npt.NDArray[np.bool_]


def key_changes(columns: Sequence[pa.Array]) -> Bools:
    """Return for each row except the first whether its key differs from that of the row before."""
    changes = np.zeros(len(columns[0]) - 1, np.bool_)
    for column in columns:
        changes |= _differs(column)
    return changes


def same_key(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether two keys, as Python values, are equal for Spark."""
    return all(map(_same, a, b))


def _differs(column: pa.Array) -> Bools:
    kind = column.type
    if pa.types.is_null(kind):
        return np.zeros(len(column) - 1, np.bool_)
    if pa.types.is_nested(kind):  # Arrow cannot compare these
        values = column.cast(_plain(kind)).to_pylist()
        return np.fromiter((not _same(a, b) for a, b in pairwise(values)), np.bool_, len(values) - 1)
    before, after = column.slice(0, len(column) - 1), column.slice(1)
    differs = pc.not_equal(before, after)
    if pa.types.is_floating(kind):
        differs = pc.and_not(differs, pc.and_(pc.is_nan(before), pc.is_nan(after)))
    if column.null_count:
        differs = pc.if_else(pc.is_valid(differs), differs, pc.xor(pc.is_null(before), pc.is_null(after)))
    result: Bools = differs.to_numpy(zero_copy_only=False)
    return result


def _plain(kind: pa.DataType) -> pa.DataType:
    """
    Return a type with bytes and numbers in the place of text, dates and timestamps.

    Python has neither text that is invalid UTF-8 nor years beyond 1 to 9999, which Spark's columns may have.
    """
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_timestamp(kind):
        return pa.int64()
    return pa.int32() if pa.types.is_date32(kind) else kind


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_same(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, datetime) and isinstance(b, datetime) and a.fold != b.fold:
        return False  # for Python they are equal: the same clock time, before and after the clock is set back
    return bool(a == b or (_is_nan(a) and _is_nan(b)))


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
