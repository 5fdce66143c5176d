"""
The answer of the flights example as one batch computation in pandas, and the comparison with the job's output.

Shares only the data set and the definitions with the job; the docstring of `examples.flights.job` has the definitions.
"""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
import pandas as pd

ROUTE = ["origin", "dest"]
COLUMNS = [
    *ROUTE,
    "flights",
    "cancelled",
    "mean_delay",
    "p95_delay",
    "mean_delay_clear",
    "mean_delay_rain",
    "mean_delay_wind",
    "mean_delay_low_visibility",
]


def answer(flights: pd.DataFrame, weather: pd.DataFrame) -> pd.DataFrame:
    """
    Compute the statistics of all routes.

    Args:
        flights: Columns as `examples.flights.data.read_flights` returns them.
        weather: Columns as `examples.flights.data.read_weather` returns them; one row per airport and hour.

    Returns:
        One row per route, sorted by route, with the columns `COLUMNS`.
    """
    joined = flights.merge(weather, on=["origin", "time_hour"], validate="many_to_one")
    conditions = [joined["visib"] < 3, joined["precip"] > 0, joined["wind_speed"] >= 20]
    joined["weather"] = np.select(conditions, ["low_visibility", "rain", "wind"], "clear")
    departed = joined.dropna(subset="dep_delay").astype({"dep_delay": "int64"})
    routes = joined.groupby(ROUTE).size().to_frame("flights")
    departures = departed.groupby(ROUTE)["dep_delay"]
    routes["cancelled"] = routes["flights"] - departures.size().reindex(routes.index, fill_value=0)
    routes["mean_delay"] = departures.sum() / departures.size()
    routes["p95_delay"] = _p95(departed)
    by_weather = departed.groupby([*ROUTE, "weather"])["dep_delay"]
    means = (by_weather.sum() / by_weather.size()).unstack("weather")
    for name in ("clear", "rain", "wind", "low_visibility"):
        routes[f"mean_delay_{name}"] = means.get(name, np.nan)
    return routes.sort_index().reset_index()[COLUMNS]


def _p95(departed: pd.DataFrame) -> pd.Series:
    """Return, per route, the smallest delay that at least 95 % of the departures do not exceed."""
    ranked = departed.sort_values([*ROUTE, "dep_delay"])
    groups = ranked.groupby(ROUTE)["dep_delay"]
    rank, size = groups.cumcount() + 1, groups.transform("size")
    reached = ranked[rank * 100 >= size * 95]
    return reached.groupby(ROUTE)["dep_delay"].first()


def differences(expected: pd.DataFrame, actual: pd.DataFrame) -> list[str]:
    """
    Compare two answers row by row, without tolerance.

    Returns:
        One line for each different, missing or extra row; empty if the answers are identical.
    """
    if list(expected.columns) != list(actual.columns):
        return [f"columns {list(actual.columns)}, expected {list(expected.columns)}"]
    pairs = zip_longest(plain_rows(expected.sort_values(ROUTE)), plain_rows(actual.sort_values(ROUTE)))
    return [f"{found}, expected {wanted}" for wanted, found in pairs if wanted != found]


def plain_rows(frame: pd.DataFrame) -> list[tuple[object, ...]]:
    """Return the rows of a frame as tuples, with None for missing values."""
    rows = frame.astype(object).itertuples(index=False, name=None)
    return [tuple(None if pd.isna(value) else value for value in row) for row in rows]
