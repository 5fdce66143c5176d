"""
Profiles of object stores: latency by percentiles, bandwidth of a host, and how often requests fail. Values only.

The fault proxy's script reads them in mitmproxy's environment: this module needs only Python's own library.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import exp, log
from statistics import NormalDist
from types import MappingProxyType

SMALL_BYTES_MAX = 64 * 1024
"""Requests that carry at most this many bytes either way have the latencies of `StoreProfile.small`."""

CAP_MS = 5_000.0
"""No latency is longer: beyond it, clients have given up."""

_NORMAL = NormalDist()
_POSITION_MIN = 1e-9


@dataclass(frozen=True)
class Latency:
    """
    A distribution of latencies, given by some of its percentiles.

    Between two percentiles it is log-normal: the logarithm is linear over the normal distribution's quantile. The first
    and the last stretch go on beyond them, up to `CAP_MS`.

    Args:
        percentiles_ms: Milliseconds, > 0, by percent, > 0 and < 100; at least two, both ascending.
        assumed: The percents of those that are not published.
    """

    percentiles_ms: Mapping[float, float]
    assumed: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        rows = list(self.percentiles_ms.items())
        if len(rows) < 2 or not all(0 < percent < 100 and 0 < ms <= CAP_MS for percent, ms in rows):
            raise ValueError(f"a latency needs two or more percentiles in (0, 100), of at most {CAP_MS:g} ms: {rows}")
        if any(percent >= next_percent or ms >= next_ms for (percent, ms), (next_percent, next_ms) in pairwise(rows)):
            raise ValueError(f"percentiles must ascend with their latencies: {rows}")

    @cached_property
    def _points(self) -> list[tuple[float, float]]:
        return [(_NORMAL.inv_cdf(percent / 100), log(ms)) for percent, ms in self.percentiles_ms.items()]

    def at(self, position: float) -> float:
        """Return the latency in ms, > 0 and <= `CAP_MS`, that this share of all, in [0, 1], does not exceed."""
        x = _NORMAL.inv_cdf(min(max(position, _POSITION_MIN), 1 - _POSITION_MIN))
        points = self._points
        right = min(max(bisect_right(points, (x,)), 1), len(points) - 1)
        (x_left, left), (x_right, right_log) = points[right - 1], points[right]
        return min(CAP_MS, exp(left + (right_log - left) * (x - x_left) / (x_right - x_left)))


@dataclass(frozen=True, slots=True)
class StoreProfile:
    """
    What a store does to requests.

    Args:
        small: Latency of requests of up to `SMALL_BYTES_MAX`; None adds nothing.
        large: Latency of all others, whatever their size: that of the bandwidth comes on top.
        bandwidth_bytes_per_s: Bandwidth of one host, each way, > 0; None for no limit. It is assumed.
        refused_share: Share of requests answered with 503, in [0, 1].
        reset_share: Share of requests whose connection ends, half of them after the store has acted, in [0, 1].
        outage_every_s: Distance of the beginnings of outages, in which every request is answered with 503; 0 for none.
        outage_s: Length of each; it is at the end of its period.
        assumptions: The parts of this that are not published, in words.
    """

    small: Latency | None = None
    large: Latency | None = None
    bandwidth_bytes_per_s: float | None = None
    refused_share: float = 0.0
    reset_share: float = 0.0
    outage_every_s: float = 0.0
    outage_s: float = 0.0
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.refused_share >= 0 and self.reset_share >= 0 and self.refused_share + self.reset_share <= 1):
            raise ValueError(f"shares must be in [0, 1] together: {self.refused_share}, {self.reset_share}")
        if not 0 <= self.outage_s <= self.outage_every_s:
            raise ValueError(f"an outage must be within its period: {self.outage_s} s of {self.outage_every_s} s")

    @property
    def lines(self) -> dict[str, Latency]:
        """Its latencies by the name of their line."""
        return {name: line for name, line in (("small", self.small), ("large", self.large)) if line is not None}


_SAME_ZONE = Latency({50: 15, 99: 45, 99.9: 120}, assumed=(99, 99.9))
_SAME_ZONE_BANDWIDTH = 250e6
_SAME_ZONE_ASSUMED = "p99 of 45 ms and p99.9 of 120 ms, and 250 MB/s of a host, are assumed"

PROFILES: Mapping[str, StoreProfile] = MappingProxyType(
    {
        "local": StoreProfile(),
        "same-zone": StoreProfile(_SAME_ZONE, _SAME_ZONE, _SAME_ZONE_BANDWIDTH, assumptions=(_SAME_ZONE_ASSUMED,)),
        "s3-standard": StoreProfile(
            small=Latency({50: 30, 99: 150, 99.9: 600}, assumed=(50, 99, 99.9)),
            large=Latency({50: 459, 99: 1_039, 99.9: 3_202}),  # PUTs of 5 MB, as FLIP-158 measured them
            bandwidth_bytes_per_s=100e6,
            assumptions=(
                "latencies of up to 64 KB (p50 30, p99 150, p99.9 600 ms) are assumed: nothing is published",
                "every larger request has the latency of a PUT of 5 MB, whatever its size and kind",
                "100 MB/s of a host are assumed",
            ),
        ),
        "lossy": StoreProfile(
            _SAME_ZONE,
            _SAME_ZONE,
            _SAME_ZONE_BANDWIDTH,
            refused_share=0.01,
            reset_share=0.005,
            assumptions=(_SAME_ZONE_ASSUMED, "0.5 % resets are assumed"),
        ),
        "outage": StoreProfile(
            _SAME_ZONE,
            _SAME_ZONE,
            _SAME_ZONE_BANDWIDTH,
            outage_every_s=30.0,
            outage_s=5.0,
            assumptions=(_SAME_ZONE_ASSUMED, "outages of 5 s every 30 s are assumed"),
        ),
    }
)
"""By name. `local` is the store as it is."""
