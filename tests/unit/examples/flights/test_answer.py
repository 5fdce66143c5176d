"""The batch answer of the flights example compared with numbers computed manually, and the comparison."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from examples.flights.answer import COLUMNS, answer, differences, plain_rows


def flights(*rows: tuple[str, str, str, int | None]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["origin", "time_hour", "dest", "dep_delay"])
    return frame.astype({"dep_delay": "Int32"})


def weather(*rows: tuple[str, str, float | None, float, float]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["origin", "time_hour", "wind_speed", "precip", "visib"])


HOURS = weather(
    ("EWR", "h1", 5.0, 0.0, 10.0),
    ("EWR", "h2", 25.0, 0.1, 10.0),
    ("EWR", "h3", 20.0, 0.0, 10.0),
    ("EWR", "h4", 25.0, 0.1, 2.9),
    ("EWR", "h5", None, 0.0, 3.0),
)


def test_answer_equals_manual_computation() -> None:
    """Counts, means per weather class and the percentile are as defined; flights without weather are omitted."""
    found = answer(
        flights(
            ("EWR", "h1", "IAH", -4),
            ("EWR", "h5", "IAH", 1),
            ("EWR", "h2", "IAH", 10),
            ("EWR", "h3", "IAH", 20),
            ("EWR", "h4", "IAH", 40),
            ("EWR", "h4", "IAH", None),
            ("EWR", "h9", "IAH", 999),
            ("EWR", "h1", "LGA", None),
        ),
        HOURS,
    )

    assert plain_rows(found) == [
        ("EWR", "IAH", 6, 1, 67 / 5, 40, -1.5, 10.0, 20.0, 40.0),
        ("EWR", "LGA", 1, 1, None, None, None, None, None, None),
    ]


@pytest.mark.parametrize(("count", "expected"), [(1, 0), (19, 18), (20, 18), (21, 19), (100, 94), (101, 95)])
def test_percentile_has_nearest_rank(count: int, expected: Any) -> None:
    """The 95th percentile of n delays 0..n-1 has rank ceil(0.95 n)."""
    found = answer(flights(*[("EWR", "h1", "IAH", delay) for delay in range(count)]), HOURS)

    assert found["p95_delay"].to_list() == [expected]


def test_identical_answers_do_not_differ() -> None:
    """Neither the order of rows nor the kind of missing value matters."""
    one = pd.DataFrame([("EWR", "IAH", 1.5), ("LGA", "MIA", float("nan"))], columns=["origin", "dest", "mean_delay"])
    other = pd.DataFrame([("LGA", "MIA", None), ("EWR", "IAH", 1.5)], columns=one.columns, dtype=object)

    assert differences(one, other) == []


@pytest.mark.parametrize(
    "rows",
    [
        [("EWR", "IAH", 1.5)],
        [("EWR", "IAH", 1.5), ("LGA", "MIA", 2.0), ("LGA", "ORD", 2.0)],
        [("EWR", "IAH", 1.5), ("LGA", "MIA", 2.0000000000000004)],
        [("EWR", "IAH", 1.5), ("LGA", "MIA", None)],
        [("EWR", "IAH", 1.5), ("LGA", "MSP", 2.0)],
    ],
)
def test_every_difference_is_found(rows: Any) -> None:
    """A missing row, an extra one, another route, a null and the last bit of a number are all differences."""
    columns = ["origin", "dest", "mean_delay"]
    expected = pd.DataFrame([("EWR", "IAH", 1.5), ("LGA", "MIA", 2.0)], columns=columns)

    assert len(differences(expected, pd.DataFrame(rows, columns=columns))) == 1


def test_other_columns_are_a_difference() -> None:
    """Answers with different columns are never identical."""
    empty = pd.DataFrame(columns=COLUMNS)

    assert len(differences(empty, empty.drop(columns="flights"))) == 1
