"""
The workload of a simulated job's tasks, and the expected content of their tables. No I/O.

Everything follows from the seed, the checkpoint and the partition, in whatever order tasks run.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from loadtest.load.key_patterns import PATTERNS, Changes, large
from storage.change_set import encode_change_set
from storage.key_groups import KeyGroupRange, key_group_range

LARGE = 0.005
"""Share of tasks that send a set of about 150 KB pre-emptively, before their tail."""
LOST = 0.004
"""Share of tasks that find no table and restore from nothing, as after a move to another host."""
RESCALED = 0.004
"""Share of tasks that also restore a range of another parallelism from nothing, as after a rescale."""
RETRIED = 0.01
"""Share of tasks with an earlier attempt, whose sets no checkpoint may ever name."""
REPEATED = 0.01
"""Share of tasks that send their sets twice, as after a lost response."""


class WrongDataError(AssertionError):
    """A restore differs from the content of the completed checkpoints."""


@dataclass(frozen=True, slots=True)
class PlannedSet:
    """A change set, and its bytes: made with the plan, while other slots wait for the storage."""

    changes: Changes
    payload: bytes

    @classmethod
    def of(cls, changes: Changes) -> PlannedSet:
        """Encode changes."""
        return cls(changes, encode_change_set(changes))


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """Work of one task of a batch besides advancing its table."""

    sets: list[PlannedSet]
    """In sending order; all but the last are sent pre-emptively."""
    loser: PlannedSet | None
    """The set of an attempt that Spark does not accept, if there is one."""
    is_table_lost: bool
    is_sent_twice: bool
    rescaled: KeyGroupRange | None
    """A range that a task of another parallelism would restore."""

    def changes(self) -> Changes:
        """Return the last value of every key that the accepted attempt changes."""
        merged: Changes = {}
        for planned in self.sets:
            merged.update(planned.changes)
        return merged


class Workload:
    """
    Plans tasks by a seed.

    Args:
        seed: Seed of all draws.
        max_parallelism: The job's.
        name: A name of `key_patterns.PATTERNS`, which decides about keys; what happens to tasks is the same for all.
    """

    def __init__(self, seed: int, max_parallelism: int, name: str = "mixed") -> None:
        self._seed = seed
        self._max_parallelism = max_parallelism
        self._pattern = PATTERNS[name]

    def plan(self, checkpoint_id: int, partition: int, parallelism: int) -> TaskPlan:
        """Return the plan of this partition's task in the batch of this checkpoint."""
        chance = random.Random(f"{self._seed}/{checkpoint_id}/{partition}/{parallelism}")
        key_groups = key_group_range(partition, parallelism, self._max_parallelism)
        sets = []
        if chance.random() < LARGE:
            sets.append(PlannedSet.of(large(chance, key_groups)))
        sets.append(PlannedSet.of(self._pattern(chance, key_groups, checkpoint_id)))
        is_retried = chance.random() < RETRIED
        return TaskPlan(
            sets=sets,
            loser=PlannedSet.of(self._pattern(chance, key_groups, checkpoint_id)) if is_retried else None,
            is_table_lost=chance.random() < LOST,
            is_sent_twice=chance.random() < REPEATED,
            rescaled=self._other_range(chance, parallelism) if chance.random() < RESCALED else None,
        )

    def _other_range(self, chance: random.Random, parallelism: int) -> KeyGroupRange:
        other = min(self._max_parallelism, chance.randint(max(1, parallelism // 2), parallelism * 2))
        return key_group_range(chance.randrange(other), other, self._max_parallelism)


@dataclass(slots=True)
class SimulatedTable:
    """
    A table as a task sees it: its content by key group, and its version.

    Each key group has an order-independent digest of its keys and values, updated with every change, so that comparing
    whole tables costs no more than the changes.
    """

    key_groups: KeyGroupRange
    version: str | None = None
    content: dict[int, dict[bytes, bytes]] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget everything."""
        self.version = None
        self.content.clear()
        self.digests.clear()

    def apply(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Apply the changes within the table's range."""
        for key, value in changes.items():
            key_group = int.from_bytes(key[:2], "big")
            if not self.key_groups.contains(key_group):
                continue
            held = self.content.setdefault(key_group, {})
            digest = self.digests.get(key_group, 0)
            if (old := held.pop(key, None)) is not None:
                digest ^= hash((key, old))
            if value is not None:
                held[key] = value
                digest ^= hash((key, value))
            self.digests[key_group] = digest

    def check(self, truth: SimulatedTable) -> None:
        """
        Compare with the content of the completed checkpoints.

        Raises:
            WrongDataError: A key is missing, surplus, or has another value.
        """
        for key_group in range(self.key_groups.first, self.key_groups.last + 1):
            if self.digests.get(key_group, 0) == truth.digests.get(key_group, 0):
                continue
            found, expected = self.content.get(key_group, {}), truth.content.get(key_group, {})
            wrong = [key for key in found.keys() & expected.keys() if found[key] != expected[key]]
            raise WrongDataError(
                f"key group {key_group} at checkpoint {self.version}: {len(expected.keys() - found.keys())} keys are "
                f"missing, {len(found.keys() - expected.keys())} too many, {len(wrong)} have a wrong value"
            )
