"""List and map state as a user's function sees them, over batches whose changes reach the table in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend_client.state.codec import ValueCodec
from backend_client.state.keyed_collections import PART_BYTES, ListVariable, MapVariable
from backend_client.state.keyed_state import KeyedState
from backend_client.table.state_table import StateTable
from storage.errors import CorruptDataError, InvalidInputError
from storage.key_groups import KeyGroupRange
from tests.unit.backend_client.schemas import schema
from tests.unit.backend_client.state.partition import Partition, empty_partition

NUMBERS = ValueCodec(schema(number="long"), "numbers")
NAMES = ValueCodec(schema(name="string"), "names")


class Batches(Partition):
    """A partition with a list and a map."""

    def __init__(self, table: StateTable) -> None:
        super().__init__(table)
        self.next()

    def next(self) -> None:
        """Commit the batch's changes and start the next batch."""
        state = self.next_state()
        self.numbers = ListVariable(state, 1, NUMBERS)
        self.ages = MapVariable(state, 2, NAMES, NUMBERS)

    def list(self) -> list[Any]:
        """Return the current key's list, as plain numbers."""
        return [number for (number,) in self.numbers.get()]

    def map(self) -> dict[str, int]:
        """Return the current key's map, as plain values."""
        return {name: number for (name,), (number,) in self.ages.iterator()}


@pytest.fixture
def batches(tmp_path: Path) -> Iterator[Batches]:
    """Return a partition with an empty table."""
    with empty_partition(Batches, tmp_path) as partition:
        yield partition


def test_elements_keep_their_order(batches: Batches) -> None:
    """Elements appended in later calls and batches follow the existing ones."""
    batches.numbers.appendValue((1,))
    batches.numbers.appendList([(2,), (3,)])
    assert batches.list() == [1, 2, 3]
    batches.next()
    batches.numbers.appendValue((4,))
    assert batches.list() == [1, 2, 3, 4]
    batches.next()

    assert batches.list() == [1, 2, 3, 4]


def test_put_replaces_the_list(batches: Batches) -> None:
    """Putting a list replaces its elements in the table and in this batch."""
    batches.numbers.appendList([(1,), (2,)])
    batches.next()
    batches.numbers.appendValue((3,))
    batches.numbers.put([(9,)])
    batches.numbers.appendValue((10,))
    assert batches.list() == [9, 10]
    batches.next()

    assert batches.list() == [9, 10]


def test_empty_list_is_not_stored(batches: Batches) -> None:
    """Putting or appending nothing to an absent list leaves the key without a list."""
    batches.numbers.appendList([])
    assert not batches.numbers.exists()
    batches.numbers.appendValue((1,))
    batches.next()
    batches.numbers.put([])
    assert (batches.numbers.exists(), batches.list()) == (False, [])
    batches.next()

    assert not batches.numbers.exists()


def test_refused_element_changes_nothing(batches: Batches) -> None:
    """If one element does not fit, none is added and none is removed."""
    batches.numbers.appendValue((1,))
    for call in (batches.numbers.put, batches.numbers.appendList):
        with pytest.raises(InvalidInputError, match="number"):
            call([(2,), ("three",)])
    with pytest.raises(InvalidInputError, match="None"):
        batches.numbers.put(None)  # type: ignore[arg-type]  # refused

    assert batches.list() == [1]


def test_append_reads_nothing() -> None:
    """A batch appends one entry to a list of any length, without reading the others."""

    def fail(_: bytes) -> Any:
        raise AssertionError("nothing may be read")

    state = KeyedState(fail, KeyGroupRange(0, 0), fail, 5)
    state.key = b"\x91\x01"
    numbers = ListVariable(state, 1, NUMBERS)
    for number in range(100):
        numbers.appendValue((number,))
        numbers.appendList([(number,)])

    assert len(state.take_changes()) == 1


@pytest.mark.parametrize("how", ["appendValue", "appendList", "put"])
def test_long_list_is_in_parts(batches: Batches, how: str) -> None:
    """An entry is no longer than a bound plus one element, however much a batch appends."""
    numbers = range(100_000, 100_000 + 11 * PART_BYTES // (2 * len(NUMBERS.encode((100_000,)))))
    elements = [(number,) for number in numbers]
    for argument in elements if how == "appendValue" else [elements]:
        getattr(batches.numbers, how)(argument)
    batches.next()
    entries = [value for _, value in batches.table.items()]

    assert len(entries) == 6
    assert max(map(len, entries)) < 2 * PART_BYTES
    assert batches.list() == list(numbers)


def test_elements_stay_with_their_key(batches: Batches) -> None:
    """Elements appended to one key's list never reach the next key, although they are written when that key arrives."""
    lists = {b"\x91\x01": [1, 2], b"\x91\x02": [3], b"\x91\x03": []}
    for key_group, (key, numbers) in enumerate(lists.items()):
        batches.at(key, key_group)
        for number in numbers:
            batches.numbers.appendValue((number,))
    assert (batches.numbers.exists(), batches.list()) == (False, [])
    batches.next()

    for key_group, (key, numbers) in enumerate(lists.items()):
        batches.at(key, key_group)
        assert (batches.numbers.exists(), batches.list()) == (bool(numbers), numbers)


def test_changes_taken_between_keys_have_all_elements(batches: Batches) -> None:
    """Changes taken before the end of a batch include all elements appended so far, and no later ones."""
    taken = []
    for number in range(3):
        batches.at(b"\x91" + bytes([number]))
        batches.numbers.appendValue((number,))
        taken.append(batches.state.take_changes())

    assert [len(changes) for changes in taken] == [1, 1, 1]
    assert batches.state.take_changes() == {}


def test_map_entries_are_apart(batches: Batches) -> None:
    """Keys of a map are set, replaced, found and removed individually, over batches."""
    batches.ages.updateValue(("bob",), (20,))
    batches.ages.updateValue(("eve",), (30,))
    batches.next()
    batches.ages.updateValue(("bob",), (21,))
    batches.ages.removeKey(("eve",))
    batches.ages.removeKey(("nobody",))
    assert batches.ages.getValue(("bob",)) == (21,)
    assert batches.ages.getValue(("eve",)) is None
    assert batches.ages.containsKey(("bob",))
    assert not batches.ages.containsKey(("eve",))
    batches.next()

    assert batches.map() == {"bob": 21}
    assert (list(batches.ages.keys()), list(batches.ages.values())) == ([("bob",)], [(21,)])


def test_cleared_map_is_empty(batches: Batches) -> None:
    """Clearing removes the variable's entries in the table and in this batch; other variables stay."""
    batches.ages.updateValue(("bob",), (20,))
    batches.numbers.appendValue((1,))
    batches.next()
    batches.ages.updateValue(("eve",), (30,))
    batches.ages.clear()
    assert (batches.ages.exists(), batches.map()) == (False, {})
    batches.ages.updateValue(("joe",), (40,))
    batches.next()

    assert (batches.map(), batches.list()) == ({"joe": 40}, [1])


def test_keys_do_not_see_each_other(batches: Batches) -> None:
    """Keys with a common prefix, or in other key groups, have separate state."""
    batches.ages.updateValue(("bob",), (1,))
    batches.numbers.appendValue((1,))
    batches.at(b"\x91\xa3ann", 4)
    assert not batches.ages.exists()
    batches.at(b"\x91\xa4anna")
    assert not batches.numbers.exists()
    batches.numbers.appendValue((2,))
    batches.next()

    assert (batches.list(), batches.map()) == ([1], {"bob": 1})


def test_map_may_change_while_it_is_read(batches: Batches) -> None:
    """A function may remove keys while it iterates over them."""
    for number in range(5):
        batches.ages.updateValue((f"name-{number}",), (number,))
    batches.next()
    for name, (number,) in batches.ages.iterator():
        if number % 2:
            batches.ages.removeKey(name)

    assert sorted(batches.map().values()) == [0, 2, 4]


def test_changes_are_not_met_by_the_iteration_that_makes_them(batches: Batches) -> None:
    """An iteration yields each entry once, as it was at its start, whatever the function sets, adds or removes."""
    for batch in range(2):
        for number in range(3):
            batches.ages.updateValue((f"name-{batch}-{number}",), (10,))
            batches.numbers.appendValue((number,))
        if batch == 0:
            batches.next()
    met = []
    for name, (number,) in batches.ages.iterator():
        met.append(number)
        batches.ages.updateValue(name, (number + 1,))
        batches.ages.updateValue((f"new-{number}-{len(met)}",), (100,))
    for (number,) in batches.numbers.get():
        batches.numbers.appendValue((number + 10,))

    assert met == [10] * 6
    assert sorted(batches.map().values()) == [11] * 6 + [100] * 6
    assert batches.list() == [0, 1, 2, 0, 1, 2, 10, 11, 12, 10, 11, 12]


def test_damaged_list_is_reported() -> None:
    """I10: bytes that are not a chunk of a list are an error, not an element."""
    state = KeyedState(lambda _: None, KeyGroupRange(0, 0), lambda prefix: iter([(prefix + b"x" * 12, b"\xc1")]), 0)
    with pytest.raises(CorruptDataError):
        list(ListVariable(state, 1, NUMBERS).get())


@pytest.mark.parametrize("seed", range(8))
def test_random_calls_agree_with_plain_values(batches: Batches, seed: int) -> None:
    """I14: after any calls in any batches, lists and maps equal Python's own."""
    chance = random.Random(seed)
    keys = [b"\x91\xa1" + name for name in (b"a", b"b", b"c")]
    lists: dict[bytes, list[int]] = {key: [] for key in keys}
    maps: dict[bytes, dict[str, int]] = {key: {} for key in keys}
    for _ in range(12):
        for key in chance.sample(keys, 2):
            batches.at(key)
            for _ in range(chance.randint(0, 6)):
                number, name = chance.randint(0, 99), chance.choice("xyz")
                call = chance.choice(["append", "put", "clear list", "update", "remove", "clear map"])
                if call == "append":
                    batches.numbers.appendValue((number,))
                    lists[key].append(number)
                elif call == "put":
                    batches.numbers.put([(number,), (1,)])
                    lists[key] = [number, 1]
                elif call == "clear list":
                    batches.numbers.clear()
                    lists[key] = []
                elif call == "update":
                    batches.ages.updateValue((name,), (number,))
                    maps[key][name] = number
                elif call == "remove":
                    batches.ages.removeKey((name,))
                    maps[key].pop(name, None)
                else:
                    batches.ages.clear()
                    maps[key] = {}
                assert (batches.list(), batches.map()) == (lists[key], maps[key])
                assert batches.numbers.exists() == bool(lists[key])
        batches.next()
    for key in keys:
        batches.at(key)
        assert (batches.list(), batches.map()) == (lists[key], maps[key])
