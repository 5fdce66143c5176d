"""Methods of processors that Spark's class has, too, and that do nothing there."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from backend_client.columnar import Aggregate, ColumnarProcessor, Count, tumbling
from backend_client.spark.processor_methods import check_columnar_names, check_methods
from backend_client.testing import StateTester
from storage.errors import InvalidInputError
from tests.support.processors import SilentProcessor


def _with(*methods: str) -> Any:
    return type("Made", (SilentProcessor,), dict.fromkeys(methods, lambda *_: iter(())))()


@pytest.mark.parametrize(
    ("method", "meant"),
    [
        ("handleExpiredTimers", "handleExpiredTimer"),
        ("handle_expired_timer", "handleExpiredTimer"),
        ("handleInitalState", "handleInitialState"),
    ],
)
def test_slips_are_told(method: str, meant: str) -> None:
    """Timers would fire, and rows be taken, by Spark's own method, which does nothing: state would stay, or lack."""
    with pytest.raises(
        InvalidInputError, match=f"has a method '{method}', which is never called; it looks like '{meant}'"
    ):
        check_methods("totals", _with(method), has_initial_rows=False)
    with pytest.raises(InvalidInputError, match=method):
        StateTester(_with(method))
    check_methods("totals", _with(method, meant), has_initial_rows="Init" in meant)


def test_initial_rows_need_a_method() -> None:
    """They would be left out, and totals begin at 0."""
    with pytest.raises(
        InvalidInputError, match="operator 'totals' has an initial state, but its processor Made has no"
    ):
        check_methods("totals", _with(), has_initial_rows=True)
    with pytest.raises(InvalidInputError, match="no method handleInitialState"):
        StateTester(_with(), initialStateRow=[("a", (1,))])  # type: ignore[list-item]  # any row will do
    check_methods("totals", _with("handleInitialState"), has_initial_rows=True)


def test_other_methods_are_the_users() -> None:
    """Helpers may have names of their own."""
    check_methods(
        "totals", _with("handleExpired", "expire", "_handleExpiredTimers", "handleRows"), has_initial_rows=False
    )


@pytest.mark.parametrize(
    ("slip", "value", "meant"),
    [
        ("expire", None, "expired"),
        ("expire", lambda *_: None, "expired"),
        ("expire", True, "expires"),
        ("Windows", None, "windows"),
        ("window", tumbling("at", timedelta(hours=1)), "windows"),
        ("window", property(lambda _: None), "windows"),
        ("water_mark_column", "at", "watermark_column"),
    ],
)
def test_slips_of_columnar_processors_are_told(slip: str, value: Any, meant: str) -> None:
    """State would end without output, or never."""
    made: Any = type("Made", (ColumnarProcessor,), {slip: value, "state_schema": None, "process": None})()

    with pytest.raises(InvalidInputError, match=f"Made of operator 'x' has '{slip}', which .* looks like '{meant}'"):
        check_columnar_names("x", made)


def test_other_names_of_columnar_processors_are_the_users() -> None:
    """Helpers may have names of their own; what is defined beside a similar name is meant."""
    own = {"_expire": None, "ends_ms": None, "expired": None, "expires": True, "expire": None, "output": None}
    check_columnar_names("x", type("Made", (Aggregate,), own)(Count()))
    other = {"window": timedelta(minutes=30), "expire": "never", "outputSchema": pa.schema([])}
    check_columnar_names("x", type("Made", (Aggregate,), {**other, "expires": False})(Count()))


def test_other_objects_than_processors_are_told() -> None:
    """A class, whose methods lack `self`, or a function; in a query and in a test."""
    for given, told in ((type(_with()), "is the class Made; give an object"), (len, "takes a StatefulProcessor, not")):
        processor: Any = given
        with pytest.raises(InvalidInputError, match=told):
            check_methods("totals", processor, has_initial_rows=False)
        with pytest.raises(InvalidInputError, match=told):
            StateTester(processor)
