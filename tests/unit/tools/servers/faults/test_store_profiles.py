"""Latencies by percentiles."""

from __future__ import annotations

import pytest

from tools.servers.faults.store_profiles import CAP_MS, PROFILES, Latency, StoreProfile


@pytest.mark.parametrize("name", [name for name, profile in PROFILES.items() if profile.lines])
def test_given_percentiles_are_met(name: str) -> None:
    """The latency at each given percentile is the given one, and it grows with the position up to the cap."""
    for line in PROFILES[name].lines.values():
        for percent, ms in line.percentiles_ms.items():
            assert line.at(percent / 100) == pytest.approx(ms)
        drawn = [line.at(position / 10_000) for position in range(10_001)]
        assert drawn == sorted(drawn)
        assert 0 < drawn[0] < drawn[5_000] / 2
        assert drawn[-1] <= CAP_MS


def test_put_of_5_mb_is_as_measured() -> None:
    """The latencies of S3 are those of FLIP-158; beyond p99.9, the last stretch goes on up to 5 s."""
    line = PROFILES["s3-standard"].lines["large"]

    assert [round(line.at(position)) for position in (0.5, 0.99, 0.999)] == [459, 1_039, 3_202]
    assert 3_202 < line.at(0.9993) < CAP_MS
    assert line.at(0.9999) == line.at(1.0) == CAP_MS


def test_two_percentiles_are_a_log_normal_distribution() -> None:
    """With two percentiles, the quartiles are those of the log-normal distribution through both."""
    line = Latency({50: 100.0, 84.1344746: 200.0})  # one standard deviation

    assert line.at(0.158655254) == pytest.approx(50.0)
    assert line.at(0.977249868) == pytest.approx(400.0)


@pytest.mark.parametrize(
    "percentiles_ms",
    [
        {},
        {50: 10},
        {50: 10, 99: 10},
        {99: 20, 50: 10},
        {50: 10, 100: 20},
        {0: 1, 50: 10},
        {50: 0, 99: 1},
        {50: 1, 99: 5_001},
    ],
)
def test_impossible_percentiles_are_refused(percentiles_ms: dict[float, float]) -> None:
    """Percentiles that do not ascend, or are out of bounds, are refused."""
    with pytest.raises(ValueError, match="percentiles"):
        Latency(percentiles_ms)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"refused_share": 0.9, "reset_share": 0.2}, "shares"),
        ({"refused_share": -0.1}, "shares"),
        ({"outage_s": 1.0}, "period"),
        ({"outage_s": 3.0, "outage_every_s": 2.0}, "period"),
    ],
)
def test_impossible_profile_is_refused(values: dict[str, float], message: str) -> None:
    """Shares that exceed all requests, and outages longer than their period, are refused."""
    with pytest.raises(ValueError, match=message):
        StoreProfile(**values)  # type: ignore[arg-type]  # numbers only


def test_what_nobody_published_is_stated() -> None:
    """Every profile but the store as it is says what it assumes; that of S3 names the objects of up to 64 KB."""
    assert [name for name, profile in PROFILES.items() if not profile.assumptions] == ["local"]
    assert "up to 64 KB" in PROFILES["s3-standard"].assumptions[0]
