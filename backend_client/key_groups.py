"""
Who owns which key, as Spark computes it: key -> key group -> partition.

The key group of a row is computed in Spark (a hash of the key columns, modulo `max_parallelism`), so that it never
depends on Python. `storage.key_groups` has the ranges that partitions own.
No I/O.
"""

from __future__ import annotations


def key_group_expression(key_columns: list[str], max_parallelism: int) -> str:
    """Return the SQL expression of a row's key group; `key_columns` are quoted SQL names."""
    return f"pmod(hash({', '.join(key_columns)}), {max_parallelism})"


def partition_expression(key_group_column: str, parallelism: int, max_parallelism: int) -> str:
    """Return the SQL expression of the partition that owns a key group."""
    return f"cast({key_group_column} * {parallelism} div {max_parallelism} as int)"
