"""The keys that each workload changes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from loadtest.load.key_patterns import BURST_EVERY, KEY, LIFETIME, NEW_KEYS, PATTERNS, SLIDE, WINDOWS, Changes
from storage.key_groups import KeyGroupRange

RANGE = KeyGroupRange(3, 5)


def history(name: str, checkpoints: int) -> list[Changes]:
    """Return the changes of one task in each of these checkpoints."""
    return [PATTERNS[name](random.Random(f"{name}/{n}"), RANGE, n) for n in range(checkpoints)]


def written(changes: Changes) -> set[bytes]:
    return {key for key, value in changes.items() if value is not None}


@pytest.mark.parametrize("name", PATTERNS)
def test_keys_are_in_range(name: str) -> None:
    """Every workload changes keys of the task's key groups only, one or more in each checkpoint, and uses all."""
    made = history(name, 150)
    key_groups = {KEY.unpack(key)[0] for changes in made for key in changes}

    assert all(made)
    assert key_groups == {3, 4, 5}


@pytest.mark.parametrize("name", PATTERNS)
def test_workloads_cost_about_the_same(name: str) -> None:
    """Tasks of all workloads change 25 to 75 keys in the mean."""
    made = history(name, 300)

    assert 25 <= sum(map(len, made)) / len(made) <= 75


@pytest.mark.parametrize("name", PATTERNS)
def test_table_stays_bounded(name: str) -> None:
    """The live keys of a task do not grow without end: as many after 1,000 checkpoints as after 1,500."""
    live: set[bytes] = set()
    sizes = []
    for changes in history(name, 1_500):
        live = (live - changes.keys()) | written(changes)
        sizes.append(len(live))

    assert sizes[1_499] <= sizes[999] * 1.25


def test_value_state_writes_mostly_new_keys() -> None:
    """Nine of ten written keys of `value-state` were never there, and each is deleted when its time is over."""
    made = history("value-state", 3 * LIFETIME)
    seen: set[bytes] = set()
    deleted_at = {key: number for number, changes in enumerate(made) for key in changes.keys() - written(changes)}
    for number, changes in enumerate(made):
        new = written(changes) - seen
        assert len(new) == NEW_KEYS
        assert len(new) / len(written(changes)) >= 0.9
        seen |= new
        assert not [key for key in written(changes) if deleted_at.get(key, number + 1) <= number]
        assert {deleted_at.get(key, number + LIFETIME) for key in new} == {number + LIFETIME}


def test_record_is_in_ten_windows() -> None:
    """Each record of `sliding-window` changes ten consecutive windows of its user, the current one first."""
    for number, changes in enumerate(history("sliding-window", 60)):
        window = number // SLIDE
        of_users: dict[int, list[int]] = {}
        for key in sorted(written(changes)):
            user, found = divmod(KEY.unpack(key)[2], 1 << 20)
            of_users.setdefault(user, []).append(found)
        assert of_users
        assert all(windows == [*range(window, window + WINDOWS)] for windows in of_users.values())


def test_ended_window_is_deleted() -> None:
    """No window of `sliding-window` is left after its end."""
    live: set[bytes] = set()
    for number, changes in enumerate(history("sliding-window", 200)):
        live = (live - changes.keys()) | written(changes)
        assert all(KEY.unpack(key)[2] % (1 << 20) >= number // SLIDE for key in live)


def test_few_keys_are_hot() -> None:
    """In `hot-keys`, the first key changes in nearly every checkpoint, and most others once or twice at all."""
    made = history("hot-keys", 200)
    often = Counter(KEY.unpack(key)[2] for changes in made for key in changes)

    assert often.most_common(1)[0][0] == 0
    assert often[0] >= 190
    assert sum(count <= 2 for count in often.values()) > len(often) / 2


def test_every_tenth_checkpoint_is_a_burst() -> None:
    """Every tenth checkpoint of `burst` has many times the changes of the others."""
    sizes = [len(changes) for changes in history("burst", 500)]
    bursts = sizes[BURST_EVERY - 1 :: BURST_EVERY]
    quiet = [size for number, size in enumerate(sizes) if number % BURST_EVERY != BURST_EVERY - 1]

    assert sum(bursts) / len(bursts) > 15 * sum(quiet) / len(quiet)
