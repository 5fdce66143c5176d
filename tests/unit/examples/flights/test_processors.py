"""
The processors of the flights example, run without Spark.

Unlike Spark, PySpark's `TwsTester` passes a key of several columns as one value, so this module has its own runner.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from examples.flights.answer import COLUMNS, answer, differences
from examples.flights.data import read_flights, read_weather
from examples.flights.processors import FlightWeatherJoin, RouteStats, nearest_rank

HOUR = ("EWR", "2013-01-01T10:00:00Z")


class KeyedRunner:
    """Runs a processor key by key; the state is copied in and out, as if it were stored."""

    def __init__(self, processor: StatefulProcessor) -> None:
        self._processor = processor
        self._key: tuple[str, str] = ("", "")
        self.states: dict[tuple[str, str], Any] = {}
        processor.init(self)  # type: ignore[arg-type]  # replaces a handle and its values

    def getValueState(self, stateName: str, schema: str) -> KeyedRunner:
        return self  # each processor has one state

    def get(self) -> Any:
        return copy.deepcopy(self.states.get(self._key))

    def update(self, value: tuple[Any, ...]) -> None:
        self.states[self._key] = copy.deepcopy(value)

    def test(self, key: tuple[str, str], rows: list[Row]) -> list[Row]:
        self._key = key
        # Replaces a handle and its values.
        found: Iterator[Any] = self._processor.handleInputRows(key, iter(rows), None)  # type: ignore[arg-type]
        return list(found)


def flight(dest: str = "IAH", dep_delay: int | None = 2) -> Row:
    return Row(is_weather=False, dest=dest, carrier="UA", flight=1, dep_delay=dep_delay)


def weather(wind_speed: float = 5.0, precip: float = 0.0, visib: float = 10.0) -> Row:
    return Row(is_weather=True, wind_speed=wind_speed, precip=precip, visib=visib)


def joined(dep_delay: int | None, weather_class: str = "clear") -> Row:
    return Row(dep_delay=dep_delay, weather=weather_class)


def _rows(frame: pd.DataFrame) -> Iterator[Any]:
    return iter(frame.itertuples())


def events_of(flights: pd.DataFrame, hours: pd.DataFrame) -> list[tuple[tuple[str, str], Row]]:
    """Return flights and weather as tagged rows with their keys."""
    events = [
        ((f.origin, f.time_hour), flight(f.dest, None if pd.isna(f.dep_delay) else int(f.dep_delay)))
        for f in _rows(flights)
    ]
    return events + [((w.origin, w.time_hour), weather(w.wind_speed, w.precip, w.visib)) for w in _rows(hours)]


def weather_class(row: Row) -> str:
    """Return what the job computes with column functions between its operators."""
    if row.visib < 3:
        return "low_visibility"
    if row.precip > 0:
        return "rain"
    return "wind" if row.wind_speed >= 20 else "clear"


def run_job(batches: list[list[tuple[tuple[str, str], Row]]]) -> pd.DataFrame:
    """Run both processors over batches and return the last row of each route."""
    join, stats, latest = KeyedRunner(FlightWeatherJoin()), KeyedRunner(RouteStats()), {}
    for batch in batches:
        by_hour, by_route = defaultdict(list), defaultdict(list)
        for key, row in batch:
            by_hour[key].append(row)
        for key, rows in by_hour.items():
            for row in join.test(key, rows):
                by_route[row.origin, row.dest].append(Row(dep_delay=row.dep_delay, weather=weather_class(row)))
        for key, rows in by_route.items():
            (latest[key],) = stats.test(key, rows)
    return pd.DataFrame([row.asDict() for row in latest.values()])[COLUMNS]


@pytest.mark.parametrize("seed", [1, 2])
def test_processors_agree_with_batch_answer(seed: int) -> None:
    """I14: whatever the order of rows and batches, the last rows are the batch answer."""
    flights, hours = read_flights().iloc[:4000], read_weather().iloc[:900]
    events = events_of(flights, hours)
    random.Random(seed).shuffle(events)
    batches = [events[start : start + 700] for start in range(0, len(events), 700)]

    assert differences(answer(flights, hours), run_job(batches)) == []


def test_flights_wait_for_weather() -> None:
    """Flights that arrive first are held, and yielded once, when the weather arrives."""
    runner = KeyedRunner(FlightWeatherJoin())

    assert runner.test(HOUR, [flight("IAH"), flight("MIA")]) == []
    assert [row.dest for row in runner.test(HOUR, [weather()])] == ["IAH", "MIA"]
    assert runner.states[HOUR] == ((5.0, 0.0, 10.0), [])


def test_weather_waits_for_flights() -> None:
    """Weather that arrives first is held and joined with every later flight, in any number of batches."""
    runner = KeyedRunner(FlightWeatherJoin())

    assert runner.test(HOUR, [weather(visib=1.5)]) == []
    assert [(row.dest, row.visib) for row in runner.test(HOUR, [flight("IAH")])] == [("IAH", 1.5)]
    assert [(row.dest, row.visib) for row in runner.test(HOUR, [flight("MIA")])] == [("MIA", 1.5)]


def test_weather_meets_flights_of_its_own_batch() -> None:
    """Both sides in one call are joined, whichever comes first."""
    rows = KeyedRunner(FlightWeatherJoin()).test(HOUR, [flight("IAH"), weather(), flight("MIA")])

    assert [row.dest for row in rows] == ["IAH", "MIA"]


def test_flights_without_weather_stay_in_state() -> None:
    """A flight whose weather never arrives is in the state, and in no output."""
    runner = KeyedRunner(FlightWeatherJoin())
    runner.test(HOUR, [flight("IAH", None)])

    assert runner.states[HOUR] == (None, [("IAH", "UA", 1, None)])


def test_route_without_departure_has_no_delay() -> None:
    """A route whose flights were all cancelled has counts, and null means and percentile."""
    (row,) = KeyedRunner(RouteStats()).test(("EWR", "LGA"), [joined(None)])

    assert (row.flights, row.cancelled, row.mean_delay, row.p95_delay, row.mean_delay_clear) == (1, 1, None, None, None)


def test_statistics_cover_all_batches() -> None:
    """Counts, means per weather class and the percentile cover all batches, including negative delays."""
    runner = KeyedRunner(RouteStats())
    runner.test(("EWR", "IAH"), [joined(-5), joined(10, "rain"), joined(None, "rain")])
    (row,) = runner.test(("EWR", "IAH"), [joined(-6), joined(21, "rain")])

    assert (row.flights, row.cancelled, row.mean_delay, row.p95_delay) == (5, 1, 5.0, 21)
    assert (row.mean_delay_clear, row.mean_delay_rain, row.mean_delay_wind) == (-5.5, 15.5, None)


@pytest.mark.parametrize(
    ("histogram", "percent", "expected"),
    [
        ([], 95, None),
        ([(7, 1)], 95, 7),
        ([(-3, 19), (50, 1)], 95, -3),  # rank 19 of 20
        ([(-3, 18), (40, 1), (50, 1)], 95, 40),
        ([(-3, 20), (50, 1)], 95, -3),  # rank ceil(19.95) of 21
        ([(1, 1), (2, 1), (3, 1)], 50, 2),
        ([(1, 1), (2, 1)], 100, 2),
        ([(1, 50), (2, 50)], 1, 1),
    ],
)
def test_nearest_rank_is_exact(histogram: Any, percent: int, expected: Any) -> None:
    """The percentile is the value with rank ceil(percent / 100 * n), computed in integers."""
    assert nearest_rank(histogram, percent) == expected
