"""
Who owns which key, as Spark computes it: key -> key group -> partition; and the order of a partition's rows.

The key group of a row is computed in Spark (a hash of the key columns, modulo `max_parallelism`), so that it never
depends on Python. `storage.key_groups` has the ranges that partitions own.
No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

HASH_BITS = 48
"""A row's order has the key group above so many bits of another hash of the key."""


def order_expression(key_columns: Sequence[str], max_parallelism: int) -> str:
    """
    Return the SQL expression of the number by which rows are sorted; `key_columns` are quoted SQL names.

    It is from 0 up to 2^63, by key groups and within those by a hash of the key. Spark sorts by one number in place of
    the key without a look at the rows, and without a comparison.
    """
    keys = ", ".join(key_columns)
    group = f"pmod(hash({keys}), {max_parallelism})"
    return f"shiftleft(cast({group} as bigint), {HASH_BITS}) | shiftrightunsigned(xxhash64({keys}), {64 - HASH_BITS})"


def partition_expression(order_column: str, parallelism: int, max_parallelism: int) -> str:
    """Return the SQL expression of the partition that owns a row of this order, or of its complement (``~order``)."""
    order = f"if({order_column} < 0, ~{order_column}, {order_column})"
    return f"cast(shiftright({order}, {HASH_BITS}) * {parallelism} div {max_parallelism} as int)"
