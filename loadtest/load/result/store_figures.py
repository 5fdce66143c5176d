"""Compares the draws of the service's store with its profile. No I/O."""

from __future__ import annotations

from math import sqrt

from tools.reporting.figures import Figure, Goal, percentile
from tools.servers.faults.store_model import Drawn
from tools.servers.faults.store_profiles import StoreProfile

DEVIATION_MAX = 4.0
"""Most standard deviations between a drawn share and the wanted one; chance alone exceeds it once in 16,000 times."""


def store_figures(profile: StoreProfile, drawn: Drawn) -> list[Figure]:
    """
    Return the figures of the draws.

    Percentiles have no goal of their own, for few requests have no steady p99.9: the goal is that the share of requests
    above each wanted percentile is as near to the wanted one as their number allows. The times of answers have no
    goal either: on a busy machine, the store itself takes longer than some draws.
    """
    figures = [
        Figure("store: requests", drawn.requests, "requests"),
        Figure("store: requests in outages", drawn.out, "requests"),
    ]
    if profile.bandwidth_bytes_per_s is not None:
        bandwidth = profile.bandwidth_bytes_per_s / 1e6
        figures.append(Figure("store: bandwidth of a host, assumed", bandwidth, "MB/s"))
    for name, line in profile.lines.items():
        latencies_ms = drawn.latencies_ms.get(name, [])
        figures.append(Figure(f"store, {name}: requests", len(latencies_ms), "requests"))
        for percent, wanted_ms in line.percentiles_ms.items():
            title = f"store, {name}: p{percent:g}"
            source = ", assumed" if percent in line.assumed else ""
            above = sum(latency_ms > wanted_ms for latency_ms in latencies_ms)
            figures.append(Figure(f"{title} drawn", percentile(latencies_ms, percent), "ms"))
            figures.append(Figure(f"{title} wanted{source}", wanted_ms, "ms"))
            figures.append(Figure(f"{title} answered", percentile(drawn.answered_ms.get(name, []), percent), "ms"))
            figures.append(_deviation(title, above, len(latencies_ms), 1 - percent / 100))
    if profile.lines:
        figures.append(Figure("store: answers that the store itself gave later", drawn.late, "requests"))
    for title, count, share in (
        ("store: answered with 503", drawn.refused, profile.refused_share),
        ("store: reset", drawn.reset, profile.reset_share),
    ):
        if share:
            figures.append(Figure(title, count, "requests"))
            figures.append(_deviation(title, count, drawn.requests, share))
    return figures


def _deviation(title: str, count: int, of: int, share: float) -> Figure:
    """Return how far a count is from its share, in standard deviations of chance; one request more or less is none."""
    title, unit = f"{title}, deviation", "standard deviations"
    if not of:
        return Figure(title, None, unit)
    surplus = max(0.0, abs(count - of * share) - 1)
    return Figure(title, surplus / sqrt(of * share * (1 - share)), unit, Goal("<=", DEVIATION_MAX))
