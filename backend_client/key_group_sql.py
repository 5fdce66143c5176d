"""
The owner of a key, as SQL for Spark: key -> key group -> partition; and the order of a partition's rows.

The key group of a row is computed in Spark (a hash of the key columns, modulo `max_parallelism`), so it
never depends on Python. `storage.key_groups` has the ranges that partitions own.
No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

HASH_BITS = 48
"""An order number is the key group, followed by this many bits of another hash of the key."""


def key_group_expression(key_columns: Sequence[str], max_parallelism: int) -> str:
    """Return the SQL expression of a row's key group; `key_columns` are quoted SQL names."""
    return f"pmod(hash({', '.join(key_columns)}), {max_parallelism})"


def order_expression(key_columns: Sequence[str], max_parallelism: int) -> str:
    """
    Return the SQL expression of the order number by which rows are sorted; `key_columns` are quoted SQL names.

    The number is from 0 up to 2^63, by key group and within it by a hash of the key. Spark sorts by this one number
    without reading rows or comparing keys.
    """
    keys, group = ", ".join(key_columns), key_group_expression(key_columns, max_parallelism)
    return f"shiftleft(cast({group} as bigint), {HASH_BITS}) | shiftrightunsigned(xxhash64({keys}), {64 - HASH_BITS})"


def partition_expression(order_column: str, parallelism: int, max_parallelism: int) -> str:
    """Return the SQL expression of the partition that owns an order number, or its complement (``~order``)."""
    order = f"if({order_column} < 0, ~{order_column}, {order_column})"
    return owner_expression(f"shiftright({order}, {HASH_BITS})", parallelism, max_parallelism)


def owner_expression(key_group: str, parallelism: int, max_parallelism: int) -> str:
    """Return the SQL expression of the partition that owns a key group, itself an SQL expression."""
    return f"cast(cast({key_group} as bigint) * {parallelism} div {max_parallelism} as int)"
