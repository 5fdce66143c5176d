"""Changes that each call of a user's function adds to those the log writer seals: every mutation once, no read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backend_client.state.codec import ValueCodec
from backend_client.state.keyed_collections import ListVariable, MapVariable
from backend_client.state.keyed_state import KeyedState, ValueVariable
from backend_client.table.state_table import StateTable
from storage.key_groups import KeyGroupRange
from tests.unit.backend_client.schemas import schema

NUMBERS = ValueCodec(schema(number="long"), "numbers")
NAMES = ValueCodec(schema(name="string"), "names")
KEY_GROUP, KEY = 3, b"\x91\xa3ann"


class Function:
    """A user's function on one key in one batch, with a value, a list and a map."""

    def __init__(self, table: StateTable, batch: int) -> None:
        self.state = KeyedState(table.get, KeyGroupRange(2, 9), table.scan, batch)
        self.state.key_group, self.state.key = KEY_GROUP, KEY
        self.value = ValueVariable(self.state, 1, NUMBERS)
        self.list = ListVariable(self.state, 2, NUMBERS)
        self.map = MapVariable(self.state, 3, NAMES, NUMBERS)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[StateTable]:
    """Return a table with a value, a list of two chunks and a map of two entries."""
    made = StateTable.open(tmp_path)
    first = Function(made, 0)
    first.value.update((1,))
    first.list.appendValue((1,))
    assert list(first.list.get()) == [(1,)]  # a chunk ends where the list is read
    first.list.appendValue((2,))
    first.map.updateValue(("bob",), (1,))
    first.map.updateValue(("eve",), (2,))
    made.advance(first.state.take_changes().items(), "0.0.u")
    yield made
    made.close()


@pytest.fixture
def function(table: StateTable) -> Function:
    """Return a function that has changed nothing in this batch."""
    return Function(table, 1)


def remove_while_reading(function: Function) -> None:
    """Remove each map key that an iteration yields."""
    for name, _ in function.map.iterator():
        function.map.removeKey(name)


def set_while_reading(function: Function) -> None:
    """Set the value of each map key that an iteration yields."""
    for name, (number,) in function.map.iterator():
        function.map.updateValue(name, (number + 1,))


@pytest.mark.parametrize(
    ("call", "state_id", "set_entries", "removed_entries"),
    [
        (lambda f: f.value.update((2,)), 1, 1, 0),
        (lambda f: f.value.clear(), 1, 0, 1),
        (lambda f: f.list.appendValue((3,)), 2, 1, 0),
        (lambda f: f.list.appendList([(3,), (4,), (5,)]), 2, 1, 0),
        (lambda f: f.list.put([(3,), (4,)]), 2, 1, 2),
        (lambda f: f.list.put([]), 2, 0, 2),
        (lambda f: f.list.clear(), 2, 0, 2),
        (lambda f: f.map.updateValue(("joe",), (3,)), 3, 1, 0),
        (lambda f: f.map.updateValue(("bob",), (3,)), 3, 1, 0),
        (lambda f: f.map.removeKey(("bob",)), 3, 0, 1),
        (lambda f: f.map.clear(), 3, 0, 2),
        (remove_while_reading, 3, 0, 2),
        (set_while_reading, 3, 2, 0),
    ],
)
def test_mutation_is_logged_once(
    function: Function, call: Callable[[Function], Any], state_id: int, set_entries: int, removed_entries: int
) -> None:
    """I1: a call logs each entry it sets or removes once, under its key group and variable, and nothing else."""
    call(function)
    for write in function.state.before_taking:
        write()
    changes = function.state.changes

    assert [value is None for value in changes.values()].count(False) == set_entries
    assert [value is None for value in changes.values()].count(True) == removed_entries
    head = KEY_GROUP.to_bytes(2, "big") + state_id.to_bytes(2, "big") + KEY
    assert all(key.startswith(head) for key in changes)
    assert function.state.changed_bytes > 0


@pytest.mark.parametrize(
    "call",
    [
        lambda f: f.value.get(),
        lambda f: f.value.exists(),
        lambda f: list(f.list.get()),
        lambda f: f.list.exists(),
        lambda f: f.list.appendList([]),
        lambda f: f.map.getValue(("bob",)),
        lambda f: f.map.containsKey(("nobody",)),
        lambda f: list(f.map.iterator()),
        lambda f: [*f.map.keys(), *f.map.values()],
        lambda f: f.map.exists(),
    ],
)
def test_read_is_not_logged(function: Function, call: Callable[[Function], Any]) -> None:
    """Reading state, or appending nothing, logs nothing."""
    call(function)

    assert (function.state.changes, function.state.changed_bytes) == ({}, 0)


def test_repeated_mutation_is_logged_as_the_last(function: Function) -> None:
    """However often a value changes within a batch, only the last change is logged."""
    for number in range(5):
        function.value.update((number,))
        function.map.updateValue(("bob",), (number,))
        function.map.removeKey(("eve",))

    assert sorted(function.state.changes.values(), key=repr) == [None, NUMBERS.encode((4,)), NUMBERS.encode((4,))]


def test_log_is_what_the_function_saw(table: StateTable, function: Function) -> None:
    """I14: a table with the logged changes applied has the content that the function saw after its calls."""
    function.value.clear()
    function.list.put([(7,)])
    function.list.appendValue((8,))
    set_while_reading(function)
    seen = content(function)
    table.advance(function.state.take_changes().items(), "1.0.u")

    assert seen == (None, [(7,), (8,)], [(("bob",), (2,)), (("eve",), (3,))])
    assert content(Function(table, 2)) == seen


def content(function: Function) -> tuple[Any, ...]:
    """Return the content of all of the function's variables."""
    return function.value.get(), list(function.list.get()), sorted(function.map.iterator())
