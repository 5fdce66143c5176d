"""
Which keys a task changes, by the name of the workload. No I/O.

A pattern takes the task's generator, its key groups and the checkpoint, and returns the task's changes: about forty in
the median, so that all workloads cost the load generator about the same. Keys have the layout of tables: key group,
state, number.
"""

from __future__ import annotations

import random
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import accumulate
from types import MappingProxyType
from typing import TypeAlias

from storage.key_groups import KeyGroupRange

Changes: TypeAlias = dict[bytes, bytes | None]
"""The last value of each changed key; None is a deletion."""

Pattern: TypeAlias = Callable[[random.Random, KeyGroupRange, int], Changes]
"""Makes the changes of a task from its generator, its key groups and its checkpoint's id."""

KEY = struct.Struct(">HHI")
"""Key group, state, number."""

NEW_KEYS = 18
"""New keys of a task of `value-state`; they are deleted `LIFETIME` checkpoints later."""
UPDATED_KEYS = 2
LIFETIME = 100

WINDOWS = 10
"""Windows that hold each record of `sliding-window`."""
SLIDE = 5
"""Checkpoints until its oldest window ends and is deleted."""
USERS = 50
"""Users of a partition; each has windows of its own."""

RANKS = 5_000
"""Keys of a partition of `hot-keys`."""
ZIPF_EXPONENT = 1.2

BURST_EVERY = 10
"""Every this many checkpoints of `burst`, one is large."""

_STATE_ID = 1
_KEYS_PER_KEY_GROUP = 2_000
_CHANGES_MEDIAN = 40
_CHANGES_SIGMA = 0.6
_VALUE_BYTES = (60, 160)
_AGGREGATE_BYTES = (16, 40)
_DELETED = 0.03
_NOISE_BYTES = 8_192  # values are slices of it: drawing each one would be half of a task's cost here
_LARGE_CHANGES = 400
_LARGE_VALUE_BYTES = (300, 700)
_RECORDS_MEDIAN = 4
_HOT_RECORDS_MEDIAN = 80
_BURST_CHANGES = 300
_QUIET_CHANGES = 10
_NUMBERS = 1 << 32
_WINDOW_NUMBERS = 1 << 20


def mixed(chance: random.Random, key_groups: KeyGroupRange, _checkpoint_id: int) -> Changes:
    """Change keys of a table that stays as large as it is; those with low numbers often, a few are deleted."""
    return _among_known(chance, key_groups, _drawn_count(chance, _CHANGES_MEDIAN), _VALUE_BYTES)


def large(chance: random.Random, key_groups: KeyGroupRange) -> Changes:
    """Make a set of about 150 KB, which tasks of all workloads send now and then."""
    return _among_known(chance, key_groups, _LARGE_CHANGES, _LARGE_VALUE_BYTES)


def value_state(chance: random.Random, key_groups: KeyGroupRange, checkpoint_id: int) -> Changes:
    """Write mostly keys that were never there, update a few of the living, and delete those whose time is over."""
    oldest = max(0, checkpoint_id - LIFETIME + 1) * NEW_KEYS
    first = checkpoint_id * NEW_KEYS
    written = [*range(first, first + NEW_KEYS)]
    written += [chance.randrange(oldest, first) for _ in range(UPDATED_KEYS) if oldest < first]
    ended = range(oldest - NEW_KEYS, oldest) if oldest else ()
    changes: Changes = {_key(key_groups, number): None for number in ended}
    return changes | _valued(chance, (_key(key_groups, number) for number in written), _VALUE_BYTES)


def sliding_window(chance: random.Random, key_groups: KeyGroupRange, checkpoint_id: int) -> Changes:
    """Add each record to its user's next `WINDOWS` windows; when one ends, delete it for all users."""
    window = checkpoint_id // SLIDE
    changes: Changes = {}
    if window and checkpoint_id % SLIDE == 0:
        changes = dict.fromkeys(_window_key(key_groups, user, window - 1) for user in range(USERS))
    users = [chance.randrange(USERS) for _ in range(_drawn_count(chance, _RECORDS_MEDIAN))]
    keys = (_window_key(key_groups, user, window + number) for user in users for number in range(WINDOWS))
    return changes | _valued(chance, keys, _AGGREGATE_BYTES)


def hot_keys(chance: random.Random, key_groups: KeyGroupRange, _checkpoint_id: int) -> Changes:
    """Update keys by Zipf's law: a few change in every checkpoint, most hardly ever."""
    weights = _zipf_weights()
    count = _drawn_count(chance, _HOT_RECORDS_MEDIAN)
    ranks = (bisect_left(weights, chance.random() * weights[-1]) for _ in range(count))
    return _valued(chance, (_key(key_groups, rank) for rank in ranks), _VALUE_BYTES)


def burst(chance: random.Random, key_groups: KeyGroupRange, checkpoint_id: int) -> Changes:
    """Change few keys in most checkpoints, and thirty times as many in every tenth."""
    is_burst = checkpoint_id % BURST_EVERY == BURST_EVERY - 1
    count = _drawn_count(chance, _BURST_CHANGES if is_burst else _QUIET_CHANGES)
    return _among_known(chance, key_groups, count, _VALUE_BYTES)


PATTERNS: Mapping[str, Pattern] = MappingProxyType(
    {
        "mixed": mixed,
        "value-state": value_state,
        "sliding-window": sliding_window,
        "hot-keys": hot_keys,
        "burst": burst,
    }
)
"""The workloads by name."""


def _drawn_count(chance: random.Random, median: int) -> int:
    return max(1, round(chance.lognormvariate(0, _CHANGES_SIGMA) * median))


def _key(key_groups: KeyGroupRange, number: int) -> bytes:
    return KEY.pack(key_groups.first + number % len(key_groups), _STATE_ID, number % _NUMBERS)


def _window_key(key_groups: KeyGroupRange, user: int, window: int) -> bytes:
    number = user * _WINDOW_NUMBERS + window % _WINDOW_NUMBERS
    return KEY.pack(key_groups.first + user % len(key_groups), _STATE_ID, number)


def _valued(chance: random.Random, keys: Iterable[bytes], value_bytes: tuple[int, int]) -> Changes:
    return dict(zip(keys, _values(chance, value_bytes), strict=False))


def _values(chance: random.Random, value_bytes: tuple[int, int]) -> Iterator[bytes]:
    low, high = value_bytes
    noise = chance.randbytes(_NOISE_BYTES)
    draw = chance.random  # five times as fast as `randrange`, and a thousand tasks a second call this
    while True:
        size, start = low + int(draw() * (high - low)), int(draw() * (_NOISE_BYTES - high))
        yield noise[start : start + size]


def _among_known(chance: random.Random, key_groups: KeyGroupRange, count: int, value_bytes: tuple[int, int]) -> Changes:
    """Change about `count` keys; those with low numbers are the hot ones."""
    draw = chance.random
    changes: Changes = {}
    for value, _ in zip(_values(chance, value_bytes), range(count), strict=False):
        number = int(_KEYS_PER_KEY_GROUP * draw() ** 2)
        key = KEY.pack(key_groups.first + int(draw() * len(key_groups)), _STATE_ID, number)
        changes[key] = None if draw() < _DELETED else value
    return changes


@cache
def _zipf_weights() -> list[float]:
    """Return the cumulative weights of the ranks."""
    return list(accumulate((rank + 1) ** -ZIPF_EXPONENT for rank in range(RANKS)))
