"""
The two stateful processors of the flights example; `examples.flights.job` has the definitions.

They only use Spark's `StatefulProcessor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

JOINED_SCHEMA = (
    "origin STRING, dest STRING, carrier STRING, flight INT, dep_delay INT, "
    "wind_speed DOUBLE, precip DOUBLE, visib DOUBLE"
)
STATS_SCHEMA = (
    "origin STRING, dest STRING, flights BIGINT, cancelled BIGINT, mean_delay DOUBLE, p95_delay INT, "
    "mean_delay_clear DOUBLE, mean_delay_rain DOUBLE, mean_delay_wind DOUBLE, mean_delay_low_visibility DOUBLE"
)
WEATHER_CLASSES = ("clear", "rain", "wind", "low_visibility")


class FlightWeatherJoin(StatefulProcessor):
    """
    Joins the flights of one airport and hour with the weather of that hour, in any order of arrival.

    The state of a key: the hour's weather, null until it arrives, and the flights that wait for it.
    """

    _STATE = (
        "weather STRUCT<wind_speed: DOUBLE, precip: DOUBLE, visib: DOUBLE>, "
        "waiting ARRAY<STRUCT<dest: STRING, carrier: STRING, flight: INT, dep_delay: INT>>"
    )

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self._hour = handle.getValueState("hour", self._STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any = None) -> Iterator[Row]:  # noqa: N802, N803
        """Yield the flights whose weather is known, waiting ones first."""
        stored = self._hour.get()
        weather, waiting = stored if stored is not None else (None, [])
        flights = [tuple(flight) for flight in waiting]
        weather_is_new = False
        for row in rows:
            if row.is_weather:
                weather, weather_is_new = (row.wind_speed, row.precip, row.visib), True
            else:
                flights.append((row.dest, row.carrier, row.flight, row.dep_delay))
        if weather is None:
            self._hour.update((None, flights))
            return
        if weather_is_new:
            self._hour.update((weather, []))
        wind_speed, precip, visib = weather
        for dest, carrier, flight, dep_delay in flights:
            yield Row(
                origin=key[0],
                dest=dest,
                carrier=carrier,
                flight=flight,
                dep_delay=dep_delay,
                wind_speed=wind_speed,
                precip=precip,
                visib=visib,
            )

    def close(self) -> None:
        """Do nothing: there are no resources."""


class RouteStats(StatefulProcessor):
    """
    Keeps the statistics of one route and yields them once per batch.

    The state of a key: cancelled flights, departures per minute of delay (ascending), and per weather class the number
    of departures and the sum of their delays. It has at most one entry per distinct delay, about 300.
    """

    _STATE = (
        "cancelled BIGINT, delays ARRAY<STRUCT<minutes: INT, departures: BIGINT>>, "
        "by_weather MAP<STRING, STRUCT<departures: BIGINT, minutes: BIGINT>>"
    )

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self._route = handle.getValueState("route", self._STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any = None) -> Iterator[Row]:  # noqa: N802, N803
        """Yield the route's statistics over all flights so far."""
        stored = self._route.get()
        cancelled, old_delays, old_by_weather = stored if stored is not None else (0, [], {})
        delays = dict(old_delays)
        by_weather = {weather: tuple(totals) for weather, totals in old_by_weather.items()}
        for row in rows:
            if row.dep_delay is None:
                cancelled += 1
                continue
            delays[row.dep_delay] = delays.get(row.dep_delay, 0) + 1
            departures, minutes = by_weather.get(row.weather, (0, 0))
            by_weather[row.weather] = (departures + 1, minutes + row.dep_delay)
        histogram = sorted(delays.items())
        self._route.update((cancelled, histogram, by_weather))
        departed = sum(departures for departures, _ in by_weather.values())
        means = {f"mean_delay_{name}": _mean(*by_weather.get(name, (0, 0))) for name in WEATHER_CLASSES}
        yield Row(
            origin=key[0],
            dest=key[1],
            flights=cancelled + departed,
            cancelled=cancelled,
            mean_delay=_mean(departed, sum(minutes for _, minutes in by_weather.values())),
            p95_delay=nearest_rank(histogram, 95),
            **means,
        )

    def close(self) -> None:
        """Do nothing: there are no resources."""


def nearest_rank(histogram: Sequence[tuple[int, int]], percent: int) -> int | None:
    """
    Return the nearest-rank percentile: the value with rank ceil(percent / 100 * n) of n values in ascending order.

    Args:
        histogram: (value, count) pairs with ascending values.
        percent: 1 to 100.

    Returns:
        The value; None without values.
    """
    remaining = -(-percent * sum(count for _, count in histogram) // 100)  # ceiling in integers
    for value, count in histogram:
        remaining -= count
        if remaining <= 0:
            return value
    return None


def _mean(count: int, total: int) -> float | None:
    return total / count if count else None
