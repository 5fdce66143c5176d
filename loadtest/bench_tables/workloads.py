"""
Flink's two workloads, one quarter of one of its fifty subtasks. No I/O.

A subtask of the published run takes 1,000 events a second; here it takes 250, on a quarter of the state. Sizes of
values follow from the published sizes: 950 bytes of changelog per event, and 670 per changed window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Protocol, TypeAlias

from loadtest.bench_tables.published import EVENTS_PER_S as PUBLISHED_EVENTS_PER_S
from loadtest.bench_tables.published import PARALLELISM
from storage.key_groups import KeyGroupRange

Changes: TypeAlias = dict[bytes, bytes | None]
"""The last value of each changed key; None is a deletion."""

SCALE = 4
"""The factor from the values measured here to those of a subtask of the published run."""
EVENTS_PER_S = PUBLISHED_EVENTS_PER_S / PARALLELISM / SCALE
KEY_GROUPS = KeyGroupRange(0, 127)

_STATE = (1).to_bytes(2, "big")
_NOISE_BYTES = 1 << 20


class Workload(Protocol):
    """
    Makes the changes of one checkpoint after the other.

    Attributes:
        table: What the table holds after the changes made so far.
        interval_s: Time between two checkpoints with the changelog, as published.
        off_every: How many of these intervals pass between two checkpoints without it, as published.
        log_ratio: Log of the interval of materialization as a multiple of the table, as published; at most the default.
    """

    table: dict[bytes, bytes]
    interval_s: float
    off_every: int
    log_ratio: float

    def fill(self) -> list[Changes]:
        """Return the changes that fill the table, in parts."""

    def changes(self) -> Changes:
        """Return the changes until the next checkpoint."""


class ValueStates:
    """
    A value per key: nine of ten events bring a new key, and each key is deleted when `keys` newer ones exist.

    Args:
        keys: Keys of the table.
        seed: Seed of all draws.
    """

    interval_s = 0.311
    off_every = 16
    log_ratio = 0.46
    _VALUE_BYTES = 920

    def __init__(self, keys: int = 97_000, seed: int = 1) -> None:
        self.table: dict[bytes, bytes] = {}
        self._keys = keys
        self._chance = Random(seed)
        self._noise = self._chance.randbytes(_NOISE_BYTES)
        self._living: deque[bytes] = deque()

    def fill(self) -> list[Changes]:
        """Return the changes that fill the table, in parts of 2,000 keys."""
        return [self._of(min(2_000, self._keys - begun), 1.0) for begun in range(0, self._keys, 2_000)]

    def changes(self) -> Changes:
        """Return the changes until the next checkpoint."""
        return self._of(round(self.interval_s * EVENTS_PER_S), 0.9)

    def _of(self, events: int, new_share: float) -> Changes:
        changes: Changes = {}
        for _ in range(events):
            is_new = self._chance.random() < new_share
            key = _key(self._chance) if is_new else self._living[self._chance.randrange(len(self._living))]
            if is_new:
                self._living.append(key)
            changes[key] = self.table[key] = _value(self._chance, self._noise, self._VALUE_BYTES)
        while len(self._living) > self._keys:
            ended = self._living.popleft()
            changes[ended] = None
            self.table.pop(ended, None)
        return changes


class SlidingWindows:
    """
    Ten overlapping windows per user: each event changes all of its user's, and ended ones are deleted for all users.

    Args:
        users: Number of users.
        seed: Seed of all draws.
    """

    interval_s = 0.791
    off_every = 1
    log_ratio = 1.0
    _WINDOWS = 10
    _SLIDE = 6
    _VALUE_BYTES = 640

    def __init__(self, users: int = 1_500, seed: int = 1) -> None:
        self.table: dict[bytes, bytes] = {}
        self._chance = Random(seed)
        self._noise = self._chance.randbytes(_NOISE_BYTES)
        self._users = [_key(self._chance) for _ in range(users)]
        self._checkpoint = 0

    def fill(self) -> list[Changes]:
        """Return the changes until as many windows end as begin."""
        return [self.changes() for _ in range(2 * self._WINDOWS * self._SLIDE)]

    def changes(self) -> Changes:
        """Return the changes until the next checkpoint."""
        first = self._checkpoint // self._SLIDE
        changes: Changes = {}
        if self._checkpoint % self._SLIDE == 0:
            changes = {key: None for user in self._users if (key := _window(user, first - 1)) in self.table}
        for _ in range(round(self.interval_s * EVENTS_PER_S)):
            user = self._chance.choice(self._users)
            for number in range(self._WINDOWS):
                changes[_window(user, first + number)] = _value(self._chance, self._noise, self._VALUE_BYTES)
        self._checkpoint += 1
        for key, value in changes.items():
            if value is None:
                del self.table[key]
            else:
                self.table[key] = value
        return changes


WORKLOADS: Mapping[str, type[ValueStates | SlidingWindows]] = MappingProxyType(
    {"value-state": ValueStates, "sliding-window": SlidingWindows}
)
"""By name."""


def _key(chance: Random) -> bytes:
    return chance.randrange(len(KEY_GROUPS)).to_bytes(2, "big") + _STATE + chance.randbytes(12)


def _window(user: bytes, number: int) -> bytes:
    return user + max(number, 0).to_bytes(4, "big")


def _value(chance: Random, noise: bytes, size_bytes: int) -> bytes:
    start = chance.randrange(len(noise) - size_bytes)
    return noise[start : start + size_bytes]
