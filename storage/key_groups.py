"""
Ranges of key groups, and which of them a partition owns.

Partitions own contiguous ranges of key groups. The number of partitions may change between checkpoints, the number of
key groups never does. No I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from storage.errors import InvalidInputError
from storage.validation import KEY_GROUP_MAX, check_int, shorten

_RANGE = re.compile(r"([0-9]{5})-([0-9]{5})")


@dataclass(frozen=True, slots=True, order=True)
class KeyGroupRange:
    """
    A contiguous range of key groups, inclusive at both ends, never empty.

    Args:
        first: 0 <= first <= last.
        last: first <= last <= 32767.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        check_int("first key group", self.first, KEY_GROUP_MAX)
        check_int("last key group", self.last, KEY_GROUP_MAX)
        if self.first > self.last:
            raise InvalidInputError(f"key-group range {self.first}-{self.last} ends before it begins")

    def __len__(self) -> int:
        return self.last - self.first + 1

    def contains(self, key_group: int) -> bool:
        """Return whether the key group is in this range."""
        return self.first <= key_group <= self.last

    def intersects(self, other: KeyGroupRange) -> bool:
        """Return whether the ranges have a key group in common."""
        return self.first <= other.last and other.first <= self.last

    def covers(self, other: KeyGroupRange) -> bool:
        """Return whether every key group of `other` is in this range."""
        return self.first <= other.first and other.last <= self.last

    def within(self, other: KeyGroupRange) -> KeyGroupRange:
        """Return the part of this range that lies in `other`; `InvalidInputError` if there is none."""
        return KeyGroupRange(max(self.first, other.first), min(self.last, other.last))

    def to_text(self) -> str:
        """Return "00000-00031": five digits each, so that texts sort as ranges do."""
        return f"{self.first:05d}-{self.last:05d}"

    @classmethod
    def parse(cls, text: Any) -> KeyGroupRange:
        """Parse the output of `to_text`; `InvalidInputError` for anything else."""
        match = _RANGE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidInputError(f'{shorten(text)} is not a key-group range such as "00000-00031"')
        return cls(int(match[1]), int(match[2]))


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


def partition_of(key_groups: KeyGroupRange, parallelism: int, max_parallelism: int) -> int | None:
    """Return the partition that has exactly these key groups; None if none has."""
    partition = key_groups.first * parallelism // max_parallelism
    is_one = parallelism <= max_parallelism and partition < parallelism
    return partition if is_one and key_group_range(partition, parallelism, max_parallelism) == key_groups else None


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
