"""Ownership of keys."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from backend_client.key_group_sql import order_expression, partition_expression
from storage.errors import InvalidInputError
from storage.key_groups import KeyGroupRange, check_parallelism, key_group_range, partition_of


@pytest.mark.parametrize("max_parallelism", [1, 2, 7, 16, 100, 128])
def test_ranges_follow_sql_rule(max_parallelism: int) -> None:
    """I14: at every parallelism, each key group is owned by the one partition that the SQL rule assigns."""
    for parallelism in range(1, max_parallelism + 1):
        owners = {
            key_group: partition
            for partition in range(parallelism)
            for owned in [key_group_range(partition, parallelism, max_parallelism)]
            for key_group in range(owned.first, owned.last + 1)
        }
        assert owners == {group: group * parallelism // max_parallelism for group in range(max_parallelism)}


@pytest.mark.parametrize("parallelism", [1, 3, 1000, 32_767, 32_768])
def test_largest_job_is_divided(parallelism: int) -> None:
    """The maximum number of key groups is divided without a gap and without an empty range."""
    ranges = [key_group_range(partition, parallelism, 32_768) for partition in range(parallelism)]

    assert (ranges[0].first, ranges[-1].last) == (0, 32_767)
    assert all(left.last + 1 == right.first for left, right in pairwise(ranges))


@pytest.mark.parametrize("parallelism", [0, -1, 129, 2.5, 2.0, True])
def test_impossible_parallelism_is_refused(parallelism: Any) -> None:
    """The number of partitions must be an integer from 1 to the number of key groups."""
    with pytest.raises(InvalidInputError, match="128"):
        check_parallelism(parallelism, 128)


@pytest.mark.parametrize("parallelism", [1, 3, 7, 100])
def test_partition_is_found_by_its_key_groups(parallelism: int) -> None:
    """A range is that of one partition or of none."""
    ranges = [key_group_range(partition, parallelism, 100) for partition in range(parallelism)]

    assert [partition_of(owned, parallelism, 100) for owned in ranges] == list(range(parallelism))
    assert partition_of(KeyGroupRange(0, ranges[0].last + 1), parallelism, 100) is None
    assert partition_of(KeyGroupRange(100, 100), parallelism, 100) is None
    assert partition_of(ranges[0], 101, 100) is None


@pytest.mark.parametrize("partition", [-1, 4])
def test_missing_partition_is_refused(partition: int) -> None:
    """A partition that does not exist owns nothing."""
    with pytest.raises(InvalidInputError):
        key_group_range(partition, 4, 128)


def test_expressions_are_sql() -> None:
    """Spark's SQL expressions have the same rule, in the bits above the rest of a key's order."""
    order = order_expression(["`a`", "`b`"], 128)
    assert (
        order == "shiftleft(cast(pmod(hash(`a`, `b`), 128) as bigint), 48) | shiftrightunsigned(xxhash64(`a`, `b`), 16)"
    )
    assert (
        partition_expression("o", 4, 128) == "cast(cast(shiftright(if(o < 0, ~o, o), 48) as bigint) * 4 div 128 as int)"
    )
