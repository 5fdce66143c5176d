"""Objects that a query ships to its tasks once."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import pytest

from backend_client.spark.shipping import Shipments, copy_of
from storage.errors import InvalidInputError

if TYPE_CHECKING:
    from pyspark import SparkContext

LARGE = 1 << 19


class Context:
    """Accepts broadcasts as Spark does, and forgets destroyed ones."""

    def __init__(self) -> None:
        self.kept: list[Context.Broadcast] = []

    def broadcast(self, value: bytes) -> Context.Broadcast:
        """Keep a value."""
        self.kept.append(Context.Broadcast(self.kept, value))
        return self.kept[-1]

    class Broadcast:
        """A broadcast value."""

        def __init__(self, kept: list[Context.Broadcast], value: bytes) -> None:
            self._kept = kept
            self.value = value

        def destroy(self) -> None:
            """Forget it."""
            self._kept.remove(self)


@pytest.fixture
def context() -> Context:
    """Return a context without broadcasts."""
    return Context()


@pytest.fixture
def shipments(context: Context) -> Shipments:
    """Return shipments that use the context."""
    return Shipments(cast("SparkContext", context))


@pytest.mark.parametrize(("size_bytes", "broadcasts"), [(10, 0), (LARGE, 1)])
def test_an_object_is_packed_once(shipments: Shipments, context: Context, size_bytes: int, broadcasts: int) -> None:
    """However often a query ships a large object, it is one broadcast, which is destroyed with the query."""
    model = {"weights": b"w" * size_bytes}

    parcels = [shipments.parcel(model) for _ in range(3)]

    assert len(context.kept) == broadcasts
    assert parcels[0].unpack() == model
    assert parcels[0].unpack() is not parcels[0].unpack()
    shipments.close()
    shipments.close()
    assert not context.kept


def test_function_is_called_as_it_was_when_the_query_started(shipments: Shipments) -> None:
    """As in Spark, a function is fixed when its query starts, and its modules are found by name."""
    factors = [2]

    def scaled(value: int) -> str:
        return json.dumps(value * factors[0])

    shipped = shipments.function(scaled)
    factors[0] = 3

    assert shipped(21) == "42"
    assert shipments.function(scaled)(21) == "42"


def test_function_that_cannot_be_sent_is_named(shipments: Shipments) -> None:
    """A function that refers to a process-local object is refused by name, before anything runs."""
    import threading

    lock: Any = threading.Lock()

    def guarded(batches: Any) -> Any:
        with lock:
            yield from batches

    with pytest.raises(InvalidInputError, match=r"guarded cannot be sent to tasks: .*lock.* inside the function"):
        shipments.function(guarded)


@pytest.mark.parametrize("what", [{"a": 1}.keys(), {"a": 1}.items(), MappingProxyType({"a": 1}), memoryview(b"a")])
def test_copy_is_made_of_all_that_can_be_sent(what: Any) -> None:
    """Spark sends views and files to tasks, which Python cannot copy: a processor with one is not refused."""
    model = {"fields": what, "seen": []}

    copied = copy_of(model)
    copied["seen"].append(1)

    assert copied["fields"] is what
    assert model["seen"] == []
