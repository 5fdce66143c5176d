"""State as a user's function sees it."""

from __future__ import annotations

import pytest

from backend_client.state.codec import ValueCodec
from backend_client.state.keyed_state import KeyedState, ValueVariable, table_key
from storage.errors import InvalidInputError
from storage.key_groups import KeyGroupRange
from tests.unit.backend_client.schemas import schema

CODEC = ValueCodec(schema(count="long"), "total")
STORED = {table_key(3, 0, b"ann"): CODEC.encode((1,)), table_key(3, 1, b"ann"): CODEC.encode((100,))}


@pytest.fixture
def state() -> KeyedState:
    """Return a state positioned at the one key in its table."""
    made = KeyedState(STORED.get, KeyGroupRange(2, 4), lambda _: iter(()), 0)
    made.key_group, made.key = 3, b"ann"
    return made


def test_table_is_read(state: KeyedState) -> None:
    """A function reads each variable's own value from the table."""
    assert ValueVariable(state, 0, CODEC).get() == (1,)
    assert ValueVariable(state, 1, CODEC).get() == (100,)
    assert ValueVariable(state, 0, CODEC).exists()


def test_other_key_sees_nothing(state: KeyedState) -> None:
    """A key sees only its own values, and so does the same key in another key group."""
    total = ValueVariable(state, 0, CODEC)
    state.key = b"bob"
    assert total.get() is None
    state.key_group, state.key = 4, b"ann"

    assert not total.exists()


def test_own_writes_are_read(state: KeyedState) -> None:
    """I1: a write is visible to the next read, and the table is unchanged."""
    total = ValueVariable(state, 0, CODEC)
    before = dict(STORED)
    total.update((2,))
    total.update((3,))

    assert total.get() == (3,)
    assert state.changes == {table_key(3, 0, b"ann"): CODEC.encode((3,))}
    assert before == STORED


def test_cleared_value_is_gone(state: KeyedState) -> None:
    """A cleared value is not read from the table again, and can be rewritten."""
    total = ValueVariable(state, 0, CODEC)
    total.clear()
    assert (total.get(), total.exists()) == (None, False)
    assert state.changes == {table_key(3, 0, b"ann"): None}
    total.update((5,))

    assert total.get() == (5,)


def test_clearing_touches_one_variable(state: KeyedState) -> None:
    """Clearing one variable keeps the key's others."""
    ValueVariable(state, 0, CODEC).clear()

    assert ValueVariable(state, 1, CODEC).get() == (100,)


def test_refused_value_changes_nothing(state: KeyedState) -> None:
    """A value that does not fit leaves the state unchanged."""
    total = ValueVariable(state, 0, CODEC)
    with pytest.raises(InvalidInputError):
        total.update(("many",))

    assert (total.get(), state.changes, state.changed_bytes) == ((1,), {}, 0)


def test_changes_are_taken_once(state: KeyedState) -> None:
    """Changes are taken once, and their bytes are then counted from zero again."""
    total = ValueVariable(state, 0, CODEC)
    total.update((2,))
    assert state.changed_bytes > 0
    taken = state.take_changes()
    state.key = b"bob"
    total.update((7,))

    assert list(taken) == [table_key(3, 0, b"ann")]
    assert list(state.changes) == [table_key(3, 0, b"bob")]


def test_table_keys_sort_by_key_group() -> None:
    """A table's keys sort by key group, then by variable, so a range of key groups is one range of keys."""
    places = [(0, 0), (0, 1), (0, 256), (1, 0), (255, 0), (256, 0), (32_767, 65_535)]
    keys = [table_key(group, state_id, b"k") for group, state_id in places]

    assert keys == sorted(keys)
    assert keys[-1] < b"\xff\xffversion"
