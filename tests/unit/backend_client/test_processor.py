"""Which states a processor may ask for, and how they are found again in stored state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from backend_client.declared_states import merge_states
from backend_client.spark.processor import declare_states
from dstl_service.wire import StateInfo
from storage.errors import InvalidInputError

NUMBER = StructType().add("n", "long")
NAME = StructType().add("name", "string")


class Asking(StatefulProcessor):
    """A processor whose `init` does what it is told."""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        self._ask = ask

    def init(self, handle: Any) -> None:
        self._ask(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return iter(())

    def close(self) -> None:
        pass


def declared(ask: Callable[[Any], Any]) -> dict[str, StateInfo]:
    """Return the states that an `init` asks for."""
    return declare_states("op", Asking(ask), StructType().add)[0]


def stored_of(ask: Callable[[Any], Any]) -> dict[str, StateInfo]:
    """Return what the first checkpoint has of these states."""
    return merge_states("op", {}, declared(ask))


def test_new_variable_comes_behind_stored_ones() -> None:
    """I14: variables keep the numbers under which their values are stored, in whatever order `init` asks for them."""
    stored = stored_of(lambda handle: (handle.getValueState("a", NUMBER), handle.getListState("b", NAME)))
    changed = declared(
        lambda handle: (
            handle.getMapState("c", NAME, NUMBER),
            handle.getListState("b", NAME),
            handle.getValueState("a", NUMBER),
        )
    )
    merged = merge_states("op", stored, changed)

    assert {name: (info.id, info.kind) for name, info in merged.items()} == {
        "a": (1, "value"),
        "b": (2, "list"),
        "c": (3, "map"),
    }


def test_variable_that_is_not_asked_for_keeps_its_number() -> None:
    """I14: a variable that a newer program leaves out keeps number and schema, so that nobody else gets its values."""
    stored = stored_of(lambda handle: (handle.getValueState("a", NUMBER), handle.getValueState("b", NAME)))
    merged = merge_states("op", stored, declared(lambda handle: handle.getValueState("c", NUMBER)))

    assert {name: info.id for name, info in merged.items()} == {"a": 1, "b": 2, "c": 3}
    assert (merged["a"], merged["b"]) == (stored["a"], stored["b"])


@pytest.mark.parametrize(
    ("ask", "difference"),
    [
        (lambda handle: handle.getListState("a", NUMBER), "stored as value state, now it is list state"),
        (
            lambda handle: handle.getValueState("a", StructType().add("n", "integer")),
            "field 'n' was stored as bigint, now it is int",
        ),
        (
            lambda handle: handle.getValueState("a", StructType().add("n", "long").add("m", "integer", nullable=False)),
            "the new field 'm' is not nullable and has no default",
        ),
    ],
)
def test_other_schema_is_refused(ask: Callable[[Any], Any], difference: str) -> None:
    """A stored variable that cannot become what is asked for is refused with the first difference."""
    stored = stored_of(lambda handle: handle.getValueState("a", NUMBER))

    with pytest.raises(InvalidInputError, match=difference):
        merge_states("op", stored, declared(ask))
