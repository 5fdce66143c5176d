"""Stored state variables when a processor requests others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backend_client.state.declared_states import DELETED, STATE_ID_MAX, ids_to_delete, merge_states
from dstl_service.wire import StateInfo
from storage.errors import InvalidInputError
from tests.unit.backend_client.schemas import schema, struct

COUNT = schema(n="integer")


def value(text: str = COUNT) -> StateInfo:
    """Return a value state as declared by a processor."""
    return StateInfo(0, "value", text)


def map_state(key: dict[str, Any], of: dict[str, Any]) -> StateInfo:
    """Return a map state as declared by a processor."""
    return StateInfo(0, "map", json.dumps(struct(key=key, value=of)))


def test_variables_are_numbered_in_order() -> None:
    """New variables are numbered from 1; known ones keep their numbers, even if no longer requested."""
    first = merge_states("op", {}, {"a": value(), "b": value()})
    second = merge_states("op", first, {"c": value(), "b": value()})

    assert {name: info.id for name, info in second.items()} == {"a": 1, "b": 2, "c": 3}


def test_changed_schema_keeps_the_one_before() -> None:
    """The manifest keeps a variable's schema history; a comment or a newly nullable field is not a change."""
    wider, commented = schema(n="long"), json.loads(schema(n="long"))
    commented["fields"][0]["metadata"] = {"comment": "rows"}
    states = merge_states("op", {}, {"a": value()})
    states = merge_states("op", states, {"a": value(wider)})
    states = merge_states("op", states, {"a": value(json.dumps(commented))})

    assert states["a"] == StateInfo(1, "value", json.dumps(commented), [COUNT])


def test_change_is_checked_against_whole_history() -> None:
    """A field that returns with another type is refused: values of an earlier schema may still exist."""
    states = merge_states("op", {}, {"a": value(schema(n="integer", x="long"))})
    states = merge_states("op", states, {"a": value(COUNT)})

    with pytest.raises(
        InvalidInputError, match="state 'a' of operator 'op': field 'x' was stored as bigint, now it is"
    ):
        merge_states("op", states, {"a": value(schema(n="integer", x="string"))})


def test_map_changes_in_its_values_only() -> None:
    """Map values may widen; map keys never change, because entries are stored under their bytes."""
    states = merge_states("op", {}, {"m": map_state(struct(k="integer"), struct(n="integer"))})
    wider = merge_states("op", states, {"m": map_state(struct(k="integer"), struct(n="long"))})

    assert len(wider["m"].earlier) == 1
    with pytest.raises(InvalidInputError, match="the user key of state 'm' of operator 'op' was stored with field 'k'"):
        merge_states("op", states, {"m": map_state(struct(k="long"), struct(n="integer"))})


def test_other_kind_of_state_is_refused() -> None:
    """A value cannot become a list."""
    states = merge_states("op", {}, {"a": value()})

    with pytest.raises(InvalidInputError, match="was stored as value state, now it is list state"):
        merge_states("op", states, {"a": StateInfo(0, "list", COUNT)})


def test_number_of_deleted_state_is_not_reused() -> None:
    """A deleted variable's number is never reused, not even for a variable of its name."""
    states = merge_states("op", {}, {"a": value(), "b": value()})
    deleted = merge_states("op", states, {"a": value(), "b": StateInfo(0, DELETED, "")})
    again = merge_states("op", deleted, {"a": value(), "c": value(), "b": StateInfo(0, "list", COUNT)})

    assert ids_to_delete(states, deleted) == (2,)
    assert ids_to_delete(deleted, again) == ()
    assert {name: info.id for name, info in again.items()} == {"a": 1, "c": 3, "b": 4}


def test_unknown_deleted_state_is_fine() -> None:
    """Deleting a variable that does not exist has no effect, as the method's name says."""
    states = merge_states("op", {}, {"a": value(), "b": StateInfo(0, DELETED, "")})

    assert states.keys() == {"a"}
    assert ids_to_delete({}, states) == ()


def test_state_deleted_and_requested_is_deleted_in_every_batch() -> None:
    """A variable that is deleted and then requested keeps its number, and its entries are deleted in every batch."""
    states = merge_states("op", {}, {"a": value(), "b": value()})

    assert ids_to_delete({}, states, {"b"}) == ()
    assert ids_to_delete(states, states, {"b"}) == (2,)


def test_numbers_of_states_end() -> None:
    """A state never gets a number of the backend's own entries."""
    stored = {"last": StateInfo(STATE_ID_MAX, "value", COUNT)}

    with pytest.raises(InvalidInputError, match="has used up the 65280 numbers of state variables"):
        merge_states("op", stored, {"one more": value()})


def test_state_that_had_time_to_live_keeps_knowing_it() -> None:
    """A TTL that is removed, or whose state is deleted, leaves a 0: stored values may still have an end."""
    states = merge_states("op", {}, {"a": StateInfo(0, "value", COUNT, ttl_ms=9), "b": value()})
    without = merge_states("op", states, {"a": value(), "b": value()})
    deleted = merge_states("op", states, {"a": StateInfo(0, DELETED, "")})

    assert [states["a"].ttl_ms, without["a"].ttl_ms, without["b"].ttl_ms, deleted["a"].ttl_ms] == [9, 0, None, 0]
