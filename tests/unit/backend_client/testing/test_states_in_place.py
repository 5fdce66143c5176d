"""States are asked for in ``init`` and used with a key; elsewhere they are refused, never answered wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from pyspark.sql import Row

from backend_client import StateTester
from storage.errors import InvalidInputError
from tests.unit.backend_client.testing.purchases import Purchases


class OutOfPlace(Purchases):
    """A processor that uses its states, or its handle, where told."""

    def __init__(self, where: str, use: Callable[[Any, Any], Any]) -> None:
        self._where = where
        self._use = use

    def init(self, handle: Any) -> None:
        super().init(handle)
        self.handle = handle
        self.called = ""
        self._at("init")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self.called = "rows"
        yield from super().handleInputRows(key, rows, timerValues)
        self._at("rows")

    def close(self) -> None:
        if self.called:  # not the close on the driver
            self._at("close")

    def _at(self, place: str) -> None:
        if place == self._where:
            self._use(self, self.handle)


LATE = [
    lambda _, handle: handle.getValueState("count", "n int"),
    lambda _, handle: handle.getListState("amounts", "amount double"),
    lambda _, handle: handle.getMapState("last", "article string", "amount double"),
    lambda _, handle: handle.deleteIfExists("count"),
]
WITHOUT_KEY = [
    lambda processor, _: processor.count.get(),
    lambda processor, _: processor.count.update((1,)),
    lambda processor, _: processor.amounts.appendValue((1.0,)),
    lambda processor, _: list(processor.amounts.get()),
    lambda processor, _: processor.last.updateValue(("pen",), (1.0,)),
]


@pytest.mark.parametrize("use", LATE)
def test_state_is_asked_for_in_init_only(use: Callable[[Any, Any], Any]) -> None:
    """Two variables of one state would not see each other's writes and would overwrite them: refused, as on Spark."""
    with (
        StateTester(OutOfPlace("rows", use)) as tester,
        pytest.raises(InvalidInputError, match=r"state '\w+' outside of init"),
    ):
        tester.test("ann", [Row(article="pen", amount=1.0)])


@pytest.mark.parametrize("use", WITHOUT_KEY)
def test_state_is_not_used_without_a_key(use: Callable[[Any, Any], Any]) -> None:
    """In `close` there is no key: a write does not go to the key that happened to be the last one, twice neither."""

    def twice(processor: Any, handle: Any) -> None:
        with suppress(InvalidInputError):
            use(processor, handle)
        use(processor, handle)

    with StateTester(OutOfPlace("close", twice)) as tester:
        with pytest.raises(InvalidInputError, match="used without a key"):
            tester.test("ann", [Row(article="pen", amount=1.0)])
        assert tester.peekValueState("count", "ann") is None
    with pytest.raises(InvalidInputError, match="used without a key"):
        StateTester(OutOfPlace("init", use))


def test_init_may_keep_methods_of_its_states() -> None:
    """On the driver, where `init` runs first, a variable has its methods."""

    class Short(Purchases):
        def init(self, handle: Any) -> None:
            super().init(handle)
            self.get_count = self.count.get

    with StateTester(Short()) as tester:
        assert tester.test("ann", [Row(article="pen", amount=1.0)]) == [Row(key="ann", n=1, total=1.0)]
