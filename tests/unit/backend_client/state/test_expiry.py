"""TTL: visibility of values over time, removal from the table, and changes of the TTL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backend_client.state.codec import ValueCodec
from backend_client.state.expiry import EXPIRY, ExpiringValue, Expiry, check_ttl, remove_expired
from backend_client.state.keyed_collections import ListVariable, MapVariable
from backend_client.state.keyed_state import ValueVariable
from backend_client.table.state_table import StateTable
from storage.errors import InvalidInputError
from tests.unit.backend_client.schemas import schema
from tests.unit.backend_client.state.partition import BOB, Partition, empty_partition

NUMBERS = ValueCodec(schema(number="long"), "numbers")


class Batches(Partition):
    """A partition with a value, a list and a map that have a TTL."""

    def __init__(self, table: StateTable) -> None:
        super().__init__(table)
        self.next(0)

    def next(self, timestamp_ms: int, ttl_ms: int | None = 100, *, remove: int = 0) -> None:
        """Commit the batch's changes and start the next batch at a time; remove up to this many expired entries."""
        state = self.next_state(timestamp_ms)
        self.removed = remove_expired(state, 3, remove)
        self.value = ValueVariable(state, 1, NUMBERS)
        expiry = None if ttl_ms is None else Expiry(state, ttl_ms)
        if expiry is not None:
            self.value = ExpiringValue(state, 1, NUMBERS, expiry)
        self.numbers = ListVariable(state, 2, NUMBERS, expiry)
        self.ages = MapVariable(state, 3, NUMBERS, NUMBERS, expiry=expiry)

    def content(self) -> tuple[object, list[int], dict[int, int]]:
        """Return the current key's value, list and map."""
        value = self.value.get()
        pairs = {key: value for (key,), (value,) in self.ages.iterator()}
        return value and value[0], [number for (number,) in self.numbers.get()], pairs

    def entries(self) -> list[int]:
        """Return the variable numbers of all entries of the table, including the index."""
        return [int.from_bytes(key[2:4], "big") for key, _ in self.table.items()]


@pytest.fixture
def batches(tmp_path: Path) -> Iterator[Batches]:
    """Return a partition with an empty table."""
    with empty_partition(Batches, tmp_path) as partition:
        yield partition


def test_every_entry_ends_by_itself(batches: Batches) -> None:
    """A value, a list element and a map entry each expire one TTL after their last write."""
    batches.value.update((1,))
    batches.numbers.appendValue((1,))
    batches.ages.updateValue((1,), (1,))
    batches.ages.updateValue((2,), (2,))
    assert batches.content() == (1, [1], {1: 1, 2: 2})
    batches.next(60)
    batches.numbers.appendValue((2,))
    batches.ages.updateValue((2,), (22,))
    batches.next(99)
    assert batches.content() == (1, [1, 2], {1: 1, 2: 22})
    batches.next(100)
    assert batches.content() == (None, [2], {2: 22})
    assert not batches.value.exists()
    assert not batches.ages.containsKey((1,))
    assert batches.ages.getValue((1,)) is None
    batches.next(160)
    assert batches.content() == (None, [], {})
    assert not batches.numbers.exists()
    assert not batches.ages.exists()


def test_expired_entries_are_removed_gradually(batches: Batches) -> None:
    """Each batch removes a limited number of expired entries, except rewritten ones, until none is left."""
    batches.value.update((1,))
    batches.numbers.appendValue((1,))
    batches.ages.updateValue((1,), (1,))
    batches.at(BOB)
    batches.value.update((1,))
    batches.next(50)
    batches.at(BOB)
    batches.value.update((2,))
    batches.next(110, remove=3)
    assert batches.removed == 3
    batches.next(111, remove=3)
    assert batches.removed == 1
    batches.at(BOB)
    assert batches.content() == (2, [], {})
    batches.next(112)
    assert batches.entries() == [1, EXPIRY]
    batches.next(1000, remove=3)
    batches.next(1000)
    assert batches.entries() == []


def test_cleared_entries_stay_away_when_the_clock_is_set_back(batches: Batches) -> None:
    """Entries that had expired, and were not removed yet, when the list was replaced and the map cleared."""
    batches.value.update((1,))
    batches.numbers.appendValue((1,))
    batches.ages.updateValue((1,), (1,))
    batches.next(200)
    assert batches.content() == (None, [], {})
    batches.value.clear()
    batches.numbers.appendValue((7,))
    batches.numbers.put([(2,)])
    batches.ages.updateValue((7,), (7,))
    batches.ages.clear()
    assert batches.content() == (None, [2], {})
    batches.next(50)
    assert batches.content() == (None, [2], {})


def test_entry_rewritten_after_its_removal_stays(batches: Batches) -> None:
    """A value that expired and is rewritten in the batch that removes it has the new value afterwards."""
    batches.value.update((1,))
    batches.next(500, remove=10)
    assert batches.removed == 1
    batches.value.update((2,))
    batches.next(501)
    assert batches.content() == (2, [], {})


def test_changed_ttl_applies_to_later_writes(batches: Batches) -> None:
    """Values from before a TTL stay, values with an end keep it when the TTL is removed; writes follow the new TTL."""
    batches.next(0, ttl_ms=None)
    batches.value.update((1,))
    batches.numbers.appendValue((1,))
    batches.next(1_000_000, ttl_ms=100)
    assert batches.content() == (1, [1], {})
    batches.numbers.appendValue((2,))
    batches.ages.updateValue((1,), (1,))
    batches.next(1_000_050, ttl_ms=0)
    assert batches.content() == (1, [1, 2], {1: 1})
    batches.ages.updateValue((2,), (2,))
    batches.next(1_000_100, ttl_ms=0, remove=10)
    assert batches.content() == (1, [1], {2: 2})
    batches.next(2_000_000_000, ttl_ms=0)
    assert batches.content() == (1, [1], {2: 2})


def test_rewritten_value_has_few_index_entries(batches: Batches) -> None:
    """A value that is written at every moment of its TTL has at most a few dozen index entries."""
    for moment in range(0, 1000, 2):
        batches.next(moment, ttl_ms=1000)
        batches.value.update((moment,))
    batches.next(1000, ttl_ms=1000)
    assert 1 < batches.entries().count(EXPIRY) <= 20


@pytest.mark.parametrize("ttl_ms", [-1, 0, 1.5, True, np.float64(5), "1 hour"])
def test_impossible_ttl_is_refused(ttl_ms: object) -> None:
    """A TTL must be a positive integer of milliseconds."""
    with pytest.raises(InvalidInputError, match="ttlDurationMs of state 'visits' must be a positive whole number"):
        check_ttl("visits", ttl_ms)  # type: ignore[arg-type]  # refused whatever it is


def test_ttl_of_numpy_is_that_of_python() -> None:
    """A TTL may be one of NumPy's integers, as on Spark; it is stored as Python's."""
    ttl_ms = check_ttl("visits", np.int64(5000))
    assert (ttl_ms, type(ttl_ms)) == (5000, int)
