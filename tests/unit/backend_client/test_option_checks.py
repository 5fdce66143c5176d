"""Arguments of ready-made processors that are of another type, or beyond what can be computed with."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructType, TimestampType

from backend_client import ChangelogStateBackend, join_streams
from backend_client.columnar import Aggregate, ApproxDistinct, Count, Deduplicate, Last, Sum, TopK, sliding, tumbling
from backend_client.spark.columnar_plan import ColumnarPlan
from storage.errors import InvalidInputError

HOUR = timedelta(hours=1)
ROWS = pa.schema([("v", pa.int64()), ("at", pa.timestamp("us", "UTC"))])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda given: tumbling("at", given), "the size of windows must be a datetime.timedelta"),
        (lambda given: tumbling("at", HOUR, given), "the offset of windows must be a datetime.timedelta"),
        (lambda given: sliding("at", HOUR, given), "the slide of windows must be a datetime.timedelta"),
        (lambda given: Deduplicate("at", given), "Deduplicate: within must be a datetime.timedelta"),
    ],
)
def test_durations_are_timedeltas(make: Callable[[Any], Any], told: str) -> None:
    """Spark takes text, and a number has no unit; a duration beyond the range of times would end before it begins."""
    for given in ("1 hour", 3600, None):
        with pytest.raises(InvalidInputError, match=f"{told}.*not {given!r}"):
            make(given)
    if "slide" not in told:
        with pytest.raises(InvalidInputError, match="at most 3650000 days"):
            make(timedelta.max)


def test_row_is_in_few_windows() -> None:
    """A slide in another unit than the size would have each row in billions of windows, and no batch would end."""
    sliding("at", timedelta(days=365), HOUR)
    with pytest.raises(InvalidInputError, match=r"in 3600000000 windows, and may be in 100000: .* is too short"):
        sliding("at", HOUR, timedelta(microseconds=1))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Sum(object()), "Sum takes the name of a column as text"),  # type: ignore[arg-type]  # as Spark's col()
        (lambda: TopK("v", 3), r"TopK\('v'\): the name of the output column must be text, not 3"),  # type: ignore[arg-type]  # a slip
        (lambda: Aggregate([Count()]), r"as in Aggregate\(Count\(\), Sum\('price'\)\), not \["),  # type: ignore[arg-type]  # a list
        (lambda: Aggregate(Count), "not <class"),  # type: ignore[arg-type]  # a class
        (lambda: Last("v", by=object()).state_types(ROWS), "by takes the name of a column"),  # type: ignore[arg-type]  # likewise
        (lambda: TopK("v", limit=True).state_types(ROWS), "limit must be a whole number, 1 to 1000, not True"),
        (lambda: TopK("v", limit=2.5).state_types(ROWS), "limit must be a whole number"),  # type: ignore[arg-type]  # a slip
        (
            lambda: ApproxDistinct("v", log2_size=12.0).state_types(ROWS),  # type: ignore[arg-type]  # a slip
            "log2_size must be a whole number, 4 to 21, not 12.0",
        ),
    ],
)
def test_other_types_are_told(make: Callable[[], Any], told: str) -> None:
    """The error names the argument; it was one of Python's, or came from a task of the first batch."""
    with pytest.raises(InvalidInputError, match=told):
        make()


def test_numbers_and_durations_of_numpy_and_pandas_are_taken() -> None:
    """A program that computes them does not have to convert them."""
    limit: Any = np.int64(3)
    log2_size: Any = np.int32(12)
    assert TopK("v", limit=limit).state_types(ROWS) == [pa.int64()] * 3
    assert ApproxDistinct("v", log2_size=log2_size).state_types(ROWS) == [pa.binary()]
    assert tumbling("at", pd.Timedelta("1h"), pd.Timedelta("5min")) == tumbling("at", HOUR, timedelta(minutes=5))
    assert type(tumbling("at", pd.Timedelta("1h")).size_us) is int


def test_windows_of_another_library_are_told() -> None:
    """Spark's ``window(…)`` is a column."""
    rows = StructType().add("k", StringType()).add("at", TimestampType())
    aggregate = Aggregate(Count(), windows=HOUR)  # type: ignore[arg-type]  # a duration alone

    with pytest.raises(InvalidInputError, match=r"the windows of Aggregate must be tumbling\(…\) or sliding\(…\)"):
        ColumnarPlan.of(aggregate, "Update", rows, ["k"])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"inputs": ["a", "b"]}, "inputs must name the streams.*not be a list"),
        ({"on": 3}, "on must be the name of a column of all inputs or a list of such names, not 3"),
        ({"on": ["k", object()]}, r"put other conditions into where\(…\)"),
        ({"columnar": "False"}, "columnar must be True or False, not 'False'"),
        ({"backend": "file:///state"}, "first argument is the ChangelogStateBackend, not str"),
    ],
)
def test_other_types_of_a_join_are_told(changes: dict[str, Any], told: str) -> None:
    """A text counted as true, and what is no name was an error of Python or Spark."""
    given = {"backend": ChangelogStateBackend("file:///state", job="j"), "inputs": {}, "on": "k", "wait": "1 hour"}

    with pytest.raises(InvalidInputError, match=told):
        join_streams(**{**given, **changes})
