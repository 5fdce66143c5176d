"""
The key groups of a partition.

Partitions own contiguous ranges of key groups. The number of partitions may change between checkpoints, the number of
key groups never does. No I/O.
"""

from __future__ import annotations

from storage.errors import InvalidInputError
from storage.model import KeyGroupRange


def key_group_range(partition: int, parallelism: int, max_parallelism: int) -> KeyGroupRange:
    """
    Return the key groups of one partition, both ends included.

    The rule is ``partition = key_group * parallelism div max_parallelism``, as in the SQL that places rows.

    Raises:
        InvalidInputError: `parallelism` is not within ``1..max_parallelism`` or the partition does not exist.
    """
    check_parallelism(parallelism, max_parallelism)
    if not 0 <= partition < parallelism:
        raise InvalidInputError(f"partition {partition} does not exist: parallelism is {parallelism}")
    first = -(-partition * max_parallelism // parallelism)
    last = -(-(partition + 1) * max_parallelism // parallelism) - 1
    return KeyGroupRange(first, last)


def check_parallelism(parallelism: int, max_parallelism: int) -> None:
    """
    Check that every partition owns at least one key group.

    Raises:
        InvalidInputError: A partition would own none, or the number is not an integer.
    """
    if type(parallelism) is not int or not 1 <= parallelism <= max_parallelism:
        raise InvalidInputError(
            f"parallelism must be a whole number within 1..{max_parallelism} (the job's max_parallelism), not "
            f"{parallelism!r}"
        )
