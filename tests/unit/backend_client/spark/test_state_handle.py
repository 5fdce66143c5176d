"""Which states a processor may request, and how they are found again in stored state."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import LongType, StructType

from backend_client.batch_time import TimeMode
from backend_client.spark.shipping import Shipments
from backend_client.spark.task.state_handle import TaskHandle, declare_states
from backend_client.state.declared_states import merge_states
from backend_client.state.keyed_state import KeyedState
from dstl_service.wire import StateInfo
from storage.errors import InvalidInputError
from storage.key_groups import KeyGroupRange

if TYPE_CHECKING:
    from pyspark import SparkContext

NUMBER = StructType().add("n", "long")
NAME = StructType().add("name", "string")


class Asking(StatefulProcessor):
    """A processor whose `init` does what the test gives it."""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        self._ask = ask

    def init(self, handle: Any) -> None:
        self._ask(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return iter(())

    def close(self) -> None:
        pass


def parse(schema: str) -> StructType:
    """Parse a schema text, which no processor here uses."""
    raise AssertionError(schema)


def declared(ask: Callable[[Any], Any]) -> dict[str, StateInfo]:
    """Return the states that an `init` requests."""
    return declare_states("op", Asking(ask), parse)[0]


def stored_of(ask: Callable[[Any], Any]) -> dict[str, StateInfo]:
    """Return these states as the first checkpoint stores them."""
    return merge_states("op", {}, declared(ask))


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (
            lambda handle: handle.getValueState("v", NUMBER, 1000),
            r"state 'v' has a TTL.* use timeMode 'ProcessingTime'",
        ),
        (lambda handle: handle.getMapState("m", NAME, NUMBER, 1000), "state 'm' has a TTL"),
        (lambda handle: handle.getListState("l", NUMBER, ttlDurationMs=-1), "must be a positive whole number"),
        (lambda handle: handle.getValueState("v", LongType()), r"state 'v' must be a StructType .* not LongType\(\)"),
        (lambda handle: handle.getListState("l", ["n"]), r"state 'l' must be a StructType .* not \['n'\]"),
        (lambda handle: handle.getMapState("m", NAME, StructType([])), "state 'm' must be a StructType with fields"),
        (lambda handle: handle.registerTimer(1), "set timers in handleInputRows"),
        (lambda handle: handle.deleteTimer(1), "set timers in handleInputRows"),
        (lambda handle: handle.listTimers(), "set timers in handleInputRows"),
    ],
)
def test_impossible_declaration_is_refused(ask: Callable[[Any], Any], what: str) -> None:
    """A TTL without processing time and timers without a key are refused before any batch runs, never ignored."""
    with pytest.raises(InvalidInputError, match=what):
        declared(ask)


def test_ttl_is_kept_with_the_variable() -> None:
    """A TTL of 0 means none, as in Spark; after any other TTL, stored values may have an end for ever."""

    def declare(ttl_ms: int | None) -> dict[str, StateInfo]:
        ask = Asking(lambda handle: handle.getValueState("v", NUMBER, ttl_ms))
        return merge_states("op", {}, declare_states("op", ask, parse, TimeMode.PROCESSING)[0])

    assert [declare(ttl_ms)["v"].ttl_ms for ttl_ms in (1000, 0, None)] == [1000, None, None]

    def changed(before: int | None, now: int | None) -> int | None:
        stored = {"v": replace(declare(None)["v"], ttl_ms=before)}
        return merge_states("op", stored, declare(now))["v"].ttl_ms

    assert (changed(None, 1000), changed(1000, 5), changed(1000, None), changed(0, None)) == (1000, 5, 0, 0)
    assert changed(None, None) is None


def test_timers_need_a_time_mode() -> None:
    """With time mode None, timers raise an error that names the modes with timers."""
    state = KeyedState(dict[bytes, bytes]().get, KeyGroupRange(0, 1), lambda _: iter(()), 0)
    with pytest.raises(InvalidInputError, match=r"'op' has no timers.*timeMode 'ProcessingTime' or 'EventTime'"):
        TaskHandle("op", {}, state).registerTimer(1)


class Connected(Asking):
    """A processor whose `init` creates process-local objects, also inside existing ones."""

    def __init__(self) -> None:
        super().__init__(lambda handle: handle.getValueState("v", NUMBER))
        self.parts: dict[str, Any] = {"json": json}

    def init(self, handle: Any) -> None:
        super().init(handle)
        self.handle = handle
        self.parts["lock"] = threading.Lock()

    def close(self) -> None:
        self.parts["lock"].acquire()


def test_init_may_make_what_cannot_be_sent() -> None:
    """As in Spark, `init` and `close` run on a copy: tasks get a processor untouched by both, which can be pickled."""
    processor = Connected()

    states, _ = declare_states("op", processor, parse)

    assert list(states) == ["v"]
    assert vars(processor).keys() == {"_ask", "parts"}
    assert processor.parts == {"json": json}
    shipped = Shipments(cast("SparkContext", None)).parcel(processor).unpack()
    assert vars(shipped).keys() == {"_ask", "parts"}


def test_processor_that_cannot_be_pickled_is_refused() -> None:
    """A processor that cannot be pickled is refused when the operator is created; the error names the remedy."""
    processor = Connected()
    processor.parts["lock"] = threading.Lock()

    with pytest.raises(InvalidInputError, match=r"Connected cannot be sent to tasks: .*lock.* in a processor's init"):
        declare_states("op", processor, parse)


def test_new_variable_comes_after_stored_ones() -> None:
    """I14: variables keep the numbers under which their values are stored, whatever the order of requests in `init`."""
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
    """I14: a variable that a newer program omits keeps number and schema, so no other variable gets its values."""
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
    """A stored variable that cannot be changed to the requested schema is refused with the first difference."""
    stored = stored_of(lambda handle: handle.getValueState("a", NUMBER))

    with pytest.raises(InvalidInputError, match=difference):
        merge_states("op", stored, declared(ask))
